"""Families that people run: random shapes of each, compared with transformers.

Also that drafted text equals plain text.
"""

import functools

from flax import nnx
from flax import traverse_util
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import tiny
import tiny_drafters
import variants

import specdec
from specdec.models.checkpoints import hub
from specdec.models.nn import adapter
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn.cpu import build

_LENGTH = len(variants.LONG)
_long = lambda *values, runs: pytest.param(
  *values, marks=[] if runs else [pytest.mark.long]
)
# Shapes of each family; the others take minutes.
_SOME = ('granite4_0', 'granite4_3', 'ministral3_0', 'phi4_mini_0', 'minicpm_0')
_SOME += ('minicpm_3', 'gpt_oss_0', 'gpt_oss_3', 'gemma4_0', 'gemma4_3')
_NAMES = [_long(name, runs=name in _SOME) for name in variants.FAMILIES]
# One shape of each, of Granite 4 one without experts.
_FIRST = ('granite4_3', 'ministral3_0', 'phi4_mini_0', 'minicpm_0')
_FIRST += ('gpt_oss_0', 'gemma4_3')
# A GGUF file cannot say these: Llama 3's factors for texts of 16 tokens,
# windows that begin with the second layer, where a MiniCPM changes its factors,
# and other rotations of a Gemma 4 than its own.
_NOT_IN_FILES = (
  'gemma4_3',
  'gemma4_7',
  'gemma4_11',
  'granite4_5',
  'granite4_8',
  'gpt_oss_4',
  'gpt_oss_8',
  *(f'minicpm_{number}' for number in (6, 8, 9, 10, 11)),
)
_ARCHITECTURES = {'granite4': 'granitemoe', 'ministral3': 'mistral3'}
_ARCHITECTURES |= {'phi4_mini': 'phi3', 'minicpm': 'minicpm'}
_ARCHITECTURES |= {'gpt_oss': 'gpt-oss', 'gemma4': 'gemma4'}


@jax.jit
def _forward(model, tokens, positions, mask):
  """Logits of a prefill of 40 tokens into a cache that is longer."""
  cache = model.spec.init_cache(1, len(variants.LONG) + 3)
  mask = jnp.pad(mask[None], ((0, 0), (0, 0), (0, 3)))
  return model.apply(tokens[None], positions[None], mask, cache)[0][0]


def _logits(module, text=variants.LONG, positions=None, mask=variants.CAUSAL):
  """Logits `[40, V]` of a text, by default the long one."""
  positions = np.arange(len(variants.LONG)) if positions is None else positions
  return np.asarray(_forward(adapter.as_model(module), text, positions, mask))


def _in_floats(module, floats):
  """A module of floats with the weights that another one has in few bits."""
  graph, params = hub.flat_params(floats)
  for path, leaf in hub.flat_params(module)[1].items():
    host = jax.tree.map(np.asarray, leaf)
    if not isinstance(leaf, jax.Array):
      host = host.take(np.arange(leaf.shape[0]))
    params[path] = np.asarray(host, np.float32)
  return nnx.merge(graph, traverse_util.unflatten_dict(params))


def _error(module, name):
  """The errors of some logits at all positions."""
  with np.load(variants.FAMILY_RESULTS) as results:
    logits = np.asarray(_logits(module))
    return np.abs(logits[:, variants.SOME_WORDS] - results[name])


def _loaded(name, parent, **options):
  folder = variants.write(variants.FAMILIES[name], parent / name)
  return hub.load_module(folder, **options)


@pytest.mark.parametrize('name', _NAMES)
def test_logits_are_those_of_transformers(name, tmp_path):
  module = _loaded(name, tmp_path)
  assert np.max(_error(module, name)) < 2e-4
  # A tree whose branches go on after the same beginning: nodes see windows,
  # sinks and factors by their own positions.
  start, size = 16, 12
  stretch = np.arange(start, start + size)
  branch = np.arange(start + size, _LENGTH)
  positions, mask = np.arange(_LENGTH), variants.CAUSAL.copy()
  positions[branch], mask[np.ix_(branch, stretch)] = stretch, False
  logits = _logits(module, variants.LONG, positions, mask)
  text = np.roll(variants.LONG, -size)
  text[:start] = variants.LONG[:start]
  expected = _logits(module, text)
  np.testing.assert_allclose(
    logits[branch], expected[stretch], rtol=0, atol=2e-4
  )


