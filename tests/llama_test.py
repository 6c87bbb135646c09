"""Llamas and mixtures: what is read, computed, written, and what is refused."""

import functools
import json

import jax
import jax.numpy as jnp
import llama_reference
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

WEIGHTS = 'model.safetensors'


@pytest.fixture(scope='module', params=llama_variants.VARIANTS)
def folder(request, tmp_path_factory):
  """Of a checkpoint of each kind."""
  folder = tmp_path_factory.mktemp('variant') / request.param
  llama_variants.write(llama_variants.VARIANTS[request.param], folder)
  return folder


def _write(tmp_path, name):
  folder = tmp_path / name
  llama_variants.write(llama_variants.VARIANTS[name], folder)
  return folder


@jax.jit
def _cached_logits(model, tokens):
  """Of a prefill into a cache that is longer than the text."""
  batch_size, length = tokens.shape
  cache = model.spec.init_cache(batch_size, length + 3)
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  mask = causal_mask(cache.length, length, length + 3)
  return model.apply(tokens, positions, mask, cache)[0]


@functools.cache
def _logits(folder, dtype='float32'):
  module = hub.load_module(folder, dtype=dtype)
  tokens = jnp.asarray(llama_variants.tokens())
  return np.asarray(_cached_logits(as_model(module), tokens))


def _assert_same(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
  np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))


def _transformers_logits(folder):
  torch = pytest.importorskip('torch')
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  with torch.no_grad():
    tokens = torch.from_numpy(llama_variants.tokens())
    return model.eval()(tokens).logits.numpy()


def test_logits_are_those_of_the_slow_reference(folder):
  logits = _logits(folder)
  expected = llama_reference.Reference(folder).logits(llama_variants.tokens())
  _assert_same(logits, expected)
  assert len(np.unique(logits.argmax(-1))) > 3, 'not a trivial text'


def test_logits_are_those_of_transformers(folder):
  _assert_same(_logits(folder), _transformers_logits(folder))


def test_saving_and_loading_changes_no_bit(folder, tmp_path):
  module = hub.load_module(folder)
  hub.save_pretrained(module, tmp_path)
  loaded = hub.load_module(tmp_path)
  assert loaded.config == module.config
  expected = tiny.parameters(module)
  actual = tiny.parameters(loaded)
  assert actual.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(actual[name], array, err_msg=name)


# One of each model_type that is written, and a scaling.
@pytest.mark.parametrize(
  'name', ['yarn_in_full', 'biases', 'qwen3_biases', 'mixtral', 'qwen3_moe']
)
def test_transformers_loads_what_is_saved(name, tmp_path):
  folder = _write(tmp_path, name)
  tmp_path = tmp_path / 'saved'
  hub.save_pretrained(hub.load_module(folder), tmp_path)
  _assert_same(_transformers_logits(tmp_path), _logits(folder))


def test_every_family_has_enough_variants():
  assert len(llama_variants.LLAMAS) >= 8
  assert len(llama_variants.MIXTURES) >= 8


# Details of the forward.


@pytest.mark.parametrize('name', ['qwen3', 'mixtral'])
def test_logits_do_not_depend_on_how_the_cache_was_filled(name, tmp_path):
  folder = _write(tmp_path, name)
  expected = _logits(folder)
  model = as_model(hub.load_module(folder))
  tokens = llama_variants.tokens()
  batch_size, length = tokens.shape
  cache = model.spec.init_cache(batch_size, length)
  apply = jax.jit(model.spec.apply)
  for position in range(length):
    now = slice(position, position + 1)
    logits, cache = apply(
      model.params,
      tokens[:, now],
      np.full((batch_size, 1), position),
      causal_mask(cache.length, 1, length),
      cache,
    )
    cache = cache.replace(length=cache.length + 1)
    _assert_same(np.asarray(logits), expected[:, now])


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
  error = np.abs(_logits(folder, 'bfloat16') - _logits(folder))
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
  error = np.abs(_logits(folder, 'int8') - _logits(folder))
  assert 0 < np.median(error) < 0.2


# What is refused.


def _edit_tensors(folder, edit):
  tensors = safetensors_numpy.load_file(folder / WEIGHTS)
  edit(tensors)
  safetensors_numpy.save_file(tensors, folder / WEIGHTS)


_EXPERT = 'model.layers.1.block_sparse_moe.experts.2'

