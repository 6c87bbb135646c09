"""The `model_type`s: their keys, and what these say."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import transformers

from specdec.models.checkpoints.keys import config_keys
from specdec.models.checkpoints.keys import gemma_keys
from specdec.models.nn import delta as delta_lib
from specdec.models.nn import gemma as gemma_lib
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import lfm2 as lfm2_lib
from specdec.models.nn import llama_config
from specdec.models.nn import mixtral as mixtral_lib

FULL, SLIDING = 'full_attention', 'sliding_attention'
QUERY_SCALAR = 'query_pre_attn_scalar'  # Scores are divided by its square root.
# Fields of shapes, and their keys in config.json. Where a class of transformers
# has several of them, the last one counts.
_KEYS = {
  'vocab_size': ('vocab_size',),
  'width': ('hidden_size',),
  'num_layers': ('num_hidden_layers',),
  'num_heads': ('num_attention_heads',),
  'num_kv_heads': ('num_key_value_heads',),
  'inner_width': ('intermediate_size',),
  'activation': ('hidden_act', 'hidden_activation'),
  'norm_epsilon': ('rms_norm_eps', 'norm_eps'),
  'tie_embeddings': ('tie_word_embeddings',),
  'qkv_bias': ('attention_bias', 'qkv_bias'),
  'output_bias': ('attention_bias',),
  'mlp_bias': ('mlp_bias',),
  'embedding_scale': ('embedding_multiplier',),
  'attention_scale': ('attention_multiplier', QUERY_SCALAR),
  'residual_scale': ('residual_multiplier',),
  'logit_divisor': ('logits_scaling',),
  'score_cap': ('attn_logit_softcapping',),
  'logit_cap': ('final_logit_softcapping',),
  'layer_width': ('hidden_size_per_layer_input',),
  'num_experts': ('num_local_experts', 'num_experts'),
  'experts_per_token': ('num_experts_per_tok',),
  'renormalize': ('norm_topk_prob',),
  'shared_width': (
    'shared_intermediate_size',
    'shared_expert_intermediate_size',
  ),
  'conv_size': ('conv_L_cache', 'linear_conv_kernel_dim'),
  'conv_bias': ('conv_bias',),
  'key_heads': ('linear_num_key_heads',),
  'key_width': ('linear_key_head_dim',),
  'value_heads': ('linear_num_value_heads',),
  'value_width': ('linear_value_head_dim',),
}
ROUNDED = 'quantization_config'
# Further keys that all read, and their types where a class has no such field.
_TYPES = {
  'head_dim': int | None,
  'rope_theta': float | None,
  'partial_rotary_factor': float | None,
  'rope_parameters': dict | None,
  'rope_scaling': dict | None,
  'sliding_window': int | None,
  'use_sliding_window': bool | None,
  'max_window_layers': int | None,
  'layer_types': list[str] | None,
  ROUNDED: dict | None,
}
WINDOWS = (
  'sliding_window',
  'layer_types',
  'use_sliding_window',
  'max_window_layers',
)
_TOKENS = frozenset({'bos_token_id', 'eos_token_id', 'pad_token_id'})
_ROPE_KEYS = _TOKENS | {'max_position_embeddings', *_TYPES}
_ROPE_KEYS -= {*WINDOWS, ROUNDED}
ORIGINAL = 'original_max_position_embeddings'
# Keys that are read if the class has such a field.
_SOMETIMES = (
  'no_rope_layers',
  'no_rope_layer_interval',
  'position_embedding_type',
  'num_local_experts',
  ORIGINAL,
)


@dataclasses.dataclass(frozen=True)
class ModelType:
  """A `model_type`: what the fields of its class of transformers do not say.

  Attributes:
    config: class of transformers.
    shape: class of the shape.
    keys: fields of the shape with other keys in config.json than usual.
    fixed: further fields, and the values that they have in all such models.
    ropes: `one` rotation for all layers that rotate; one for each of the
      `kinds` of layers, with a window and without; or `growing`, one for all,
      by which queries grow with the position.
    is_partial: whether partial_rotary_factor may be below 1.
    extra: keys that transformers reads besides the fields of its class, and
      their types.
    idle: keys that change nothing.
    constants: keys, and the only values of them that are computed.
    rounded: ways in which weights may be rounded, see quantization_config.
    given: keys that the class needs, for parts that no model here has.
    mixture: the same for models with experts, by the key num_local_experts.
    mixers: what mixes positions in a layer, by its entry in `layer_types`.
    renames: parts of canonical names, and of the names that are stored.
    of_layers: makes further fields of a config of transformers.
    to_keys: its inverse, makes keys of a shape.
  """

  config: Any
  _: dataclasses.KW_ONLY
  shape: Any = llama_config.LlamaConfig
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  ropes: str = 'one'
  is_partial: bool = False
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  idle: tuple[str, ...] = ()
  constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rounded: tuple[str, ...] = ()
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  mixture: 'ModelType | None' = None
  mixers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
  of_layers: Callable[[Any], dict[str, Any]] = lambda config: {}
  to_keys: Callable[[Any], dict[str, Any]] = lambda config: {}

  @functools.cached_property
  def class_keys(self) -> frozenset[str]:
    """The keys that the class has."""
    return frozenset(field.name for field in dataclasses.fields(self.config))

  @functools.cached_property
  def rotates(self) -> bool:
    """Whether positions are rotations: whether it is of Llama's kind."""
    return issubclass(self.shape, llama_config.LlamaConfig)

  @functools.cached_property
  def names(self) -> dict[str, str]:
    """Fields of the shape, and their keys in config.json."""
    fields = {field.name for field in dataclasses.fields(self.shape)}
    keys_by_field = {
      ours: key
      for ours, keys in _KEYS.items()
      for key in keys
      if key in self.class_keys and ours in fields - {*self.fixed}
    }
    return {**keys_by_field, **self.keys}

  @functools.cached_property
  def types(self) -> dict[str, Any]:
    """Keys and their types."""
    return {**_TYPES, **config_keys.types_of(self.config), **self.extra}

  @functools.cached_property
  def reads(self) -> frozenset[str]:
    """The keys that are read."""
    sometimes = self.class_keys & {*WINDOWS, *_SOMETIMES}
    named = {*self.names.values(), *self.extra, *self.constants}
    return (_ROPE_KEYS if self.rotates else _TOKENS) | named | sometimes


