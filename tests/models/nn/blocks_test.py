"""Weights in blocks of few bits, as GGUF files have them, and in four bits."""

import command_lines
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_blocks

import models
from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import hub
from models.nn import blocks as blocks_lib
from models.nn import matrices as matrices_lib
from models.nn.cpu import build

_RNG = np.random.default_rng(0)
# Parts of a group of outputs, and of a block of inputs.
_SHAPES = [(77, 768), (40, 224)]
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


@jax.jit
def _computed(x, packed, index):
  """Products of all rows, products of some of them, and rows of the matrix."""
  some = [
    matrices_lib.matmul(x[2 : 2 + count], packed)
    for count in (*range(1, 9), 11)
  ]
  rows = matrices_lib.take_rows(packed, index)
  return matrices_lib.matmul(x, packed), some, rows


def _rounded(x):
  """Rows in eight bits by 128 inputs."""
  parts = np.pad(x, ((0, 0), (0, -x.shape[1] % 128))).reshape(len(x), -1, 128)
  scale = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
  values = (np.round(parts / scale) * scale).reshape(len(x), -1)
  return values[:, : x.shape[1]]


@_kernels
@pytest.mark.parametrize('shape', _SHAPES)
@pytest.mark.parametrize('kind', blocks_lib.KINDS)
def test_products_are_those_of_the_weights_of_gguf(kind, shape):
  """The rows are rounded alike, and a row has the same bits alone."""
  matrix, weights = _drawn(kind, shape)
  packed = matrices_lib.pack(matrix)
  np.testing.assert_array_equal(matrices_lib.unpack(packed), matrix.words)
  x = _RNG.standard_normal((19, shape[1]), np.float32)
  x[3] *= 1e-30
  index = _RNG.integers(0, shape[0], (2, 3))
  result, some, rows = jax.tree.map(np.asarray, _computed(x, packed, index))
  # float32 loses as much of a sum as of its largest term.
  sizes = np.abs(_rounded(x)) @ np.abs(weights).T
  exact = _rounded(x).astype(np.float64) @ weights.T.astype(np.float64)
  assert (np.abs(result - exact) <= 1e-6 * sizes).all()
  for part in some:
    np.testing.assert_array_equal(part, result[2 : 2 + len(part)])
  np.testing.assert_array_equal(rows, weights[index])
  # A row that is not finite spoils no other.
  x[1, 0] = np.nan
  spoiled = np.asarray(_computed(x, packed, index)[0])
  assert not np.isfinite(spoiled[1]).any()
  np.testing.assert_array_equal(spoiled[2:], result[2:])


@_kernels
@pytest.mark.parametrize('outputs', [40, 10_000])  # Few pages, huge ones.
@pytest.mark.parametrize('kind', ['Q4_K', 'int8'])
def test_a_packed_matrix_lies_where_it_was_packed(kind, outputs, monkeypatch):
  made = []
  make = blocks_lib.aligned_zeros
  keep = lambda shape: made.append(make(shape)) or made[-1]
  monkeypatch.setattr(blocks_lib, 'aligned_zeros', keep)
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
    *((512, False, 'Q4_K', 'Q4_1'), (96, False, 'Q4_1', 'Q4_0')),
    *((70, False, 'Q4_1', None), (96, True, 'Q8_0', None)),
  ],
)
def test_four_bits_are_near_the_weights(width, is_head, kind, simpler):
  """Nearer than the rule of the next simpler kind is."""
  shape = 30, width
  weights = _RNG.standard_normal(shape, np.float32)
  weights[3], weights[4, :40] = 0.0, 0.5
  form = matrices_lib.FORMATS['int4']
  make = form.of_head if is_head else form.from_blocks
  parts = [(slice(10), weights[:10]), (slice(10, 30), weights[10:])]
  matrix = make(parts, shape)
  assert matrix.kind == kind
  found = blocks_lib.expand(matrix.words, kind, width, np)
  assert not found[3].any()
  error = np.square(found - weights).mean()
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
def test_drafted_tokens_in_four_bits_are_those_of_plain_decoding(tmp_path):
  """With matrices of several kinds; and their bytes are counted."""
  folder = tmp_path / 'model'
  module = tiny.module(
    vocab_size=4096, num_positions=64, width=32, tie_embeddings=False
  )
  hub.save_pretrained(module, folder, tokenizer=hub.locate('demo').tokenizer)
  load = lambda method: models.load(
    str(folder), 'demo-draft', method=method, dtype='int4', draft_dtype='int4'
  )
  plain, drafted = load('plain'), load('chain')
  prompts = ['def f(x):', 'import']
  texts = [
    each.generate(prompts, max_new_tokens=12, seed=3).tokens
    for each in (plain, drafted)
  ]
  assert texts[0] == texts[1]
  target = plain.pair.target
  packed = lambda leaf: isinstance(leaf, blocks_lib.PackedBlocks)
  leaves = jax.tree.leaves(target.params, is_leaf=packed)
  matrices = [leaf for leaf in leaves if packed(leaf)]
  assert {one.kind for one in matrices} == {'Q4_1', 'Q8_0'}
  read = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
  read -= target.params['wte']['embedding'].words.nbytes
  read -= target.params['wpe']['embedding'].nbytes
  assert target.spec.weight_bytes == read
  with pytest.raises(ValueError, match='dtype=int4 cannot be saved'):
    hub.save_pretrained(hub.load_module(folder, dtype='int4'), tmp_path / 'b')


@pytest.mark.parametrize('family', ['gpt2', 'mixtral'])
def test_a_model_written_in_four_bits_is_not_rounded_again(family, tmp_path):
  folder, rounded = tmp_path / 'model', tmp_path / 'rounded'
  module = tiny.module() if family == 'gpt2' else tiny.llama_module(family)
  hub.save_pretrained(module, folder, tokenizer=hub.locate('demo').tokenizer)
  ended = command_lines.run(
    'round_model.py', f'--model={folder}', f'--output={rounded}'
  )
  assert ended.code == 0, ended.errors
  checkpoint = hub.locate(rounded)
  assert checkpoint.tokenizer is not None
  assert checkpoint_lib.resolve_dtype('auto', checkpoint, packed=True) == (
    'stored'
  )
  loaded = [
    hub.flat_params(hub.load_module(path, dtype=dtype))[1]
    for path, dtype in (
      *((folder, 'int4'), (rounded, 'stored'), (rounded, 'float32')),
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
