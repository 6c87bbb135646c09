"""Kernels for CPU: against XLA, and the same bits whatever is computed beside.

What is compared bit by bit is compared with what the same kernel computes for
one row, one query or one token alone.
"""

import functools
import os
import subprocess
import sys

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from models.checkpoints import hub
from models.nn import attention
from models.nn.adapter import as_model
from models.nn.cpu import build
from models.nn.cpu import ops
from models.nn.matmul import matmul
from models.nn.matmul import pack
from models.nn.matmul import quantize
from models.nn.matmul import take_rows
from specdec import cache as kv

pytestmark = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)

_RNG = np.random.default_rng(0)
# Outputs and inputs: one, parts of a block, several blocks with a rest, and
# more of each than a thread takes at once.
_SHAPES = [(1, 1), (48, 64), (101, 37), (1900, 481)]


_multiply, _matmul, _take_rows = map(jax.jit, (ops.multiply, matmul, take_rows))
_attend = jax.jit(functools.partial(ops.attend, scale=0.2))
_write_slots = jax.jit(ops.write_slots, donate_argnums=0)


def _matrix(shape, dtype):
  values = _RNG.standard_normal(shape, np.float32)
  return quantize(values) if dtype == 'int8' else jnp.asarray(values, dtype)


@pytest.mark.parametrize('shape', _SHAPES)
@pytest.mark.parametrize('dtype', ops.DTYPES)
def test_products_equal_those_of_xla(shape, dtype):
  weight = _matrix(shape, dtype)
  packed = pack(weight)
  unpacked = weight.values if dtype == 'int8' else weight
  np.testing.assert_array_equal(ops.unpack(packed), unpacked)
  x = _RNG.standard_normal((35, shape[1]), np.float32)
  alone = np.concatenate([_multiply(x[i : i + 1], packed) for i in range(35)])
  for count in (2, 8, 19, 35):
    result = _multiply(x[:count], packed)
    np.testing.assert_array_equal(result, alone[:count])
  expected = _matmul(x, weight)
  np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
  index = _RNG.integers(0, shape[0], (2, 3))
  rows = _take_rows(packed, index)
  np.testing.assert_array_equal(rows, _take_rows(weight, index))
  # A row that is not finite spoils no other.
  for value in (np.nan, np.inf):
    spoiled = x.copy()
    spoiled[1, 0] = value
    result = np.asarray(_multiply(spoiled, packed))
    assert not np.isfinite(result[1]).any()
    np.testing.assert_array_equal(result[2:], alone[2:])


def _attention(width, dtype):
  batch, length, slots = 2, 3, 45
  draw = lambda heads, size: _RNG.standard_normal((batch, heads, size, width))
  arrays = draw(6, length), draw(2, slots), draw(2, slots)
  mask = _RNG.random((batch, length, slots)) < 0.6
  mask[:, :, 0], mask[:, :, 7] = True, False
  return *(array.astype(jnp.dtype(dtype)) for array in arrays), mask


@pytest.mark.parametrize('width', [4, 24, 80])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_attention_equals_that_of_xla(width, dtype):
  query, key, value, mask = _attention(width, dtype)
  result = np.asarray(_attend(query, key, value, mask))
  exact = [array.astype('float32') for array in (query, key, value)]
  expected = attention.attend(*exact, mask, scale=0.2)
  np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)
  nothing = _attend(query, key, value, np.zeros_like(mask))
  assert not np.asarray(nothing).any()
  # A query has the same bits wherever the slots are that it sees.
  for row, place in np.ndindex(mask.shape[:2]) if width == 24 else ():
    seen = np.flatnonzero(mask[row, place])
    alone = _attend(
      query[row : row + 1, :, place : place + 1],
      *(array[row : row + 1, :, seen] for array in (key, value)),
      np.ones((1, 1, len(seen)), bool),
    )
    np.testing.assert_array_equal(alone[0, :, 0], result[row, :, place])
  # What a masked slot holds; values are finite, see `specdec.cache.write`.
  key[:, :, 7], value[:, :, 7] = np.nan, -3.0
  np.testing.assert_array_equal(_attend(query, key, value, mask), result)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_entries_are_written_where_xla_writes_them(dtype):
  """In place, and at the end of the cache where there is no room."""
  draw = lambda *shape: jnp.asarray(_RNG.standard_normal(shape), dtype)
  slots, new = draw(3, 2, 9, 5), draw(3, 2, 4, 5)
  start = jnp.array([0, 3, 7], jnp.int32)
  expected = np.asarray(kv.write_slots(slots, new, start), np.float32)
  before = slots.unsafe_buffer_pointer()
  written = _write_slots(slots, new, start)
  np.testing.assert_array_equal(np.asarray(written, np.float32), expected)
  assert written.unsafe_buffer_pointer() == before


