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

from specdec.checks import padded_shape
from specdec.generation import Generation
from specdec.statistics import relative_bandwidth

# (prompts, limit) -> Generation; a limit of 0 compiles, does all that comes
# before the first new token, and decodes nothing.
Arm = Callable[[Sequence[Sequence[int]], int], Generation]


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One decode of one batch of prompts by one arm.

  Attributes:
    seconds: from the prompts to all new tokens.
    generation: what came of it.
    prefill_seconds: of the same with a limit of 0: the prompts' own forward and
      what a call costs in any case.
  """

  seconds: float
  generation: Generation
  prefill_seconds: float = 0.0

  @property
  def seconds_per_token(self) -> float:
    """Wall time over emitted tokens."""
    return self.seconds / max(self.generation.stats['new_tokens'], 1)


def _timed(
  arm: Arm, batch: Sequence[Sequence[int]], limit: int
) -> tuple[float, Generation]:
  start = time.perf_counter()
  generation = arm(batch, limit)
  return time.perf_counter() - start, generation


def warm_up(
  arms: Mapping[str, Arm],
  batches: Sequence[Sequence[Sequence[int]]],
  *,
  max_new_tokens: int,
  report: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
  """Compiles every arm for every shape of a batch.

  Args:
    arms: by name.
    batches: lists of prompts; each list is decoded as one batch.
    max_new_tokens: the limit per row.
    report: called after every arm.

  Returns:
    By arm, the seconds that the first calls took beyond what the same calls
    took again: tracing and compiling. What an earlier arm has compiled is not
    compiled again.
  """
  shape = lambda batch: (len(batch), *padded_shape(batch, max_new_tokens))
  first_of_shape = {shape(batch): batch for batch in reversed(batches)}
  seconds = {}
  for name, arm in arms.items():
    total = 0.0
    for batch in first_of_shape.values():
      for sign in (1, -1):
        total += sign * _timed(arm, batch, 0)[0]
    arm(batches[0], min(8, max_new_tokens))
    seconds[name] = max(total, 0.0)
    report()
  return seconds


def measure(
  arms: Mapping[str, Arm],
  batches: Sequence[Sequence[Sequence[int]]],
  *,
  max_new_tokens: int,
  before_batch: Callable[[], Any] = lambda: None,
  max_seconds: float | None = None,
  report: Callable[[], Any] = lambda: None,
) -> dict[str, list[Measurement]]:
  """Decodes every batch with every arm; call `warm_up` first.

  Args:
    arms: by name.
    batches: lists of prompts; each list is decoded as one batch.
    max_new_tokens: the limit per row.
    before_batch: called before every batch, to measure the machine meanwhile.
    max_seconds: no batch is begun after so long, the first one apart.
    report: called after every decode.

  Returns:
    One measurement per batch that was decoded, by arm.
  """
  start = time.perf_counter()
  results: dict[str, list[Measurement]] = {name: [] for name in arms}
  for index, batch in enumerate(batches):
    elapsed = time.perf_counter() - start
    if index and max_seconds is not None and elapsed > max_seconds:
      break
    before_batch()
    order = list(arms) if index % 2 == 0 else list(arms)[::-1]
    for name in order:
      prefill, _ = _timed(arms[name], batch, 0)
      seconds, generation = _timed(arms[name], batch, max_new_tokens)
      results[name].append(Measurement(seconds, generation, prefill))
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
  'positions',
)


def _pool(counts: Sequence[Any]) -> Any:
  """Adds numbers, lists or dictionaries of one structure, entry by entry."""
  return jax.tree.map(lambda *values: sum(values), *counts)


def _columns(measurements: Sequence[Measurement]) -> tuple[list, list]:
  tokens = [one.generation.stats['new_tokens'] for one in measurements]
  return tokens, [one.seconds for one in measurements]


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
    ratios that follow; `seconds`, and `prefill_seconds` of them;
    `tokens_per_second`; `speed`, the baseline's seconds per token over the
    arm's, pooled; `speed_per_batch`, the same batch by batch; of the two pooled
    figures `..._interval`, 95 % over batches (`specdec.bootstrap`), None for a
    single batch.
  """
  arms = {}
  base_tokens, base_seconds = _columns(results[baseline])
  for name, measurements in results.items():
    stats = [one.generation.stats for one in measurements]
    pooled = {key: _pool([one[key] for one in stats]) for key in _COUNTS}
    tokens = pooled['new_tokens']
    forwards = max(pooled['target_forwards'], 1)
    columns = _columns(measurements)
    seconds = sum(columns[1])
    arms[name] = pooled | {
      'block_efficiency': tokens / forwards,
      'nodes_per_forward': pooled['positions']['target'] / forwards,
      'relative_bandwidth': relative_bandwidth(
        pooled['reads'], stats[0]['costs']
      ),
      'seconds': seconds,
      'prefill_seconds': sum(one.prefill_seconds for one in measurements),
      'tokens_per_second': tokens / seconds,
      'tokens_per_second_interval': pooled_interval(columns, np.divide),
      'speed': tokens / seconds / (sum(base_tokens) / sum(base_seconds)),
      'speed_interval': pooled_interval(
        (*columns, base_tokens, base_seconds),
        lambda tokens, seconds, base_tokens, base_seconds: (
          tokens / seconds / (base_tokens / base_seconds)
        ),
      ),
      'speed_per_batch': [
        base.seconds_per_token / one.seconds_per_token
        for base, one in zip(results[baseline], measurements, strict=True)
      ],
    }
  return arms


def pooled_interval(
  columns: Sequence[Sequence[float]],
  statistic: Callable[..., np.ndarray],
  *,
  level: float = 0.95,
  num_resamples: int = 10_000,
  seed: int = 0,
) -> tuple[float, float] | None:
  """The interval of a figure that depends on sums over prompts.

  Args:
    columns: sequences of n numbers, one per prompt (or batch of prompts, what
      is drawn as one).
    statistic: takes the sums of the columns, each `[num_resamples]`, and gives
      the figure of each resample, e.g. tokens over seconds.
    level: the share of the resamples between the ends.
    num_resamples: how often n prompts are drawn from the n.
    seed: of the draws.

  Returns:
    Its ends; None where there are fewer than two prompts, which say nothing
    about others.

  Raises:
    ValueError: columns of different lengths, or a level that is no share.
  """
  if len({len(column) for column in columns}) != 1:
    raise ValueError(f'columns must be of one length, got {columns}')
  values = np.asarray(columns, np.float64)
  if not 0 < level < 1:
    raise ValueError(f'level must be between 0 and 1, got {level}')
  size = values.shape[1]
  if size < 2:
    return None
  rng = np.random.default_rng(seed)
  times_drawn = rng.multinomial(size, np.full(size, 1 / size), num_resamples)
  figures = statistic(*(times_drawn @ column for column in values))
  tail = (1 - level) / 2
  low, high = np.quantile(figures, (tail, 1 - tail))
  return float(low), float(high)
