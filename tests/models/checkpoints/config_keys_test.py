"""Every key of a configuration is read, known to change nothing, or refused.

Which keys there are, with which types and defaults, is what the classes of
transformers say.
"""

import dataclasses
import json
import pathlib

import pytest
import transformers
import variants

from specdec.models.checkpoints import families

_PATH = pathlib.Path('config.json')
_PUBLISHED = json.loads(
  (pathlib.Path(__file__).parents[2] / 'golden' / 'published.json').read_text()
)
_NEW = ('granite4', 'ministral3', 'gpt_oss', 'gemma4')
# One of each model_type.
_OF_TYPE = {
  variant['config']['model_type']: variant['config']
  for variant in (
    *(variants.FAMILIES[f'{name}_0'] for name in _NEW),
    *variants.VARIANTS.values(),
  )
}
# Fields of the classes that change nothing. Those of windows are read where a
# window is; `mlp_only_layers` and others are refused.
_IDLE = {
  'attention_dropout',
  'attn_pdrop',
  'embd_pdrop',
  'resid_pdrop',
  'bos_token_id',
  'eos_token_id',
  'pad_token_id',
  'use_cache',
  'initializer_range',
  'pretraining_tp',
  'reorder_and_upcast_attn',
  'output_router_logits',
  'router_aux_loss_coef',
  'router_jitter_noise',
  'summary_type',
  'summary_use_proj',
  'summary_activation',
  'summary_proj_to_labels',
  'summary_first_dropout',
}
_IDLE_OF_TYPE = {
  'phi3': {'original_max_position_embeddings'},
  'qwen2': {'attention_bias'},
  **{kind: {'intermediate_size'} for kind in ('qwen2_moe', 'qwen3_moe')},
  'mistral': {'use_sliding_window'},
  'gemma4_text': {'use_bidirectional_attention'},  # But `all` is refused.
  'granitemoehybrid': {
    *(
      f'mamba_{key}' for key in ('chunk_size', 'conv_bias', 'd_conv', 'expand')
    ),
    *(f'mamba_{key}' for key in ('d_head', 'd_state', 'n_groups', 'n_heads')),
    'mamba_proj_bias',
    'time_step_limit',
    'sliding_window',
  },
}
# Without lists of layers, other keys say which layers have what.
_LISTS = ('layer_types', 'no_rope_layers')
_WINDOW = {'use_sliding_window': True, 'sliding_window': 5}
_FIRST = {kind: {'max_window_layers': 0} for kind in ('qwen2', 'qwen3')}
_FIRST['smollm3'] = {'no_rope_layer_interval': 2}
# Keys that are no fields, but read in older files.
_OLDER = {'rope_theta', 'rope_scaling', 'partial_rotary_factor', 'head_dim'}
# Values of every type; and others that are unusual and good.
_VALUES = (
  True,
  False,
  'relu',
  [1],
  ['full_attention'],
  ['sliding_attention'] * 2,
  [0, 1],
  [1, 1],
  0,
  1,
  2,
  3,
  4,
  6,
  8,
  32,
  0.25,
  0.5,
  7.5,
  {'a': 1},
  {'rope_theta': 50.0},
  {'rope_type': 'linear', 'factor': 2.0},
)


def _read(config):
  return families.config_from_keys(config, _PATH)


def _keys(kind):
  found = transformers.AutoConfig.for_model(kind)
  base = {one.name for one in dataclasses.fields(transformers.PreTrainedConfig)}
  own = {one.name for one in dataclasses.fields(found)}
  gemma = {'sliding_window_pattern'} if kind == 'gemma3_text' else set()
  return sorted((own - base) | (_OLDER if kind != 'gpt2' else set()) | gemma)


def _tried(config, key, value):
  """The outcome of a value: same, other, wrong type or refused."""
  try:
    same = _read(config | {key: value}) == _read(config)
    return 'same' if same else 'other'
  except ValueError as error:
    said = str(error)
  assert said.startswith(str(_PATH))
  if f' {key} must be ' in said and f', got {value!r}' in said:
    return 'wrong type'
  key = 'rope_' if key.startswith('rope_') else key
  return 'refused' if key in said else said


@pytest.mark.parametrize('kind', _OF_TYPE)
def test_every_key_changes_the_shape_or_is_refused_or_idle(kind):
  config, keys = _OF_TYPE[kind], _keys(kind)
  if 'use_sliding_window' in keys:
    config = {key: config[key] for key in config if key not in _LISTS} | _WINDOW
    config |= _FIRST.get(kind, {})
  idle = _IDLE | _IDLE_OF_TYPE.get(kind, set())
  for key in keys:
    found = {_tried(config, key, value) for value in _VALUES}
    # Sizes that do not fit are called by the names of fields.
    assert found & {'other', 'refused'} or (key in idle), (key, found)
    assert 'other' not in found or key not in idle, key
    assert 'wrong type' in found, key


