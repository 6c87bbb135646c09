"""Llamas and mixtures: what is read, computed, written, and what is refused."""

import functools
import json

import jax
import jax.numpy as jnp
import llama_variants
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny

from models.bench import machine as roofline
from models.bench import peers as peer_counts
from models.checkpoints import expand
from models.checkpoints import hub
from models.nn.adapter import as_model
from models.nn.matmul import Int8Matrix
from specdec.cache import causal_mask

_VARIANTS = llama_variants.VARIANTS


def _write(tmp_path, name):
  folder = tmp_path / name
  llama_variants.write(_VARIANTS[name], folder)
  return folder


@jax.jit
def _cached_logits(model, tokens):
  """Of a prefill into a cache that is longer than the text."""
  batch_size, length = tokens.shape
  cache = model.spec.init_cache(batch_size, length + 3)
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  mask = causal_mask(cache.length, length, length + 3)
  return model.apply(tokens, positions, mask, cache)[0]


def _logits(folder, dtype='float32'):
  module = hub.load_module(folder, dtype=dtype)
  tokens = jnp.asarray(llama_variants.tokens())
  return np.asarray(_cached_logits(as_model(module), tokens))


@functools.cache
def _stored_logits():
  return np.load(llama_variants.RESULTS)


def _assert_same(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
  np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope='module')
def reference():
  pytest.importorskip('torch')
  from golden import make_llama_variants

  return make_llama_variants


@pytest.mark.parametrize('name', _VARIANTS)
def test_logits_and_tensors_are_those_of_transformers(name, tmp_path):
  folder, saved = _write(tmp_path, name), tmp_path / 'saved'
  _assert_same(_logits(folder), _stored_logits()[name])
  module = hub.load_module(folder)
  hub.save_pretrained(module, saved)
  assert hub.load_module(saved).config == module.config
  tensors = safetensors_numpy.load_file(saved / 'model.safetensors')
  with_prefix = lambda name: (
    name if name.startswith(('model.', 'lm_head.')) else f'model.{name}'
  )
  expected = {with_prefix(name) for name in _VARIANTS[name]['tensors']}
  assert tensors.keys() == expected
  stored = {
    with_prefix(name): array
    for file in folder.glob('*.safetensors')
    for name, array in safetensors_numpy.load_file(file).items()
  }
  for name, array in stored.items():
    np.testing.assert_array_equal(tensors[name], array.astype(np.float32), name)


# One of each model_type that is written, and a scaling.
@pytest.mark.parametrize(
  'name', ['yarn_in_full', 'biases', 'qwen3_biases', 'mixtral', 'qwen3_moe']
)
def test_transformers_loads_what_is_saved(name, reference, tmp_path):
  saved = tmp_path / 'saved'
  hub.save_pretrained(hub.load_module(_write(tmp_path, name)), saved)
  _assert_same(reference.reference_logits(saved), _stored_logits()[name])


def test_every_family_has_enough_variants():
  kinds = [variant['config']['model_type'] for variant in _VARIANTS.values()]
  mixtures = [kind for kind in kinds if kind in ('mixtral', 'qwen3_moe')]
  assert (len(kinds) - len(mixtures), len(mixtures)) == (17, 11)
  assert len(set(kinds)) == 6


# Details of the forward.


def test_the_cache_has_key_and_value_heads_only(tmp_path):
  definition = as_model(hub.load_module(_write(tmp_path, 'multi_query'))).spec
  cache = definition.init_cache(3, 10)
  assert [array.shape for array in cache.keys] == [(3, 1, 10, 4)] * 2
  assert definition.cache_bytes_per_slot == 2 * 2 * 1 * 4 * 4


def test_a_forward_of_one_position_reads_the_experts_of_one_token(tmp_path):
  definition = as_model(hub.load_module(_write(tmp_path, 'mixtral'))).spec
  attention = 16 * 16 + 2 * 8 * 16 + 16 * 16
  experts = 2 * 3 * 16 * 24  # 2 of 4
  per_layer = attention + 4 * 16 + experts
  matrices = 2 * per_layer + 40 * 16
  assert definition.parameters == matrices
  assert definition.weight_bytes == 4 * (matrices + 5 * 16)
  tied = as_model(hub.load_module(_write(tmp_path, 'mixture_tied'))).spec
  assert tied.parameters == per_layer + 40 * 16