_POST_NORM = {'pre_norm': False, 'post_norm': True}
_POST_NORM |= {'qk_norm': True, 'joint_qk_norm': True}
_QWEN_MOE: dict[str, Any] = {
  'shape': mixtral_lib.MixtralConfig,
  'keys': {'inner_width': 'moe_intermediate_size'},
  # Layers without experts are not supported, and have a size of their own.
  'constants': {'mlp_only_layers': [], 'decoder_sparse_step': 1},
  'idle': ('intermediate_size',),
}
_GEMMA4_EXTRA = {
  'global_head_dim': int | None,
  'per_layer_config': dict | None,
  'num_kv_shared_layers': int,
  'use_double_wide_mlp': bool,
  'vocab_size_per_layer_input': int,
}
_LFM2_EXTRA = {
  'block_ff_dim': int,
  'tie_embedding': bool,
  'block_multiple_of': int,
  'layer_types': list[str] | None,
  'block_auto_adjust_ff_dim': bool,
  'block_ffn_dim_multiplier': float | None,
  'full_attn_idxs': list[int] | None,
}
_LFM2_NAMES = {
  'input_layernorm': 'operator_norm',
  'post_attention_layernorm': 'ffn_norm',
  'norm': 'embedding_norm',
  'mlp': 'feed_forward',
  'o_proj': 'out_proj',
  'q_norm': 'q_layernorm',
  'k_norm': 'k_layernorm',
  'gate_proj': 'w1',
  'up_proj': 'w3',
  'down_proj': 'w2',
}
# The last one is of GGUF files, see `models/checkpoints/gguf_parts`.
_DELTA_EXTRA = {
  'full_attention_interval': int,
  'layer_types': list[str] | None,
  'linear_heads_tiled': bool,
}
_LOCAL = {'sliding_window_pattern': int, 'rope_local_base_freq': float | None}

_GRANITE_4: dict[str, Any] = {
  'config': transformers.GraniteMoeHybridConfig,
  'extra': {'time_step_limit': list | None},
  'given': {
    'mamba_n_heads': 1,
    'mamba_d_head': 'auto',
    'time_step_limit': None,
  },
  'idle': (
    *(f'mamba_{key}' for key in ('n_heads', 'n_groups', 'd_state', 'd_head')),
    *(f'mamba_{key}' for key in ('d_conv', 'expand', 'chunk_size')),
    'mamba_conv_bias',
    'mamba_proj_bias',
    'init_method',
    'normalization_function',
    'num_experts_per_tok',
    'intermediate_size',
  ),
  # The matrices of all experts are in one tensor.
  'renames': {
    'mlp.gate': 'block_sparse_moe.router.layer',
    'mlp.experts.gate_up_proj': 'block_sparse_moe.input_linear',
    'mlp.experts.down_proj': 'block_sparse_moe.output_linear',
    'mlp.shared_expert.gate_up_proj': 'shared_mlp.input_linear',
    'mlp.shared_expert.down_proj': 'shared_mlp.output_linear',
  },
}

