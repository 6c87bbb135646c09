"""What the machine can do at best, measured beside what it is asked to do.

Memory: reading a large array flat out, by the faster of two readers.
Arithmetic: a large matrix product. Machines drift, so both are measured again
before every batch of a benchmark, and the medians count.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import threading
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.cost_model import Hardware
from specdec.model import LanguageModel

# Beyond what caches hold, small enough to be had beside the models.
_READ_BYTES = {'cpu': 256 << 20, 'default': 2 << 30}
_MATRIX_WIDTH = {'cpu': 2048, 'default': 8192}
_COLUMNS = 1024
_REPEATS = 4  # per sample, in one go


def _rate(work: float, run: Callable[[], jax.Array]) -> float:
  start = time.perf_counter()
  results = [run() for _ in range(_REPEATS)]
  jax.block_until_ready(results)
  return work * _REPEATS / (time.perf_counter() - start)


@jax.jit
def _product(array, vector):
  """One product of every row with a vector, as decoding reads weights."""
  dims = (((1,), (0,)), ((), ()))
  return lax.dot_general(array, vector, dims)


@jax.jit
def _sum(array):
  return jnp.sum(array)


@jax.jit
def _square(left, right):
  # Whole numbers are summed in whole numbers, the rest in float32.
  is_integer = jnp.issubdtype(left.dtype, jnp.integer)
  dims = (((1,), (1,)), ((), ()))
  return lax.dot_general(
    left,
    right,
    dims,
    preferred_element_type=jnp.int32 if is_integer else jnp.float32,
  )


class MachineLimits:
  """Measures the limits of the default device, sample by sample.

  Args:
    dtypes: of the matrix products.
  """

  def __init__(self, dtypes: Sequence[str]):
    platform = jax.default_backend()
    pick = lambda sizes: sizes.get(platform, sizes['default'])
    rows = pick(_READ_BYTES) // (4 * _COLUMNS)
    width = pick(_MATRIX_WIDTH)
    self._array = jnp.ones((rows, _COLUMNS), jnp.float32)
    self._vector = jnp.ones(_COLUMNS, jnp.float32)
    self._matrices = {
      dtype: jnp.ones((width, width), dtype) for dtype in dtypes
    }
    self._bytes_per_second: list[float] = []
    self._flops_per_second: dict[str, list[float]] = {
      dtype: [] for dtype in dtypes
    }
    self.sample()  # compiles, and does not count
    self._bytes_per_second.clear()
    for samples in self._flops_per_second.values():
      samples.clear()

  def sample(self) -> None:
    """Takes one sample of everything."""
    readers = (
      functools.partial(_product, self._array, self._vector),
      functools.partial(_sum, self._array),
    )
    self._bytes_per_second.append(
      max(_rate(self._array.nbytes, reader) for reader in readers)
    )
    for dtype, matrix in self._matrices.items():
      work = 2 * matrix.shape[0] ** 3
      self._flops_per_second[dtype].append(
        _rate(work, functools.partial(_square, matrix, matrix))
      )

  def summary(self) -> dict[str, Any]:
    """The medians, and all samples.

    Returns:
      `bytes_per_second`, and `flops_per_second` by dtype, two per
      multiplication and addition; both with `..._samples`.
    """
    return {
      'bytes_per_second': float(np.median(self._bytes_per_second)),
      'bytes_per_second_samples': self._bytes_per_second,
      'flops_per_second': {
        dtype: float(np.median(samples))
        for dtype, samples in self._flops_per_second.items()
      },
      'flops_per_second_samples': self._flops_per_second,
    }


def this_machine(
  dtypes: Sequence[str] = ('float32', 'bfloat16'), *, samples: int = 5
) -> Hardware:
  """The default device, as the cost model wants to know it.

  Args:
    dtypes: of the matrix products.
    samples: whose medians count.
  """
  limits = MachineLimits(dtypes)
  for _ in range(samples):
    limits.sample()
  summary = limits.summary()
  return Hardware(
    name='this machine',
    bytes_per_second=summary['bytes_per_second'],
    flops_per_second=summary['flops_per_second'],
  )


@dataclasses.dataclass(frozen=True)
class ModelSize:
  """What a forward computes with.

  Attributes:
    parameters: that are multiplied with every position.
    cache_per_slot: elements of the cache, keys and values, in one slot.
  """

  parameters: int
  cache_per_slot: int


def model_size(model: LanguageModel) -> ModelSize:
  """The size of a model of `models.language_model.as_model`."""
  cache = jax.eval_shape(lambda: model.spec.init_cache(1, 1))
  return ModelSize(
    parameters=model.spec.parameters,
    cache_per_slot=sum(
      leaf.size for leaf in jax.tree.leaves(cache) if leaf.ndim > 1
    ),
  )


def bytes_read(
  reads: Mapping[str, Mapping[str, float]],
  costs: Mapping[str, Mapping[str, float]],
) -> float:
  """Weights and visible cache slots, once per forward, of all models.

  Args:
    reads: see `specdec.statistics.summarize`.
    costs: likewise.
  """
  return sum(
    count['forwards'] * costs[name]['per_forward']
    + count['slots'] * costs[name]['per_slot']
    for name, count in reads.items()
    if name != 'plain'
  )


def flops(figures: Mapping[str, Any], sizes: Mapping[str, ModelSize]) -> float:
  """Operations of all models: two per multiplication and addition.

  Args:
    figures: of an arm, with the counts of `specdec.statistics.summarize`.
    sizes: of the target and of each stage that is a language model; others
      compute next to nothing.

  Returns:
    Operations on the positions counted, each of which multiplies all weights,
    and the slots of the cache that its forward saw.
  """
  forwards = {'target': figures['target_forwards']} | figures['stage_forwards']
  total = 0.0
  for name, size in sizes.items():
    slots = figures['reads'][name]['slots'] / max(forwards[name], 1)
    per_position = size.parameters + slots * size.cache_per_slot
    total += 2 * figures['positions'][name] * per_position
  return total


def place(
  figures: Mapping[str, Any],
  costs: Mapping[str, Mapping[str, float]],
  sizes: Mapping[str, ModelSize],
  limits: Mapping[str, Any],
) -> dict[str, float]:
  """An arm beside the limits of the machine.

  Time is that of decoding, prefill apart, whatever it was spent on.

  Args:
    figures: of `specdec.benchmarking.summarize_arms`.
    costs: of `specdec.statistics.summarize`.
    sizes: see `flops`.
    limits: of `models.machine_limits`.

  Returns:
    `arithmetic_intensity` (operations per byte) and `flops_per_second`;
    `seconds_per_target_forward` and `ideal_seconds_per_target_forward`, what
    reading the weights and filled cache, those of drafts included, would take
    flat out; `of_memory_limit`, the second over the first.
  """
  steps = max(figures['reads']['target']['forwards'], 1)
  seconds = max(figures['seconds'] - figures['prefill_seconds'], 1e-9)
  read = bytes_read(figures['reads'], costs)
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
_RESET_PEAK = '5'  # `man 5 proc`, clear_refs: the peak becomes what is resident
_SECONDS_BETWEEN_LOOKS = 1e-3


def _resident(key: str) -> int:
  """A size in `/proc/self/status`, in bytes."""
  for line in (_PROC / 'status').read_text().splitlines():
    name, _, value = line.partition(':')
    if name == key:
      return 1024 * int(value.removesuffix('kB'))
  raise OSError(f'/proc/self/status has no {key}')


def _host_peak(run: Callable[[], Any]) -> int:
  with contextlib.suppress(OSError, AttributeError):
    # What was freed but is still resident would hide that it is needed again.
    ctypes.CDLL(None).malloc_trim(0)
  (_PROC / 'clear_refs').write_text(_RESET_PEAK)
  before = _resident('VmRSS')
  run()
  return max(_resident('VmHWM') - before, 0)


def _in_use(device: jax.Device) -> int:
  return device.memory_stats()['bytes_in_use']


def _device_peak(run: Callable[[], Any], device: jax.Device) -> int:
  # The device's own high-water mark cannot be reset, so look often.
  before = peak = _in_use(device)
  done = threading.Event()

  def watch():
    nonlocal peak
    while not done.is_set():
      peak = max(peak, _in_use(device))
      time.sleep(_SECONDS_BETWEEN_LOOKS)

  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  try:
    run()
  finally:
    done.set()
    watcher.join()
  return peak - before


def peak_beyond(run: Callable[[], Any]) -> int | None:
  """The most memory in use during a call, beyond that before it.

  Args:
    run: done once before, so that it does not compile; not to be timed.

  Returns:
    Bytes: of the process on CPU, else those of the first device that JAX has in
    use. None where the platform does not say (CPU without Linux, or a container
    without `/proc/self/clear_refs`).
  """
  device = jax.devices()[0]
  try:
    if device.platform == 'cpu':
      return _host_peak(run)
    return _device_peak(run, device)
  except (OSError, TypeError, KeyError):
    return None
