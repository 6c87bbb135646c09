"""Kernels for CPU: against XLA, and the same bits next to any other rows."""

import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_test
import tiny
import tiny_blocks
import tiny_recurrent
import variants

from specdec import cache as cache_lib
from specdec.models.checkpoints import hub
from specdec.models.nn import adapter
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import contraction
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import mixtral
from specdec.models.nn import rope as rope_lib
from specdec.models.nn.cpu import build
from specdec.models.nn.cpu import ops

pytestmark = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)

_RNG = np.random.default_rng(0)
_matmul, _take_rows = map(
  jax.jit, (matrices_lib.matmul, matrices_lib.take_rows)
)
_attend = jax.jit(
  functools.partial(ops.attend, scale=0.2), donate_argnums=(3, 4)
)
_write_slots = jax.jit(ops.write_slots, donate_argnums=0)


_DTYPES = 'float32', 'bfloat16', 'int8'
# Outputs and inputs: one, parts of a block, several blocks with a rest, and
# more of each than a thread takes at once. For weights in blocks of few bits:
# whole groups of outputs and blocks of inputs, and parts of each.
_PRODUCTS = [
  *itertools.product(_DTYPES, [(101, 37), (1900, 481)]),
  ('float32', (1, 1)),
  ('int8', (1, 1)),
  ('bfloat16', (48, 64)),
  *itertools.product(blocks_lib.KINDS, [(77, 736)]),
]


def _matrix(shape, dtype, rng=_RNG):
  if dtype in blocks_lib.KINDS:
    return tiny_blocks.matrix(rng, dtype, shape)
  values = rng.standard_normal(shape, np.float32)
  return (
    matrices_lib.quantize(values)
    if dtype == 'int8'
    else values.astype(jnp.dtype(dtype))
  )


@jax.jit
def _computed(x, packed, index):
  """Products of all rows, products of some of them, and rows of the matrix."""
  some = [
    matrices_lib.matmul(x[2 : 2 + count], packed)
    for count in (*range(1, 9), 11, 19)
  ]
  rows = matrices_lib.take_rows(packed, index)
  return matrices_lib.matmul(x, packed), some, rows


def _rounded(x):
  """Rows in eight bits by 128 inputs."""
  parts = np.pad(x, ((0, 0), (0, -x.shape[1] % 128))).reshape(len(x), -1, 128)
  scale = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
  values = (np.round(parts / scale) * scale).reshape(len(x), -1)
  return values[:, : x.shape[1]]


@pytest.mark.parametrize(('dtype', 'shape'), _PRODUCTS)
def test_products_are_those_of_the_weights(dtype, shape):
  """By XLA, or of blocks by NumPy; and a row has the same bits alone."""
  matrix = _matrix(shape, dtype)
  packed = matrices_lib.pack(matrix)
  x = _RNG.standard_normal((35, shape[1]), np.float32)
  x[3] *= 1e-30
  index = _RNG.integers(0, shape[0], (2, 3))
  result, some, rows = jax.tree.map(np.asarray, _computed(x, packed, index))
  if dtype in blocks_lib.KINDS:
    stored, rounded = matrix.words, _rounded(x)
    weights = blocks_lib.expand(stored, dtype, shape[1], np)
    expected = rounded.astype(np.float64) @ weights.T.astype(np.float64)
    # float32 loses as much of a sum as of its largest term.
    off, taken = 1e-6 * np.abs(rounded) @ np.abs(weights).T, weights[index]
  else:
    stored = matrix.values if dtype == 'int8' else matrix
    expected, taken = _matmul(x, matrix), _take_rows(matrix, index)
    off = 1e-4 + 1e-5 * np.abs(expected)
  np.testing.assert_array_equal(matrices_lib.unpack(packed), stored)
  assert (np.abs(result - expected) <= off).all()
  np.testing.assert_array_equal(rows, taken)
  for part in some:
    np.testing.assert_array_equal(part, result[2 : 2 + len(part)])
  # A row that is not finite spoils no other.
  for value in (np.nan, np.inf):
    x[1, 0] = value
    spoiled = np.asarray(_computed(x, packed, index)[0])
    assert not np.isfinite(spoiled[1]).any()
    np.testing.assert_array_equal(spoiled[2:], result[2:])