def test_positions_beyond_the_context_are_finite(tmp_path):
  rope = hub.config_of(str(_write(tmp_path, 'llama3'))).rope
  for turned in rope.rotation(jnp.array([[0, 64, 10**6]]), 16):
    assert turned.shape == (1, 1, 3, 8)
    assert np.all(np.isfinite(turned))


# Other dtypes.


@pytest.mark.parametrize('name', ['biases', 'qwen3_moe'])
def test_bfloat16_is_near_and_norms_stay_float32(name, tmp_path):
  folder = _write(tmp_path, name)
  module = hub.load_module(folder, dtype=jnp.bfloat16)
  for path, array in tiny.parameters(module).items():
    assert (array.dtype == jnp.float32) == ('norm' in path), path
  error = np.abs(_logits(folder, 'bfloat16') - _stored_logits()[name])
  assert 0 < np.median(error) < 0.1


@pytest.mark.parametrize('name', ['grouped', 'mixtral', 'tied'])
def test_eight_bits(name, tmp_path):
  folder = _write(tmp_path, name)
  params = as_model(hub.load_module(folder, dtype='int8')).params
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    params, is_leaf=lambda leaf: isinstance(leaf, Int8Matrix)
  )
  for path, leaf in leaves:
    is_router = path[-2].key == 'gate' if len(path) > 1 else False
    is_matrix = len(leaf.shape) == 2 and not is_router
    assert isinstance(leaf, Int8Matrix) == is_matrix, path
  error = np.abs(_logits(folder, 'int8') - _stored_logits()[name])
  assert 0 < np.median(error) < 0.2


# What is refused.

_EXPERT = 'model.layers.1.block_sparse_moe.experts.2'

BAD_TENSORS = [
  (
    f'{_EXPERT}.w2.weight',
    None,
    r'lacks 1 tensors, the first is layers\.1\.mlp\.experts\.2\.down_proj\.wei',
  ),
  (
    'model.layers.1.block_sparse_moe.experts.4.w1.weight',
    lambda tensors: tensors[f'{_EXPERT}.w1.weight'].copy(),
    r'experts\.4\.w1\.weight is not part of a Mixtral',
  ),
  (
    'model.layers.0.self_attn.q_proj.bias',
    lambda _: np.zeros(16, np.float32),
    r'q_proj\.bias is not part of a Mixtral',
  ),
  (
    f'{_EXPERT}.w2.weight',
    lambda tensors: tensors[f'{_EXPERT}.w1.weight'].copy(),
    r'experts\.2\.w2\.weight has shape \(24, 16\), expected \(16, 24\)',
  ),
  (
    f'{_EXPERT}.w1.weight',
    lambda tensors: tensors[f'{_EXPERT}.w1.weight'].astype(np.int8),
    r'experts\.2\.w1\.weight has dtype I8, expected one of',
  ),
]


@pytest.mark.parametrize(('name', 'edit', 'message'), BAD_TENSORS)
def test_bad_tensor(name, edit, message, tmp_path):
  folder = _write(tmp_path, 'mixtral')
  llama_variants.edit_tensors(folder, {name: edit})
  with pytest.raises(ValueError, match=message):
    hub.load_module(folder)


def test_old_buffers_and_a_head_stored_twice_are_fine(tmp_path):
  folder = _write(tmp_path, 'tied')
  expected = tiny.parameters(hub.load_module(folder))
  embedding = lambda tensors: tensors['model.embed_tokens.weight'].copy()
  frequencies = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  edits = {frequencies: lambda _: np.ones(2, np.float32)}
  llama_variants.edit_tensors(folder, edits | {'lm_head.weight': embedding})
  again = tiny.parameters(hub.load_module(folder))
  assert again.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(again[name], array, name)
  other = {'lm_head.weight': lambda tensors: tensors['lm_head.weight'] + 1}
  llama_variants.edit_tensors(folder, other)
  with pytest.raises(ValueError, match='should be equal but differ'):
    hub.load_module(folder)


_NO = 'is not supported'


def _rope(kind, **values):
  return {'rope_parameters': {'rope_theta': 10.0, 'rope_type': kind} | values}


