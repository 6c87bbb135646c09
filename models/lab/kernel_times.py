"""Times of the CPU kernels, beside those of XLA."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as cache_lib
from specdec.models.lab import machine
from specdec.models.nn import attention
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn.cpu import build
from specdec.models.nn.cpu import ops


def _best_milliseconds(
  runs: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, float]:
  """The shortest time of each run over interleaved repeats."""
  for run in runs.values():
    jax.block_until_ready(run())  # compiles
  best = dict.fromkeys(runs, float('inf'))
  for _ in range(repeats):
    for name, run in runs.items():
      start = time.perf_counter()
      jax.block_until_ready(run())
      best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
  return best


def _xla_attention(projections, mask, start, keys, values, *, scale):
  """`ops.attend` of as many heads of queries as of keys, by XLA."""
  heads, width = keys.shape[1], keys.shape[3]
  shape = *projections.shape[:2], 3, heads, width
  query, key, value = (
    projections.astype(keys.dtype).reshape(shape).transpose(2, 0, 3, 1, 4)
  )
  cache = cache_lib.KVCache((keys,), (values,), start, keys.shape[2])
  cache = cache_lib.write(cache, 0, key, value)
  slots = cache.keys[0], cache.values[0]
  return attention.attend(query, *slots, mask, scale=scale), *slots


def _in_place(
  function: Callable[..., Any], arrays: list[jax.Array]
) -> Callable[[], Any]:
  """A run of a function that is given its arrays and returns them anew."""

  def run():
    out, *arrays[:] = function(*arrays)
    return out

  return run


# All formats that the kernels know, except the one that only files have.
_MADE_DTYPES = [
  dtype for dtype in matrices_lib.KERNEL_DTYPES if dtype != matrices_lib.STORED
]


def kernels(num_rows: Sequence[int], repeats: int) -> list[machine.Row]:
  """Milliseconds of XLA's products and attention, and of `models/nn/cpu`'s.

  24 products of n rows at the shape of a layer of GPT-2 Large, and attention of
  n queries of a layer to 320 of 512 slots, of which n are written before.

  Raises:
    ValueError: there are no kernels on this machine.
  """
  if not build.is_available():
    raise ValueError('kernels: there are none on this machine')
  matrices, features_in, features_out = 24, 1280, 5120
  heads, slots, filled, width = 20, 512, 320, 64
  products = jax.jit(
    lambda x, weights: sum(matrices_lib.matmul(x, w) for w in weights)
  )
  layers = {
    way: jax.jit(functools.partial(attend, scale=0.1), donate_argnums=(3, 4))
    for way, attend in (('xla', _xla_attention), ('kernels', ops.attend))
  }
  table: list[machine.Row] = []

  def add(what: str, dtype: str, rows: int, runs) -> None:
    times = _best_milliseconds(runs, repeats)
    row: machine.Row = {'what': what, 'dtype': dtype, 'rows': rows}
    table.append(row | times | {'ratio': times['xla'] / times['kernels']})

  rng = np.random.default_rng(0)
  draw = lambda *shape: np.asarray(rng.standard_normal(shape, np.float32))
  for dtype in _MADE_DTYPES:
    shape = features_out, features_in
    blocks = [[(slice(None), draw(*shape))] for _ in range(matrices)]
    make = matrices_lib.FORMATS[dtype].from_blocks
    made = [make(matrix, shape) for matrix in blocks]
    weights = {
      'xla': jax.device_put(matrices_lib.for_xla(made)),
      'kernels': list(map(matrices_lib.pack, made)),
    }
    for n in num_rows:
      x = draw(n, features_in)
      runs = {
        way: functools.partial(products, x, weights[way]) for way in weights
      }
      add('products', dtype, n, runs)
    if not matrices_lib.FORMATS[dtype].is_float:
      continue  # Attention is computed in bfloat16.
    slots_shape = 1, heads, slots, width
    for n in num_rows:
      rows = draw(1, n, 3 * heads * width)
      mask = jnp.tile(jnp.arange(slots) < filled, (1, n, 1))
      start = jnp.full(1, max(filled - n, 0), jnp.int32)
      layer_runs = {
        way: _in_place(
          functools.partial(layer, rows, mask, start),
          [jnp.asarray(draw(*slots_shape), dtype) for _ in range(2)],
        )
        for way, layer in layers.items()
      }
      add('attention', dtype, n, layer_runs)
  return table
