"""Llamas and mixtures: what is read, counted, written, and refused."""

import dataclasses
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny
import variants

from specdec.models.checkpoints import hub
from specdec.models.nn import adapter
from specdec.models.nn import block_drafter
from specdec.models.nn import eagle
from specdec.models.nn import gemma as gemma_lib
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama


def _write(tmp_path, name):
  return variants.write(name, tmp_path / name)


def test_a_forward_of_one_position_reads_the_experts_of_one_token(tmp_path):
  spec_of = lambda name: (
    adapter.as_model(hub.load_module(_write(tmp_path, name))).spec
  )
  definition, tied = map(spec_of, ('mixtral', 'mixture_tied'))
  attention = 16 * 16 + 2 * 8 * 16 + 16 * 16
  experts = 2 * 3 * 16 * 24  # 2 of 4
  per_layer = attention + 4 * 16 + experts
  matrices = 2 * per_layer + 40 * 16
  assert definition.parameters == matrices
  assert definition.weight_bytes == 4 * (matrices + 5 * 16)
  assert tied.parameters == per_layer + 40 * 16


def test_old_buffers_and_a_head_stored_twice_are_fine(tmp_path):
  folder = _write(tmp_path, 'tied')
  expected = tiny.parameters(hub.load_module(folder))
  embedding = lambda tensors: tensors['model.embed_tokens.weight'].copy()
  frequencies = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  edits = {frequencies: lambda _: np.ones(2, np.float32)}
  variants.edit_tensors(folder, edits | {'lm_head.weight': embedding})
  again = tiny.parameters(hub.load_module(folder))
  jax.tree.map(np.testing.assert_array_equal, again, expected)


_SWITCH = {'use_sliding_window': True}


@pytest.mark.parametrize(
  ('kind', 'changes', 'window'),
  [
    ('mistral', {'sliding_window': 63}, 63),
    ('mistral', {'sliding_window': 64}, None),  # All of the context.
    ('llama', {'use_sliding_window': False}, None),
    ('llama', {'layer_types': ['full_attention'] * 2}, None),
    ('qwen3_moe', _SWITCH, 8),
    ('qwen3_moe', {'use_sliding_window': False, 'max_window_layers': 1}, None),
    ('mistral', {'sliding_window': None}, None),
    ('qwen2', {'use_sliding_window': False}, None),
    ('qwen2', _SWITCH | {'max_window_layers': 2}, None),
    ('gemma3_text', {}, 8),  # The sixth layer would see the whole text.
    ('gemma3_text', {'num_hidden_layers': 7}, (*[8] * 5, None, 8)),
  ],
)
def test_layers_have_windows_and_the_context_is_whole(
  kind, changes, window, tmp_path
):
  """`hub_test` has the logits of layers with windows."""
  keys = {'model_type': kind, 'sliding_window': 8, 'num_hidden_layers': 2}
  name = kind.removesuffix('_text')
  config = variants.VARIANTS.get(name, variants.VARIANTS['grouped'])['config']
  plain = {k: v for k, v in config.items() if k != 'sliding_window_pattern'}
  (tmp_path / 'config.json').write_text(json.dumps(plain | keys | changes))
  config = hub.locate(tmp_path).config
  assert (config.num_positions, config.window) == (64, window)


def test_the_language_model_of_a_gemma_that_sees(tmp_path):
  """Its config is within another, its tensors have another prefix."""
  folder = _write(tmp_path, 'gemma3')
  expected = tiny.parameters(hub.load_module(folder))
  config = json.loads((folder / 'config.json').read_text())
  whole = {'model_type': 'gemma3', 'text_config': config, 'vision_config': {}}
  (folder / 'config.json').write_text(json.dumps(whole))
  tensors = safetensors_numpy.load_file(folder / 'model.safetensors')
  for prefix in ('language_model.model.', 'model.language_model.'):
    named = {
      name.replace('model.', prefix, 1): array
      for name, array in tensors.items()
    }
    named['vision_tower.embeddings.weight'] = np.ones((2, 2), np.float32)
    safetensors_numpy.save_file(named, folder / 'model.safetensors')
    params = tiny.parameters(hub.load_module(folder))
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_factor_of_yarn_that_is_null_follows_from_the_contexts(tmp_path):
  """As in transformers; other keys that are null have their defaults."""
  folder = _write(tmp_path, 'yarn_in_full')
  config = json.loads((folder / 'config.json').read_text())
  config['max_position_embeddings'] = 96
  rope = {'rope_type': 'yarn', 'factor': None, 'beta_fast': None}
  rope |= {'rope_theta': 10.0, 'original_max_position_embeddings': 64}
  config |= {'rope_parameters': rope, 'rope_theta': 10.0}
  (folder / 'config.json').write_text(json.dumps(config))
  scaling = hub.locate(folder).config.rope.scaling
  assert (scaling.factor, scaling.beta_fast) == (1.5, 32.0)


_PLAIN = nn_llama.fields_of(tiny.LLAMA_CONFIGS['llama'])
_CONFIGS = tiny.LLAMA_CONFIGS | {
  'gemma4': gemma_lib.Gemma4Config(**_PLAIN, layer_width=8),
  'head': eagle.HeadConfig(**_PLAIN, target_width=16, fc_norm=True),
  'block': block_drafter.BlockDrafterConfig(
    **_PLAIN, target_width=16, reads=(0,), block_size=4, conv_size=2
  ),
}
_DRAFTERS = {'head': eagle.Head, 'block': block_drafter.BlockDrafter}


@pytest.mark.parametrize('name', _CONFIGS)
def test_all_norms_have_the_epsilon_of_the_config(name):
  """Most families have 1e-6, as a norm that ignores it would have."""
  config = dataclasses.replace(_CONFIGS[name], norm_epsilon=0.3)
  if make := _DRAFTERS.get(name):
    module = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
  else:
    module = hub.shape_module(config, jnp.float32)
  norms = [
    part
    for _, part in nnx.iter_modules(module)
    if isinstance(part, layers.Norm)
  ]
  assert {norm.epsilon for norm in norms} == {0.3}
  assert len(norms) > 2
