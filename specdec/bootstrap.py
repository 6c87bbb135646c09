"""Confidence intervals of pooled figures, over the prompts of a benchmark.

Prompts differ more than repetitions do: how well a text can be drafted decides
how fast it is decoded. So what a figure would be on other prompts of the same
kind is estimated by drawing prompts with replacement (the percentile bootstrap;
Efron and Tibshirani 1993, chapter 13).
"""

from collections.abc import Callable
from collections.abc import Sequence

import numpy as np


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
