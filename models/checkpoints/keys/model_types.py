"""The `model_type`s of Llama's kind."""

from typing import Any

import transformers

from models.checkpoints.keys import gemma_keys
from models.checkpoints.keys import model_type
from models.nn import delta as delta_lib
from models.nn import gemma as gemma_lib
from models.nn import lfm2 as lfm2_lib
from models.nn import mixtral as mixtral_lib

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
_CAPS = {
  'activation': 'hidden_activation',
  'attention_scale': model_type.QUERY_SCALAR,
  'score_cap': 'attn_logit_softcapping',
  'logit_cap': 'final_logit_softcapping',
}
_GEMMA4_KEYS = {
  'activation': 'hidden_activation',
  'logit_cap': 'final_logit_softcapping',
  'layer_width': 'hidden_size_per_layer_input',
}
_GEMMA4_EXTRA = {
  **{'global_head_dim': int | None, 'per_layer_config': dict | None},
  **{'num_kv_shared_layers': int, 'use_double_wide_mlp': bool},
  'vocab_size_per_layer_input': int,
}
_BEHIND = {'pre_norm': False, 'post_norm': True}
_BEHIND |= {'qk_norm': True, 'joint_qk_norm': True}
_LFM2_KEYS = {
  **{'norm_epsilon': 'norm_eps', 'conv_size': 'conv_L_cache'},
  'conv_bias': 'conv_bias',
}
_LFM2_EXTRA = {
  **{'block_ff_dim': int, 'tie_embedding': bool, 'block_multiple_of': int},
  **{'layer_types': list[str] | None, 'block_auto_adjust_ff_dim': bool},
  'block_ffn_dim_multiplier': float | None,
  'full_attn_idxs': list[int] | None,
}
_LFM2_NAMES = {
  'input_layernorm': 'operator_norm',
  'post_attention_layernorm': 'ffn_norm',
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
    'mamba_n_heads': 1,
    'mamba_d_head': 'auto',
    'time_step_limit': None,
  },
  'idle': (
    *(f'mamba_{key}' for key in ('n_heads', 'n_groups', 'd_state', 'd_head')),
    *(f'mamba_{key}' for key in ('d_conv', 'expand', 'chunk_size')),
    *('mamba_conv_bias', 'mamba_proj_bias', 'init_method'),
    *('normalization_function', 'num_experts_per_tok', 'intermediate_size'),
  ),
}

