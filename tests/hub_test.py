"""Hugging Face folders: what is read, what is written, what is refused."""

import functools
import json
import pathlib
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import llama_variants
import numpy as np
import pytest
import safetensors
import tiny

from models.checkpoints import hub
from models.nn.adapter import as_model
from specdec.cache import causal_mask

# Remade with tests/golden/make_gpt2_variants.py.
GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'gpt2_variants'

VARIANTS = sorted(path.name for path in GOLDEN.iterdir())

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'


def test_there_are_enough_variants():
  assert len(VARIANTS) == 21


@pytest.mark.parametrize('variant', VARIANTS)
def test_logits_are_those_stored_by_transformers(variant):
  reference = np.load(GOLDEN / variant / 'reference.npz')
  module = hub.load_module(GOLDEN / variant)
  logits = tiny.logits(module, reference['tokens'])
  np.testing.assert_allclose(logits, reference['logits'], rtol=0, atol=1e-5)


@pytest.fixture(scope='module')
def reference():
  pytest.importorskip('torch')
  from golden import make_gpt2_variants

  return make_gpt2_variants


def test_logits_are_those_of_the_installed_transformers(reference, tmp_path):
  """With the activations of which none are stored."""
  variants = reference.MORE_ACTIVATIONS.items()
  for seed, (name, variant) in enumerate(variants, 1000):
    reference.write_checkpoint(variant, tmp_path / name, seed=seed)
    tokens = tiny.tokens(seed=seed)
    logits = tiny.logits(hub.load_module(tmp_path / name), tokens)
    expected = reference.reference_logits(tmp_path / name, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-5, err_msg=name)


SHAPES = {
  'tied': {},
  'everything': {
    'tie_embeddings': False,
    'inner_width': 24,
    'num_heads': 4,
    'activation': 'relu',
    'norm_epsilon': 0.1,
    'scale_attention': False,
    'scale_attention_by_layer': True,
  },
}


def _assert_same(actual, expected):
  actual, expected = tiny.parameters(actual), tiny.parameters(expected)
  jax.tree.map(
    functools.partial(np.testing.assert_array_equal, strict=True),
    actual,
    expected,
  )


@pytest.mark.parametrize(
  ('shape', 'dtype'), [('tied', 'float32'), ('everything', 'bfloat16')]
)
def test_saving_and_loading_changes_no_bit(shape, dtype, tmp_path):
  module = tiny.module(dtype=dtype, **SHAPES[shape])
  hub.save_pretrained(module, tmp_path)
  loaded = hub.load_module(tmp_path, dtype=jnp.dtype(dtype))
  assert loaded.config == module.config
  _assert_same(loaded, module)
  # It can be saved where it was loaded from.
  hub.save_pretrained(loaded, tmp_path)
  _assert_same(hub.load_module(tmp_path, dtype=jnp.dtype(dtype)), module)


@pytest.mark.parametrize('variant', ['untied', 'bfloat16', 'sharded_float16'])
def test_large_tensors_are_read_in_blocks(variant, monkeypatch):
  expected = hub.load_module(GOLDEN / variant)
  monkeypatch.setattr(hub, '_BLOCK_BYTES', 200)  # Three rows, in float32.
  _assert_same(hub.load_module(GOLDEN / variant), expected)


@pytest.mark.parametrize(
  ('dtype', 'stored', 'rounding'),
  [
    ('float32', 'F32', 0),
    ('float16', 'F16', 2**-11),
    ('bfloat16', 'BF16', 2**-8),
  ],
)
@pytest.mark.parametrize('shape', SHAPES)
def test_what_is_saved_is_rounded_and_transformers_loads_it(
  shape, dtype, stored, rounding, tmp_path, request
):
  module = tiny.module(**SHAPES[shape])
  hub.save_pretrained(module, tmp_path, dtype=jnp.dtype(dtype))
  assert json.loads((tmp_path / 'config.json').read_text())['dtype'] == dtype
  with safetensors.safe_open(tmp_path / WEIGHTS, 'numpy') as file:
    dtypes = {file.get_slice(name).get_dtype() for name in file.offset_keys()}
  assert dtypes == {stored}
  loaded = hub.load_module(tmp_path)
  rounded = tiny.parameters(loaded)
  for name, array in tiny.parameters(module).items():
    np.testing.assert_allclose(
      rounded[name], array, rtol=rounding, atol=1e-7, err_msg=name
    )
  reference = request.getfixturevalue('reference')
  expected = reference.reference_logits(tmp_path, tiny.tokens())
  logits = tiny.logits(loaded, tiny.tokens())
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_in_bfloat16_norms_stay_float32():
  module = hub.load_module(GOLDEN / 'untied', dtype=jnp.bfloat16)
  for name, array in tiny.parameters(module).items():
    is_norm = '.ln_' in f'.{name}'
    assert array.dtype == (jnp.float32 if is_norm else jnp.bfloat16), name


@pytest.fixture
def folder(tmp_path):
  """A good checkpoint, to be broken."""
  return shutil.copytree(GOLDEN / 'tied', tmp_path / 'model')


C_FC = 'transformer.h.1.mlp.c_fc'
WTE = 'transformer.wte.weight'