@pytest.mark.parametrize(
  ('width', 'center'), [(3, True), (40, True), (3, False), (40, False)]
)
def test_norms_equal_their_definition(width, center):
  x = _RNG.standard_normal((4, 3, width), np.float32)
  scale = _RNG.standard_normal(width, np.float32)
  normalize = functools.partial(ops.normalize, epsilon=0.1, center=center)
  result = normalize(x, scale)
  shifted = x - x.mean(-1, keepdims=True) if center else x
  mean_square = np.square(shifted).mean(-1, keepdims=True)
  expected = shifted / np.sqrt(mean_square + 0.1) * scale
  np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
  alone = normalize(x[2:3, :1], scale)
  np.testing.assert_array_equal(alone[0, 0], result[2, 0])


def _packed(module, dtype):
  """The module with packed matrices, of int8 or of its own dtype."""
  graph, params = hub.flat_params(module)
  for path, leaf in params.items():
    if leaf.ndim == 2 and path[0] != 'wpe':
      matrix = quantize(np.asarray(leaf)) if dtype == 'int8' else leaf
      params[path] = pack(matrix)
  return nnx.merge(graph, traverse_util.unflatten_dict(params))


@pytest.mark.parametrize(
  'case', ['gpt2 float32', 'gpt2 int8', 'llama bfloat16', 'mixtral int8']
)
def test_a_token_has_the_same_bits_in_any_forward(case):
  """Read one by one, in chunks, in a batch of other orders: equal logits."""
  family, dtype = case.split()
  floats = 'float32' if dtype == 'float32' else 'bfloat16'
  module = (
    tiny.module(dtype=jnp.dtype(floats))
    if family == 'gpt2'
    else tiny.llama_module(family, floats)
  )
  graph, state = nnx.split(_packed(module, dtype))
  apply = jax.jit(lambda state, *args: nnx.merge(graph, state)(*args))
  tokens = _RNG.integers(0, module.config.vocab_size, (3, 12))

  def logits(rows, chunk):
    cache = as_model(module).spec.init_cache(len(rows), 20)
    parts = []
    for start in range(0, 12, chunk):
      positions = np.tile(np.arange(start, start + chunk), (len(rows), 1))
      mask = np.arange(20)[None, None] <= positions[:, :, None]
      part, cache = apply(
        state, tokens[rows][:, start : start + chunk], positions, mask, cache
      )
      end = np.full(len(rows), start + chunk, np.int32)
      cache = cache.replace(length=end)
      parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1)

  alone = np.concatenate([logits([row], 1) for row in range(3)])
  for rows, chunk in (([0, 1, 2], 1), ([2, 0, 1], 4), ([1], 12)):
    np.testing.assert_array_equal(logits(rows, chunk), alone[rows])


def test_without_a_compiler_xla_computes(monkeypatch, capsys):
  monkeypatch.setattr(build.shutil, 'which', lambda name: None)
  monkeypatch.delenv('CXX', raising=False)
  assert not build.is_available.__wrapped__()
  assert 'there is no C++ compiler' in capsys.readouterr().err
  monkeypatch.setenv('CXX', '/nowhere/g++')
  assert not build.is_available.__wrapped__()
  assert '/nowhere/g++' in capsys.readouterr().err


def test_a_library_is_compiled_once_for_its_flags(monkeypatch, tmp_path):
  def run(command, **kw):
    if '-o' in command:
      assert not command[-1].exists()
      command[-1].write_bytes(b'')
    return subprocess.CompletedProcess(command, 0, stdout=b'g++ 1')

  monkeypatch.setattr(build.subprocess, 'run', run)
  make = functools.partial(build.compile_library, 'g++', tmp_path)
  assert make() == make() != make(flags=('-O2',))


@pytest.mark.long
def test_random_calls_read_and_write_in_bounds(tmp_path):
  """In a process of its own, under the sanitizers of g++."""
  libraries = [
    subprocess.check_output(
      ['g++', f'-print-file-name=lib{name}.so'], text=True
    )
    for name in ('asan', 'ubsan')
  ]
  preload = ' '.join(path.strip() for path in libraries)
  command = [sys.executable, 'tests/cpu_calls.py', tmp_path, '2000']
  options = {'ASAN_OPTIONS': 'detect_leaks=0', 'LD_PRELOAD': preload}
  done = subprocess.run(
    command, env=os.environ | options, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert '2000 calls' in done.stdout
  assert 'runtime error' not in done.stderr
