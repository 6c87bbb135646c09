"""Interleaved timing of several ways of decoding the same prompts.

The speed of a machine drifts, so only ratios within one run are reliable. Every
arm decodes a batch of prompts before the next batch begins, the order of the
arms is reversed from batch to batch, and everything is compiled beforehand.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import math
import time
from typing import Any

import numpy as np
import tqdm

from specdec import arguments as arguments_lib
from specdec import generation as generation_lib
from specdec import statistics as statistics_lib

# (prompts, limit) -> Generation. A call with limit 0 compiles, reads the
# prompts and emits nothing.
Arm = Callable[[Sequence[Sequence[int]], int], generation_lib.Generation]


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One decode of one batch of prompts by one arm."""

  seconds: float  # Wall time of the call.
  generation: generation_lib.Generation
  # The same call with limit 0: the prefill and the fixed cost of a call.
  prefill_seconds: float = 0.0

  @property
  def new_tokens(self) -> int:
    """Emitted tokens of all rows."""
    return self.generation.stats.new_tokens


def _timed(
  arm: Arm, batch: Sequence[Sequence[int]], limit: int
) -> tuple[float, generation_lib.Generation]:
  start = time.perf_counter()
  generation = arm(batch, limit)
  return time.perf_counter() - start, generation


def warm_up(
  arms: Mapping[str, Arm],
  batches: Sequence[Sequence[Sequence[int]]],
  *,
  max_new_tokens: int,
) -> None:
  """Compiles every arm for every padded shape of the batches.

  Each arm runs twice; the second run lets a GPU record its command buffers.
  """
  shape = lambda batch: (
    len(batch),
    *arguments_lib.padded_shape(batch, max_new_tokens),
  )
  first_of_shape = {shape(batch): batch for batch in reversed(batches)}
  for arm in tqdm.tqdm(arms.values(), 'compiling', unit='arm'):
    for batch in first_of_shape.values():
      for _ in range(2):
        arm(batch, 0)
    arm(batches[0], min(8, max_new_tokens))


def time_arms(
  arms: Mapping[str, Arm],
  batches: Sequence[Sequence[Sequence[int]]],
  *,
  max_new_tokens: int,
  before_batch: Callable[[], Any] = lambda: None,
  max_seconds: float | None = None,
) -> dict[str, list[Measurement]]:
  """By arm, the measurement of each batch; call `warm_up` first.

  Args:
    arms: by name.
    batches: lists of prompts; each list is decoded as one batch.
    max_new_tokens: the limit per row.
    before_batch: called before every batch, e.g. to measure the machine.
    max_seconds: after that time no other batch begins; the first always does.
  """
  most_seconds = math.inf if max_seconds is None else max_seconds
  start = time.perf_counter()
  results: dict[str, list[Measurement]] = {name: [] for name in arms}
  for index, batch in enumerate(tqdm.tqdm(batches, unit='batch')):
    if index and time.perf_counter() - start > most_seconds:
      break
    before_batch()
    for name in list(arms)[:: 1 if index % 2 == 0 else -1]:
      prefill, _ = _timed(arms[name], batch, 0)
      seconds, generation = _timed(arms[name], batch, max_new_tokens)
      results[name].append(Measurement(seconds, generation, prefill))
  return results


_COUNTS = (
  'new_tokens',
  'target_forwards',
  'accepted_histogram',
  'stage_forwards',
  'origins',
  'reads',
  'positions',
)


def acceptance_by_position(histogram: Sequence[int] | None) -> list[float]:
  """By depth from 1, the share of target forwards that accepted a draft token.

  One plus their sum is the block efficiency. `histogram` is the
  `accepted_histogram` of `specdec.statistics.Statistics`; empty without it.
  """
  reached = np.cumsum((histogram or [0])[::-1])[::-1]
  return (reached[1:] / max(reached[0], 1)).tolist()


