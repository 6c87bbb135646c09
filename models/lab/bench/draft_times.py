"""The time of the draft side of a step, beside that of a target forward.

It does not depend on weights, so they may be random (`pair.drawn_pair`). From
it and published figures of acceptance the speed can be computed, but not
measured.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import heapq
from typing import Any

import jax
import numpy as np

import specdec
from specdec.models.lab import machine
from specdec.models.lab.bench import replay
from specdec.models.lab.bench import timing
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib

_NEW_TOKENS = 24  # Steps of a decode, as nothing is accepted.


def tree_tokens(
  accepted: Sequence[float], of_misses: Sequence[float], num_nodes: int
) -> float:
  """Expected tokens per step of a tree that grows best first, computed.

  Nothing follows a token that is not the best one of its depth.

  Args:
    accepted: how often a chain is accepted up to each position; beyond these it
      goes on with the last ratio.
    of_misses: how often the token of the target, where it is not the best one
      of the drafter, is the second best one, the third best one and so on.
    num_nodes: N, the root included.
  """
  ratios = np.divide(accepted, (1.0, *accepted[:-1]))
  found, heap = 0.0, [(-1.0, 0)]
  for _ in range(num_nodes):
    if not heap:
      break
    minus, depth = heapq.heappop(heap)
    found -= minus
    if depth < 0:  # A token that nothing follows.
      continue
    best = float(ratios[min(depth, len(ratios) - 1)])
    heapq.heappush(heap, (minus * best, depth + 1))
    for share in of_misses:
      heapq.heappush(heap, (minus * (1 - best) * share, -1))
  return found


def measure(
  pair: pair_lib.Pair,
  drafting: settings_lib.DraftSettings,
  methods: Sequence[str],
  *,
  context: int,
  repeats: int,
) -> list[dict[str, Any]]:
  """Milliseconds of the draft side of a step, and of target forwards.

  The draft side is a step with a target that costs nothing (`replay`), so that
  it includes what a step does beside the models.

  Args:
    pair: a target and a drafter.
    drafting: settings of the methods.
    methods: names of methods with a drafter.
    context: tokens in the cache.
    repeats: interleaved measurements.

  Returns:
    A row for each method: N nodes, `draft_ms`, V(1) and V(N) in `plain_ms` and
    `verify_ms`, and `draft_per_plain`, the first of these over the second.
  """
  spec = pair.target.spec
  rng = np.random.default_rng(0)
  text = rng.integers(spec.vocab_size, size=context + _NEW_TOKENS).tolist()
  oracle = replay.oracle_target(pair.target, [text])
  drafting = dataclasses.replace(drafting, inner='none')

  def arm(drafter: specdec.Drafter) -> timing.Arm:
    return lambda prompts, limit: specdec.generate(
      oracle, jax.random.key(0), prompts, drafter=drafter, max_new_tokens=limit
    )

  chosen = {
    name: drafters.make_drafter(name, pair, drafting) for name in methods
  }
  arms = {name: arm(drafter) for name, drafter in chosen.items()}
  batches = [[text[:context]]] * repeats
  timing.warm_up(arms, batches, max_new_tokens=_NEW_TOKENS)
  found = timing.time_arms(arms, batches, max_new_tokens=_NEW_TOKENS)
  sizes = {name: one.shape.num_nodes for name, one in chosen.items()}
  verification = machine.measure_step_costs(
    pair.target,
    [text],
    prompt_slots=context,
    max_new_tokens=64,
    context=context,
    node_counts=[*sizes.values()],
    effort=machine.Effort(num_steps=4, repeats=repeats),
  ).verification
  return [
    _row(name, sizes[name], measured, verification)
    for name, measured in found.items()
  ]


def _row(
  name: str,
  num_nodes: int,
  measured: Sequence[timing.Measurement],
  verification: Mapping[int, float],
) -> dict[str, Any]:
  """A row of `measure`."""
  steps = [one.generation.stats.reads['target']['forwards'] for one in measured]
  seconds = [one.seconds - one.prefill_seconds for one in measured]
  draft = float(np.median(np.divide(seconds, steps)))
  plain, verify = verification[1], verification[num_nodes]
  return {
    'method': name,
    'N': num_nodes,
    'draft_ms': 1e3 * draft,
    'plain_ms': 1e3 * plain,
    'verify_ms': 1e3 * verify,
    'draft_per_plain': draft / plain,
  }


def with_speeds(
  rows: Sequence[Mapping[str, Any]],
  accepted: Sequence[float],
  of_misses: Sequence[float],
) -> list[dict[str, Any]]:
  """Rows of `measure` with tokens per step and speed, which are computed.

  The arguments are those of `tree_tokens`.
  """
  found = []
  for row in rows:
    misses = () if row['method'] == 'chain' else of_misses
    tokens = tree_tokens(accepted, misses, row['N'])
    step = row['draft_ms'] + row['verify_ms']
    speed = tokens * row['plain_ms'] / step
    found.append({**row, 'computed_tokens': tokens, 'computed_speed': speed})
  return found
