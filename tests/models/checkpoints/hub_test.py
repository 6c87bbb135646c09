"""Hugging Face folders: what is read, what is written, what is refused."""

import functools
import json

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
import safetensors
from safetensors import numpy as safetensors_numpy
import tiny
import transformers
import variants

from specdec import cache as cache_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import adapter
from specdec.models.nn import matrices as matrices_lib

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'

# Keys of configs that do not shape a model, or whose value other keys imply.
_SAID_OTHERWISE = {
  '_name_or_path',
  'architectures',
  'dtype',
  'reorder_and_upcast_attn',
  'bos_token_id',
  'eos_token_id',
  'pad_token_id',
  'use_sliding_window',
  'max_window_layers',
  'full_attn_idxs',
  'sliding_window_pattern',
  '_sliding_window_pattern',
  'intermediate_size',
  'block_auto_adjust_ff_dim',
  'block_ffn_dim_multiplier',
  'block_multiple_of',
  'partial_rotary_factor',
  'original_max_position_embeddings',
}


# The others are read, not written.
_SAVED = ('gpt2', 'llama', 'qwen3')


def _says(ours, theirs):
  """Whether a value is another one, or an object has its entries."""
  if isinstance(ours, dict) and isinstance(theirs, dict):
    keys = {key: theirs[key] for key in theirs if key != 'type'}
    return all(_says(ours.get(key), keys[key]) for key in keys)
  return ours == theirs


def _write(tmp_path, name):
  return variants.write(name, tmp_path / name)


@jax.jit
def _cached_logits(model, tokens):
  """Logits of a prefill into a cache that is longer than the text."""
  batch_size, length = tokens.shape
  cache = model.spec.init_cache(batch_size, length + 3)
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  mask = cache_lib.causal_mask(cache.length, length, length + 3)
  return model.apply(tokens, positions, mask, cache)[0]


def _error(module, name):
  """Error of the logits, compared with the logits of transformers."""
  tokens = jnp.asarray(variants.tokens(name))
  logits = _cached_logits(adapter.as_model(module), tokens)
  return np.abs(logits - np.load(variants.RESULTS)[name])


@pytest.mark.parametrize('name', variants.VARIANTS)
def test_logits_and_tensors_are_those_of_transformers(name, tmp_path):
  folder, saved = _write(tmp_path, name), tmp_path / 'saved'
  module = hub.load_module(folder)
  assert np.max(_error(module, name)) < (1e-5 if 'gpt2' in name else 1e-4)
  config = variants.VARIANTS[name]['config']
  if config['model_type'] not in _SAVED or config.get('sliding_window'):
    with pytest.raises(ValueError, match='only the shapes of gpt2, llama, '):
      hub.save_pretrained(module, saved)
    assert not saved.exists()
    return
  hub.save_pretrained(module, saved)
  assert hub.load_module(saved).config == module.config
  read = lambda path: transformers.AutoConfig.from_pretrained(path).to_dict()
  ours, theirs = read(saved), read(folder)
  if theirs.get('head_dim') is None:  # It follows from the width.
    theirs['head_dim'] = ours.get('head_dim')
  different = {
    k for k in ours | theirs if not _says(ours.get(k), theirs.get(k))
  }
  assert different <= _SAID_OTHERWISE, different - _SAID_OTHERWISE
  tensors = safetensors_numpy.load_file(saved / WEIGHTS)
  prefix = 'transformer.' if 'gpt2' in name else 'model.'
  with_prefix = lambda name: (
    name if name.startswith((prefix, 'lm_head.')) else prefix + name
  )
  expected = {*map(with_prefix, variants.VARIANTS[name]['tensors'])}
  assert tensors.keys() == expected
  for file in folder.glob('*.safetensors'):
    for key, array in safetensors_numpy.load_file(file).items():
      if (key := with_prefix(key)) in expected:  # or it is a buffer
        np.testing.assert_array_equal(
          tensors[key], array.astype(np.float32), err_msg=key
        )


@pytest.mark.parametrize('name', ['gpt2_untied', 'qwen3_moe'])
def test_bfloat16_is_near_and_norms_stay_float32(name, tmp_path):
  module = hub.load_module(_write(tmp_path, name), dtype=jnp.bfloat16)
  for path, array in tiny.parameters(module).items():
    is_norm = 'norm' in path or 'ln_' in path
    assert array.dtype == (jnp.float32 if is_norm else jnp.bfloat16), path
  assert 0 < np.median(_error(module, name)) < 0.1