BAD_TENSORS = [
  (f'{C_FC}.bias', None, 'lacks 1 tensors, the first is h.1.mlp.c_fc.bias'),
  (
    'transformer.h.2.ln_1.bias',
    lambda t: np.ones(16, np.float32),
    'transformer.h.2.ln_1.bias is not part of a GPT-2',
  ),
  (
    f'{C_FC}.weight',
    lambda t: t[f'{C_FC}.weight'].T.copy(),
    r'c_fc.weight has shape \(24, 16\), expected \(16, 24\)',
  ),
  (
    f'{C_FC}.weight',
    lambda t: t[f'{C_FC}.weight'].astype(np.int8),
    'h.1.mlp.c_fc.weight has dtype I8, expected one of',
  ),
  (
    'lm_head.weight',
    lambda t: t[WTE] + 1,
    'tensors lm_head.weight and transformer.wte.weight should be equal',
  ),
]


@pytest.mark.parametrize(('name', 'edit', 'message'), BAD_TENSORS)
def test_bad_tensor(name, edit, message, folder):
  llama_variants.edit_tensors(folder, {name: edit})
  with pytest.raises(ValueError, match=message):
    hub.load_module(folder)


SHARD = 'model-00002-of-00005.safetensors'
# A variant, one of its files, what is in it instead (None: it is gone).
BAD_FILES = [
  *(
    ('tied', 'config.json', text, r'config\.json')
    for text in ('{"model_type": ', '[]', '"gpt2"', '\x00')
  ),
  ('tied', 'config.json', None, r'has no config\.json'),
  ('tied', WEIGHTS, None, f'has no {WEIGHTS} and no {INDEX}'),
  *(
    ('sharded', INDEX, text, f'{INDEX} is not an index of shards')
    for text in ('{', '{}', '[]', '{"weight_map": null}')
  ),
  ('sharded', SHARD, None, f'lacks the shards .*{SHARD}'),
]


@pytest.mark.parametrize(('variant', 'name', 'text', 'message'), BAD_FILES)
def test_bad_file(variant, name, text, message, tmp_path):
  folder = shutil.copytree(GOLDEN / variant, tmp_path / 'model')
  (folder / name).unlink()
  if text is not None:
    (folder / name).write_text(text)
  with pytest.raises(ValueError, match=message):
    hub.load_module(folder)


@pytest.mark.parametrize('size', [0, 4, 100, -1])
def test_truncated_file(size, folder):
  data = (folder / WEIGHTS).read_bytes()
  (folder / WEIGHTS).write_bytes(data[:size])
  with pytest.raises(ValueError, match=f'{WEIGHTS} is not a safetensors file'):
    hub.load_module(folder)


def test_pickled_weights_are_not_read_but_can_be_converted(folder):
  (folder / WEIGHTS).rename(folder / 'pytorch_model.bin')
  message = (
    r'only pickled weights \(pytorch_model\.bin\)(.|\n)*convert(.|\n)*'
    rf"from_pretrained\('{folder}'\)(.|\n)*\.save_pretrained\("
  )
  with pytest.raises(ValueError, match=message):
    hub.load_module(folder)


@pytest.mark.parametrize('name', ['nobody/nothing-of-this-name', 'a b'])
def test_name_that_is_neither_folder_nor_model(name, monkeypatch, tmp_path):
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.chdir(tmp_path)
  message = f"^'{name}' is neither a folder nor a model that could.*"
  with pytest.raises(ValueError, match=message + r'\Z'):  # one line
    hub.load_module(name)


@pytest.mark.parametrize('name', ['/no/such/folder', './none', '~/none here'])
def test_path_of_no_folder_is_not_asked_of_the_hub(name, monkeypatch):
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', pytest.fail)
  with pytest.raises(ValueError, match=f'there is no folder {name}'):
    hub.load_module(name)


def test_revision_of_a_folder(folder):
  with pytest.raises(ValueError, match='is not a hub id, and a revision needs'):
    hub.load_module(folder, revision='main')


MODELS = {
  'float32': lambda: tiny.module(scale_attention_by_layer=True),
  'bfloat16': lambda: tiny.module(dtype='bfloat16'),
  'llama': lambda: tiny.llama_module('llama'),
  'mixtral': lambda: tiny.llama_module('mixtral'),
}


@pytest.mark.parametrize('name', MODELS)
def test_logits_do_not_depend_on_how_the_cache_was_filled(name):
  """All at once or token by token; no cache gives the same."""
  module = MODELS[name]()
  model, tokens = as_model(module), tiny.tokens()
  batch_size, length = tokens.shape
  every = np.broadcast_to(np.arange(length), tokens.shape)
  causal = causal_mask(np.zeros(batch_size, np.int32), length, length)
  expected = jax.jit(lambda: module(tokens, every, causal)[0])()
  apply = jax.jit(model.spec.apply)
  for size in (length, 1):
    cache = model.spec.init_cache(batch_size, length + 3)
    for start in range(0, length, size):
      now = slice(start, start + size)
      mask = causal_mask(cache.length, size, length + 3)
      logits, cache = apply(
        model.params, tokens[:, now], every[:, now], mask, cache
      )
      cache = cache.replace(length=cache.length + size)
      atol = 0.05 if name == 'bfloat16' else 1e-5
      np.testing.assert_allclose(logits, expected[:, now], rtol=0, atol=atol)


def test_positions_beyond_the_context_and_tokens_that_see_nothing_are_finite():
  module = tiny.module()
  tokens = jnp.asarray(tiny.tokens())
  beyond = np.broadcast_to(np.arange(8) + 5, tokens.shape)
  for sees, positions in ((True, beyond), (False, 0 * beyond)):
    mask = np.full((2, 8, 8), sees)
    logits, _ = module(tokens, jnp.asarray(positions), mask)
    assert np.all(np.isfinite(logits))
