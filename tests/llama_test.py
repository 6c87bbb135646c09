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
def test_transformers_loads_what_is_saved(name, tmp_path):
  pytest.importorskip('torch')
  from golden import make_llama_variants as reference

  saved = tmp_path / 'saved'
  hub.save_pretrained(hub.load_module(_write(tmp_path, name)), saved)
  _assert_same(reference.reference_logits(saved), _stored_logits()[name])


def test_every_family_has_enough_variants():
  kinds = [variant['config']['model_type'] for variant in _VARIANTS.values()]
  mixtures = [kind for kind in kinds if kind in ('mixtral', 'qwen3_moe')]
  assert (len(kinds) - len(mixtures), len(mixtures)) == (17, 11)
  assert len(set(kinds)) == 6


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


def test_bfloat16_is_near_and_norms_stay_float32(tmp_path):
  folder = _write(tmp_path, 'qwen3_moe')
  module = hub.load_module(folder, dtype=jnp.bfloat16)
  for path, array in tiny.parameters(module).items():
    assert (array.dtype == jnp.float32) == ('norm' in path), path
  error = np.abs(_logits(folder, 'bfloat16') - _stored_logits()['qwen3_moe'])
  assert 0 < np.median(error) < 0.1


@pytest.mark.parametrize('name', ['mixtral', 'tied'])
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
  keys = {'model_type': kind, 'sliding_window': 8, 'num_hidden_layers': 2}
  config = _VARIANTS[kind]['config'] | keys | changes
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