@pytest.mark.parametrize('name', ['mixtral', 'tied', 'gpt2', 'gpt2_untied'])
def test_eight_bits(name, tmp_path):
  """All matrices but routers and position embeddings; a wrong scale shows."""
  module = hub.load_module(_write(tmp_path, name), dtype='int8')
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    adapter.as_model(module).params,
    is_leaf=lambda leaf: isinstance(leaf, matrices_lib.Int8Matrix),
  )
  for path, leaf in leaves:
    stays_float = {'gate', 'wpe'} & {getattr(key, 'key', 0) for key in path}
    is_matrix = len(leaf.shape) == 2 and not stays_float
    assert isinstance(leaf, matrices_lib.Int8Matrix) == is_matrix, path
  assert 0 < np.median(_error(module, name)) < 0.2


def _assert_same(*modules):
  equal = functools.partial(np.testing.assert_array_equal, strict=True)
  jax.tree.map(equal, *map(tiny.parameters, modules))


@pytest.mark.parametrize(
  'name', ['gpt2_untied', 'gpt2_bfloat16', 'gpt2_sharded_float16']
)
def test_large_tensors_are_read_in_blocks(name, monkeypatch, tmp_path):
  folder = _write(tmp_path, name)
  dtypes = ('float32', 'int8')
  load = lambda: [hub.load_module(folder, dtype=dtype) for dtype in dtypes]
  expected = load()
  # Three rows, in float32.
  monkeypatch.setattr(tensor_parts, '_BLOCK_BYTES', 200)
  for module, whole in zip(load(), expected, strict=True):
    _assert_same(module, whole)


_UNUSUAL = {'tie_embeddings': False, 'inner_width': 24, 'num_heads': 4}
_UNUSUAL |= {'activation': 'relu', 'norm_epsilon': 0.1}
_UNUSUAL |= {'scale_attention': False, 'scale_attention_by_layer': True}


@pytest.mark.parametrize(
  ('dtype', 'stored', 'rounding', 'shape'),
  [
    ('float32', 'F32', 0, _UNUSUAL),
    ('float16', 'F16', 2**-11, {}),
    ('bfloat16', 'BF16', 2**-8, _UNUSUAL),
  ],
)
def test_a_saved_gpt2_is_rounded(dtype, stored, rounding, shape, tmp_path):
  module = tiny.module(**shape)
  hub.save_pretrained(module, tmp_path, dtype=jnp.dtype(dtype))
  assert json.loads((tmp_path / 'config.json').read_text())['dtype'] == dtype
  with safetensors.safe_open(tmp_path / WEIGHTS, 'numpy') as file:
    dtypes = {file.get_slice(name).get_dtype() for name in file.offset_keys()}
  assert dtypes == {stored}
  loaded = hub.load_module(tmp_path)
  assert loaded.config == module.config
  rounded = tiny.parameters(loaded)
  for name, array in tiny.parameters(module).items():
    np.testing.assert_allclose(
      rounded[name], array, rtol=rounding, atol=1e-4 * rounding, err_msg=name
    )
  # It can be saved where it was loaded from, and changes no bit.
  hub.save_pretrained(hub.load_module(tmp_path, dtype=dtype), tmp_path)
  _assert_same(hub.load_module(tmp_path), loaded)


@pytest.fixture
def folder(tmp_path):
  """A good checkpoint, to be broken."""
  return _write(tmp_path, 'gpt2')


# A variant, one of its tensors, what shape it has instead (None: it is gone).
@pytest.mark.parametrize(
  ('variant', 'name', 'shape', 'message'),
  refusals.of('models/checkpoints', 'tensor'),
)
def test_bad_tensor(variant, name, shape, message, tmp_path):
  array = shape and np.ones(shape, np.float32)
  folder = variants.write(variant, tmp_path / 'model', **{name: array})
  with pytest.raises(ValueError, match=message):
    hub.load_module(folder)


def test_a_tensor_of_integers_is_refused(tmp_path):
  name = 'transformer.h.1.mlp.c_fc.weight'
  integers = {name: np.ones((16, 24), np.int8)}
  folder = variants.write('gpt2', tmp_path / 'model', **integers)
  with pytest.raises(ValueError, match=rf'{name[12:]}: it has dtype I8, exp'):
    hub.load_module(folder)


_LFS = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n'
_POINTER = 'is a pointer of Git LFS, not the file itself; run git lfs pull in'
_PAGE = '\n<!DOCTYPE html>\n<html lang="en">'
_TEMPLATE = 'chat_template.jinja'