BAD_TENSORS = {
  'missing': (
    lambda tensors: tensors.pop(f'{_EXPERT}.w2.weight'),
    r'lacks 1 tensors, the first is layers\.1\.mlp\.experts\.2\.down_proj\.wei',
  ),
  'left over': (
    lambda tensors: tensors.update(
      {
        'model.layers.1.block_sparse_moe.experts.4.w1.weight': (
          tensors[f'{_EXPERT}.w1.weight']
        )
      }
    ),
    r'experts\.4\.w1\.weight is not part of a Mixtral',
  ),
  'a bias': (
    lambda tensors: tensors.update(
      {'model.layers.0.self_attn.q_proj.bias': np.zeros(16, np.float32)}
    ),
    r'q_proj\.bias is not part of a Mixtral',
  ),
  'misshapen': (
    lambda tensors: tensors.update(
      {f'{_EXPERT}.w2.weight': tensors[f'{_EXPERT}.w1.weight']}
    ),
    r'experts\.2\.w2\.weight has shape \(24, 16\), expected \(16, 24\)',
  ),
  'eight bits': (
    lambda tensors: tensors.update(
      {f'{_EXPERT}.w1.weight': tensors[f'{_EXPERT}.w1.weight'].astype(np.int8)}
    ),
    r'experts\.2\.w1\.weight has dtype I8, expected one of',
  ),
}


@pytest.mark.parametrize('name', BAD_TENSORS)
def test_bad_tensor(name, tmp_path):
  folder = _write(tmp_path, 'mixtral')
  edit, message = BAD_TENSORS[name]
  _edit_tensors(folder, edit)
  with pytest.raises(ValueError, match=message):
    hub.load_module(folder)


def test_old_buffers_and_a_head_stored_twice_are_fine(tmp_path):
  folder = _write(tmp_path, 'tied')
  expected = _logits(folder)
  frequencies = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  _edit_tensors(
    folder,
    lambda tensors: tensors.update(
      {
        frequencies: np.ones(2, np.float32),
        'lm_head.weight': tensors['model.embed_tokens.weight'].copy(),
      }
    ),
  )
  again = _logits.__wrapped__(folder)
  np.testing.assert_array_equal(again, expected)
  _edit_tensors(
    folder,
    lambda tensors: tensors.update(
      {'lm_head.weight': tensors['lm_head.weight'] + 1}
    ),
  )
  with pytest.raises(ValueError, match='should be equal but differ'):
    hub.load_module(folder)


_SCALED = {'rope_theta': 10.0, 'factor': 2.0}
BAD_CONFIGS = [
  (
    'llama',
    {'rope_parameters': _SCALED | {'rope_type': 'dynamic'}},
    r"rope_type='dynamic' is not supported; choose from \['default', 'linear'",
  ),
  (
    'llama',
    {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
    "rope_type='dynamic' is not supported",
  ),
  (
    'qwen2',
    {
      'rope_parameters': _SCALED
      | {
        'rope_type': 'yarn',
        'mscale': 1.0,
        'original_max_position_embeddings': 32,
      }
    },
    "mscale is not supported with rope_type='yarn'",
  ),
  (
    'llama',
    {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 10.0}},
    'factor',
  ),
  (
    'llama',
    {'rope_parameters': _SCALED | {'rope_type': 'linear', 'factor': -1.0}},
    r'factor must be a positive number, got -1\.0',
  ),
  (
    'llama',
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 0.5}},
    r'rope_theta must be above 1, got 0\.5',
  ),
  (
    'llama',
    {'partial_rotary_factor': 0.5},
    r'partial_rotary_factor=0\.5 is not supported',
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
  ('llama', {'auto_map': {'AutoModel': 'code.M'}}, 'auto_map=.* is not suppor'),
  (
    'llama',
    {'quantization_config': {'quant_method': 'awq'}},
    'quantization_config=.*awq.* is not supported',
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


@pytest.mark.parametrize(('kind', 'changes', 'message'), BAD_CONFIGS)
def test_bad_config(kind, changes, message, tmp_path):
  config = llama_variants.config_of(llama_variants.Variant(kind, changes))
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(config))
  with pytest.raises(ValueError, match=r'config\.json(.|\n)*' + message):
    hub.config_of(str(tmp_path))


@pytest.mark.parametrize(
  ('kind', 'changes', 'context'),
  [
    ('mistral', {'sliding_window': 8}, 8),
    ('mistral', {'sliding_window': 100}, 64),
    ('mistral', {'sliding_window': None}, 64),
    ('mixtral', {'sliding_window': 8}, 8),
    ('qwen2', {'sliding_window': 8, 'use_sliding_window': False}, 64),
    (
      'qwen2',
      {'sliding_window': 8, 'use_sliding_window': True, 'max_window_layers': 1},
      8,
    ),
    (
      'qwen2',
      {'sliding_window': 8, 'use_sliding_window': True, 'max_window_layers': 2},
      64,
    ),
  ],
)
def test_the_context_ends_where_a_window_would_slide(
  kind, changes, context, tmp_path
):
  config = llama_variants.config_of(llama_variants.Variant(kind, changes, 2))
  (tmp_path / 'config.json').write_text(json.dumps(config))
  assert hub.config_of(str(tmp_path)).num_positions == context


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
