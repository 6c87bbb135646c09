"""Config keys and tensor names of Llama, related models and mixtures."""

from collections.abc import Mapping
import dataclasses
import functools
import math
import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
import numpy as np
import transformers

from models.checkpoints.keys import config_keys
from models.checkpoints.keys import rope_keys
from models.checkpoints.keys import tensor_parts
from models.nn import delta as delta_lib
from models.nn import gemma as gemma_lib
from models.nn import layers
from models.nn import lfm2 as lfm2_lib
from models.nn import llama as nn_llama
from models.nn import mixtral as mixtral_lib

_PREFIX = 'model.'
# Buffers of old checkpoints: frequencies, which follow from the config.
_BUFFERS = re.compile(r'layers\.\d+\.self_attn\.rotary_emb\.inv_freq')

# Names of the parts of a perceptron, and what Mixtral calls them.
_MIXTRAL_NAMES = {'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}
# Matrices that Phi-3 stores as one, whose rows lie one after the other.
_FUSED = {
  'qkv_proj': ('q_proj', 'k_proj', 'v_proj'),
  'gate_up_proj': ('gate_proj', 'up_proj'),
}
# Names of Granite 4, which has the matrices of all experts in one tensor.
_GRANITE_NAMES = {
  'block_sparse_moe.router.layer': 'mlp.gate',
  'block_sparse_moe.input_linear': 'mlp.experts.gate_up_proj',
  'block_sparse_moe.output_linear': 'mlp.experts.down_proj',
  'shared_mlp.input_linear': 'mlp.shared_expert.gate_up_proj',
  'shared_mlp.output_linear': 'mlp.shared_expert.down_proj',
}
# The parts of a model that sees, and the prefix of its language model.
_VISION = re.compile(
  r'(model\.)?(vision_tower|multi_modal_projector|visual)\..*'
)
_LANGUAGE = re.compile(r'(model\.)?language_model\.')

_FULL, _SLIDING = 'full_attention', 'sliding_attention'


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelType:
  """A `model_type`: the keys that it has besides those that all have.

  Attributes:
    config: class of transformers.
    shape: class of the shape.
    keys: further fields of the shape, and their keys in config.json.
    fixed: further fields, and the values that they have in all such models.
    windows: which layers may have a window: `none`, `all` by the key
      sliding_window, `some` by layer_types, or `switched`, some only if
      use_sliding_window is true.
    ropes: `one` for all layers, one for each of the `kinds` of layers with a
      window and without, or one for the layers of the key `no_rope_layers` that
      are not 0; `growing`, one whose queries grow with the position; `stated`,
      one if the key position_embedding_type says so.
    is_partial: whether partial_rotary_factor may be below 1.
    extra: keys that transformers reads besides the fields of its class, and
      their types.
    idle: keys that change nothing.
    constants: keys, and the only values of them that are computed.
    rounded: ways in which weights may be rounded, see quantization_config.
    given: keys that the class is made with, of what no model here has.
    mixture: the same for models with experts, by the key num_local_experts.
    mixers: what mixes positions in a layer, by its entry in `layer_types`.
    renames: parts of canonical names, and of the names that are stored.
    written: keys that are written with these values.
  """

  config: Any
  shape: type[nn_llama.LlamaConfig] = nn_llama.LlamaConfig
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  windows: str = 'none'
  ropes: str = 'one'
  is_partial: bool = False
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  idle: tuple[str, ...] = ()
  constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rounded: tuple[str, ...] = ()
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  mixture: '_ModelType | None' = None
  mixers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
  written: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def names(self) -> dict[str, str]:
    """Fields of the shape, and their keys in config.json."""
    named = {**_KEYS, **self.keys}.items()
    return {ours: key for ours, key in named if ours not in self.fixed}

  @functools.cached_property
  def types(self) -> dict[str, Any]:
    """The keys whose types are known, and these."""
    return {**_TYPES, **config_keys.types_of(self.config), **self.extra}

  @functools.cached_property
  def reads(self) -> frozenset[str]:
    """The keys that are read."""
    own = {one.name for one in dataclasses.fields(self.config)}
    read = {*self.names.values(), *_ALWAYS}
    read |= {*self.extra, *self.constants}
    windows = () if self.windows == 'none' else _WINDOWS
    return frozenset(read | own & {*windows, *_SOMETIMES})

  def can_state(self, config: nn_llama.LlamaConfig) -> bool:
    """Whether a config of this type can have a shape."""
    if type(config) is not self.shape:
      return False
    stated = {*self.names, *_COMPUTED}
    others = {
      field.name: self.fixed.get(field.name, field.default)
      for field in dataclasses.fields(config)
      if field.name not in stated
    }
    if any(getattr(config, name) != value for name, value in others.items()):
      return False
    try:
      written = self.config(**_to_keys(config, self))
      return _read_shape(written, self) == config
    except (StrictDataclassError, ValueError):  # It has no such models.
      return False


_BIASES = {'qkv_bias': 'attention_bias', 'output_bias': 'attention_bias'}
_MLP_BIAS = {'mlp_bias': 'mlp_bias'}
_EXPERTS = {'experts_per_token': 'num_experts_per_tok'}
_DENSE = ('intermediate_size',)  # Only layers without experts have it.
_OWN_EXPERTS = _EXPERTS | {
  'num_experts': 'num_experts',
  'inner_width': 'moe_intermediate_size',
  'renormalize': 'norm_topk_prob',
}
_MULTIPLIERS = {
  'embedding_scale': 'embedding_multiplier',
  'attention_scale': 'attention_multiplier',
  'residual_scale': 'residual_multiplier',
  'logit_divisor': 'logits_scaling',
}
_SCALAR = 'query_pre_attn_scalar'  # Scores are divided by its square root.
_CAPS = {
  'activation': 'hidden_activation',
  'attention_scale': _SCALAR,
  'score_cap': 'attn_logit_softcapping',
  'logit_cap': 'final_logit_softcapping',
}
_BEHIND = {'pre_norm': False, 'post_norm': True}
_BEHIND |= {'qk_norm': True, 'joint_qk_norm': True}
_LFM2_KEYS = {
  **{'norm_epsilon': 'norm_eps', 'conv_size': 'conv_L_cache'},
  'conv_bias': 'conv_bias',
}
_LFM2_EXTRA = {
  **{
    'block_ff_dim': int,
    'tie_embedding': bool,
    'layer_types': list[str] | None,
  },
  **{'block_auto_adjust_ff_dim': bool, 'block_multiple_of': int},
  **{'block_ffn_dim_multiplier': float | None},
  **{'full_attn_idxs': list[int] | None},
}
_LFM2_NAMES = {
  **{
    'input_layernorm': 'operator_norm',
    'post_attention_layernorm': 'ffn_norm',
  },
  **{'norm': 'embedding_norm', 'mlp': 'feed_forward', 'o_proj': 'out_proj'},
  **{'q_norm': 'q_layernorm', 'k_norm': 'k_layernorm'},
  **{'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'},
}
_DELTA_KEYS = {
  **{'key_heads': 'linear_num_key_heads', 'key_width': 'linear_key_head_dim'},
  'value_heads': 'linear_num_value_heads',
  'value_width': 'linear_value_head_dim',
  'conv_size': 'linear_conv_kernel_dim',
}
# The last one is of GGUF files, see `models.checkpoints.gguf_parts`.
_DELTA_EXTRA = {
  **{'full_attention_interval': int, 'layer_types': list[str] | None},
  'linear_heads_tiled': bool,
}
_LOCAL = {'sliding_window_pattern': int, 'rope_local_base_freq': float | None}

_GRANITE_4: dict[str, Any] = {
  'config': transformers.GraniteMoeHybridConfig,
  'windows': 'some',
  'ropes': 'stated',
  'extra': {'time_step_limit': list | None},
  'given': {
    **{'mamba_n_heads': 1, 'mamba_d_head': 'auto', 'time_step_limit': None}
  },
  'idle': (
    *(f'mamba_{key}' for key in ('n_heads', 'n_groups', 'd_state', 'd_head')),
    *(f'mamba_{key}' for key in ('d_conv', 'expand', 'chunk_size')),
    *('mamba_conv_bias', 'mamba_proj_bias', 'init_method'),
    *('normalization_function', 'num_experts_per_tok', 'intermediate_size'),
  ),
}

# The multipliers of a MiniCPM (arXiv 2404.06395), which is saved as a Granite.
_MINICPM = ('scale_emb', 'scale_depth', 'dim_model_base')

# A shape is saved as the first type that can state it.
_MODEL_TYPES = {
  'llama': _ModelType(
    config=transformers.LlamaConfig, keys=_BIASES | _MLP_BIAS
  ),
  'mistral': _ModelType(config=transformers.MistralConfig, windows='all'),
  'qwen2': _ModelType(
    config=transformers.Qwen2Config,
    fixed={'qkv_bias': True},
    windows='switched',
    idle=('attention_bias', 'qkv_bias'),
  ),
  'qwen3': _ModelType(
    config=transformers.Qwen3Config,
    keys=_BIASES,
    fixed={'qk_norm': True},
    windows='switched',
  ),
  'ministral': _ModelType(config=transformers.MinistralConfig, windows='some'),
  'ministral3': _ModelType(
    config=transformers.Ministral3Config, windows='all', ropes='growing'
  ),
  'phi3': _ModelType(
    config=transformers.Phi3Config, windows='all', is_partial=True
  ),
  'olmo2': _ModelType(
    config=transformers.Olmo2Config, keys=_BIASES, fixed=_BEHIND
  ),
  'olmo3': _ModelType(
    config=transformers.Olmo3Config,
    keys=_BIASES,
    fixed=_BEHIND,
    windows='some',
    ropes='kinds',
  ),
  'granite': _ModelType(
    config=transformers.GraniteConfig, keys=_BIASES | _MLP_BIAS | _MULTIPLIERS
  ),
  'granitemoehybrid': _ModelType(
    **_GRANITE_4 | {'given': _GRANITE_4['given'] | {'num_local_experts': 0}},
    keys=_BIASES | _MULTIPLIERS | {'inner_width': 'shared_intermediate_size'},
    mixture=_ModelType(
      **_GRANITE_4,
      shape=mixtral_lib.MixtralConfig,
      keys=_BIASES
      | _MULTIPLIERS
      | _EXPERTS
      | {'num_experts': 'num_local_experts'}
      | {'shared_width': 'shared_intermediate_size'},
      fixed={'shared_gate': False},
    ),
  ),
  'smollm3': _ModelType(
    config=transformers.SmolLM3Config,
    keys=_BIASES | _MLP_BIAS,
    windows='switched',
    ropes='no_rope_layers',
  ),
  'gemma': _ModelType(
    config=transformers.GemmaConfig, shape=gemma_lib.GemmaConfig, keys=_BIASES
  ),
  'gemma2': _ModelType(
    config=transformers.Gemma2Config,
    shape=gemma_lib.GemmaConfig,
    keys=_BIASES | _CAPS,
    fixed={'post_norm': True},
    windows='some',
  ),
  'gemma3_text': _ModelType(
    config=transformers.Gemma3TextConfig,
    shape=gemma_lib.GemmaConfig,
    keys=_BIASES | _CAPS,
    fixed={'post_norm': True, 'qk_norm': True},
    windows='some',
    ropes='kinds',
    extra=_LOCAL,
  ),
  'lfm2': _ModelType(
    config=transformers.Lfm2Config,
    shape=lfm2_lib.Lfm2Config,
    keys=_LFM2_KEYS,
    fixed={'qk_norm': True, 'activation': 'silu'},
    extra=_LFM2_EXTRA,
    idle=('block_mlp_init_scale', 'block_out_init_scale')
    + ('block_use_xavier_init', 'conv_use_xavier_init'),
    mixers={_FULL: 'self_attn', 'conv': 'conv'},
    renames=_LFM2_NAMES,
    written={'block_auto_adjust_ff_dim': False},
  ),
  'qwen3_5_text': _ModelType(
    config=transformers.Qwen3_5TextConfig,
    shape=delta_lib.DeltaConfig,
    keys=_BIASES | _DELTA_KEYS,
    fixed={'qk_norm': True},
    extra=_DELTA_EXTRA,
    is_partial=True,
    idle=('mamba_ssm_dtype', 'mtp_num_hidden_layers')
    + ('mtp_use_dedicated_embeddings',),
    mixers={_FULL: 'self_attn', 'linear_attention': 'linear_attn'},
    renames={'linear_attn.o_proj': 'linear_attn.out_proj'}
    | {'linear_attn.rate': 'linear_attn.A_log'},
  ),
  'mixtral': _ModelType(
    config=transformers.MixtralConfig,
    shape=mixtral_lib.MixtralConfig,
    keys=_EXPERTS | {'num_experts': 'num_local_experts'},
    windows='all',
  ),
  'gpt_oss': _ModelType(
    config=transformers.GptOssConfig,
    shape=mixtral_lib.GptOssConfig,
    keys=_BIASES | _EXPERTS | {'num_experts': 'num_local_experts'},
    fixed={'mlp_bias': True, 'sinks': True, 'clamped': True},
    windows='some',
    constants={
      **{'swiglu_limit': 7.0, 'swiglu_alpha': 1.702, 'hidden_act': 'silu'}
    },
    idle=('initial_context_length',),
    rounded=('mxfp4',),
  ),
  'qwen3_moe': _ModelType(
    config=transformers.Qwen3MoeConfig,
    shape=mixtral_lib.MixtralConfig,
    keys=_BIASES | _OWN_EXPERTS,
    fixed={'qk_norm': True},
    windows='all',
    idle=_DENSE,
  ),
  'qwen2_moe': _ModelType(
    config=transformers.Qwen2MoeConfig,
    shape=mixtral_lib.MixtralConfig,
    keys=_OWN_EXPERTS
    | {
      'qkv_bias': 'qkv_bias',
      'shared_width': 'shared_expert_intermediate_size',
    },
    windows='switched',
    idle=_DENSE,
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
_ROUNDED = 'quantization_config'
# Further keys that all read, and their types where a class has no such field.
_TYPES = {
  'head_dim': int | None,
  'rope_theta': float | None,
  'partial_rotary_factor': float | None,
  **{'rope_parameters': dict | None, 'rope_scaling': dict | None},
  **{'sliding_window': int | None, 'use_sliding_window': bool | None},
  **{'max_window_layers': int | None, 'layer_types': list[str] | None},
  _ROUNDED: dict | None,
}
_WINDOWS = (
  *('sliding_window', 'use_sliding_window', 'max_window_layers'),
  'layer_types',
)
_ALWAYS = {'max_position_embeddings', *_TYPES} - {*_WINDOWS, _ROUNDED}
_ALWAYS |= {'bos_token_id', 'eos_token_id', 'pad_token_id'}
_ORIGINAL = 'original_max_position_embeddings'
# Keys that are read if the class has such a field.
_SOMETIMES = (
  *('no_rope_layers', 'no_rope_layer_interval'),
  *('mlp_only_layers', 'decoder_sparse_step', 'position_embedding_type'),
  *('num_local_experts', _ORIGINAL),
)
# Fields that follow from several keys, or from a key and others.
_COMPUTED = {'num_positions', 'head_width', 'rope', 'window', 'mixers'}
_COMPUTED |= {'attention_scale', 'embedding_scale'}


def _read_windows(config: Any, kind: _ModelType) -> tuple[int | None, ...]:
  """The window of each layer, None where it sees the whole text."""
  window = getattr(config, 'sliding_window', None)
  number = config.num_hidden_layers
  if kind.windows == 'none':
    return (None,) * number
  if kind.windows == 'all':
    return (window,) * number
  kinds = config.layer_types
  slides = {_SLIDING} if hasattr(config, 'sliding_window') else set()
  if unknown := {*kinds} - {_FULL, *slides}:
    raise ValueError(f'layer_types has {sorted(unknown)}, not supported')
  if len(kinds) != number:
    raise ValueError(
      f'layer_types has {len(kinds)} entries for {number} layers'
    )
  return tuple(window if kind == _SLIDING else None for kind in kinds)


def _check_windows(
  keys: Mapping[str, Any], shape: nn_llama.LlamaConfig, kind: _ModelType
) -> None:
  """Refuses windows that transformers ignores, and others do not."""
  unread = [key for key in _WINDOWS if keys.get(key) and key not in kind.reads]
  number, window = shape.num_layers, keys.get('sliding_window')
  types = keys.get('layer_types') or [_SLIDING] * number
  if keys.get('use_sliding_window') is False:
    window = None
  if window is not None and window >= shape.num_positions:
    window = None
  stated = tuple(window if one == _SLIDING else None for one in types)
  if unread and (
    stated != shape.of_layers('window') or {*types} - {_FULL, _SLIDING}
  ):
    raise ValueError(
      f'{unread[0]}={keys[unread[0]]!r:.60}: the layers of such a model have no'
      f' such window; remove the key if this one has been trained so'
    )


def _read_mixers(config: Any, kind: _ModelType) -> tuple[str, ...]:
  """The mixer of each layer, see `LlamaConfig.mixers`."""
  types, number = config.layer_types, config.num_hidden_layers
  if len(types) != number:
    raise ValueError(
      f'layer_types has {len(types)} entries for {number} layers'
    )
  if unknown := {*types} - {*kind.mixers}:
    raise ValueError(f'layer_types has {sorted(unknown)}, not supported')
  stated = getattr(config, 'full_attn_idxs', None)
  with_attention = [at for at, one in enumerate(types) if one == _FULL]
  if stated is not None and sorted(stated) != with_attention:
    raise ValueError(
      f'full_attn_idxs={stated!r:.60} and layer_types={types!r:.60} contradict'
      ' each other'
    )
  return tuple(kind.mixers[one] for one in types)


def _adjusted_width(config: Any) -> int:
  """The width of a perceptron of an LFM2 (transformers, models/lfm2)."""
  width = int(2 * config.intermediate_size / 3)
  factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
  if factor is None:
    return width
  if multiple < 1:
    raise ValueError(f'block_multiple_of must be positive, got {multiple}')
  return -(-int(factor * width) // multiple) * multiple


def _read_shape(config: Any, kind: _ModelType) -> nn_llama.LlamaConfig:
  """The shape that a transformers config describes."""
  keys = kind.names
  activation = getattr(config, keys.get('activation', ''), 'silu')
  if activation not in layers.ACTIVATIONS:
    raise ValueError(
      f'{keys["activation"]}={activation!r} is not known; choose from'
      f' {sorted(layers.ACTIVATIONS)}'
    )
  if kind.shape is mixtral_lib.MixtralConfig and (
    getattr(config, 'mlp_only_layers', None)
    or getattr(config, 'decoder_sparse_step', 1) != 1
  ):
    raise ValueError(
      f'mlp_only_layers={config.mlp_only_layers!r} and decoder_sparse_step='
      f'{config.decoder_sparse_step!r}: layers without experts are not'
      ' supported'
    )
  for key, value in kind.constants.items():
    if getattr(config, key) != value:
      raise ValueError(
        f'{key}={getattr(config, key)!r} is not supported, only {value}'
      )
  fields = {ours: getattr(config, key) for ours, key in keys.items()}
  ropes = rope_keys.read_all(config, kind.ropes, is_partial=kind.is_partial)
  if _SCALAR in keys.values():
    fields['attention_scale'] = 1 / math.sqrt(fields['attention_scale'])
  if kind.mixers:
    fields['mixers'] = _read_mixers(config, kind)
  if getattr(config, 'linear_heads_tiled', False):
    fields['tiled'] = True
  if getattr(config, 'block_auto_adjust_ff_dim', False):
    fields['inner_width'] = _adjusted_width(config)
  return kind.shape(
    **{**fields, **kind.fixed},
    num_positions=rope_keys.context_of(config, ropes),
    head_width=getattr(config, 'head_dim', None)
    or config.hidden_size // config.num_attention_heads,
    rope=ropes,
    window=_read_windows(config, kind),
  )


def model_types(shape: type[nn_llama.LlamaConfig]) -> frozenset[str]:
  """Values of `model_type` whose shapes are of a class."""
  has = lambda kind: kind is not None and kind.shape is shape
  types = {**_MODEL_TYPES, 'minicpm': _MODEL_TYPES['granite']}
  return frozenset(
    name for name, kind in types.items() if has(kind) or has(kind.mixture)
  )


def _as_granite(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of a MiniCPM as those of the Granite that computes the same."""
  config_keys.check_types(raw, dict.fromkeys(_MINICPM, float))
  for key in _MINICPM:
    if not raw.get(key, 0) > 0:
      raise ValueError(f'{key}={raw.get(key)!r}: a MiniCPM needs one above 0')
  width = raw['hidden_size']
  head_width = raw.get('head_dim') or width // raw['num_attention_heads']
  own = {key: raw[key] for key in raw if key not in _MINICPM}
  own['model_type'] = 'granite'
  own['embedding_multiplier'] = raw['scale_emb']
  own['residual_multiplier'] = (
    raw['scale_depth'] / raw['num_hidden_layers'] ** 0.5
  )
  own['logits_scaling'] = width / raw['dim_model_base']
  own['attention_multiplier'] = 1 / math.sqrt(head_width)
  return {'tie_word_embeddings': True} | own


def read_config(raw: Mapping[str, Any]) -> nn_llama.LlamaConfig:
  """Reads the keys of a `config.json`; raises ValueError."""
  if raw['model_type'] == 'minicpm':
    raw = _as_granite(raw)
  kind = _MODEL_TYPES[raw['model_type']]
  if kind.mixture and raw.get('num_local_experts') != 0:  # None: the default
    kind = kind.mixture
  config_keys.check_types(raw, kind.types)
  if raw.get('num_attention_heads') == 0:  # transformers would divide by it.
    raise ValueError('num_attention_heads must be positive, got 0')
  read = config_keys.select(kind.config, raw, kind.reads)
  normalized = rope_keys.normalized(read, kind.ropes)
  config = kind.config.from_dict({**normalized, **kind.given})
  rope_keys.check_read(read, config.rope_parameters)
  shape = _read_shape(config, kind)
  _check_windows(raw, shape, kind)
  unread = dict(raw)
  if raw.get(_ROUNDED) and raw[_ROUNDED].get('quant_method') in kind.rounded:
    del unread[_ROUNDED]
  config_keys.refuse_unread(
    unread, {*kind.reads, *read}, idle=(*kind.idle, *_WINDOWS), resolved=config
  )
  return shape


@functools.lru_cache
def _model_type(config: nn_llama.LlamaConfig) -> tuple[str, _ModelType]:
  """The `model_type` whose config can state a shape, and the type."""
  for name, known in _MODEL_TYPES.items():
    for kind in filter(None, (known, known.mixture)):
      if kind.can_state(config):
        return name, kind
  raise ValueError(
    f'no model of transformers has this shape; it cannot be saved: {config}'
  )


def _layer_keys(
  config: nn_llama.LlamaConfig, kind: _ModelType
) -> dict[str, Any]:
  """The keys of what layers see, and how they rotate."""
  windows, ropes = config.of_layers('window'), config.of_layers('rope')
  slides = [window is not None for window in windows]
  types = [_SLIDING if one else _FULL for one in slides]
  window = next((one for one in windows if one is not None), None)
  keys: dict[str, Any] = {}
  if 'sliding_window' in kind.reads:
    # Where layers say whether they have it, transformers needs one.
    whole = config.num_positions if kind.windows == 'some' else None
    keys['sliding_window'] = window or whole
  if kind.windows in ('some', 'switched'):
    keys['layer_types'] = types
  if kind.windows == 'switched':
    keys['use_sliding_window'] = any(slides)
  # Some classes have another default than 1.
  part = lambda rope: (
    {'partial_rotary_factor': rope.fraction} if kind.is_partial else {}
  )
  by_type = {
    name: rope_keys.write(rope) | part(rope)
    for name, rope in zip(types, ropes, strict=True)
    if rope is not None
  }
  if kind.mixers:
    names = {ours: theirs for theirs, ours in kind.mixers.items()}
    mixers = config.of_layers('mixers')
    keys['layer_types'] = [names.get(one, one) for one in mixers]
  if kind.ropes == 'kinds':
    return keys | {'rope_parameters': by_type}
  if kind.ropes == 'no_rope_layers':
    keys['no_rope_layers'] = [int(rope is not None) for rope in ropes]
  if kind.ropes == 'stated':
    keys['position_embedding_type'] = 'rope' if by_type else None
  stated, original = next(iter(by_type.values()), None), _ORIGINAL
  if original in kind.reads:
    keys[original] = (stated or {}).get(original, config.num_positions)
  return keys | {'rope_parameters': stated}


def _to_keys(config: nn_llama.LlamaConfig, kind: _ModelType) -> dict[str, Any]:
  """The keys of a config of a type that are to state a shape."""
  keys = {key: getattr(config, ours) for ours, key in kind.names.items()}
  if key := kind.keys.get('attention_scale'):
    scale = config.attention_scale or 1 / math.sqrt(config.head_width)
    keys[key] = round(scale**-2) if key == _SCALAR else scale
  return {**keys, **kind.given} | {
    'max_position_embeddings': config.num_positions,
    'head_dim': config.head_width,
    **_layer_keys(config, kind),
    **kind.written,
  }


def to_hugging_face(
  config: nn_llama.LlamaConfig, *, dtype: str, eos_token_id: int | None
) -> transformers.PreTrainedConfig:
  """The transformers config of a shape; raises ValueError if there is none."""
  _, kind = _model_type(config)
  made = kind.config(
    **_to_keys(config, kind),
    bos_token_id=eos_token_id,
    eos_token_id=eos_token_id,
    pad_token_id=eos_token_id,  # Some defaults lie beyond small vocabularies.
    dtype=dtype,
  )
  name = type(made).__name__.replace('TextConfig', 'Config')
  made.architectures = [name.replace('Config', 'ForCausalLM')]
  return made


def canonical_name(stored: str, config: nn_llama.LlamaConfig) -> str | None:
  """The canonical name of a stored tensor, or None for a known buffer.

  Bare models lack the `model.` prefix. A tied head may be stored too. Models
  that see have other tensors, which are not needed.
  """
  if _VISION.fullmatch(stored):
    return None
  name = _LANGUAGE.sub('', stored, count=1).removeprefix(_PREFIX)
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and config.tie_embeddings:
    return 'embed_tokens.weight'
  for theirs, ours in _GRANITE_NAMES.items():
    name = name.replace(f'.{theirs}.', f'.{ours}.')
  if not isinstance(config, mixtral_lib.MixtralConfig):
    name = name.replace('.shared_expert.', '.')
  if '.block_sparse_moe.' in name:
    name = name.replace('.block_sparse_moe.', '.mlp.')
    for ours, theirs in _MIXTRAL_NAMES.items():
      name = name.replace(f'.{theirs}.', f'.{ours}.')
  return name


def _with_parts(name: str, renames: Mapping[str, str]) -> str:
  """A name whose parts are called otherwise."""
  name = f'.{name}.'
  for old, new in renames.items():
    name = name.replace(f'.{old}.', f'.{new}.')
  return name[1:-1]


def renamed(kind: str, stored: str, config: nn_llama.LlamaConfig) -> str | None:
  """The same as `canonical_name`, where a `model_type` has other names."""
  name = canonical_name(stored, config)
  ours = {theirs: one for one, theirs in _MODEL_TYPES[kind].renames.items()}
  return name and _with_parts(name, ours)


def delta_name(stored: str, config: delta_lib.DeltaConfig) -> str | None:
  """The same as `canonical_name`, of a Qwen3.5 that may see.

  What predicts several tokens is not read.
  """
  if _VISION.fullmatch(stored) or stored.startswith('mtp.'):
    return None
  return renamed('qwen3_5_text', _LANGUAGE.sub('', stored, count=1), config)


def to_rates(name: str, rows: np.ndarray) -> np.ndarray:
  """Values of a Qwen3.5, whose folders have scales minus one and logarithms."""
  if name.endswith('linear_attn.rate'):
    return -np.exp(rows.astype(np.float32))
  own = name.endswith('linear_attn.norm.weight')
  return rows if own else shift_norms(1.0, name, rows)


def from_rates(name: str, rows: np.ndarray) -> np.ndarray:
  """The inverse of `to_rates`."""
  if name.endswith('linear_attn.rate'):
    return np.log(-rows)
  own = name.endswith('linear_attn.norm.weight')
  return rows if own else shift_norms(-1.0, name, rows)


def parts(
  name: str, config: nn_llama.LlamaConfig, *, interleaved: bool = False
) -> Mapping[str, tensor_parts.Part]:
  """The tensors that are stored as one, and their parts; {} if it is but one.

  The last has all rows that are left, so that too many do not pass.

  Args:
    name: canonical name of the one.
    config: the shape.
    interleaved: whether the rows of several lie in turn.
  """
  sizes = {'gate_proj': config.inner_width}
  sizes['q_proj'] = config.num_heads * config.head_width
  sizes['k_proj'] = config.num_kv_heads * config.head_width
  found: dict[str, tensor_parts.Part] = {}
  *parents, own, leaf = name.split('.')
  experts: tuple[int | None, ...] = (None,)
  if parents[-1:] == ['experts']:  # A stack of those of all.
    experts = tuple(range(config.num_experts))
  elif own not in _FUSED:
    return {}
  elif parents[-1] == 'shared_expert' and isinstance(
    config, mixtral_lib.MixtralConfig
  ):
    sizes['gate_proj'] = config.shared_width or 0
  for expert in experts:
    start, path = 0, parents if expert is None else [*parents, str(expert)]
    together = _FUSED.get(own, (own,))
    for one in together:
      end = start + sizes[one] if one in sizes else None
      rows = slice(start, end)
      if interleaved:
        rows = slice(together.index(one), None, len(together))
      count = None if expert is None else len(experts)
      key = '.'.join([*path, one, leaf])
      found[key] = tensor_parts.Part(rows, expert, count)
      start = end or 0
  return found


def stored_name(name: str, config: nn_llama.LlamaConfig) -> str:
  """The name that transformers stores a canonical name under."""
  if name == 'lm_head.weight':
    return name
  kind, _ = _model_type(config)
  name = _with_parts(name, _MODEL_TYPES[kind].renames)
  if kind == 'mixtral':
    name = name.replace('.mlp.', '.block_sparse_moe.')
    for ours, theirs in _MIXTRAL_NAMES.items():
      name = name.replace(f'.{ours}.', f'.{theirs}.')
  if kind == 'granitemoehybrid':
    name = re.sub(r'\.experts\.\d+\.', '.experts.', name)
    if not isinstance(config, mixtral_lib.MixtralConfig):
      name = name.replace('.mlp.', '.mlp.shared_expert.')
    for one in _FUSED['gate_up_proj']:
      name = name.replace(f'.{one}.', '.gate_up_proj.')
    for theirs, ours in _GRANITE_NAMES.items():
      name = name.replace(f'.{ours}.', f'.{theirs}.')
  if kind == 'phi3':
    for fused, names in _FUSED.items():
      for one in names:
        name = name.replace(f'.{one}.', f'.{fused}.')
  return _PREFIX + name


def shift_norms(by: float, name: str, rows: np.ndarray) -> np.ndarray:
  """Values of a Gemma, whose folders have the scales of norms minus one."""
  is_norm = name.endswith('norm.weight')
  return rows.astype(np.float32) + np.float32(by) if is_norm else rows