def _added(counts: Sequence[Any]) -> Any:
  """Numbers, lists and dictionaries added entry by entry.

  Entries may be missing: an arm may draft in several ways.
  """
  counts = [count for count in counts if count is not None]
  if not counts:
    return None
  if isinstance(counts[0], Mapping):
    keys = dict.fromkeys(key for count in counts for key in count)
    return {key: _added([count.get(key) for count in counts]) for key in keys}
  if isinstance(counts[0], list):
    return [sum(row) for row in itertools.zip_longest(*counts, fillvalue=0)]
  return sum(counts)


def costs_of(
  measurements: Sequence[Measurement],
) -> dict[str, Mapping[str, float]]:
  """`Statistics.costs` of all stages that occur."""
  costs = dict[str, Mapping[str, float]]()
  for measured in measurements:
    costs |= measured.generation.stats.costs
  return costs


def summarize_arms(
  results: Mapping[str, Sequence[Measurement]], *, baseline: str
) -> dict[str, dict[str, Any]]:
  """Pools the measurements of each arm; speed ratios refer to `baseline`.

  Returns:
    By arm: pooled counts and ratios of `specdec.statistics.Statistics`;
    `acceptance_by_position`;
    `seconds` and the `prefill_seconds` among them; `tokens_per_second`;
    `speed`, the baseline's seconds per token over the arm's, pooled;
    `decoding_tokens_per_second` and `decoding_speed`, the same without the
    prefill; for the four pooled figures `..._interval`, the
    95 % interval over batches (`pooled_interval`), None for a single batch.
  """
  base = results[baseline]
  return {name: _summarize(runs, base) for name, runs in results.items()}


def _summarize(
  measurements: Sequence[Measurement], baseline: Sequence[Measurement]
) -> dict[str, Any]:
  stats = [measured.generation.stats for measured in measurements]
  counts = [{key: getattr(row, key) for key in _COUNTS} for row in stats]
  pooled = _added(counts)
  figures = statistics_lib.Statistics(**pooled, costs=costs_of(measurements))
  speed = lambda tokens, seconds, base_tokens, base_seconds: (
    tokens / seconds / (base_tokens / base_seconds)
  )
  times = {
    '': lambda measured: measured.seconds,
    'decoding_': lambda measured: measured.seconds - measured.prefill_seconds,
  }
  rates = dict[str, Any]()
  for name, time_of in times.items():
    columns = [
      values
      for arm in (measurements, baseline)
      for values in ([m.new_tokens for m in arm], [*map(time_of, arm)])
    ]
    sums = [max(sum(column), 1e-9) for column in columns]
    rates |= {
      f'{name}tokens_per_second': sums[0] / sums[1],
      f'{name}tokens_per_second_interval': pooled_interval(
        columns[:2], np.divide
      ),
      f'{name}speed': speed(*sums),
      f'{name}speed_interval': pooled_interval(columns, speed),
    }
  return (
    pooled
    | rates
    | {
      'block_efficiency': figures.block_efficiency,
      'acceptance_by_position': acceptance_by_position(
        pooled['accepted_histogram']
      ),
      'nodes_per_forward': figures.nodes_per_forward,
      'relative_bandwidth': figures.relative_bandwidth,
      'seconds': sum(m.seconds for m in measurements),
      'prefill_seconds': sum(m.prefill_seconds for m in measurements),
    }
  )


_RESAMPLES = 10_000


def pooled_interval(
  columns: Sequence[Sequence[float]],
  statistic: Callable[..., np.ndarray],
) -> tuple[float, float] | None:
  """The 95 % percentile bootstrap interval of a function of sums over prompts.

  `columns` have n numbers each, one per prompt or batch of prompts; `statistic`
  maps the sums of the columns over each resample, arrays of equal length, to
  the figure, e.g. tokens over seconds. Returns both ends; None for n < 2.
  """
  values = np.asarray(columns, np.float64)
  size = values.shape[1]
  if size < 2:
    return None
  rng = np.random.default_rng(0)
  times_drawn = rng.multinomial(size, np.full(size, 1 / size), _RESAMPLES)
  figures = statistic(*(times_drawn @ column for column in values))
  tail = (1 - 0.95) / 2
  low, high = np.quantile(figures, (tail, 1 - tail))
  return float(low), float(high)