@pytest.mark.parametrize('kind', _OF_TYPE)
def test_a_key_that_nobody_knows_is_refused_unless_it_is_off(kind):
  config = _OF_TYPE[kind]
  for key in ('rope_interleaved', 'use_alibi', 'logit_bias_scale', 'is_causal'):
    for value in (None, False, 0, [], ''):
      if key != 'is_causal' or value is None:
        assert _tried(config, key, value) == 'same'
    for value in (True, 3, 'a', {'b': 1}, [None]):
      if key != 'is_causal' or value is not True:
        assert _tried(config, key, value) == 'refused'


@pytest.mark.parametrize('name', _PUBLISHED)
def test_keys_of_published_configurations_are_read(name):
  assert _read(_PUBLISHED[name]).num_layers > 0


def _rope(kind, **values):
  return {'rope_parameters': {'rope_type': kind} | values}


_grows = lambda **changes: _rope(
  'yarn', factor=2.0, original_max_position_embeddings=32, **changes
)
_BETA = {'llama_4_scaling_beta': 0.1}
_LONG = {'type': 'longrope', 'short_factor': [1.5]}
_long = lambda **changes: {
  'original_max_position_embeddings': 48,
  'rope_scaling': _LONG | {'long_factor': [3.0]} | changes,
}
_LINEAR = {'rope_type': 'linear', 'factor': 2.0}
_NESTED = {'full_attention': _LINEAR}
_TWO_KINDS = {'type': 'linear', 'rope_type': 'yarn'}
_YARN_OF_4 = {'mscale': 1.0, 'original_max_position_embeddings': 32}
_NO_CONTEXT = {'factor': None, 'original_max_position_embeddings': None}
_SLIDES = {'sliding_window': 8}
_LAYERS = {'2': {'num_key_value_heads': 2}}
_OF_OLD = {'rope_theta': 5.0} | _rope('default', rope_theta=7.0)
# By model_type: other keys, and what is said of them. That values have the type
# of their key is tested above.
_REFUSED = {
  'gpt2': (
    ({'n_layer': 4000}, '4000 layers, at most 256'),
    ({'n_embd': 17}, 'num_heads must divide width 17, got 2'),
    ({'n_head': 0}, 'num_heads must be positive'),
    ({'activation_function': 'prelu'}, "activation_function='prelu' is not"),
    ({'model_type': ['gpt2']}, r"model_type \['gpt2'\] is not known"),
    ({'model_type': 'mamba'}, "'mamba' is not known; choose from"),
    ({'n_ctx': 32}, 'n_ctx=32 and n_positions=.* contradict each other'),
    ({'hidden_size': 32}, 'hidden_size=32 and n_embd=16 contradict'),
    (
      {'layer_norm_epsilon': float('nan')},
      'epsilon must be .* got nan',
    ),
    ({'quantization_config': {'quant_method': 'awq'}}, "'awq'} is not supp"),
  ),
  'llama': (
    ({'hidden_size': 18}, r'hidden size \(18\)'),
    ({'num_key_value_heads': 3}, 'num_kv_heads must divide num_heads 4'),
    (_rope(['a']), r"rope_type must be .* got \['a'\]"),
    (_rope('dynamic', factor=2.0), r"\['default', 'linear'"),
    (_rope('yarn', factor=2.0, **_YARN_OF_4), 'mscale=1.0 is not supported'),
    (_rope('linear'), 'factor'),
    (_rope('yarn', **_NO_CONTEXT), "'yarn': {'factor'}"),
    (_rope('llama3', factor=8.0, low_freq_factor=None), 'low_freq_factor'),
    (_rope('linear', factor=-1.0), 'got -1.0'),
    ({'rope_theta': 0.5}, 'got 0.5'),
    # transformers ignores this, and others do not.
    (_SLIDES, 'sliding_window=8: the layers of such'),
    (_OF_OLD, 'rope_theta=5.0 and .* contradict'),
    ({'rope_scaling': _LINEAR} | _rope('default'), 'rope_type.* contradict'),
    ({'rope_scaling': _NESTED}, 'full_attention'),
    ({'rope_scaling': _TWO_KINDS}, "='yarn' and type='linear' contradict"),
    ({'rope_scaling': {'factor': 2.0}}, "factor=2.0 .*'default'"),
    ({'partial_rotary_factor': 0.5}, 'is not supported'),
  ),
  'mistral': (
    ({'layer_types': ['full_attention']}, 'layer_types=.* the layers of'),
  ),
  'qwen3': (
    ({'layer_types': ['chunked_attention']}, 'chunked_'),
    ({'layer_types': ['full_attention'] * 2}, 'layer_types'),
  ),
  'gemma2': (
    ({'final_logit_softcapping': -3.0}, 'logit_cap must be positive'),
    ({'hidden_act': 'relu'}, 'hidden_act=.*relu.* contradict'),
  ),
  'gemma3_text': ((_rope('default'), "must have the keys .* has 'rope_type'"),),
  'smollm3': (({'no_rope_layers': [1, 0, 1]}, 'no_rope_layers has 3 entri'),),
  'phi3': (
    ({'partial_rotary_factor': 0}, 'partial_rotary_factor must be'),
    (_long(short_factor=[1.0] * 3), 'short_factor'),
    (_long(short_factor=[0.0]), 'short_factor must have positive'),
    (_long(long_factor=None), 'Missing required keys .*long_factor'),
    (_long(type='su', rope_type='yarn'), "='yarn' and type='longrope' contra"),
  ),
  'granitemoehybrid': (
    ({'layer_types': ['attention', 'mamba']}, r"\['linear_attention'\]"),
    ({'layers_block_type': ['mamba', 'mamba']}, 'contradict'),
    ({'num_local_experts': 1}, 'num_experts=1, got 2'),
  ),
  'ministral3': (
    (_grows(max_position_embeddings=32, **_BETA), 'contradict'),
    (_rope('default', factor=2.0, **_BETA), 'factor=2.0 is not supported'),
    (_grows(), 'must have llama_4_scaling_beta'),
  ),
  'minicpm': (  # It has no class above.
    ({'scale_depth': 'a'}, "scale_depth must be a finite.* got 'a'"),
    ({'dim_model_base': 0}, 'dim_model_base=0: a MiniCPM needs one above 0'),
    ({'scale_emb': -1.0}, 'scale_emb=-1.0: a MiniCPM needs'),
    ({'sparse_config': {'topk': 8}}, "sparse_config={'topk': 8} is not"),
    ({'model_type': 'minicpm3'}, "model_type 'minicpm3' is not known"),
  ),
  'mixtral': (({'num_experts_per_tok': 9}, 'num_experts=4, got 9'),),
  'qwen2_moe': (({'decoder_sparse_step': 2}, 'step=2 is not supp'),),
  'qwen3_moe': (({'mlp_only_layers': [1]}, r'layers=\[1\] is not supported'),),
  'gpt_oss': (
    ({'swiglu_limit': 5.0}, 'swiglu_limit=5.0 is not supported, only 7.0'),
    ({'experts_per_token': 3}, 'experts_per_token=3 and num_experts_per_tok'),
  ),
  'gemma4_text': (
    ({'num_kv_shared_layers': 3}, '=3: none of the others is of slid'),
    ({'num_kv_shared_layers': 5}, '=5 must lie between 0 an'),
    ({'vocab_size_per_layer_input': 63}, '_per_layer_input=63 is not'),
    ({'global_head_dim': 9}, 'head_width must be even, got 9'),
    ({'per_layer_config': _LAYERS}, r"per_layer_config has \['num_key_va"),
    ({'use_bidirectional_attention': 'all'}, "bidirectional_attention='all'"),
    ({'hidden_size_per_layer_input': -4}, 'layer_width must not be below 0'),
    ({'model_type': 'gemma4_assistant'}, "Google's drafters of Gemma 4 read"),
  ),
  'gemma3': (({}, 'text_config must be an object, got None'),),
}


def test_an_older_name_of_longrope():
  """As the first files of Phi 3 and Phi 4 have it."""
  config = _OF_TYPE['phi3']
  assert _read(config | _long(type='su')) == _read(config | _long())


@pytest.mark.parametrize(
  ('kind', 'changes', 'message'),
  [(kind, *row) for kind, rows in _REFUSED.items() for row in rows],
)
def test_what_no_layer_here_computes_is_refused(kind, changes, message):
  of_minicpm = variants.FAMILIES['minicpm_0']['config']
  config = _OF_TYPE.get(kind, of_minicpm) | {'model_type': kind}
  with pytest.raises(ValueError, match=rf'^config\.json.*{message}'):
    _read(config | changes)