# A shape is saved as the first type that can state it.
MODEL_TYPES = {
  'llama': model_type.ModelType(
    config=transformers.LlamaConfig, keys=_BIASES | _MLP_BIAS
  ),
  'mistral': model_type.ModelType(
    config=transformers.MistralConfig, windows='all'
  ),
  'qwen2': model_type.ModelType(
    config=transformers.Qwen2Config,
    fixed={'qkv_bias': True},
    windows='switched',
    idle=('attention_bias', 'qkv_bias'),
  ),
  'qwen3': model_type.ModelType(
    config=transformers.Qwen3Config,
    keys=_BIASES,
    fixed={'qk_norm': True},
    windows='switched',
  ),
  'ministral': model_type.ModelType(
    config=transformers.MinistralConfig, windows='some'
  ),
  'ministral3': model_type.ModelType(
    config=transformers.Ministral3Config, windows='all', ropes='growing'
  ),
  'phi3': model_type.ModelType(
    config=transformers.Phi3Config, windows='all', is_partial=True
  ),
  'olmo2': model_type.ModelType(
    config=transformers.Olmo2Config, keys=_BIASES, fixed=_BEHIND
  ),
  'olmo3': model_type.ModelType(
    config=transformers.Olmo3Config,
    keys=_BIASES,
    fixed=_BEHIND,
    windows='some',
    ropes='kinds',
  ),
  'granite': model_type.ModelType(
    config=transformers.GraniteConfig, keys=_BIASES | _MLP_BIAS | _MULTIPLIERS
  ),
  'granitemoehybrid': model_type.ModelType(
    **_GRANITE_4 | {'given': _GRANITE_4['given'] | {'num_local_experts': 0}},
    keys=_BIASES | _MULTIPLIERS | {'inner_width': 'shared_intermediate_size'},
    mixture=model_type.ModelType(
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
  'smollm3': model_type.ModelType(
    config=transformers.SmolLM3Config,
    keys=_BIASES | _MLP_BIAS,
    windows='switched',
    ropes='no_rope_layers',
  ),
  'gemma': model_type.ModelType(
    config=transformers.GemmaConfig, shape=gemma_lib.GemmaConfig, keys=_BIASES
  ),
  'gemma2': model_type.ModelType(
    config=transformers.Gemma2Config,
    shape=gemma_lib.GemmaConfig,
    keys=_BIASES | _CAPS,
    fixed={'post_norm': True},
    windows='some',
  ),
  'gemma3_text': model_type.ModelType(
    config=transformers.Gemma3TextConfig,
    shape=gemma_lib.GemmaConfig,
    keys=_BIASES | _CAPS,
    fixed={'post_norm': True, 'qk_norm': True},
    windows='some',
    ropes='kinds',
    extra=_LOCAL,
  ),
  'gemma4_text': model_type.ModelType(
    config=transformers.Gemma4TextConfig,
    shape=gemma_lib.Gemma4Config,
    keys=_BIASES | _GEMMA4_KEYS,
    fixed={'post_norm': True, 'qk_norm': True, 'value_norm': True}
    | {'attention_scale': 1.0},
    windows='some',
    ropes='kinds',
    extra=_GEMMA4_EXTRA,
    constants={'enable_moe_block': False, 'attention_k_eq_v': False},
    of_layers=gemma_keys.read,
    to_keys=gemma_keys.write,
  ),
  'lfm2': model_type.ModelType(
    config=transformers.Lfm2Config,
    shape=lfm2_lib.Lfm2Config,
    keys=_LFM2_KEYS,
    fixed={'qk_norm': True, 'activation': 'silu'},
    extra=_LFM2_EXTRA,
    idle=('block_mlp_init_scale', 'block_out_init_scale')
    + ('block_use_xavier_init', 'conv_use_xavier_init'),
    mixers={model_type.FULL: 'self_attn', 'conv': 'conv'},
    renames=_LFM2_NAMES,
    to_keys=lambda config: {'block_auto_adjust_ff_dim': False},
  ),
  'qwen3_5_text': model_type.ModelType(
    config=transformers.Qwen3_5TextConfig,
    shape=delta_lib.DeltaConfig,
    keys=_BIASES | _DELTA_KEYS,
    fixed={'qk_norm': True},
    extra=_DELTA_EXTRA,
    is_partial=True,
    idle=('mamba_ssm_dtype', 'mtp_num_hidden_layers')
    + ('mtp_use_dedicated_embeddings',),
    mixers={model_type.FULL: 'self_attn', 'linear_attention': 'linear_attn'},
    renames={'linear_attn.o_proj': 'linear_attn.out_proj'}
    | {'linear_attn.rate': 'linear_attn.A_log'},
  ),
  'mixtral': model_type.ModelType(
    config=transformers.MixtralConfig,
    shape=mixtral_lib.MixtralConfig,
    keys=_EXPERTS | {'num_experts': 'num_local_experts'},
    windows='all',
  ),
  'gpt_oss': model_type.ModelType(
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
  'qwen3_moe': model_type.ModelType(
    config=transformers.Qwen3MoeConfig,
    shape=mixtral_lib.MixtralConfig,
    keys=_BIASES | _OWN_EXPERTS,
    fixed={'qk_norm': True},
    windows='all',
    idle=_DENSE,
  ),
  'qwen2_moe': model_type.ModelType(
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
