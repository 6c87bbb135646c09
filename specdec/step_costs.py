"""Measures what the target takes in a step of the production loop.

The loop is that of `specdec.decode`, with a drafter that never guesses: its
trees have room for N nodes, so the target's forward is over N of them, but it
costs nothing. The same loop with a stand-in for the target (`specdec.replay`)
takes the time of everything else; the difference is V(N).
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec.arguments import check_sampling
from specdec.arguments import row_keys
from specdec.decode import advance
from specdec.decode import DecodeConfig
from specdec.decode import Request
from specdec.decode import start
from specdec.drafter import Drafter
from specdec.model import Model
from specdec.planning import StepCosts
from specdec.ranking import IMPOSSIBLE
from specdec.replay import stand_in
from specdec.sampling import Sampling
from specdec.scorers.candidates import CandidateScorer
from specdec.tree_config import TreeConfig
from specdec.verification.verdict import RUNNING

_LEAST_SECONDS = 1e-9


class _Silent(flax.struct.PyTreeNode):
  """A `Proposer` that never has a guess."""

  name = 'silent'
  vocab_size = None
  bytes_per_node = 0

  def propose(self, tree, nodes, tokens, length):
    del tree, tokens, length
    shape = (nodes.shape[0], 1)
    return jnp.zeros(shape, jnp.int32), jnp.full(shape, IMPOSSIBLE)


def _silent_drafter(num_nodes: int) -> Drafter | None:
  if num_nodes == 1:
    return None
  return Drafter(
    CandidateScorer((_Silent(),)),
    TreeConfig(
      num_nodes=num_nodes,
      width=1,
      branching=1,
      rounds=1,
      capacity=num_nodes,
      cost_ratio=0.0,
    ),
  )


def _median_seconds(
  runs: Sequence[Callable[[], object]], repeats: int
) -> list[float]:
  """Interleaved: machines drift."""
  seconds: list[list[float]] = [[] for _ in runs]
  for run in runs:
    jax.block_until_ready(run())  # compiles
  for _ in range(repeats):
    for run, found in zip(runs, seconds, strict=True):
      begin = time.perf_counter()
      jax.block_until_ready(run())
      found.append(time.perf_counter() - begin)
  return [float(np.median(found)) for found in seconds]


def _step_run(target, drafter, request, config, context, num_steps):
  """Some steps from a text of `context` tokens, again and again."""
  # Empty slots cost what full ones do, so there is no prompt to be read, and
  # nothing to be compiled for it.
  shapes = jax.eval_shape(
    functools.partial(start, config=config), target, drafter, request
  )
  zeros = lambda one: jnp.zeros(one.shape, one.dtype)
  states = [jax.tree.map(zeros, shapes)]

  def run():
    state = states.pop()
    lengths = jnp.full_like(state.length, context)
    cache = state.target_cache.replace(length=lengths - 1)
    state = state.replace(
      length=lengths,
      reason=jnp.full_like(state.reason, RUNNING),
      target_cache=cache,
    )
    states.append(
      advance(
        target, drafter, request, state, np.int32(num_steps), config=config
      )
    )
    return states[0]

  return run


def measure_step_costs(
  target: Model,
  *,
  batch_size: int,
  prompt_slots: int,
  max_new_tokens: int,
  context: int,
  sampling: Sampling,
  node_counts: Sequence[int],
  num_steps: int = 8,
  repeats: int = 5,
) -> StepCosts:
  """Times the target's part of a step, medians of interleaved repeats.

  Args:
    target: the model.
    batch_size: B.
    prompt_slots: P, the prompts' padded length.
    max_new_tokens: room for new tokens, as padded by `specdec.generate`.
    context: tokens of a text halfway.
    sampling: as users give it.
    node_counts: N to measure; 1 is added.
    num_steps: in one measurement.
    repeats: measurements.

  Raises:
    ValueError: there is no room for that many steps after the context.
  """
  if not 1 < context <= prompt_slots + max_new_tokens - num_steps:
    raise ValueError(
      f'context must leave room for {num_steps} steps in'
      f' {prompt_slots + max_new_tokens} slots, got {context}'
    )
  definition = target.definition
  config = DecodeConfig(max_new_tokens=max_new_tokens)
  request = Request(
    prompt=jnp.zeros((batch_size, prompt_slots), jnp.int32),
    prompt_length=jnp.full(batch_size, prompt_slots, jnp.int32),
    limit=jnp.full(batch_size, max_new_tokens, jnp.int32),
    row_keys=row_keys(jax.random.key(0), batch_size),
    sampling=check_sampling(sampling, batch_size, definition.vocab_size),
  )
  nothing = stand_in(definition, [[0]] * batch_size)
  models = (target, nothing)
  read = lambda model: functools.partial(
    start, model, None, request, config=config
  )
  with_target, without = _median_seconds([read(one) for one in models], repeats)
  node_counts = sorted({1, *node_counts})
  # The rest of the loop grows evenly with N, once there is a drafter at all.
  ends = sorted({1, node_counts[min(1, len(node_counts) - 1)], node_counts[-1]})
  runs = [(target, size) for size in node_counts]
  runs += [(nothing, size) for size in ends]
  seconds = _median_seconds(
    [
      _step_run(
        model, _silent_drafter(size), request, config, context, num_steps
      )
      for model, size in runs
    ],
    repeats,
  )
  per_step = np.array(seconds) / num_steps
  steps, rest = np.split(per_step, [len(node_counts)])
  # A stand-in slower than the target can only be noise.
  verification = np.maximum(
    steps - np.interp(node_counts, ends, rest), _LEAST_SECONDS
  )
  return StepCosts(
    prompt=max(with_target - without, 0.0),
    verification=dict(zip(node_counts, verification.tolist(), strict=True)),
    plain_step=float(steps[0]),
  )
