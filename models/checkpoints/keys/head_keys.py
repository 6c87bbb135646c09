"""The keys of the configurations of drafting heads, by who writes them.

    SafeAILab, SpecForge, vLLM  all keys in one object
    SGLang, Model-Optimizer     also `eagle_config`; its list of layers names
                                the layers that write a state
    speculators                 the layers in `transformer_layer_config`

All other lists name the layers that read a state: the writer plus one.
"""

from collections.abc import Mapping
from typing import Any

from specdec.models.checkpoints.keys import config_keys
from specdec.text import text_files

READS = 'eagle_aux_hidden_state_layer_ids'
_NESTED, _LAYERS = 'eagle_config', 'transformer_layer_config'
_SPECULATORS = 'speculators_model_type'
# Types of layers that a head may have. The others differ in what no head has.
_LAYER_TYPES = ('llama', 'mistral', 'ministral', 'phi3', 'qwen2', 'qwen3')
# Keys that neither describe tensors nor configure layers.
_TYPES: dict[str, Any] = {
  READS: list[int] | None,
  'vocab_size': int | None,
  'norm_before_residual': bool | None,
  'norm_output': bool | None,
  'tie_word_embeddings': bool | None,
  _SPECULATORS: str | None,
}


def flat(
  raw: Mapping[str, Any], nested_name: str, types: Mapping[str, Any]
) -> dict[str, Any]:
  """The keys of all objects of a config.json as one.

  `nested_name` is the object of a drafter next to the keys of its layers.

  Raises:
    ValueError: a key has another type, or two of them contradict each other.
  """
  objects = (nested_name, _LAYERS)
  text_files.check_types(raw, {nested_name: dict | None, _LAYERS: dict})
  nested, layers = ({**(raw.get(key) or {})} for key in objects)
  outer = {key: raw[key] for key in raw if key not in objects}
  for keys in (outer, layers, nested):
    text_files.check_types(keys, types)
  for key, value in nested.items():
    config_keys.check_same(key, outer.get(key), f'{nested_name}: {key}', value)
  # Whether matrices are tied is not said of layers.
  layers.pop('tie_word_embeddings', None)
  return outer | layers | {k: v for k, v in nested.items() if v is not None}


def merged(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of `flat` for a head; `READS` names the layers that read."""
  text_files.check_types(raw, {_NESTED: dict | None})
  nested = {**(raw.get(_NESTED) or {})}
  text_files.check_types(nested, _TYPES)
  if nested.get(READS):
    nested[READS] = [layer + 1 for layer in nested[READS]]
  keys = flat({**raw, _NESTED: nested}, _NESTED, _TYPES)
  if keys.get('norm_output') is False and not keys.get(_SPECULATORS):
    raise ValueError(
      'norm_output=False: a head without the norm before its output matrix is'
      ' not supported; remove the key if it has one'
    )
  return keys


def check_claims(keys: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
  """Raises ValueError if keys contradict facts of tensors and the target."""
  for key in sorted(keys.keys() & facts.keys()):
    fact, value = facts[key], keys[key]
    text_files.check_types(keys, {key: type(fact) | None})
    if value not in (None, fact):
      raise ValueError(
        f'{key}={value!r} contradicts the tensors or the target, which say'
        f' {fact!r}'
      )


def of_layers(
  keys: Mapping[str, Any], facts: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
  """The keys of a model of the layers of a head; see `families`.

  Configs are often copied from a target, with its number of layers.
  """
  idle = {*facts, *_TYPES} - {'hidden_size', 'intermediate_size', 'head_dim'}
  layers = {key: keys[key] for key in keys if key not in idle}
  if layers.get('model_type') not in _LAYER_TYPES:
    layers['model_type'] = 'llama'
  if isinstance(types := layers.get('layer_types'), list) and (
    len(types) != num_layers and len({*types}) == 1
  ):
    layers['layer_types'] = types[:1] * num_layers
  return layers | {
    'num_hidden_layers': num_layers,
    'tie_word_embeddings': False,
  }
