"""Times the matrix products of a decode forward: the table of docs/cpu.md.

python scripts/measure_matmul.py
"""

import functools
import time

from absl import flags
import command_line
import jax
from jax import lax
import jax.numpy as jnp

_MATRICES = flags.DEFINE_integer('matrices', 24, 'products per measurement')
_IN = flags.DEFINE_integer('features_in', 1280, 'contracted')
_OUT = flags.DEFINE_integer('features_out', 5120, 'of the result')
_ROWS = flags.DEFINE_list(
  'rows', ['1', '2', '4', '8', '16', '32', '64'], 'rows of x'
)
_REPEATS = flags.DEFINE_integer('repeats', 7, 'the fastest counts')

_BLOCK = 16
_OUT_IN, _IN_OUT, _BLOCKS = '[out, in]', '[in, out]', f'[_, in, {_BLOCK}]'

_CASES = (  # weights, result, stored
  ('float32', 'float32', _OUT_IN),
  ('float32', 'float32', _IN_OUT),
  ('float32', 'float32', _BLOCKS),
  ('bfloat16', 'float32', _OUT_IN),
  ('bfloat16', 'float32', _IN_OUT),
  ('bfloat16', 'bfloat16', _OUT_IN),
)


def _product(
  x: jax.Array, weight: jax.Array, stored: str, result: jnp.dtype
) -> jax.Array:
  contract = functools.partial(lax.dot_general, preferred_element_type=result)
  if stored == _OUT_IN:
    return contract(x, weight, (((1,), (1,)), ((), ())))
  if stored == _IN_OUT:
    return contract(x, weight, (((1,), (0,)), ((), ())))
  # One product per block, in one batch.
  everywhere = jnp.broadcast_to(x, (weight.shape[0], *x.shape))
  blocks = contract(everywhere, weight, (((2,), (1,)), ((0,), (0,))))
  return jnp.moveaxis(blocks, 0, 1).reshape(x.shape[0], -1)


def _milliseconds(rows: int, dtype: str, result: str, stored: str) -> float:
  shape = {
    _OUT_IN: (_OUT.value, _IN.value),
    _IN_OUT: (_IN.value, _OUT.value),
    _BLOCKS: (_OUT.value // _BLOCK, _IN.value, _BLOCK),
  }[stored]
  weights = [jnp.full(shape, 0.01, dtype) for _ in range(_MATRICES.value)]

  @jax.jit
  def products(x, weights):
    return sum(_product(x, w, stored, jnp.dtype(result)) for w in weights)

  x = jnp.ones((rows, _IN.value), dtype)
  best = float('inf')
  for _ in range(_REPEATS.value + 1):  # the first one compiles
    start = time.perf_counter()
    products(x, weights).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 1e3 * best


def main() -> None:
  rows = [int(number) for number in _ROWS.value]
  if _OUT.value % _BLOCK:
    raise ValueError(
      f'--features_out={_OUT.value}: expected a multiple of {_BLOCK}'
    )
  print('weights   result    stored        ' + ''.join(f'{n:>8}' for n in rows))
  for dtype, result, stored in _CASES:
    times = (_milliseconds(n, dtype, result, stored) for n in rows)
    cells = ''.join(f'{time:8.1f}' for time in times)
    print(f'{dtype:10}{result:10}{stored:14}{cells}', flush=True)


if __name__ == '__main__':
  command_line.run(main)
