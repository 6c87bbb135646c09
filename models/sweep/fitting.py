"""What the cost model needs to know of a machine, from forwards alone.

A data sheet, or reading memory flat out, says what a machine can do at best;
products of few rows do less. So the limits that predictions are made with are
fitted to measured forwards, V(N) of `specdec.step_costs`, and never to a
speedup that is to be predicted.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np
from scipy import optimize

from specdec.cost_model import forward_seconds
from specdec.cost_model import Hardware
from specdec.cost_model import ModelShape

# Seconds. V(N) is the difference of two loops, so that of a small draft may be
# any fraction of a millisecond.
_NOISE = 5e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTime:
  """A measured forward.

  Attributes:
    shape: of the model.
    batch_size: B.
    num_tokens: L, of each row.
    slots: of the cache of each row. On CPU all are read, empty ones too.
    seconds: it took.
  """

  shape: ModelShape
  batch_size: int
  num_tokens: int
  slots: int
  seconds: float

  def predicted(self, hardware: Hardware, *, overlap: bool) -> float:
    """What the cost model says that it takes."""
    return forward_seconds(
      self.shape,
      hardware,
      batch_size=self.batch_size,
      num_tokens=self.num_tokens,
      context=self.slots,
      overlap=overlap,
    )


@dataclasses.dataclass(frozen=True)
class Fit:
  """A machine as its forwards show it.

  Attributes:
    hardware: with effective limits.
    overlap: see `specdec.cost_model.forward_seconds`; whichever fits better.
    errors: of each forward, predicted over measured.
  """

  hardware: Hardware
  overlap: bool
  errors: tuple[float, ...]

  @property
  def typical_error(self) -> float:
    """Root mean square of the logarithms, as a factor less one."""
    return float(np.exp(np.sqrt(np.mean(np.log(self.errors) ** 2))) - 1)


def _with_limits(hardware: Hardware, dtype: str, logs: np.ndarray) -> Hardware:
  moved, flops, layer = np.exp(logs).tolist()
  return dataclasses.replace(
    hardware,
    bytes_per_second=moved,
    flops_per_second={**hardware.flops_per_second, dtype: flops},
    layer_seconds=layer,
  )


def _log_ratio(predicted: float, measured: float) -> float:
  return float(np.log((predicted + _NOISE) / (measured + _NOISE)))


def fit(times: Sequence[ForwardTime], start: Hardware) -> Fit:
  """Bandwidth, FLOP per second and seconds per layer, by least squares.

  Of the logarithms, so that short forwards count as much as long ones, down to
  the noise of the measurements.

  Args:
    times: of one dtype; some of few tokens, some of many, and best of two
      models of different size.
    start: what the machine can do at best.

  Raises:
    ValueError: there are fewer than four, or their dtypes differ.
  """
  dtypes = {one.shape.dtype for one in times}
  if len(times) < 4 or len(dtypes) != 1:
    raise ValueError(
      'a fit needs at least 4 forwards of one dtype, got'
      f' {len(times)} of {sorted(dtypes)}'
    )
  (dtype,) = dtypes
  first = np.log([start.bytes_per_second, start.peak(dtype), 1e-5])
  # Nothing is faster than the limits, but for small models in fast caches.
  bounds = (first - np.log([30, 100, 1e4]), first + np.log([2, 2, 1e3]))
  found = []
  for overlap in (True, False):

    def logs(limits, overlap=overlap):
      hardware = _with_limits(start, dtype, limits)
      return [
        _log_ratio(one.predicted(hardware, overlap=overlap), one.seconds)
        for one in times
      ]

    best = optimize.least_squares(
      logs, first - 0.7, bounds=bounds, loss='soft_l1', f_scale=0.1
    )
    hardware = _with_limits(start, dtype, best.x)
    found.append(Fit(hardware, overlap, tuple(np.exp(logs(best.x)).tolist())))
  return min(found, key=lambda one: one.typical_error)


def described(fitted: Fit, times: Sequence[ForwardTime]) -> dict[str, Any]:
  """For the record: what was fitted, and what to; `errors` in that order."""
  return {
    'hardware': dataclasses.asdict(fitted.hardware),
    'overlap': fitted.overlap,
    'typical_error': fitted.typical_error,
    'times': [
      {
        'model': one.shape.name,
        'batch_size': one.batch_size,
        'num_tokens': one.num_tokens,
        'slots': one.slots,
        'seconds': one.seconds,
        'predicted': one.predicted(fitted.hardware, overlap=fitted.overlap),
      }
      for one in times
    ],
  }
