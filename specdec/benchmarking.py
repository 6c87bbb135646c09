"""Times several ways of decoding the same prompts, interleaved.

Machines drift, so only ratios within one run mean something: every prompt is
decoded by every arm before the next prompt, in an order that is reversed from
one prompt to the next, and nothing counts before everything is compiled.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from specdec.generation import Generation
from specdec.statistics import relative_bandwidth

# (prompts, limit) -> Generation; a limit of 0 compiles and decodes nothing.
Arm = Callable[[Sequence[Sequence[int]], int], Generation]


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One decode of one batch of prompts by one arm."""

  seconds: float
  generation: Generation

  @property
  def seconds_per_token(self) -> float:
    """Wall time over emitted tokens."""
    return self.seconds / max(self.generation.stats['new_tokens'], 1)


def measure(
  arms: Mapping[str, Arm],
  batches: Sequence[Sequence[Sequence[int]]],
  *,
  max_new_tokens: int,
  report: Callable[[], None] = lambda: None,
) -> dict[str, list[Measurement]]:
  """Decodes every batch with every arm.

  Args:
    arms: by name.
    batches: lists of prompts; each list is decoded as one batch.
    max_new_tokens: the limit per row.
    report: called after every decode, and every warm-up.

  Returns:
    One measurement per batch, by arm.
  """
  for arm in arms.values():
    for batch in batches:
      arm(batch, 0)
      report()
    arm(batches[0], min(8, max_new_tokens))
  results: dict[str, list[Measurement]] = {name: [] for name in arms}
  for index, batch in enumerate(batches):
    order = list(arms) if index % 2 == 0 else list(arms)[::-1]
    for name in order:
      start = time.perf_counter()
      generation = arms[name](batch, max_new_tokens)
      seconds = time.perf_counter() - start
      results[name].append(Measurement(seconds, generation))
      report()
  return results


@dataclasses.dataclass(frozen=True)
class Flip:
  """A row whose tokens leave those of the reference at `offset`."""

  batch: int
  row: int
  offset: int


def find_flips(
  measurements: Sequence[Measurement], reference: Sequence[Measurement]
) -> list[Flip]:
  """Where an arm's tokens first differ from the reference's, row by row."""
  flips = []
  pairs = zip(measurements, reference, strict=True)
  for index, (one, other) in enumerate(pairs):
    rows = zip(one.generation.tokens, other.generation.tokens, strict=True)
    for row, (tokens, expected) in enumerate(rows):
      if tokens == expected:
        continue
      shared = min(len(tokens), len(expected))
      differs = np.array(tokens[:shared]) != np.array(expected[:shared])
      offset = int(np.argmax(differs)) if differs.any() else shared
      flips.append(Flip(index, row, offset))
  return flips


_COUNTS = (
  'new_tokens',
  'target_forwards',
  'accepted_histogram',
  'stage_forwards',
  'origins',
  'reads',
)


def _pool(counts: Sequence[Any]) -> Any:
  """Adds numbers, lists or dictionaries of one structure, entry by entry."""
  return jax.tree.map(lambda *values: sum(values), *counts)


def summarize_arms(
  results: Mapping[str, Sequence[Measurement]],
  *,
  baseline: str,
) -> dict[str, dict[str, Any]]:
  """Pools the measurements of each arm.

  Args:
    results: from `measure`.
    baseline: the arm that speed ratios refer to.

  Returns:
    Per arm: the counts of `specdec.statistics.summarize`, pooled, and the
    ratios that follow; `seconds`; `tokens_per_second`; `speed`, the baseline's
    seconds per token over the arm's, pooled; `speed_per_batch`, the same batch
    by batch.
  """
  arms = {}
  for name, measurements in results.items():
    stats = [one.generation.stats for one in measurements]
    pooled = {key: _pool([one[key] for one in stats]) for key in _COUNTS}
    tokens = pooled['new_tokens']
    forwards = max(pooled['target_forwards'], 1)
    nodes = sum(
      one['nodes_per_forward'] * one['target_forwards'] for one in stats
    )
    seconds = sum(one.seconds for one in measurements)
    arms[name] = pooled | {
      'block_efficiency': tokens / forwards,
      'nodes_per_forward': nodes / forwards,
      'relative_bandwidth': relative_bandwidth(
        pooled['reads'], stats[0]['costs']
      ),
      'seconds': seconds,
      'tokens_per_second': tokens / seconds,
      'speed_per_batch': [
        base.seconds_per_token / one.seconds_per_token
        for base, one in zip(results[baseline], measurements, strict=True)
      ],
    }
  base_rate = arms[baseline]['tokens_per_second']
  for arm in arms.values():
    arm['speed'] = arm['tokens_per_second'] / base_rate
  return arms