BAD_CONFIGS = [
  (
    'llama',
    _rope('dynamic', factor=2.0),
    rf"rope_type='dynamic' {_NO}; choose from \['default', 'linear'",
  ),
  (
    'llama',
    {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
    f"rope_type='dynamic' {_NO}",
  ),
  (
    'qwen2',
    _rope('yarn', factor=2.0, mscale=1.0, original_max_position_embeddings=32),
    "mscale is not supported with rope_type='yarn'",
  ),
  ('llama', _rope('linear'), 'factor'),
  (
    'llama',
    _rope('linear', factor=-1.0),
    r'factor must be a positive number, got -1\.0',
  ),
  (
    'llama',
    _rope('default', rope_theta=0.5),
    r'rope_theta must be above 1, got 0\.5',
  ),
  (
    'llama',
    {'partial_rotary_factor': 0.5},
    rf'partial_rotary_factor=0\.5 {_NO}',
  ),
  ('llama', {'hidden_act': 'prelu'}, "hidden_act='prelu' is not known; choose"),
  (
    'llama',
    {'num_key_value_heads': 3},
    'num_kv_heads must divide num_heads 4, got 3',
  ),
  ('llama', {'num_attention_heads': 0}, 'num_attention_heads must be positive'),
  ('llama', {'num_hidden_layers': 0}, 'num_layers must be positive, got 0'),
  ('llama', {'hidden_size': 'wide'}, 'hidden_size'),
  ('llama', {'auto_map': {'AutoModel': 'code.M'}}, f'auto_map=.* {_NO}'),
  (
    'llama',
    {'quantization_config': {'quant_method': 'awq'}},
    f'quantization_config=.*awq.* {_NO}',
  ),
  ('gemma2', {}, "model_type 'gemma2' is not known; choose from"),
  (
    'mixtral',
    {'num_experts_per_tok': 9},
    'experts_per_token must lie between 1 and num_experts=4, got 9',
  ),
  (
    'qwen3_moe',
    {'mlp_only_layers': [1]},
    r'mlp_only_layers=\[1\] and decoder_sparse_step=1: layers without experts',
  ),
]


# Variants whose config.json has the plain keys of a model_type.
_OF_TYPE = {'llama': 'tied', 'gemma2': 'tied'}


def _config(tmp_path, kind, **changes):
  config = _VARIANTS[_OF_TYPE.get(kind, kind)]['config'] | {'model_type': kind}
  (tmp_path / 'config.json').write_text(json.dumps(config | changes))
  return hub.config_of(str(tmp_path))


@pytest.mark.parametrize(('kind', 'changes', 'message'), BAD_CONFIGS)
def test_bad_config(kind, changes, message, tmp_path):
  with pytest.raises(ValueError, match=r'config\.json(.|\n)*' + message):
    _config(tmp_path, kind, **changes)


@pytest.mark.parametrize(
  ('kind', 'changes', 'context'),
  [
    ('mistral', {'sliding_window': 8}, 8),
    ('mistral', {'sliding_window': 100}, 64),
    ('mistral', {'sliding_window': None}, 64),
    ('mixtral', {'sliding_window': 8}, 8),
    ('qwen2', {'use_sliding_window': False}, 64),
    ('qwen2', {'use_sliding_window': True, 'max_window_layers': 1}, 8),
    ('qwen2', {'use_sliding_window': True, 'max_window_layers': 2}, 64),
  ],
)
def test_the_context_ends_where_a_window_would_slide(
  kind, changes, context, tmp_path
):
  changes = {'sliding_window': 8, 'num_hidden_layers': 2} | changes
  assert _config(tmp_path, kind, **changes).num_positions == context


def test_a_shape_that_transformers_has_not_is_not_saved(tmp_path):
  module = hub.load_module(_write(tmp_path, 'qwen3_moe'))
  object.__setattr__(module.config, 'output_bias', True)
  with pytest.raises(ValueError, match='no model of transformers has this sha'):
    hub.save_pretrained(module, tmp_path / 'saved')
  assert not (tmp_path / 'saved').exists()


def test_only_gpt2_is_expanded(tmp_path):
  module = hub.load_module(_write(tmp_path, 'grouped'))
  with pytest.raises(ValueError, match='only a GPT-2 can be expanded, not a L'):
    expand.expand(module, width_factor=2, num_layers=2)


# What transformers reads of the same checkpoint.


@pytest.mark.parametrize('name', ['multi_query', 'tied', 'mixtral'])
def test_peers_are_counted_alike(name, tmp_path):
  pytest.importorskip('torch')
  import transformers

  folder = _write(tmp_path, name)
  model = as_model(hub.load_module(folder))
  peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
  assert peer_counts.model_size(peer) == roofline.model_size(model)
  assert peer_counts.read_costs(peer) == {
    'per_forward': model.spec.weight_bytes,
    'per_slot': model.spec.cache_bytes_per_slot,
  }