# A variant, one of its files, what is in it instead (None: it is gone).
@pytest.mark.parametrize(
  ('variant', 'name', 'texts', 'message'),
  [
    ('gpt2', 'config.json', ['[' * 99_999], r'config\.json'),
    *refusals.of('models/checkpoints', 'file'),
  ],
)
def test_bad_file(variant, name, texts, message, tmp_path):
  folder = _write(tmp_path, variant)
  for text in texts:
    (folder / name).unlink()
    if text is not None:
      (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
      hub.load_module(folder)


def test_what_stands_in_the_place_of_a_file(folder, tmp_path):
  (folder / WEIGHTS).unlink()
  (folder / WEIGHTS).mkdir()
  with pytest.raises(ValueError, match=f'{WEIGHTS} is a folder, not a file$'):
    hub.load_module(folder)
  for text, message in ((_LFS, _POINTER), (_PAGE, 'is a web page; download')):
    for file in (tmp_path / 'model.gguf', tmp_path / 'a.safetensors'):
      file.write_text(text)
      with pytest.raises(ValueError, match=f'^{file} {message}'):
        hub.locate(file).config  # noqa: B018
    for name in (_TEMPLATE, 'tokenizer.json'):
      for other in (_TEMPLATE, 'tokenizer.json'):
        (folder / other).write_text('{}')
      (folder / name).write_text(text)
      with pytest.raises(ValueError, match=f'^{folder / name} {message}'):
        hub.locate(folder).tokenizer  # noqa: B018


def _with_shards(folder, index=None, **files):
  """Changes of an index, and files that get more tensors."""
  described = json.loads((folder / INDEX).read_text())
  described['weight_map'] |= index or {}
  (folder / INDEX).write_text(json.dumps(described))
  for number, tensors in files.items():
    path = folder / f'model-0000{number[1:]}.safetensors'
    stored = safetensors_numpy.load_file(path) | tensors
    safetensors_numpy.save_file(stored, path)


def test_the_index_decides_which_of_two_tensors_counts(tmp_path):
  folder = _write(tmp_path, 'gpt2_sharded')
  before = hub.load_module(folder)
  index = json.loads((folder / INDEX).read_text())['weight_map']
  name = next(key for key in index if key.endswith('c_fc.weight'))
  number = int(index[name][6:11])
  others = [other for other in (0, 1) if other != number]
  stored = safetensors_numpy.load_file(folder / index[name])[name]
  _with_shards(folder, **{f'_{other}': {name: 0 * stored} for other in others})
  _assert_same(hub.load_module(folder), before)
  other = f'model-0000{others[0]}.safetensors'
  _with_shards(folder, {name: other})
  params = hub.flat_params(hub.load_module(folder))[1]
  assert any(np.all(np.asarray(array) == 0) for array in params.values())
  lacks = {0, 1, 2, 3} - {number, *others}
  _with_shards(folder, {name: f'model-0000{lacks.pop()}.safetensors'})
  with pytest.raises(ValueError, match='lacks 1 tensors, the first is h'):
    hub.load_module(folder)


def test_pickled_weights_are_not_read_but_can_be_converted(folder):
  (folder / WEIGHTS).rename(folder / 'pytorch_model.bin')
  message = (
    r'only pickled weights \(pytorch_model\.bin\)(.|\n)*convert(.|\n)*'
    rf"from_pretrained\('{folder}'\)(.|\n)*\.save_pretrained\("
  )
  with pytest.raises(ValueError, match=message):
    hub.load_module(folder)


def test_name_that_is_neither_folder_nor_model(monkeypatch, tmp_path):
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  for name in ('nobody/nothing-of-this-name', 'a b'):
    message = rf"^'{name}' is not a folder or file here, and could not.*\Z"
    with pytest.raises(ValueError, match=message):  # one line
      hub.load_module(name)


def test_a_folder_of_gguf_files_names_one(tmp_path):
  (tmp_path / 'small.gguf').touch()
  with pytest.raises(ValueError, match=r'give a file of it, .*small\.gguf'):
    hub.load_module(tmp_path)


def test_a_folder_is_not_asked_of_the_hub(folder, monkeypatch):
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', pytest.fail)
  for name in ('/no/such/folder', './none', '~/none here'):
    with pytest.raises(ValueError, match=f'there is no folder {name}'):
      hub.load_module(name)
  # Not even the home of a user is there.
  with pytest.raises(ValueError, match='there is no folder ~nobody-of-this/x'):
    hub.load_module('~nobody-of-this/x')
  with pytest.raises(ValueError, match='is not a hub id, and a revision needs'):
    hub.load_module(folder, revision='main')


def test_positions_beyond_the_context_and_tokens_that_see_nothing_are_finite():
  module = tiny.module()
  tokens = jnp.asarray(tiny.tokens())
  beyond = np.broadcast_to(np.arange(8) + 5, tokens.shape)
  for sees, positions in ((True, beyond), (False, 0 * beyond)):
    mask = np.full((2, 8, 8), sees)
    logits, _ = module(tokens, jnp.asarray(positions), mask)
    assert np.all(np.isfinite(logits))
