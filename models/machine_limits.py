"""What the machine can do at best, measured beside what it is asked to do.

Memory: reading a large array flat out, by the faster of two readers.
Arithmetic: a large matrix product. Machines drift, so both are measured again
before every batch of a benchmark, and the medians count.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.cost_model import Hardware

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