def test_scaled_rows_are_not_scaled_by_xla():
  """It may round the product with a sum that follows, or not, by the shape."""
  packed = matrices_lib.pack(_matrix((20, 3), 'int8'))
  traced = str(
    jax.make_jaxpr(matrices_lib.take_rows)(packed, np.zeros((2, 4), int))
  )
  assert 'specdec_sum_rows' in traced
  assert not re.search(r':f32\[[\d,]*\] = mul', traced)


_FUNCTIONS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
  'quick_gelu': lambda x: x * jax.nn.sigmoid(1.702 * x),
  'relu': jax.nn.relu,
}
_GATES = (*_FUNCTIONS, 'clamped_swiglu')


@pytest.mark.parametrize('dtype', [*_DTYPES, 'Q4_K'])
def test_what_surrounds_products_equals_the_parts_one_by_one(dtype):
  """Norms and residuals bit by bit, and so all of a row alone."""
  draw = lambda *shape: _RNG.standard_normal(shape, np.float32)
  # Blocks of two kinds in one call.
  kinds = [dtype, 'Q5_0' if dtype == 'Q4_K' else dtype]
  matrices = [matrices_lib.pack(_matrix((70, 90), kind)) for kind in kinds]
  biases = [draw(70), jnp.asarray(draw(70), jnp.bfloat16)]
  norm = ops.Norm(draw(90), draw(90), 0.1, True)

  @jax.jit
  def compute(x, residual):
    multiply = matrices_lib.multiply_packed
    rows, pairs = ops.normalize(x, norm), [*zip(matrices, biases, strict=True)]
    return {
      'without': [multiply(rows, [matrix], [None]) for matrix in matrices],
      'parts': [multiply(rows, [matrix], [bias]) for matrix, bias in pairs],
      'whole': multiply(x, matrices, biases, norm=norm),
      'added': multiply(
        rows, matrices[:1], biases[:1], activation='relu', residual=residual
      ),
      'gated': [
        multiply(x, matrices, biases, activation=name, gated=True, norm=norm)
        for name in _GATES
      ],
    }

  x, residual = 3 * draw(37, 90), draw(37, 70)
  results = jax.tree.map(np.asarray, compute(x, residual))
  alone = compute(x[35:36], residual[35:36])
  last = jax.tree.map(lambda array: array[35:36], results)
  jax.tree.map(np.testing.assert_array_equal, alone, last)
  first, second = parts = results['parts']
  for part, without, bias in zip(
    parts, results['without'], biases, strict=True
  ):
    expected = without + np.float32(bias)[None]
    np.testing.assert_allclose(part, expected, rtol=1e-6, atol=1e-5)
  np.testing.assert_array_equal(results['whole'], np.hstack(parts))
  expected = residual + np.maximum(first, 0)
  np.testing.assert_array_equal(results['added'], expected)
  for gated, name in zip(results['gated'], _GATES, strict=True):
    if name == 'clamped_swiglu':
      limited = _FUNCTIONS['quick_gelu'](np.minimum(first, 7))
      expected = limited * (np.clip(second, -7, 7) + 1)
    else:
      expected = _FUNCTIONS[name](first) * second
    np.testing.assert_allclose(gated, expected, rtol=1e-5, atol=1e-4)


def _attention(width, dtype):
  """Projections of 6 heads of queries and 2 of keys, and a cache."""
  batch, length, slots = 2, 3, 45
  draw = lambda *shape: _RNG.standard_normal(shape, np.float32)
  cache = [draw(batch, 2, slots, width).astype(dtype) for _ in range(2)]
  mask = _RNG.random((batch, length, slots)) < 0.6
  mask[:, :, 3] = True
  # Two values of bfloat16 are read together, so of an odd number one is alone.
  mask[:, :, [*range(1 + width % 2), 7, 44]] = False
  rows = draw(batch, length, 10 * width)
  return rows, mask, jnp.array([40, 17], jnp.int32), *cache


