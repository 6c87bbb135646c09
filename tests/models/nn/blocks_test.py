"""Weights in eight bits, in four, and in blocks as GGUF files have them."""

import types

import command_lines
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_blocks
import variants

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import hub
from specdec.models.nn import adapter
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn.cpu import build
from specdec.models.nn.cpu import huge_pages

_RNG = np.random.default_rng(0)
_kernels = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)
_matmul, _take_rows = map(
  jax.jit, (matrices_lib.matmul, matrices_lib.take_rows)
)


def _drawn(kind, shape):
  """A matrix, and its weights by the package `gguf`."""
  raw = tiny_blocks.raw_rows(_RNG, kind, *shape)
  weights = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
  matrix = blocks_lib.from_raw([(slice(None), raw)], shape, kind)
  return matrix, weights[:, : shape[1]]


@_kernels
@pytest.mark.parametrize('outputs', [40, 10_000])  # Few pages, huge ones.
@pytest.mark.parametrize('kind', ['Q4_K', 'int8'])
def test_a_packed_matrix_lies_where_it_was_packed(kind, outputs, monkeypatch):
  made = []
  make = huge_pages.zeros
  keep = lambda shape: made.append(make(shape)) or made[-1]
  monkeypatch.setattr(huge_pages, 'zeros', keep)
  if kind == 'int8':
    matrix = matrices_lib.quantize(np.ones((outputs, 512)))
  else:
    matrix = _drawn(kind, (outputs, 512))[0]
  words = matrices_lib.pack(matrix).words
  assert words.unsafe_buffer_pointer() == made[0].ctypes.data


@pytest.mark.parametrize('kind', blocks_lib.KINDS)
def test_xla_expands_what_gguf_does(kind):
  """To the last bit, also where a factor is denormal."""
  matrix, weights = _drawn(kind, (40, 224))
  expanded = blocks_lib.expand(matrix.words, kind, 224, np)
  np.testing.assert_array_equal(expanded, weights)
  matrix = jax.tree.map(jnp.asarray, matrices_lib.for_xla(matrix))
  np.testing.assert_array_equal(_take_rows(matrix, jnp.arange(40)), weights)
  x = _RNG.standard_normal((3, 224), np.float32)
  # Rows and weights are rounded to bfloat16.
  sizes = np.abs(x) @ np.abs(weights).T
  assert (np.abs(_matmul(x, matrix) - x @ weights.T) <= 0.01 * sizes).all()


@pytest.mark.parametrize(
  ('width', 'is_head', 'kind', 'simpler'),
  [
    (512, False, 'Q4_K', 'Q4_1'),
    (96, False, 'Q4_1', 'Q4_0'),
    (70, False, 'Q4_1', None),
    (96, True, 'Q8_0', None),
  ],
)
def test_four_bits_are_near_the_weights(width, is_head, kind, simpler):
  """Nearer than the rule of the next simpler kind is."""
  shape = 30, width
  weights = _RNG.standard_normal(shape, np.float32)
  weights[3], weights[4, :40] = 0.0, 0.5
  form = matrices_lib.FORMATS['int4']
  make = form.of_head if is_head else form.from_rows
  parts = [(slice(10), weights[:10]), (slice(10, 30), weights[10:])]
  matrix = make(parts, shape)
  assert matrix.kind == kind
  expanded = blocks_lib.expand(matrix.words, kind, width, np)
  assert not expanded[3].any()
  error = np.square(expanded - weights).mean()
  if simpler is None:
    assert error < (1e-4 if is_head else 0.006)
  else:
    other = gguf.GGMLQuantizationType[simpler]
    theirs = gguf.dequantize(gguf.quantize(weights, other), other)
    assert error < 0.95 * np.square(theirs - weights).mean()
  weights[2, 1] = np.inf
  with pytest.raises(ValueError, match='not finite'):
    make(parts, shape)


@_kernels
def test_bytes_of_four_bits_are_counted_and_cannot_be_saved(tmp_path):
  """With matrices of several kinds."""
  module = tiny.module(width=32, tie_embeddings=False)
  hub.save_pretrained(module, tmp_path)
  module = hub.load_module(tmp_path, dtype='int4', packed=True)
  target = adapter.as_model(module)
  packed = lambda leaf: isinstance(leaf, matrices_lib.PackedMatrix)
  leaves = jax.tree.leaves(target.params, is_leaf=packed)
  matrices = [leaf for leaf in leaves if packed(leaf)]
  assert {matrix.kind for matrix in matrices} == {'Q4_1', 'Q8_0'}
  read = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
  read -= target.params['wte']['embedding'].words.nbytes
  read -= target.params['wpe']['embedding'].nbytes
  assert target.spec.weight_bytes == read
  with pytest.raises(ValueError, match='dtype=int4 cannot be saved'):
    hub.save_pretrained(module, tmp_path / 'b')


@pytest.mark.parametrize('family', ['gpt2', 'mixtral'])
def test_a_model_written_in_four_bits_is_not_rounded_again(family, tmp_path):
  folder, rounded = tmp_path / 'model', tmp_path / 'rounded'
  variants.write(family, folder)
  hub.locate('demo').tokenizer.save_pretrained(folder)
  ended = command_lines.run(
    'round_model.py', f'--model={folder}', f'--output={rounded}'
  )
  assert ended.code == 0, ended.errors
  checkpoint = hub.locate(rounded)
  assert checkpoint.tokenizer is not None
  form = checkpoint_lib.resolve_dtype('auto', checkpoint, packed=True)
  assert form.name == 'stored'
  loaded = [
    hub.flat_params(hub.load_module(path, dtype=dtype))[1]
    for path, dtype in (
      (folder, 'int4'),
      (rounded, 'stored'),
      (rounded, 'float32'),
    )
  ]
  for whole, again, floats in zip(
    *(part.values() for part in loaded), strict=True
  ):
    jax.tree.map(
      np.testing.assert_array_equal,
      *map(jax.tree.leaves, (whole, again)),
    )
    if isinstance(whole, blocks_lib.GroupedMatrix):
      whole = jax.tree.map(np.asarray, whole).take(np.arange(len(floats)))
    np.testing.assert_array_equal(np.asarray(whole, np.float32), floats)
  for name, output in ((rounded, tmp_path), (folder, folder)):
    with pytest.raises(ValueError, match=r'few bits already|is the folder of'):
      hub.save_in_four_bits(str(name), output)


