"""Measures what the target takes in a step of the production loop.

The loop is that of `specdec.decode`, with a drafter that costs nothing: N - 1
tokens of the text so far are guessed to come again. The same loop with a
stand-in for the target (`specdec.replay`) takes the time of everything else;
the difference is V(N). Nodes are as different as tokens of a text are because a
mixture of experts reads those that any node needs.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
import time

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.checks import check_sampling
from specdec.checks import row_keys
from specdec.draft.candidates import CandidateScorer
from specdec.draft.drafter import Drafter
from specdec.draft.drafter import PLAIN
from specdec.draft.drafter import Stage
from specdec.draft.drafter import StageConfig
from specdec.loop import advance
from specdec.loop import start
from specdec.model import LanguageModel
from specdec.sampling import EXCLUDED
from specdec.sampling import Sampling
from specdec.step import DecodeConfig
from specdec.step import Request
from specdec.study.planning import StepCosts
from specdec.study.replay import stand_in
from specdec.tree.topology import TreeShape
from specdec.tree.tree import NO_NODE
from specdec.verify.accept import RUNNING

_LEAST_SECONDS = 1e-9


class _Again(flax.struct.PyTreeNode):
  """A `Proposer` of the latest tokens, as if each might come again.

  Attributes:
    num_guesses: how many; static.
  """

  num_guesses: int = flax.struct.field(pytree_node=False)

  name = 'again'
  vocab_size = None
  bytes_per_node = 0

  def propose(self, tree, nodes, tokens, length):
    del tree
    at = length - 1 - jnp.arange(self.num_guesses)
    guesses = tokens[jnp.maximum(at, 0)]
    alike = -jnp.log(self.num_guesses + 1.0)
    log_probs = jnp.where(at >= 0, alike, EXCLUDED)
    rows = lambda one: jnp.broadcast_to(one, (*nodes.shape, *one.shape))
    return rows(guesses), rows(log_probs)


def _drafter(num_nodes: int) -> Drafter:
  """All guesses are children of the root."""
  if num_nodes == 1:
    return PLAIN
  stage = Stage(
    CandidateScorer((_Again(num_nodes - 1),)),
    StageConfig(width=1, branching=num_nodes - 1, rounds=1, cost_ratio=0.0),
  )
  return Drafter((stage,), TreeShape(num_nodes=num_nodes, capacity=num_nodes))


def _seconds(run: Callable[[], object]) -> float:
  begin = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - begin


def _median_seconds(
  runs: Sequence[Callable[[], object]], repeats: int
) -> list[float]:
  """Interleaved: machines drift."""
  for run in runs:
    _seconds(run)  # compiles
  seconds = [[_seconds(run) for run in runs] for _ in range(repeats)]
  return np.median(seconds, axis=0).tolist()


def _worth_measuring(
  runs: Mapping[int, Callable[[], object]], most_tokens: float
) -> list[int]:
  """Of the N, ascending, those before a step takes `most_tokens` plain ones.

  The second is always among them.
  """
  sizes = list(runs)
  plain, *others = sizes
  _seconds(runs[plain])  # compiles
  limit = most_tokens * _seconds(runs[plain])
  for place, size in enumerate(others, start=1):
    _seconds(runs[size])
    if _seconds(runs[size]) > limit:
      return sizes[: max(place, 2)]
  return sizes


def _with_room(array: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
  """A copy with zeros behind, as large as wanted."""
  room = jnp.zeros(wanted.shape, wanted.dtype)
  return lax.dynamic_update_slice(room, array, (0,) * array.ndim)


def _step_run(
  target, drafter, request, config, text, read_cache, context, num_steps
):
  """Some steps from the first `context` tokens of `text`, again and again."""
  shapes = jax.eval_shape(
    functools.partial(start, config=config), target, drafter, request
  )
  zeros = lambda one: jnp.zeros(one.shape, one.dtype)
  # What the prompts leave of the cache stays empty: it takes as long to read.
  wanted = shapes.target.cache
  cache = jax.tree.map(
    _with_room, read_cache.replace(num_slots=wanted.num_slots), wanted
  )
  state = jax.tree.map(zeros, shapes)
  window = jnp.full_like(state.target.window, NO_NODE)
  target_state = state.target.replace(cache=cache, window=window)
  states = [state.replace(tokens=jnp.copy(text), target=target_state)]

  def run():
    state = states.pop()
    lengths = jnp.full_like(state.length, context)
    cache = state.target.cache.replace(length=lengths - 1)
    state = state.replace(
      length=lengths,
      reason=jnp.full_like(state.reason, RUNNING),
      target=state.target.replace(cache=cache),
    )
    states.append(
      advance(
        target, drafter, request, state, np.int32(num_steps), config=config
      )
    )
    return states[0]

  return run


def measure_step_costs(
  target: LanguageModel,
  texts: Sequence[Sequence[int]],
  *,
  prompt_slots: int,
  max_new_tokens: int,
  context: int,
  sampling: Sampling,
  node_counts: Sequence[int],
  num_steps: int = 8,
  repeats: int = 5,
  most_tokens: float = math.inf,
) -> StepCosts:
  """Times the target's part of a step, medians of interleaved repeats.

  Args:
    target: the model.
    texts: of each of the B rows, tokens such as will be decoded; those too
      short are repeated.
    prompt_slots: P, the prompts' padded length; so many tokens are read.
    max_new_tokens: room for new tokens, as padded by `specdec.generate`.
    context: tokens of a text halfway.
    sampling: as users give it.
    node_counts: N to measure; 1 is added.
    num_steps: in one measurement.
    repeats: measurements.
    most_tokens: that a step could bring. Where a step takes more than so many
      plain ones nothing can pay, so that N and larger ones are left out.

  Raises:
    ValueError: there is no text, or no room for that many steps after the
      context.
  """
  if not texts or not all(texts):
    raise ValueError('texts must have at least one token in every row')
  num_slots = prompt_slots + max_new_tokens
  # A step brings two tokens where one of the guesses is right.
  if not 1 < context <= num_slots - 2 * num_steps:
    raise ValueError(
      f'context must leave room for {num_steps} steps, two tokens each, in'
      f' {num_slots} slots, got {context}'
    )
  batch_size = len(texts)
  text = jnp.asarray(
    np.stack([np.resize(np.array(one, np.int32), num_slots) for one in texts])
  )
  definition = target.spec
  config = DecodeConfig(max_new_tokens=max_new_tokens)
  request = Request(
    prompt=text[:, :prompt_slots],
    prompt_length=jnp.full(batch_size, prompt_slots, jnp.int32),
    limit=jnp.full(batch_size, max_new_tokens, jnp.int32),
    row_keys=row_keys(jax.random.key(0), batch_size),
    sampling=check_sampling(sampling, batch_size, definition.vocab_size),
  )
  nothing = stand_in(definition, [[0]] * batch_size)
  models = (target, nothing)
  read = lambda model: functools.partial(
    start, model, PLAIN, request, config=config
  )
  with_target, without = _median_seconds([read(one) for one in models], repeats)
  of_target, of_nothing = (
    start(model, PLAIN, request, config=config).target.cache for model in models
  )

  def step_run(model, cache, size):
    drafter = _drafter(size)
    return _step_run(
      model, drafter, request, config, text, cache, context, num_steps
    )

  runs = {
    size: step_run(target, of_target, size)
    for size in sorted({1, *node_counts})
  }
  sizes = _worth_measuring(runs, most_tokens)
  # The rest of the loop grows evenly with N, once there is a drafter at all.
  ends = sorted({*sizes[:2], sizes[-1]})
  seconds = _median_seconds(
    [
      *(runs[size] for size in sizes),
      *(step_run(nothing, of_nothing, size) for size in ends),
    ],
    repeats,
  )
  per_step = np.array(seconds) / num_steps
  steps, rest = np.split(per_step, [len(sizes)])
  # A stand-in slower than the target can only be noise.
  verification = np.maximum(
    steps - np.interp(sizes, ends, rest), _LEAST_SECONDS
  )
  return StepCosts(
    prompt=max(with_target - without, 0.0),
    verification=dict(zip(sizes, verification.tolist(), strict=True)),
    plain_step=float(steps[0]),
  )
