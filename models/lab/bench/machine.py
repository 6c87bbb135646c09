"""The limits of the machine (roofline), and the peak memory of a call.

Peak bandwidth is that of reading a large array by the faster of two kernels,
peak arithmetic that of a large matrix product. The speed of a machine drifts,
so that both are measured again before every batch of a benchmark, and the
medians are used.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import re
import threading
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from models.nn import matrices as matrices_lib
from specdec import model as model_lib
from specdec import statistics as statistics_lib

# Larger than the caches of a processor, small enough to fit beside the models.
_READ_BYTES = {'cpu': 256 << 20, 'default': 2 << 30}
_MATRIX_WIDTH = {'cpu': 2048, 'default': 8192}
_COLUMNS = 1024
_REPEATS = 4  # per sample


def _rate(work: float, run: Callable[[], jax.Array]) -> float:
  start = time.perf_counter()
  jax.block_until_ready([run() for _ in range(_REPEATS)])
  return work * _REPEATS / (time.perf_counter() - start)


@functools.partial(jax.jit, static_argnames=('axis', 'result'))
def _product(x, y, *, axis, result):
  """Contracts the last axis of x with an axis of y."""
  axes = (((1,), (axis,)), ((), ()))
  return lax.dot_general(x, y, axes, preferred_element_type=jnp.dtype(result))


_sum = jax.jit(jnp.sum)


class MachineLimits:
  """Measures the peak rates of the default device, sample by sample.

  The matrix products are those of `dtypes`.
  """

  def __init__(self, dtypes: Sequence[str]):
    platform = jax.default_backend()
    pick = lambda sizes: sizes.get(platform, sizes['default'])
    shape = (pick(_READ_BYTES) // (4 * _COLUMNS), _COLUMNS)
    width = pick(_MATRIX_WIDTH)
    self._array = jnp.ones(shape, jnp.float32)
    self._vector = jnp.ones(_COLUMNS, jnp.float32)
    # Blocks of few bits are multiplied as integers of eight bits.
    few = {
      name: matrices_lib.format_of(name).bytes_per_weight < 1 for name in dtypes
    }
    self._matrices = {
      name: jnp.ones((width, width), 'int8' if few[name] else name)
      for name in dtypes
    }
    self._memory: list[float] = []
    self._arithmetic: dict[str, list[float]] = {name: [] for name in dtypes}
    self.sample()  # compiles
    for samples in (self._memory, *self._arithmetic.values()):
      samples.clear()

  def sample(self) -> None:
    """Measures every rate once."""
    # The product reads the array as decoding reads weights.
    product = functools.partial(_product, axis=0, result='float32')
    readers = (
      functools.partial(product, self._array, self._vector),
      functools.partial(_sum, self._array),
    )
    rates = [_rate(self._array.nbytes, reader) for reader in readers]
    self._memory.append(max(rates))
    for dtype, matrix in self._matrices.items():
      is_integer = jnp.issubdtype(matrix.dtype, jnp.integer)
      result = 'int32' if is_integer else 'float32'
      run = functools.partial(_product, matrix, matrix, axis=1, result=result)
      self._arithmetic[dtype].append(_rate(2 * len(matrix) ** 3, run))

  def summary(self) -> dict[str, Any]:
    """The medians and all samples.

    Returns:
      `bytes_per_second`, and `flops_per_second` by dtype, where a
      multiply-add is two operations; both also with `..._samples`.
    """
    medians = {k: float(np.median(v)) for k, v in self._arithmetic.items()}
    return {
      'bytes_per_second': float(np.median(self._memory)),
      'bytes_per_second_samples': self._memory,
      'flops_per_second': medians,
      'flops_per_second_samples': self._arithmetic,
    }


@dataclasses.dataclass(frozen=True)
class ModelSize:
  """The sizes that determine the arithmetic of a forward."""

  parameters: int  # Number of weights that each position is multiplied with.
  cache_per_slot: int  # Elements of keys and values in one slot of the cache.


def model_size(model: model_lib.Network) -> ModelSize:
  """The size of a model made by `models.nn.adapter.as_model`."""
  cache = jax.eval_shape(lambda: model.spec.init_cache(1, 1))
  slot = sum(leaf.size for leaf in (*cache.keys, *cache.values))
  return ModelSize(model.spec.parameters, slot)


def flops(figures: Mapping[str, Any], sizes: Mapping[str, ModelSize]) -> float:
  """Operations of all models; a multiply-add is two.

  Every counted position is multiplied with all weights, and with the cache
  slots that are visible to its forward. The arithmetic of stages that are not
  in `sizes` (other than language models) is neglected.
  """
  forwards = {'target': figures['target_forwards']} | figures['stage_forwards']
  total = 0.0
  for name, size in sizes.items():
    slots = figures['reads'][name]['slots'] / max(forwards[name], 1)
    per_position = size.parameters + slots * size.cache_per_slot
    total += 2 * figures['positions'][name] * per_position
  return total


def roofline_point(
  figures: Mapping[str, Any],
  costs: Mapping[str, Mapping[str, float]],
  sizes: Mapping[str, ModelSize],
  limits: Mapping[str, Any],
) -> dict[str, float]:
  """The point of an arm in the roofline diagram.

  The time is that of decoding without prefill, all overhead included. Figures
  are those of `timing.summarize_arms`, costs of `specdec.statistics`, limits of
  `MachineLimits.summary`.

  Returns:
    `arithmetic_intensity` (operations per byte) and `flops_per_second`;
    `seconds_per_target_forward`; `ideal_seconds_per_target_forward`, the time
    of reading all weights and the filled cache, those of drafting models
    included, at peak bandwidth; `of_memory_limit`, the ideal over the actual
    time.
  """
  steps = max(figures['reads']['target']['forwards'], 1)
  seconds = max(figures['seconds'] - figures['prefill_seconds'], 1e-9)
  read = statistics_lib.bytes_read(figures['reads'], costs)
  ideal = read / limits['bytes_per_second']
  operations = flops(figures, sizes)
  return {
    'arithmetic_intensity': operations / max(read, 1),
    'flops_per_second': operations / seconds,
    'seconds_per_target_forward': seconds / steps,
    'ideal_seconds_per_target_forward': ideal / steps,
    'of_memory_limit': ideal / seconds,
  }


_PROC = pathlib.Path('/proc/self')


def _resident(key: str) -> int:
  """A size in `/proc/self/status`, in bytes."""
  found = re.search(rf'{key}:\s*(\d+) kB', (_PROC / 'status').read_text())
  if found is None:
    raise OSError(f'/proc/self/status has no {key}')
  return 1024 * int(found[1])


def host_peak(run: Callable[[], Any]) -> int:
  """The peak of resident memory during a call, in bytes (Linux only).

  Raises:
    OSError: `/proc/self/clear_refs` or `/proc/self/status` is missing.
  """
  with contextlib.suppress(OSError, AttributeError):
    # Memory that is free but resident would not be counted when it is reused.
    ctypes.CDLL(None).malloc_trim(0)
  (_PROC / 'clear_refs').write_text('5')  # VmHWM is set to VmRSS, `man 5 proc`
  before = _resident('VmRSS')
  run()
  return max(_resident('VmHWM') - before, 0)


def _device_peak(run: Callable[[], Any], device: jax.Device) -> int:
  # The high-water mark of a device cannot be reset, so memory in use is polled.
  in_use = lambda: device.memory_stats()['bytes_in_use']
  before = peak = in_use()
  done = threading.Event()

  def watch():
    nonlocal peak
    while not done.wait(1e-3):
      peak = max(peak, in_use())

  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  try:
    run()
  finally:
    done.set()
    watcher.join()
  return peak - before


def peak_beyond(run: Callable[[], Any]) -> int | None:
  """The peak memory of a call minus the memory in use before it, in bytes.

  It is that of the process if the first device is a CPU, else of that device,
  and None where the platform does not report it (CPU without Linux, or a
  container without `/proc/self/clear_refs`). If compiling should not count,
  call `run` once before.
  """
  device = jax.devices()[0]
  try:
    if device.platform == 'cpu':
      return host_peak(run)
    return _device_peak(run, device)
  except (OSError, TypeError, KeyError):
    return None