@pytest.mark.parametrize('kind', blocks_lib.KINDS)
def test_a_scale_that_is_not_finite_is_refused(kind):
  """Wherever it is, as the weights by the package `gguf` tell."""
  good = tiny_blocks.raw_rows(_RNG, kind, 3, 256)
  for place in range(0, good.shape[1], 2):
    raw = good.copy()
    raw[1, place : place + 2] = 0, 0x7C | 0x80 * (place % 4 // 2)
    if place // 2 % 3:
      raw[1, place] = 1  # NaN
    with np.errstate(all='ignore'):
      weights = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    make = lambda raw=raw: blocks_lib.from_raw(
      [(slice(3), raw)], (3, 256), kind
    )
    if np.isfinite(weights).all():
      make()
      continue
    with pytest.raises(ValueError, match=f'a block of {kind} has a scale that'):
      make()


def test_stored_is_for_files_in_blocks():
  with pytest.raises(ValueError, match='dtype=stored is for files in blocks'):
    checkpoint_lib.resolve_dtype('stored', hub.locate('demo'))


def _spread(rows, columns):
  spread = 10.0 ** _RNG.uniform(-3, 1, size=(rows, 1))
  return (spread * _RNG.normal(size=(rows, columns))).astype(np.float32)


def test_weights_are_rounded_to_the_nearest_step_of_their_row():
  matrix = _spread(6, 40)
  matrix[2] = 0.0
  ours = matrices_lib.quantize(matrix)
  assert ours.shape == matrix.shape
  values = np.asarray(ours.values, np.float32)
  step = np.asarray(ours.scale)[:, None]
  assert np.abs(values).max() == 127
  assert (np.abs(values * step - matrix) <= 0.5001 * step).all()
  # The largest weight of every row that is not zero is exactly representable.
  peaks = np.abs(values).max(axis=1)
  assert peaks.tolist() == [127, 127, 0, 127, 127, 127]
  rows = _take_rows(ours, jnp.array([[4, 1]]))
  np.testing.assert_array_equal(rows, (values * step)[[[4, 1]]])


def test_the_product_is_the_one_of_integers():
  """Bit by bit what NumPy has in 64-bit integers, scaled in the same order."""
  x, weight = _spread(5, 300), matrices_lib.quantize(_spread(7, 300))
  scale = (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float32)[:, None]
  rounded = np.round(x / scale).astype(np.int64)
  exact = rounded @ np.asarray(weight.values, np.int64).T
  expected = exact.astype(np.float32) * (scale * np.asarray(weight.scale)[None])
  result = _matmul(x, weight)
  np.testing.assert_allclose(result, expected, rtol=1e-6)
  # Nor does a row depend on the rows next to it.
  alone = _matmul(x[3:4], weight)
  np.testing.assert_array_equal(alone, result[3:4])


def test_rows_of_denormal_numbers_have_a_scale_that_is_not_zero():
  rows = np.array([[1e-44, -1e-44, 0], [1e-38, 0, 0]], np.float32)
  for xp in (np, jnp):
    values, scale = matrices_lib.quantize_rows(rows, xp)
    assert np.all(np.asarray(scale) > 0)
    np.testing.assert_array_less(np.abs(values.astype(int)), 128)


@pytest.mark.parametrize('width', [8, 8960])
def test_what_is_not_finite_stays_so_and_alone(width):
  """In long rows, too, where a maximum of XLA's may drop NaN."""
  matrix = _spread(4, width)
  weight = matrices_lib.quantize(matrix)
  for value in (np.nan, np.inf):
    x = jnp.asarray(_spread(3, width)).at[1, 2].set(value)
    result = np.asarray(weight.product(x))
    assert not np.isfinite(result[1]).any()
    assert np.isfinite(result[[0, 2]]).all()
  matrix[1, 1] = np.inf
  with pytest.raises(ValueError, match='not finite'):
    matrices_lib.quantize(matrix)


def test_default_dtype_of_the_draft():
  small = hub.locate('demo')
  large = types.SimpleNamespace(size=1 << 27, stored_dtypes=['float16'])
  in_blocks = types.SimpleNamespace(size=1 << 27, stored_dtypes=['stored'])
  for draft, dtype, target_dtype, packed, expected in (
    (small, None, 'bfloat16', True, 'int8'),
    (small, None, 'bfloat16', False, 'bfloat16'),
    (small, None, 'float32', True, 'float32'),
    (small, 'bfloat16', 'bfloat16', True, 'bfloat16'),
    (small, None, 'int8', True, 'int8'),
    (small, None, 'stored', True, 'int4'),
    (large, None, 'bfloat16', True, 'int4'),
    (large, None, 'int8', False, 'int8'),
    (large, None, 'float32', True, 'float32'),
    (in_blocks, None, 'int8', True, 'stored'),
    (in_blocks, None, 'stored', True, 'stored'),
  ):
    form = checkpoint_lib.resolve_draft_dtype(
      dtype,
      draft,
      target=matrices_lib.format_of(target_dtype),
      packed=packed,
    )
    assert form.name == expected
