"""Times the matrix products of a decode forward: the table of docs/cpu.md.

python scripts/measure_matmul.py
"""

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

_CASES = (  # weights, result, stored as [out, in]
  ('float32', 'float32', True),
  ('float32', 'float32', False),
  ('bfloat16', 'float32', True),
  ('bfloat16', 'float32', False),
  ('bfloat16', 'bfloat16', True),
)


def _milliseconds(rows: int, dtype: str, result: str, out_in: bool) -> float:
  shape = (_OUT.value, _IN.value) if out_in else (_IN.value, _OUT.value)
  weights = [jnp.full(shape, 0.01, dtype) for _ in range(_MATRICES.value)]

  @jax.jit
  def products(x, weights):
    dims = (((1,), (1 if out_in else 0,)), ((), ()))
    return sum(
      lax.dot_general(x, w, dims, preferred_element_type=jnp.dtype(result))
      for w in weights
    )

  x = jnp.ones((rows, _IN.value), dtype)
  best = float('inf')
  for _ in range(_REPEATS.value + 1):  # the first one compiles
    start = time.perf_counter()
    products(x, weights).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 1e3 * best


def main() -> None:
  rows = [int(number) for number in _ROWS.value]
  print('weights   result    stored    ' + ''.join(f'{n:>8}' for n in rows))
  for dtype, result, out_in in _CASES:
    times = (_milliseconds(n, dtype, result, out_in) for n in rows)
    layout = '[out, in]' if out_in else '[in, out]'
    cells = ''.join(f'{time:8.1f}' for time in times)
    print(f'{dtype:10}{result:10}{layout:10}{cells}', flush=True)


if __name__ == '__main__':
  command_line.run(main)
