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

from models.nn import matrices as matrices_lib
from models.nn.cpu import build
from models.nn.cpu import ops

_SANITIZE = ('-fsanitize=address,undefined', '-fno-sanitize-recover=undefined')


def call(rng: np.random.Generator) -> jax.Array:
  """One call of random sizes, dtypes and masks."""
  size = lambda limit: int(rng.integers(1, limit))
  normal = lambda *shape: rng.standard_normal(shape, np.float32)
  kind, width = rng.integers(6), size(70)
  if kind == 0:
    # Of many outputs a thread takes several blocks.
    outputs = size(120) * (20 if rng.random() < 0.1 else 1)
    made = matrices_lib.FORMATS[
      rng.choice(matrices_lib.KERNEL_DTYPES)
    ].from_blocks
    blocks = [(slice(None), normal(outputs, width))]
    matrix = matrices_lib.pack(made(blocks, (outputs, width)))
    return matrices_lib.matmul(normal(size(40), width), matrix)
  if kind == 1:
    return ops.normalize(
      *(normal(size(5), width), normal(width)),
      **{'epsilon': 1e-5, 'center': rng.random() < 0.5},
    )
  if kind == 2:
    count, renormalize = size(width + 1), rng.random() < 0.5
    logits = normal(size(5), width)
    return ops.route(logits, count, renormalize=renormalize)[1]
  if kind == 3:
    rows, shape = size(9), (size(5), size(5))
    index = jnp.asarray(rng.integers(0, rows, shape), jnp.int32)
    return ops.sum_rows(normal(rows, width), index, normal(*shape))
  batch, heads, slots = size(4), size(3), size(50)
  dtype = jnp.dtype(rng.choice(['float32', 'bfloat16']))
  draw = lambda *shape: jnp.asarray(normal(batch, *shape, width), dtype)
  if kind == 4:
    start = jnp.asarray(rng.integers(-3, slots + 3, batch), jnp.int32)
    return ops.write_slots(draw(2, slots), draw(2, size(slots + 1)), start)
  length = size(12)
  query, cache = (
    *(draw(heads * size(3), length), (draw(heads, slots) for _ in range(2))),
  )
  mask = rng.random((batch, length, slots)) < rng.random()
  return ops.attend(query, *cache, mask, scale=0.3)


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
