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

import tiny_blocks

from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn.cpu import build
from specdec.models.nn.cpu import ops

# With -O3 this compiles for many minutes.
_SANITIZE = ('-O1', '-fsanitize=address,undefined')
_SANITIZE += ('-fno-sanitize-recover=undefined',)
_REPEATS = 8  # Calls of one program, with other values.


def _products(rng: np.random.Generator, data: np.random.Generator) -> jax.Array:
  """Products with one matrix or two, and what may come before and after."""
  size = lambda limit: int(rng.integers(1, limit))
  normal = lambda *shape: data.standard_normal(shape, np.float32)
  maybe = lambda value: value if rng.random() < 0.5 else None
  count, width = size(70), size(70) * (5 if rng.random() < 0.3 else 1)
  # If there are many outputs, a thread takes several groups.
  outputs = size(120) * (20 if rng.random() < 0.1 else 1)
  number, gated = size(3), False
  if number == 2:
    gated = rng.random() < 0.5
  dtype = rng.choice(['float32', 'bfloat16', 'int8', 'blocks'])

  def matrix():
    if dtype == 'blocks':
      kind = rng.choice([*blocks_lib.KINDS])
      return tiny_blocks.matrix(data, kind, (outputs, width))
    make = matrices_lib.FORMATS[dtype].from_rows
    return make([(slice(None), normal(outputs, width))], (outputs, width))

  matrices = [matrices_lib.pack(matrix()) for _ in range(number)]
  biases = [
    maybe(jnp.asarray(normal(outputs), rng.choice(['float32', 'bfloat16'])))
    for _ in matrices
  ]
  norm = ops.Norm(normal(width), maybe(normal(width)), 1e-5, size(3) == 1)
  results = outputs if gated else number * outputs
  return matrices_lib.multiply_packed(
    normal(count, width),
    matrices,
    biases,
    norm=maybe(norm),
    activation=maybe(rng.choice(ops.ACTIVATIONS)),
    gated=gated,
    residual=maybe(normal(count, results)),
  )


def _attention(
  rng: np.random.Generator, data: np.random.Generator
) -> jax.Array:
  """Attention with or without norms and a rotation."""
  size = lambda limit: int(rng.integers(1, limit))
  normal = lambda *shape: data.standard_normal(shape, np.float32)
  maybe = lambda value: value if rng.random() < 0.5 else None
  batch, heads, width, slots = size(4), size(3), size(70), size(50)
  length = size(min(12, slots) + 1)
  rows = normal(batch, length, heads * (size(3) + 2) * width)
  shape = batch, heads, slots, width
  dtype = rng.choice(['float32', 'bfloat16'])
  cache = [jnp.asarray(normal(*shape), dtype) for _ in range(2)]
  norm = lambda: ops.Norm(normal(width), None, 1e-5, False)
  angles = batch, 1, length, size(width // 2 + 1) if width > 1 else 0
  rotation = maybe((normal(*angles), normal(*angles)))
  return ops.attend(
    rows,
    data.random((batch, length, slots)) < data.random(),
    maybe(jnp.asarray(data.integers(-3, slots + 3, batch), jnp.int32)),
    *cache,
    scale=0.3,
    norms=maybe((norm(), norm(), maybe(norm()))) or (),
    rotation=rotation,
  )[0]


def _states(rng: np.random.Generator, data: np.random.Generator) -> jax.Array:
  """A convolution and the delta rule on random trees, and a fold."""
  size = lambda limit: int(rng.integers(1, limit))
  normal = lambda *shape: data.standard_normal(shape, np.float32)
  rows, slots, taps, key_heads, group = size(4), size(12), size(4), size(3), 2
  # Some states are large enough for several threads.
  key_width, width, heads = size(200), size(200), key_heads * group
  length, window = size(slots + 1), (rows, 1, slots)
  mixed = 2 * key_heads * key_width + heads * width
  integers = lambda least, most, *shape: jnp.asarray(
    data.integers(least, most, shape), jnp.int32
  )
  parents = jnp.stack(
    [integers(-1, slot + 1, rows) for slot in range(slots)], 1
  )
  inputs = {
    'key': normal(*window, key_heads * key_width),
    'delta': normal(*window, heads * width),
    'decay': normal(*window, heads),
  }
  state, tiled = normal(rows, heads, key_width, width), rng.random() < 0.5
  first = integers(0, slots - length + 1, rows)
  taken, _ = ops.mix_convolution(
    normal(rows, length, 3 * mixed),
    normal(rows, taps, mixed),
    normal(*window, mixed),
    (parents, first),
    normal(taps + 1, mixed),
    normal(mixed),
  )
  out, _ = ops.mix_delta(
    normal(rows, length, mixed + heads * (width + 2)),
    {'conv': normal(rows, taps, mixed), 'matrix': state},
    inputs | {'conv': normal(*window, mixed)},
    (parents, first),
    normal(taps + 1, mixed),
    (-np.abs(normal(heads)), normal(heads)),
    ops.Norm(normal(width), None, 1e-6, center=False),
    tiled=tiled,
  )
  folded = ops.fold_delta(
    state,
    inputs,
    integers(-2, slots + 2, rows, slots),
    integers(0, slots + 1, rows),
    tiled=tiled,
  )
  return ops.gate(out, out).sum() + folded.sum() + taken.sum()


def call(rng: np.random.Generator, data: np.random.Generator) -> jax.Array:
  """One call: `rng` draws sizes, dtypes and options, `data` the values."""
  size = lambda limit: int(rng.integers(1, limit))
  normal = lambda *shape: data.standard_normal(shape, np.float32)
  kind, width = rng.integers(7), size(70)
  if kind == 6:
    return _states(rng, data)
  if kind == 0:
    return _products(rng, data)
  if kind == 1:
    norm = ops.Norm(normal(width), None, 1e-5, rng.random() < 0.5)
    return ops.normalize(normal(size(5), width), norm)
  if kind == 2:
    count, renormalize = size(width + 1), rng.random() < 0.5
    logits = normal(size(5), width)
    return ops.route(logits, count, renormalize=renormalize)[1]
  if kind == 3:
    rows, shape = size(9), (size(5), size(5))
    index = jnp.asarray(data.integers(0, rows, shape), jnp.int32)
    return ops.sum_rows(normal(rows, width), index, normal(*shape))
  if kind == 4:
    batch, heads, slots = size(4), size(3), size(50)
    dtype = jnp.dtype(rng.choice(['float32', 'bfloat16']))
    draw = lambda slots: jnp.asarray(normal(batch, heads, slots, width), dtype)
    start = jnp.asarray(data.integers(-3, slots + 3, batch), jnp.int32)
    return ops.write_slots(draw(slots), draw(size(slots + 1)), start)
  return _attention(rng, data)


def main(folder: str, count: str) -> None:
  """Compiles the kernels into a folder, and calls them."""
  # Most of the time is XLA's: it compiles what is called once per `_REPEATS`.
  jax.config.update('jax_disable_most_optimizations', True)
  flags = build.FLAGS + _SANITIZE
  build.register(build.compile_library('g++', pathlib.Path(folder), flags))
  data = np.random.default_rng(0)
  for index in range(int(count)):
    if index % 100 == 0:
      print(f'{index} calls', flush=True)
    if index % _REPEATS == 0:
      jax.clear_caches()
    rng = np.random.default_rng(index // _REPEATS)
    assert np.isfinite(np.asarray(call(rng, data), np.float32)).all()
  print(f'all {count} calls', flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