def _attention_of_xla(
  rows, mask, start, keys, values, *, norms=None, rotation=None
):
  """`ops.attend` in float32, of rounded queries, keys, values and weights."""
  heads = rows.reshape(*rows.shape[:2], 10, -1).swapaxes(1, 2)
  query, key, value = jnp.split(heads, (6, 8), axis=1)
  if norms is not None:
    query, key, value = map(ops.normalize, (query, key, value), norms)
    query, key = (rope_lib.rotate(part, rotation) for part in (query, key))
  new = [part.astype(keys.dtype) for part in (query, key, value)]
  keys = cache_lib.write_slots(keys, new[1], start)
  values = cache_lib.write_slots(values, new[2], start)
  exact = [part.astype('float32') for part in (new[0], keys, values)]
  repeated = [jnp.repeat(part, 3, axis=1) for part in exact[1:]]
  scores = 0.2 * jnp.einsum('bhld,bhsd->bhls', exact[0], repeated[0])
  scores = jnp.where(mask[:, None], scores, -jnp.inf)
  weights = jnp.exp(scores - scores.max(-1, keepdims=True)).astype(keys.dtype)
  out = jnp.einsum('bhls,bhsd->blhd', weights.astype('float32'), repeated[1])
  out /= weights.astype('float32').sum(-1).swapaxes(1, 2)[..., None]
  return out.reshape(*rows.shape[:2], -1), keys, values


@pytest.mark.parametrize(
  ('width', 'dtype'),
  [(5, 'float32'), (24, 'float32'), (24, 'bfloat16'), (77, 'bfloat16')],
)
def test_attention_equals_that_of_xla(width, dtype):
  arguments = _attention(width, jnp.dtype(dtype))
  rows, mask, start, *cache = arguments
  options = {}
  if width == 24:
    draw = lambda *shape: _RNG.standard_normal(shape, np.float32)
    norms = [ops.Norm(draw(width), None, 0.1, False) for _ in range(3)]
    angles = draw(2, 1, 3, width // 2 - 3)  # The last values stay.
    options = {'norms': norms, 'rotation': (np.cos(angles), np.sin(angles))}
  attend = jax.jit(functools.partial(ops.attend, scale=0.2, **options))
  result, *written = map(np.asarray, attend(*arguments))
  of_xla = functools.partial(_attention_of_xla, **options)
  expected = jax.jit(of_xla)(*arguments)
  # A weight that is rounded, or a number after a rotation, may be the next one.
  rtol, atol = 2e-5, 2e-6
  if dtype == 'bfloat16':
    rtol, atol = (0.02, 0.02) if width == 24 else (0, 1e-3)
  for part, wanted in zip((result, *written), expected, strict=True):
    both = (np.asarray(array, np.float32) for array in (part, wanted))
    np.testing.assert_allclose(*both, rtol=rtol, atol=atol)
  assert not np.asarray(attend(rows, mask & False, start, *cache)[0]).any()
  # Another layer may read what is written, and change nothing.
  queries = rows[..., : 6 * width]
  for part, same in zip(
    attend(queries, mask, None, *written), (result, *written), strict=True
  ):
    np.testing.assert_array_equal(part, same)
  # A query has the same bits wherever the slots are that it sees. Its own entry
  # is written after them.
  for row, place in np.ndindex(mask.shape[:2]) if width != 24 else ():
    seen = np.flatnonzero(mask[row, place])
    slots = [*seen, 0]
    alone = attend(
      rows[row : row + 1, place : place + 1],
      (np.arange(len(slots)) < len(seen))[None, None],
      np.array([len(seen)], np.int32),
      *(array[row : row + 1, :, slots] for array in written),
    )
    np.testing.assert_array_equal(alone[0][0, 0], result[row, place])
  # Masked slots change no bit, and slots around the visible ones are not read.
  cache[0][:, :, 7], cache[1][:, :, 7] = np.nan, -3.0
  for array in cache:
    array[:, :, [0, 44]] = np.nan
  same, *_ = attend(rows, mask, start, *cache)
  np.testing.assert_array_equal(same, result)
  # Rows that are not finite.
  mask[0, :, 42] = False
  clean = attend(rows, mask, start, *cache)
  rows[0, 2] = np.nan
  rows[1, 1] = np.finfo(np.float32).max  # Rounding makes infinity of it.
  spoiled, *written = attend(rows, mask, start, *cache)
  np.testing.assert_array_equal(spoiled[0, :2], clean[0][0, :2])
  assert not np.asarray(written)[:, 0, :, 42].astype('float32').any()
  kept = np.asarray(written)[1, 1, :, 18].astype('float32')
  # Its square is infinite, so that a norm makes zeros of it.
  stays = dtype == 'float32' and not options
  assert np.all(kept == (rows[1, 1, 0] if stays else 0))


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
  rows, mask, start, *cache = _attention(5, jnp.dtype(dtype))
  cache = [jnp.array(array) for array in cache]
  before = [array.unsafe_buffer_pointer() for array in cache]
  written = _attend(rows, mask, start, *cache)[1:]
  assert [array.unsafe_buffer_pointer() for array in written] == before


@pytest.mark.parametrize(('width', 'center'), [(3, False), (40, True)])
def test_norms_equal_their_definition(width, center):
  x = _RNG.standard_normal((4, 3, width), np.float32)
  scale = _RNG.standard_normal(width, np.float32)
  norm = ops.Norm(scale, None, 0.1, center)
  result = ops.normalize(x, norm)
  shifted = x - x.mean(-1, keepdims=True) if center else x
  mean_square = np.square(shifted).mean(-1, keepdims=True)
  expected = shifted / np.sqrt(mean_square + 0.1) * scale
  np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
  alone = ops.normalize(x[2:3, :1], norm)
  np.testing.assert_array_equal(alone[0, 0], result[2, 0])


@pytest.mark.parametrize(
  ('num_experts', 'renormalize'), [(3, False), (64, True), (130, True)]
)
def test_routing_equals_that_of_xla(num_experts, renormalize):
  logits = 3 * _RNG.standard_normal((2, 9, num_experts), np.float32)
  logits[:, :, 1] = logits[:, :, 0]  # The first of equals is better.
  logits[0, 0] = 1.0
  run = functools.partial(mixtral.route, count=3, renormalize=renormalize)
  expected = jax.jit(run)(logits)
  in_use = contraction.in_use(contraction.Backend(kernels=True))
  ours = jax.jit(in_use(run))
  result = ours(logits)
  np.testing.assert_array_equal(result.experts, expected.experts)
  both = result.weights, expected.weights
  np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-7)
  last = jax.tree.map(lambda leaf: leaf[1:, 8:], result)
  jax.tree.map(np.testing.assert_array_equal, ours(logits[1:, 8:]), last)
  # A row that is not a number is routed somewhere, and spoils no other.
  logits[1, 3, 2] = np.nan
  spoiled = ours(logits)
  assert np.isnan(spoiled.weights[1, 3]).all()
  assert len({*spoiled.experts[1, 3].tolist()}) == 3
  np.testing.assert_array_equal(spoiled.weights[1, 4:], result.weights[1, 4:])


