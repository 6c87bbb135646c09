"""Predictions beside measurements: arithmetic on figures, nothing is run."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np

from specdec.benchmarking import Measurement
from specdec.cost_model import Step
from specdec.drafter import Drafter


def counted_step(
  measurements: Sequence[Measurement],
  drafter: Drafter | None,
  *,
  draft: str | None,
) -> Step:
  """What a step did, as the decodes counted it.

  Args:
    measurements: of one arm at one setting.
    drafter: of the arm; None for plain decoding. Its forwards are as wide as
      its trees may be, whatever of that was of use.
    draft: name of its stage that is a language model; None if none costs
      anything.

  Returns:
    Per batched step: rows that are done wait for the others, so `tokens` is
    below the block efficiency.
  """
  if drafter is None:
    return Step()
  stats = [one.generation.stats for one in measurements]
  steps = sum(one['reads']['target']['forwards'] for one in stats)
  rows = sum(
    len(one.generation.tokens) * counts['reads']['target']['forwards']
    for one, counts in zip(measurements, stats, strict=True)
  )
  forwards = width = 0
  if draft is not None:
    forwards = sum(one['reads'][draft]['forwards'] for one in stats)
    width = next(
      stage.config.width for stage in drafter.stages if stage.name == draft
    )
  return Step(
    num_nodes=drafter.config.num_nodes,
    tokens=max(sum(one['new_tokens'] for one in stats) / max(rows, 1), 1.0),
    draft_forwards=forwards / max(steps, 1),
    draft_width=max(width, 1),
  )


def step_seconds(measurements: Sequence[Measurement]) -> float:
  """Of a batched step, the median over decodes."""
  return float(
    np.median(
      [
        one.seconds
        / max(one.generation.stats['reads']['target']['forwards'], 1)
        for one in measurements
      ]
    )
  )


def speedups(
  measurements: Sequence[Measurement], plain: Sequence[Measurement]
) -> list[float]:
  """Of each decode over plain decoding of the same prompts."""
  return [
    base.seconds_per_token / one.seconds_per_token
    for one, base in zip(measurements, plain, strict=True)
  ]


def crossing(xs: Sequence[float], ys: Sequence[float | None]) -> float | None:
  """Where a line falls below 1 for good; between points on a log scale.

  Args:
    xs: positive, rising.
    ys: as many; None is left out.

  Returns:
    The smallest x if all are below, None if the last is not.
  """
  points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
  if not points or points[-1][1] >= 1:
    return None
  for (x, y), (next_x, next_y) in reversed(list(itertools.pairwise(points))):
    if y >= 1:
      share = (y - 1) / (y - next_y)
      return float(x * (next_x / x) ** share)
  return float(points[0][0])


def crossings(study: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
  """Of every arm, `measured`, `predicted`, and the first over the second."""
  found = {}
  for name in study['arms']:
    line = lambda key, name=name: [
      point['arms'][name][key] for point in study['points']
    ]
    measured = crossing(study['x'], line('speedup'))
    predicted = crossing(study['x'], line('predicted'))
    found[name] = {
      'measured': measured,
      'predicted': predicted,
      'ratio': measured / predicted if measured and predicted else None,
    }
  return found


def line_through(first: tuple[float, float], second: tuple[float, float]):
  """A function through two points that never falls below 0."""
  (x, y), (other_x, other_y) = first, second
  slope = 0.0 if x == other_x else (other_y - y) / (other_x - x)
  return lambda at: max(y + slope * (at - x), 0.0)