def test_layers_that_share_do_so_in_training_and_in_the_form_for_a_gpu(
  tmp_path,
):
  name = 'gemma4_6'
  module = _loaded(name, tmp_path)
  tokens, positions = variants.LONG[None], np.arange(_LENGTH)[None]
  free, cache = nnx.jit(
    lambda module: module(tokens, positions, variants.CAUSAL[None])
  )(module)
  assert cache is None  # Nor was there one.
  gpu = adapter.as_model(module, on_gpu=True)
  of_gpu = _forward(gpu, variants.LONG, positions[0], variants.CAUSAL)
  with np.load(variants.FAMILY_RESULTS) as results:
    for logits in (free[0], of_gpu):
      error = np.abs(logits[:, variants.SOME_WORDS] - results[name])
      assert np.max(error) < 2e-4


def test_longrope_has_the_context_of_the_training(tmp_path, caplog):
  config = variants.FAMILIES['phi4_mini_0']['config']
  context = config['original_max_position_embeddings']
  target = adapter.as_model(_loaded('phi4_mini_0', tmp_path))
  assert f'context is {context} tokens, so --context may' in caplog.text
  with pytest.raises(
    ValueError, match=f'context of the target, {context} tokens'
  ):
    specdec.generate(
      target, jax.random.key(0), [[1] * 9], max_new_tokens=context
    )


@pytest.mark.parametrize('name', _NAMES)
def test_a_gguf_file_of_a_folder_is_the_same_model(name, tmp_path):
  if name in _NOT_IN_FILES:
    pytest.skip('a GGUF file cannot say this')
  module, raw = _loaded(name, tmp_path), variants.FAMILIES[name]['config']
  arch = _ARCHITECTURES[name.rsplit('_', 1)[0]]
  if arch == 'granitemoe' and not raw['num_local_experts']:
    arch = 'granite'
  keys = {'context_length': raw['max_position_embeddings']}
  if raw.get('sliding_window'):  # Perhaps no layer has it.
    keys['attention.sliding_window'] = raw['sliding_window']
  gguf_files.write(tmp_path / 'model.gguf', module, arch, keys=keys)
  loaded = hub.load_module(tmp_path / 'model.gguf')
  both = map(tiny.parameters, (module, loaded))
  jax.tree.map(np.testing.assert_array_equal, *both)
  assert np.max(_error(loaded, name)) < 2e-4


@pytest.mark.parametrize(
  ('name', 'key', 'value', 'message'), refusals.of('models/nn', 'family')
)
def test_tensors_that_contradict_the_config(
  name, key, value, message, tmp_path
):
  variant, keys = variants.FAMILIES[name], {key: value}
  folder = variants.write(variant, tmp_path / 'model', keys=keys)
  with pytest.raises(ValueError, match=f'^{folder}:? .*{message}'):
    hub.load_module(folder)


@pytest.mark.parametrize(
  'name',
  [_long(name, runs=name in ('gpt_oss_0', 'gemma4_3')) for name in _FIRST],
)
def test_kernels_and_few_bits(name, tmp_path):
  """Logits in few bits are the logits of the rounded weights.

  Rows are rounded to eight bits. This changes logits about as much as weights
  in eight bits do; a step of four bits is 17 times as large. Medians, because
  a few tokens may go to other experts.
  """
  folder = variants.write(variants.FAMILIES[name], tmp_path / name)
  load, packs = functools.partial(hub.load_module, folder), build.is_available()
  if packs:
    assert np.max(_error(load(packed=True), name)) < 2e-4
  floats, rounding, logits = load(), {}, _logits
  difference = lambda values, other: np.median(np.abs(values - other))
  for dtype, packed in (('int8', False), ('int4', packs)):
    expected = logits(_in_floats(load(dtype=dtype), floats))
    rounding[dtype] = difference(expected, logits(floats))
    computed = logits(load(dtype=dtype, packed=packed))
    assert 0 < difference(computed, expected) < 3 * rounding['int8']
  assert 2 < rounding['int4'] / rounding['int8'] < 34


