"""Every key of a configuration is read, known to change nothing, or refused.

Which keys there are, with which types and defaults, is what the classes of
transformers say.
"""

import dataclasses
import functools
import json
import pathlib

import pytest
import refusals
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
# Fields of the classes that change nothing. Fields of windows are read where
# a window is; `mlp_only_layers` and others are refused.
_IDLE = """
  attention_dropout attn_pdrop embd_pdrop resid_pdrop bos_token_id eos_token_id
  pad_token_id use_cache initializer_range pretraining_tp output_router_logits
  reorder_and_upcast_attn router_aux_loss_coef router_jitter_noise summary_type
  summary_use_proj summary_activation summary_proj_to_labels
  summary_first_dropout
"""
_IDLE_OF_TYPE = {
  'phi3': {'original_max_position_embeddings'},
  'qwen2': {'attention_bias'},
  **{kind: {'intermediate_size'} for kind in ('qwen2_moe', 'qwen3_moe')},
  'mistral': {'use_sliding_window'},
  'gemma4_text': {'use_bidirectional_attention'},  # But `all` is refused.
  'granitemoehybrid': {'time_step_limit', 'sliding_window'},
}
# Without lists of layers, other keys say which layers have what.
_LISTS = ('layer_types', 'no_rope_layers')
_WINDOW = {'use_sliding_window': True, 'sliding_window': 5}
_FIRST = {kind: {'max_window_layers': 0} for kind in ('qwen2', 'qwen3')}
_FIRST['smollm3'] = {'no_rope_layer_interval': 2}
# Keys that only older files have.
_OLDER = {'rope_theta', 'rope_scaling', 'partial_rotary_factor', 'head_dim'}
# Values of every type; and others that are unusual and good.
_VALUES = [True, False, 'relu', {'a': 1}, {'rope_theta': 50.0}]
_VALUES += [{'rope_type': 'linear', 'factor': 2.0}]
_VALUES += [[1], [0, 1], [1, 1], ['full_attention'], ['sliding_attention'] * 2]
_VALUES += [0, 1, 2, 3, 4, 6, 8, 32, 0.25, 0.5, 7.5]


def _read(config):
  return families.read(config, _PATH)[1]


def _keys(kind):
  config = transformers.AutoConfig.for_model(kind)
  base = {
    field.name for field in dataclasses.fields(transformers.PreTrainedConfig)
  }
  names = {field.name for field in dataclasses.fields(config)}
  gemma = {'sliding_window_pattern'} if kind == 'gemma3_text' else set()
  return sorted((names - base) | (_OLDER if kind != 'gpt2' else set()) | gemma)


def _tried(config, shape, key, value):
  """The outcome of a value: the same shape, other, wrong type or refused."""
  try:
    return 'same' if _read(config | {key: value}) == shape else 'other'
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
  idle = {*_IDLE.split()} | _IDLE_OF_TYPE.get(kind, set())
  idle |= {key for key in keys if key.startswith('mamba_')}
  shape = _read(config)
  for key in keys:
    outcomes = {_tried(config, shape, key, value) for value in _VALUES}
    # Sizes that do not fit are called by the names of fields.
    assert outcomes & {'other', 'refused'} or (key in idle), (key, outcomes)
    assert 'other' not in outcomes or key not in idle, key
    assert 'wrong type' in outcomes, key


@pytest.mark.parametrize('kind', _OF_TYPE)
def test_a_key_that_nobody_knows_is_refused_unless_it_is_off(kind):
  config = _OF_TYPE[kind]
  tried = functools.partial(_tried, config, _read(config))
  for key in ('rope_interleaved', 'use_alibi', 'logit_bias_scale', 'is_causal'):
    for value in (None, False, 0, [], ''):
      if key != 'is_causal' or value is None:
        assert tried(key, value) == 'same'
    for value in (True, 3, 'a', {'b': 1}, [None]):
      if key != 'is_causal' or value is not True:
        assert tried(key, value) == 'refused'


@pytest.mark.parametrize('name', _PUBLISHED)
def test_keys_of_published_configurations_are_read(name):
  assert _read(_PUBLISHED[name]).num_layers > 0


_long = lambda kind: {
  'original_max_position_embeddings': 48,
  'rope_scaling': {'type': kind, 'short_factor': [1.5], 'long_factor': [3.0]},
}


def test_an_older_name_of_longrope():
  """As the first files of Phi 3 and Phi 4 have it."""
  config = _OF_TYPE['phi3']
  assert _read(config | _long('su')) == _read(config | _long('longrope'))


@pytest.mark.parametrize(
  ('kind', 'changes', 'message'), refusals.of('models/checkpoints', 'config')
)
def test_what_no_layer_here_computes_is_refused(kind, changes, message):
  of_minicpm = variants.FAMILIES['minicpm_0']['config']
  config = _OF_TYPE.get(kind, of_minicpm) | {'model_type': kind}
  with pytest.raises(ValueError, match=rf'^config\.json.*{message}'):
    _read(config | changes)
