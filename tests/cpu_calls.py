"""Calls the CPU kernels at random, compiled with sanitizers.

As a program, because the sanitizers' libraries must be loaded first:

  LD_PRELOAD="libasan.so libubsan.so" python tests/cpu_calls.py FOLDER COUNT
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from models.nn.cpu import build
from models.nn.cpu import ops

_SANITIZE = ('-fsanitize=address,undefined', '-fno-sanitize-recover=undefined')


def call(rng: np.random.Generator) -> jax.Array:
  """One call of random sizes, dtypes and masks."""
  size = lambda limit: int(rng.integers(1, limit))
  normal = lambda *shape: rng.standard_normal(shape, np.float32)
  kind = rng.integers(4)
  if kind == 0:
    rows, outputs, inputs = size(40), size(120), size(70)
    if rng.random() < 0.1:
      outputs *= 20  # Of which a thread takes several blocks.
    dtype = rng.choice(ops.DTYPES)
    if dtype == 'int8':
      values = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
      matrix = ops.pack(values, np.ones(outputs))
    else:
      matrix = ops.pack(normal(outputs, inputs).astype(jnp.dtype(dtype)))
    return ops.multiply(normal(rows, inputs), matrix)
  if kind == 1:
    batch, heads, group, length = size(3), size(3), size(3), size(12)
    slots, width = size(50), size(70)
    dtype = jnp.dtype(rng.choice(['float32', 'bfloat16']))
    cache = batch, heads, slots, width
    return ops.attend(
      normal(batch, heads * group, length, width).astype(dtype),
      normal(*cache).astype(dtype),
      normal(*cache).astype(dtype),
      rng.random((batch, length, slots)) < rng.random(),
      scale=0.3,
    )
  if kind == 2:
    batch, slots, width = size(4), size(50), size(70)
    dtype = jnp.dtype(rng.choice(['float32', 'bfloat16']))
    length = int(rng.integers(1, slots + 1))
    return ops.write_slots(
      jnp.asarray(normal(batch, 2, slots, width), dtype),
      jnp.asarray(normal(batch, 2, length, width), dtype),
      jnp.asarray(rng.integers(-3, slots + 3, batch), jnp.int32),
    )
  rows, width = size(5), size(70)
  return ops.normalize(
    normal(rows, width), normal(width), epsilon=1e-5, center=rng.random() < 0.5
  )


def main(folder: str, count: str) -> None:
  """Compiles the kernels into a folder, and calls them."""
  flags = build.FLAGS + _SANITIZE
  build.register(build.compile_library('g++', pathlib.Path(folder), flags))
  rng = np.random.default_rng(0)
  for _ in range(int(count)):
    assert jnp.isfinite(call(rng)).all()
    jax.clear_caches()
  print(f'{count} calls')


if __name__ == '__main__':
  main(*sys.argv[1:])