_long = functools.partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize(
  ('family', 'dtype', 'num_experts'),
  [
    ('gpt2', 'int8', 0),
    ('llama', 'bfloat16', 0),
    ('mixtral', 'float32', 64),
    _long('gpt2', 'float32', 0),
    _long('gpt2', 'int4', 0),
    _long('mixtral', 'float32', 128),
    *(
      _long('mixtral', *case)
      for case in itertools.product(('bfloat16', 'int8', 'int4'), (64, 128))
    ),
  ],
)
def test_a_token_has_the_same_bits_in_any_forward(family, dtype, num_experts):
  """Read one by one, in chunks, batches of other orders and trees.

  All of them go beyond a window, within the tree as well.
  """
  changes = {'window': (5, None)}
  if num_experts:
    changes = {'num_experts': num_experts, 'experts_per_token': 8}
  module = (
    tiny.module() if family == 'gpt2' else tiny.llama_module(family, **changes)
  )
  module = hub.read_module(tiny.Stored(module), dtype=dtype, packed=True)
  model = adapter.as_model(module)
  tokens = _RNG.integers(0, model.spec.vocab_size, (3, 12))
  read = lambda rows, size: tiny_recurrent.in_chunks(model, tokens[rows], size)[
    0
  ]
  alone = np.concatenate([read([row], 1) for row in range(3)])
  # The second of each two nodes is a wrong guess next to the first.
  order = [1, 0, 2]
  nodes = np.repeat(tokens[order], 2, axis=1)
  nodes[:, 1::2] //= 2
  parents = np.maximum(np.arange(24) // 2 * 2 - 2, -1)
  tree = tiny_recurrent.Tree(nodes, np.tile(parents, (3, 1)))
  logits = tree.logits(model, tiny_recurrent.empty(model.spec, 3))
  np.testing.assert_array_equal(logits[:, ::2], alone[order])
  # Each shape of a mixture takes long to compile.
  shapes = ([0, 1, 2], 1), ([2, 0, 1], 4), ([1], 12)
  for rows, chunk in () if num_experts else shapes:
    np.testing.assert_array_equal(read(rows, chunk), alone[rows])


# Sums whose order XLA chooses.
_SUMS = re.compile(
  r':b?f\d+\[[\d,]*\] = '
  r'(\w*dot\w*|conv_\w+|reduce_(?!precision)\w+|cum\w+|scatter\W\w+)\['
)


@pytest.mark.parametrize(
  ('variant', 'dtype'),
  [
    ('gpt2', 'int8'),
    ('qwen3_biases', 'bfloat16'),
    ('qwen3_biases', 'int4'),
    ('qwen3_moe', 'float32'),
    ('qwen3_moe', 'int4'),
  ],
)
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


# Branches of the source: flags that choose them, and what the processor must
# have. If flags contradict each other, the last one counts. The other tests
# run the branch of this processor.
_BRANCHES = {
  'plain': ('-march=x86-64', 'sse2'),
  'avx2': ('-march=haswell', 'avx2 bmi2 f16c fma movbe'),
  # GCC's macros for Zen 4, without instructions that only AMD has.
  'amd': ('-march=cooperlake -D__znver4__', 'avx512_bf16 avx512_vnni'),
}
_LONG_BRANCHES = {
  'avx_vnni': ('-march=alderlake', 'avx_vnni'),
  'avx512': ('-march=skylake-avx512', 'avx512bw avx512cd avx512dq avx512vl'),
  'tiles': ('-march=sapphirerapids', 'amx_tile amx_int8 amx_bf16 avx512_fp16'),
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

  for dtype in (*_DTYPES, *blocks_lib.KINDS):
    packed = matrices_lib.pack(_matrix((101, 203), dtype, rng))
    call(
      dtype,
      functools.partial(matrices_lib.matmul, weight=packed),
      draw(40, 203),
    )
    gated = functools.partial(
      matrices_lib.multiply_packed,
      matrices=[packed, packed],
      biases=[draw(101), None],
      activation='silu',
      gated=True,
    )
    call(f'gated {dtype}', gated, draw(11, 203))
  for dtype in ('float32', 'bfloat16'):
    cache = [jnp.asarray(draw(1, 2, 45, 77), dtype) for _ in range(2)]

    def attend(rows, mask, cache=cache):
      # Each row as a text of its own, so that it sees no other's entries.
      batch = len(rows)
      slots = [jnp.tile(array, (batch, 1, 1, 1)) for array in cache]
      start = jnp.zeros(batch, jnp.int32)
      return ops.attend(rows, mask, start, *slots, scale=0.2)[0]

    call(
      f'attention {dtype}',
      attend,
      draw(9, 1, 6 * 77),
      rng.random((9, 1, 45)) < 0.6,
    )
  for center in (False, True):
    norm = ops.Norm(draw(37), None, 0.1, center)
    call(
      f'norm {center}', functools.partial(ops.normalize, norm=norm), draw(4, 37)
    )
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
  folder = pathlib.Path(__file__).parents[3] / 'build/kernels'
  library = build.compile_library(
    build.find_compiler(), folder, (*build.FLAGS, *flags.split())
  )
  build.register(library, f'_{branch}')
  expected, heads = jax.jit(_every_kernel)(), [*range(4)]
  states = recurrent_test.mixed_by_kernels(4, heads)
  call = jax.ffi.ffi_call
  renamed = lambda name, *args, **kw: call(f'{name}_{branch}', *args, **kw)
  monkeypatch.setattr(jax.ffi, 'ffi_call', renamed)
  for name, (some, last) in jax.jit(lambda: _every_kernel())().items():
    np.testing.assert_array_equal(some[-1:], last, name)
    off = 0 if name == 'int8' else 1e-4
    np.testing.assert_allclose(some, expected[name][0], off, off, err_msg=name)
  for part, whole in zip(
    recurrent_test.mixed_by_kernels(4, heads), states, strict=True
  ):
    np.testing.assert_allclose(part, whole, rtol=1e-4, atol=1e-4)
