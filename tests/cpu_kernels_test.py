"""Kernels for CPU: against XLA, and the same bits whatever is beside."""

import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import variants

from models.checkpoints import hub
from models.nn import adapter
from models.nn import attention
from models.nn import experts as experts_lib
from models.nn import matrices as matrices_lib
from models.nn import rope as rope_lib
from models.nn.cpu import build
from models.nn.cpu import ops
from specdec import cache as cache_lib

pytestmark = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)

_RNG = np.random.default_rng(0)
# Outputs and inputs: one, parts of a block, several blocks with a rest, and
# more of each than a thread takes at once.
_SHAPES = [(1, 1), (48, 64), (101, 37), (1900, 481)]


_matmul, _take_rows = map(
  jax.jit, (matrices_lib.matmul, matrices_lib.take_rows)
)
_attend = jax.jit(functools.partial(ops.attend, scale=0.2))
_write_slots = jax.jit(ops.write_slots, donate_argnums=0)


def _matrix(shape, dtype):
  values = _RNG.standard_normal(shape, np.float32)
  return (
    matrices_lib.quantize(values)
    if dtype == 'int8'
    else jnp.asarray(values, dtype)
  )


@pytest.mark.parametrize('shape', _SHAPES)
@pytest.mark.parametrize('dtype', matrices_lib.KERNEL_DTYPES)
def test_products_equal_those_of_xla(shape, dtype):
  weight = _matrix(shape, dtype)
  packed = matrices_lib.pack(weight)
  unpacked = weight.values if dtype == 'int8' else weight
  np.testing.assert_array_equal(matrices_lib.unpack(packed), unpacked)
  x = _RNG.standard_normal((35, shape[1]), np.float32)
  alone = np.concatenate([_matmul(x[i : i + 1], packed) for i in range(35)])
  for count in (2, 8, 19, 35):
    result = _matmul(x[:count], packed)
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
    result = np.asarray(_matmul(spoiled, packed))
    assert not np.isfinite(result[1]).any()
    np.testing.assert_array_equal(result[2:], alone[2:])


def test_scaled_rows_are_not_scaled_by_xla():
  """It may round the product with a sum that follows, or not, by the shape."""
  packed = matrices_lib.pack(_matrix((20, 3), 'int8'))
  traced = str(
    jax.make_jaxpr(matrices_lib.take_rows)(packed, np.zeros((2, 4), int))
  )
  assert 'specdec_sum_rows' in traced
  assert not re.search(r':f32\[[\d,]*\] = mul', traced)


def _attention(width, dtype):
  batch, length, slots = 2, 3, 45
  draw = lambda heads, size: _RNG.standard_normal((batch, heads, size, width))
  arrays = draw(6, length), draw(2, slots), draw(2, slots)
  mask = _RNG.random((batch, length, slots)) < 0.6
  mask[:, :, 0], mask[:, :, 7] = True, False
  return *(array.astype(jnp.dtype(dtype)) for array in arrays), mask


@pytest.mark.parametrize('width', [5, 24, 77])
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
  expected = np.asarray(cache_lib.write_slots(slots, new, start), np.float32)
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


@pytest.mark.parametrize(
  ('num_experts', 'renormalize'), [(3, False), (64, True), (130, True)]
)
def test_routing_equals_that_of_xla(num_experts, renormalize):
  logits = 3 * _RNG.standard_normal((2, 9, num_experts), np.float32)
  logits[:, :, 1] = logits[:, :, 0]  # Of equals the first one is better.
  logits[0, 0] = 1.0
  run = functools.partial(experts_lib.route, count=3, renormalize=renormalize)
  ours = jax.jit(functools.partial(run, kernels=True))
  result, expected = ours(logits), jax.jit(run)(logits)
  np.testing.assert_array_equal(result.experts, expected.experts)
  for name in ('weights', 'probs'):
    both = getattr(result, name), getattr(expected, name)
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-7)
  last = jax.tree.map(lambda leaf: leaf[1:, 8:], result)
  jax.tree.map(np.testing.assert_array_equal, ours(logits[1:, 8:]), last)
  # A row that is not a number is routed somewhere, and spoils no other.
  logits[1, 3, 2] = np.nan
  spoiled = ours(logits)
  assert np.isnan(spoiled.weights[1, 3]).all()
  assert len({*spoiled.experts[1, 3].tolist()}) == 3
  np.testing.assert_array_equal(spoiled.weights[1, 4:], result.weights[1, 4:])