# A shape is saved as the first type that can state it.
MODEL_TYPES = {
  'gpt2': ModelType(
    transformers.GPT2Config,
    shape=nn_gpt2.GPT2Config,
    keys={
      'num_positions': 'n_positions',
      'width': 'n_embd',
      'num_layers': 'n_layer',
      'num_heads': 'n_head',
      'inner_width': 'n_inner',
      'activation': 'activation_function',
      'norm_epsilon': 'layer_norm_epsilon',
      'scale_attention': 'scale_attn_weights',
      'scale_attention_by_layer': 'scale_attn_by_inverse_layer_idx',
    },
  ),
  'llama': ModelType(transformers.LlamaConfig),
  'mistral': ModelType(transformers.MistralConfig),
  'qwen2': ModelType(
    transformers.Qwen2Config,
    fixed={'qkv_bias': True},
    idle=('attention_bias', 'qkv_bias'),
  ),
  'mimo': ModelType(
    transformers.Qwen2Config,
    fixed={'qkv_bias': True},
    idle=('attention_bias', 'qkv_bias'),
  ),
  'qwen3': ModelType(transformers.Qwen3Config, fixed={'qk_norm': True}),
  'ministral': ModelType(transformers.MinistralConfig),
  'ministral3': ModelType(transformers.Ministral3Config, ropes='growing'),
  'phi3': ModelType(transformers.Phi3Config, is_partial=True),
  'olmo2': ModelType(transformers.Olmo2Config, fixed=_POST_NORM),
  'olmo3': ModelType(transformers.Olmo3Config, fixed=_POST_NORM, ropes='kinds'),
  'granite': ModelType(transformers.GraniteConfig),
  'granitemoehybrid': ModelType(
    **_GRANITE_4 | {'given': _GRANITE_4['given'] | {'num_local_experts': 0}},
    keys={'inner_width': 'shared_intermediate_size'},
    mixture=ModelType(
      **_GRANITE_4,
      shape=mixtral_lib.MixtralConfig,
      fixed={'shared_gate': False},
    ),
  ),
  'smollm3': ModelType(transformers.SmolLM3Config),
  'gemma': ModelType(transformers.GemmaConfig, shape=gemma_lib.GemmaConfig),
  'gemma2': ModelType(
    transformers.Gemma2Config,
    shape=gemma_lib.GemmaConfig,
    fixed={'post_norm': True},
  ),
  'gemma3_text': ModelType(
    transformers.Gemma3TextConfig,
    shape=gemma_lib.GemmaConfig,
    fixed={'post_norm': True, 'qk_norm': True},
    ropes='kinds',
    extra=_LOCAL,
  ),
  'gemma4_text': ModelType(
    transformers.Gemma4TextConfig,
    shape=gemma_lib.Gemma4Config,
    fixed={'post_norm': True, 'qk_norm': True, 'value_norm': True}
    | {'attention_scale': 1.0},
    ropes='kinds',
    extra=_GEMMA4_EXTRA,
    constants={'enable_moe_block': False, 'attention_k_eq_v': False},
    of_layers=gemma_keys.read,
    to_keys=gemma_keys.write,
  ),
  'lfm2': ModelType(
    transformers.Lfm2Config,
    shape=lfm2_lib.Lfm2Config,
    fixed={'qk_norm': True, 'activation': 'silu'},
    extra=_LFM2_EXTRA,
    idle=('block_mlp_init_scale', 'block_out_init_scale')
    + ('block_use_xavier_init', 'conv_use_xavier_init'),
    mixers={FULL: 'self_attn', 'conv': 'conv'},
    renames=_LFM2_NAMES,
    to_keys=lambda config: {'block_auto_adjust_ff_dim': False},
  ),
  'qwen3_5_text': ModelType(
    transformers.Qwen3_5TextConfig,
    shape=delta_lib.DeltaConfig,
    fixed={'qk_norm': True},
    extra=_DELTA_EXTRA,
    is_partial=True,
    idle=('mamba_ssm_dtype', 'mtp_num_hidden_layers')
    + ('mtp_use_dedicated_embeddings',),
    mixers={FULL: 'self_attn', 'linear_attention': 'linear_attn'},
    renames={'linear_attn.o_proj': 'linear_attn.out_proj'}
    | {'linear_attn.rate': 'linear_attn.A_log'},
  ),
  'mixtral': ModelType(
    transformers.MixtralConfig,
    shape=mixtral_lib.MixtralConfig,
    renames={
      'mlp': 'block_sparse_moe',
      'gate_proj': 'w1',
      'up_proj': 'w3',
      'down_proj': 'w2',
    },
  ),
  'gpt_oss': ModelType(
    transformers.GptOssConfig,
    shape=mixtral_lib.GptOssConfig,
    fixed={'mlp_bias': True, 'sinks': True, 'clamped': True},
    constants={
      'swiglu_limit': 7.0,
      'swiglu_alpha': 1.702,
      'hidden_act': 'silu',
    },
    idle=('initial_context_length',),
    rounded=('mxfp4',),
    renames={'mlp.gate': 'mlp.router'},
  ),
  'qwen3_moe': ModelType(
    transformers.Qwen3MoeConfig, fixed={'qk_norm': True}, **_QWEN_MOE
  ),
  'qwen2_moe': ModelType(transformers.Qwen2MoeConfig, **_QWEN_MOE),
}