_IN_TREES = {('gpt_oss_0', 'tree'), ('gemma4_3', 'tree')}


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    _long(name, kind, runs=(name, kind) in _IN_TREES)
    for name in variants.FAMILIES
    for kind in ('tree', 'chain', *['plain'] * (name in _FIRST))
  ],
)
def test_greedy_text_is_that_of_a_forward_without_a_cache(name, kind, tmp_path):
  target = adapter.as_model(_loaded(name, tmp_path))
  # Otherwise some texts repeat one token.
  larger = lambda leaf: np.asarray(leaf) * np.float32(3 if leaf.ndim > 1 else 1)
  target = target.replace(params=jax.tree.map(larger, target.params))
  rng = np.random.default_rng(0)
  factors = lambda leaf: 1 + 0.05 * rng.standard_normal(leaf.shape)
  noise = lambda leaf: leaf * factors(leaf).astype(np.float32)
  draft = target.replace(params=jax.tree.map(noise, target.params))
  start = 9
  result = specdec.generate(
    target,
    jax.random.key(0),
    [variants.LONG[:start].tolist()],
    max_new_tokens=_LENGTH - start,
    drafter=tiny_drafters.simple(kind, draft),
  )
  text = np.array([*variants.LONG[:start], *result.tokens[0]])
  logits = _forward(target, text, np.arange(_LENGTH), variants.CAUSAL)
  np.testing.assert_array_equal(
    text[start:], np.argmax(logits, axis=1)[start - 1 : -1]
  )
  # Some Gemmas scale their embeddings; they repeat a token even so.
  if name in _FIRST or not name.startswith('gemma4'):
    assert len({*text[start:]}) > 3
  assert (result.stats.block_efficiency > 1) == (kind != 'plain')


def test_folders_in_mxfp4_are_read_as_they_are_stored(tmp_path):
  """Neighbours are the halves of a byte, the first one the lower half."""
  variant = variants.FAMILIES['gpt_oss_0']
  keys = {'hidden_size': 64, 'intermediate_size': 64}
  wider = {24: 64, 48: 128}  # Rows of two blocks.
  variant = variant | {
    'tensors': {
      name: [wider.get(size, size) for size in shape]
      for name, shape in variant['tensors'].items()
    }
  }
  rng, floats, blocks = np.random.default_rng(0), {}, {}
  halves = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  for part, size in (('gate_up_proj', (4, 128, 2)), ('down_proj', (4, 64, 2))):
    name = f'model.layers.0.mlp.experts.{part}'
    codes = rng.integers(0, 16, (*size, 32), dtype=np.uint8)
    exponents = rng.integers(120, 128, size, dtype=np.uint8)
    values = halves[codes & 7] * np.where(codes & 8, -1, 1)
    values = values * np.float32(2) ** (np.float32(exponents) - 127)[..., None]
    rows = values.reshape(*size[:2], -1).swapaxes(1, 2)
    floats[name] = np.ascontiguousarray(rows, np.float32)
    blocks |= {
      name: None,
      f'{name}_scales': exponents,
      f'{name}_blocks': codes[..., ::2] | codes[..., 1::2] << 4,
    }
  folder = variants.write(variant, tmp_path, keys=keys, **floats)
  expected = hub.flat_params(hub.load_module(folder))[1]
  keys['quantization_config'] = {'quant_method': 'mxfp4'}
  variants.write(variant, folder, keys=keys, **blocks)
  assert hub.locate(folder).stored_dtypes == ['float32', 'stored']
  for dtype, count in (('float32', 0), ('stored', 12)):
    leaves = hub.flat_params(hub.load_module(folder, dtype=dtype))[1]
    grouped = lambda leaf: isinstance(leaf, blocks_lib.GroupedMatrix)
    assert sum(map(grouped, leaves.values())) == count
    for key, leaf in leaves.items():
      if grouped(leaf):
        leaf = leaf.take(np.arange(len(expected[key])))
      elif dtype == 'stored':
        continue  # In bfloat16.
      np.testing.assert_array_equal(leaf, expected[key], err_msg=key)
  blocks['model.layers.0.mlp.experts.down_proj_scales'] = np.uint8([[[0]]] * 4)
  variants.write(variant, folder, keys=keys, **blocks)
  with pytest.raises(ValueError, match=r'down_proj_scales has shape'):
    hub.load_module(folder)