def test_rows_are_summed_in_the_order_of_their_index():
  """So that 1e8 takes all of 1 with it, and both are gone in the end."""
  rows = np.tile(_RNG.standard_normal((5, 1), np.float32), 37)
  rows[:3] = np.array([1.0, 1e8, -1e8])[:, None]
  index = np.array([[0, 1, 2], [1, 2, 0], [3, 4, 3]], np.int32)
  weights = np.array([[1, 1, 1], [1, 1, 1], [0.5, 0.25, 0]], np.float32)
  expected = np.array([0.0, 1.0, rows[3, 0] / 2 + rows[4, 0] / 4], np.float32)
  result = ops.sum_rows(rows, index, weights)
  np.testing.assert_allclose(result, np.tile(expected[:, None], 37), rtol=1e-6)


def _packed(module, dtype):
  """The module with packed matrices, of int8 or of its own dtype."""
  graph, params = hub.flat_params(module)
  for path, leaf in params.items():
    if leaf.ndim == 2 and path[0] != 'wpe':
      matrix = (
        matrices_lib.quantize(np.asarray(leaf)) if dtype == 'int8' else leaf
      )
      params[path] = matrices_lib.pack(matrix)
  return nnx.merge(graph, traverse_util.unflatten_dict(params))


# Trees of 24 nodes: of each two, the second is a wrong guess beside the first.
_NODES = np.arange(24)
_TREE = (_NODES % 2 == 0) & np.tri(24, dtype=bool) | np.eye(24, dtype=bool)


def _module(family, dtype, **changes):
  floats = 'float32' if dtype == 'float32' else 'bfloat16'
  if family == 'gpt2':
    return tiny.module(dtype=jnp.dtype(floats))
  if family == 'windows':
    changes |= {'window': (5, None), 'rope': (rope_lib.Rope(), None)}
    family = 'llama'
  return tiny.llama_module(family, floats, **changes)


_long = functools.partial(pytest.param, marks=pytest.mark.long)
_MIXTURES = [*itertools.product(matrices_lib.KERNEL_DTYPES, (64, 128))]


