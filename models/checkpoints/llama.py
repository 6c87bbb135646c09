"""Config keys and tensor names of Llama, related models and mixtures."""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

import transformers

from models.nn import layers
from models.nn import llama as nn_llama
from models.nn import mixtral as mixtral_lib
from models.nn import rope as rope_lib

_PREFIX = 'model.'
# Buffers of old checkpoints: frequencies, which follow from the config.
_BUFFERS = re.compile(r'layers\.\d+\.self_attn\.rotary_emb\.inv_freq')

# Names of the parts of a perceptron, and what Mixtral calls them.
_MIXTRAL_NAMES = {'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}


_NONE = ((False, False),)
_QKV = ((True, False),)
_AS_STATED = ((False, False), (True, True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelType:
  """What a `model_type` has beside the keys that all have.

  Attributes:
    config: class of transformers.
    shape: class of the shape.
    biases: what attention may have, `(qkv_bias, output_bias)`; `_AS_STATED` is
      decided by the key attention_bias.
    has_mlp_bias: whether there is a key mlp_bias.
    qk_norm: whether queries and keys are normalised.
    has_expert_keys: whether there are keys for the width of an expert and for
      whether the weights of experts are normalised.
  """

  config: Any
  shape: type[nn_llama.LlamaConfig] = nn_llama.LlamaConfig
  biases: tuple[tuple[bool, bool], ...] = _NONE
  has_mlp_bias: bool = False
  qk_norm: bool = False
  has_expert_keys: bool = False

  def can_state(self, config: nn_llama.LlamaConfig) -> bool:
    """Whether a config of this type can have a shape."""
    return (
      type(config) is self.shape
      and (config.qkv_bias, config.output_bias) in self.biases
      and config.qk_norm == self.qk_norm
      and (self.has_mlp_bias or not config.mlp_bias)
      and (self.has_expert_keys or getattr(config, 'renormalize', True))
    )


# A shape is saved as the first type that can state it.
_MODEL_TYPES = {
  'llama': _ModelType(
    config=transformers.LlamaConfig, biases=_AS_STATED, has_mlp_bias=True
  ),
  'mistral': _ModelType(config=transformers.MistralConfig),
  'qwen2': _ModelType(config=transformers.Qwen2Config, biases=_QKV),
  'qwen3': _ModelType(
    config=transformers.Qwen3Config, biases=_AS_STATED, qk_norm=True
  ),
  'mixtral': _ModelType(
    config=transformers.MixtralConfig, shape=mixtral_lib.MixtralConfig
  ),
  'qwen3_moe': _ModelType(
    config=transformers.Qwen3MoeConfig,
    shape=mixtral_lib.MixtralConfig,
    biases=_AS_STATED,
    qk_norm=True,
    has_expert_keys=True,
  ),
}
# Fields of a `LlamaConfig`, and their keys in config.json.
_KEYS = {
  'vocab_size': 'vocab_size',
  'width': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'num_kv_heads': 'num_key_value_heads',
  'inner_width': 'intermediate_size',
  'activation': 'hidden_act',
  'norm_epsilon': 'rms_norm_eps',
  'tie_embeddings': 'tie_word_embeddings',
}
# Keys of `rope_parameters` that are not fields of a scaling.
_ROPE_KEYS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}
_ROPE_NUMBERS = {'rope_theta'} | {
  field.name
  for kind in rope_lib.SCALINGS.values()
  for field in dataclasses.fields(kind)
}


def _read_rope(raw: Mapping[str, Any]) -> rope_lib.Rope:
  """The rotary embedding of transformers' `rope_parameters`."""
  if raw.get('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError(
      f'partial_rotary_factor={raw["partial_rotary_factor"]!r} is not supported'
    )
  kind, theta = raw.get('rope_type', 'default'), raw['rope_theta']
  if not isinstance(kind, str):
    raise ValueError(f'rope_type must be a name, got {kind!r}')
  if kind == 'default':
    return rope_lib.Rope(theta=theta)
  if kind not in rope_lib.SCALINGS:
    raise ValueError(
      f'rope_type={kind!r} is not supported; choose from'
      f' {["default", *rope_lib.SCALINGS]}'
    )
  values = {key: raw[key] for key in raw if key not in _ROPE_KEYS}
  known = {field.name for field in dataclasses.fields(rope_lib.SCALINGS[kind])}
  if kind == 'linear':  # Some checkpoints have it; it has no effect.
    values.pop('original_max_position_embeddings', None)
  if unknown := sorted(set(values) - known):
    raise ValueError(f'{unknown[0]} is not supported with rope_type={kind!r}')
  return rope_lib.Rope(theta=theta, scaling=rope_lib.SCALINGS[kind](**values))


def _longest_context(config: Any) -> int:
  """Longest context in which every token sees all tokens before it.

  It ends where a sliding window would begin to slide: no module here slides it.
  """
  longest = config.max_position_embeddings
  kinds = set(getattr(config, 'layer_types', None) or ())
  if unknown := kinds - {'full_attention', 'sliding_attention'}:
    raise ValueError(f'layer_types has {sorted(unknown)}, not supported')
  window = getattr(config, 'sliding_window', None)
  if not isinstance(window, int | None):
    raise ValueError(f'sliding_window must be an integer, got {window!r}')
  slides = window is not None and (not kinds or 'sliding_attention' in kinds)
  return min(longest, window) if slides else longest


def _stated(rope: dict[str, Any], longest: Any) -> dict[str, Any]:
  """The keys of a scaling that are not null, checked for transformers.

  YaRN's factor may be null where it follows from the contexts, of which
  `longest` is the whole one.
  """
  stated = {key: value for key, value in rope.items() if value is not None}
  for key in _ROPE_NUMBERS & stated.keys():
    if not isinstance(stated[key], (int, float)):
      raise ValueError(f'{key} must be a number, got {stated[key]!r}')
  original = stated.get('original_max_position_embeddings')
  if (
    'yarn' in (stated.get('rope_type'), stated.get('type'))
    and rope.get('factor', 0) is None
    and (original and isinstance(longest, int))
  ):
    stated['factor'] = longest / original
  return stated


def _from_dict(kind: Any, raw: Mapping[str, Any]) -> Any:
  """The transformers config, which fills in defaults."""
  if raw.get('num_attention_heads') == 0:  # transformers would divide by it.
    raise ValueError('num_attention_heads must be positive, got 0')
  longest = raw.get('max_position_embeddings')
  ropes = {
    key: _stated(raw[key], longest)
    for key in ('rope_parameters', 'rope_scaling')
    if isinstance(raw.get(key), dict)
  }
  return kind.from_dict({**raw, **ropes})


def _common(config: Any, kind: _ModelType) -> dict[str, Any]:
  """The fields of a `LlamaConfig`, from a transformers config."""
  if config.hidden_act not in layers.ACTIVATIONS:
    raise ValueError(
      f'hidden_act={config.hidden_act!r} is not known; choose from'
      f' {sorted(layers.ACTIVATIONS)}'
    )
  attention_bias = getattr(config, 'attention_bias', False)
  return {ours: getattr(config, key) for ours, key in _KEYS.items()} | {
    'num_positions': _longest_context(config),
    'head_width': getattr(config, 'head_dim', None)
    or config.hidden_size // config.num_attention_heads,
    'rope': _read_rope(config.rope_parameters),
    'qkv_bias': kind.biases == _QKV or attention_bias,
    'output_bias': kind.biases != _QKV and attention_bias,
    'mlp_bias': getattr(config, 'mlp_bias', False),
    'qk_norm': kind.qk_norm,
  }


def _experts(config: Any, kind: _ModelType) -> dict[str, Any]:
  """The fields that a `MixtralConfig` has beside those of a `LlamaConfig`."""
  fields = {
    'num_experts': config.num_experts,
    'experts_per_token': config.num_experts_per_tok,
  }
  if not kind.has_expert_keys:
    return fields
  if config.mlp_only_layers or config.decoder_sparse_step != 1:
    raise ValueError(
      f'mlp_only_layers={config.mlp_only_layers!r} and decoder_sparse_step='
      f'{config.decoder_sparse_step!r}: layers without experts are not'
      ' supported'
    )
  return fields | {
    'inner_width': config.moe_intermediate_size,
    'renormalize': config.norm_topk_prob,
  }


def model_types(shape: type[nn_llama.LlamaConfig]) -> frozenset[str]:
  """Values of `model_type` whose shapes are of a class."""
  types = _MODEL_TYPES.items()
  return frozenset(name for name, kind in types if kind.shape is shape)


def read_config(raw: Mapping[str, Any]) -> nn_llama.LlamaConfig:
  """Reads the keys of a `config.json`; raises ValueError."""
  kind = _MODEL_TYPES[raw['model_type']]
  config = _from_dict(kind.config, raw)
  fields = _common(config, kind)
  if kind.shape is mixtral_lib.MixtralConfig:
    fields |= _experts(config, kind)
  return kind.shape(**fields)


def _model_type(config: nn_llama.LlamaConfig) -> str:
  """The `model_type` whose config can state a shape."""
  for name, kind in _MODEL_TYPES.items():
    if kind.can_state(config):
      return name
  raise ValueError(
    f'no model of transformers has this shape; it cannot be saved: {config}'
  )


def to_hugging_face(
  config: nn_llama.LlamaConfig, *, dtype: str, eos_token_id: int | None
) -> transformers.PreTrainedConfig:
  """The transformers config of a shape; raises ValueError if there is none."""
  kind = _MODEL_TYPES[_model_type(config)]
  rope: dict[str, Any] = {'rope_theta': config.rope.theta}
  scaling = config.rope.scaling
  rope['rope_type'] = 'default' if scaling is None else scaling.rope_type
  if scaling is not None:
    rope |= dataclasses.asdict(scaling)
  keys = {key: getattr(config, ours) for ours, key in _KEYS.items()} | {
    'max_position_embeddings': config.num_positions,
    'head_dim': config.head_width,
    'rope_parameters': rope,
    'bos_token_id': eos_token_id,
    'eos_token_id': eos_token_id,
    'dtype': dtype,
  }
  if kind.biases == _AS_STATED:
    keys['attention_bias'] = config.qkv_bias
  if kind.has_mlp_bias:
    keys['mlp_bias'] = config.mlp_bias
  if isinstance(config, mixtral_lib.MixtralConfig):
    keys['num_local_experts'] = config.num_experts
    keys['num_experts_per_tok'] = config.experts_per_token
    if kind.has_expert_keys:
      keys['moe_intermediate_size'] = config.inner_width
      keys['norm_topk_prob'] = config.renormalize
  made = kind.config(**keys)
  made.architectures = [type(made).__name__.replace('Config', 'ForCausalLM')]
  return made


def canonical_name(stored: str, config: nn_llama.LlamaConfig) -> str | None:
  """The canonical name of a stored tensor, or None for a known buffer.

  Bare models lack the `model.` prefix. A tied head may be stored too.
  """
  name = stored.removeprefix(_PREFIX)
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and config.tie_embeddings:
    return 'embed_tokens.weight'
  if '.block_sparse_moe.' in name:
    name = name.replace('.block_sparse_moe.', '.mlp.')
    for ours, theirs in _MIXTRAL_NAMES.items():
      name = name.replace(f'.{theirs}.', f'.{ours}.')
  return name


def stored_name(name: str, config: nn_llama.LlamaConfig) -> str:
  """The name that transformers stores a canonical name under."""
  if name == 'lm_head.weight':
    return name
  if _model_type(config) == 'mixtral':
    name = name.replace('.mlp.', '.block_sparse_moe.')
    for ours, theirs in _MIXTRAL_NAMES.items():
      name = name.replace(f'.{ours}.', f'.{theirs}.')
  return _PREFIX + name