@pytest.mark.parametrize(
  ('family', 'dtype', 'num_experts'),
  [
    *(('gpt2', 'float32', 0), ('gpt2', 'int8', 0), ('windows', 'bfloat16', 0)),
    ('mixtral', 'float32', 64),
    *(_long('mixtral', *case) for case in _MIXTURES[1:]),
  ],
)
def test_a_token_has_the_same_bits_in_any_forward(family, dtype, num_experts):
  """Read one by one, in chunks, batches of other orders and trees.

  All of them go beyond a window, within the tree as well.
  """
  experts = {'num_experts': num_experts, 'experts_per_token': 8}
  changes = experts if num_experts else {}
  module = _packed(_module(family, dtype, **changes), dtype)
  graph, state = nnx.split(module)
  apply = jax.jit(lambda state, *args: nnx.merge(graph, state)(*args))
  tokens = _RNG.integers(0, module.config.vocab_size, (3, 12))
  empty = lambda rows: adapter.as_model(module).spec.init_cache(len(rows), 24)

  def logits(rows, chunk):
    cache, parts = empty(rows), []
    for start in range(0, 12, chunk):
      positions = np.tile(np.arange(start, start + chunk), (len(rows), 1))
      mask = _NODES[None, None] <= positions[:, :, None]
      part, cache = apply(
        state, tokens[rows][:, start : start + chunk], positions, mask, cache
      )
      end = np.full(len(rows), start + chunk, np.int32)
      cache = cache.replace(length=end)
      parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1)

  def logits_of_trees(rows):
    nodes = np.repeat(tokens[rows], 2, axis=1)
    nodes[:, 1::2] = nodes[:, 1::2] // 2
    positions = np.tile(_NODES // 2, (len(rows), 1))
    mask = np.tile(_TREE[None], (len(rows), 1, 1))
    return apply(state, nodes, positions, mask, empty(rows))[0][:, ::2]

  alone = np.concatenate([logits([row], 1) for row in range(3)])
  np.testing.assert_array_equal(logits_of_trees([1, 0, 2]), alone[[1, 0, 2]])
  # Each shape of a mixture takes long to compile.
  shapes = ([0, 1, 2], 1), ([2, 0, 1], 4), ([1], 12)
  for rows, chunk in () if num_experts else shapes:
    np.testing.assert_array_equal(logits(rows, chunk), alone[rows])


# Sums whose order XLA chooses.
_SUMS = re.compile(
  r':b?f\d+\[[\d,]*\] = '
  r'(\w*dot\w*|conv_\w+|reduce_(?!precision)\w+|cum\w+|scatter\W\w+)\['
)


@pytest.mark.parametrize('variant', ['gpt2', 'qwen3_biases', 'qwen3_moe'])
@pytest.mark.parametrize('dtype', matrices_lib.KERNEL_DTYPES)
def test_xla_sums_nothing_in_a_forward(variant, dtype, tmp_path):
  folder = variants.write(variant, tmp_path / 'model')
  tokens = np.zeros((2, 3), int)

  def sums(packed):
    model = adapter.as_model(
      hub.load_module(folder, dtype=dtype, packed=packed)
    )
    cache, mask = model.spec.init_cache(2, 9), np.zeros((2, 3, 9), bool)
    arguments = model.params, tokens, tokens, mask, cache
    return {*_SUMS.findall(str(jax.make_jaxpr(model.spec.apply)(*arguments)))}

  assert sums(packed=False) >= {'dot_general', 'reduce_sum'}
  assert not sums(packed=True)


# Branches of the source: flags that choose them, of which the last ones count,
# and what the processor must have.
_BRANCHES = {
  'plain': ('-march=x86-64', 'sse2'),
  'avx2': ('-march=haswell', 'avx2 bmi2 f16c fma movbe'),
  'avx512': ('-march=skylake-avx512', 'avx512bw avx512cd avx512dq avx512vl'),
  # What GCC defines for Zen 4, without instructions that only AMD has.
  'amd': ('-march=cooperlake -D__znver4__', 'avx512_bf16 avx512_vnni'),
}
_LONG_BRANCHES = {
  'avx': ('-march=sandybridge', 'avx aes pclmulqdq'),
  'avx512f': ('-march=haswell -mavx512f', 'avx512f'),
  'vnni': ('-march=cascadelake', 'avx512_vnni'),
}


def _every_kernel():
  """By names, what kernels compute of some rows, and of the last one alone."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  results = {}

  def call(name, function, *rows):
    last = function(*(array[-1:] for array in rows))
    results[name] = function(*rows), last

  for dtype in matrices_lib.KERNEL_DTYPES:
    values = draw(101, 203)
    integers = dtype == 'int8'
    matrix = (
      matrices_lib.quantize(values)
      if integers
      else values.astype(jnp.dtype(dtype))
    )
    product = functools.partial(
      matrices_lib.matmul, weight=matrices_lib.pack(matrix)
    )
    call(dtype, product, draw(11, 203))
  for dtype in ('float32', 'bfloat16'):
    cache = [jnp.asarray(draw(1, 2, 45, 77), dtype) for _ in range(2)]

    def attend(query, mask, cache=cache):
      query = query.swapaxes(0, 1)[None]
      return ops.attend(query, *cache, mask[None], scale=0.2)[0].swapaxes(0, 1)

    query = jnp.asarray(draw(9, 2, 77), dtype)
    call(f'attention {dtype}', attend, query, rng.random((9, 45)) < 0.6)
  for center in (False, True):
    norm = functools.partial(
      ops.normalize, scale=draw(37), epsilon=0.1, center=center
    )
    call(f'norm {center}', norm, draw(4, 37))
  call('route', lambda x: ops.route(x, 5, renormalize=True)[1], draw(4, 70))
  index = rng.integers(0, 7, (4, 5)).astype(np.int32)
  call('sum', functools.partial(ops.sum_rows, draw(7, 37)), index, draw(4, 5))
  return results


@pytest.mark.parametrize('branch', [*_BRANCHES, *map(_long, _LONG_BRANCHES)])
def test_every_branch_of_the_source_computes_the_same(
  branch, monkeypatch, request
):
  """Integers are exact; sums of floats are rounded in other orders."""
  flags, needed = (_BRANCHES | _LONG_BRANCHES)[branch]
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  words = cpuinfo.read_text().split() if cpuinfo.exists() else []
  if not {*needed.split()} <= {*words}:
    pytest.skip(f'the processor must have {needed}')
  if not request.config.getoption('--long'):
    flags += ' -Og'
  folder = pathlib.Path(__file__).parents[1] / 'build/kernels'
  library = build.compile_library(
    build.find_compiler(), folder, (*build.FLAGS, *flags.split())
  )
  build.register(library, f'_{branch}')
  expected = jax.jit(_every_kernel)()
  call = jax.ffi.ffi_call
  renamed = lambda name, *args: call(f'{name}_{branch}', *args)
  monkeypatch.setattr(jax.ffi, 'ffi_call', renamed)
  for name, (some, last) in jax.jit(lambda: _every_kernel())().items():
    np.testing.assert_array_equal(some[-1:], last, name)
    off = 0 if name == 'int8' else 1e-4
    np.testing.assert_allclose(some, expected[name][0], off, off, err_msg=name)


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
