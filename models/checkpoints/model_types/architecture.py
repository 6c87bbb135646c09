"""The GGUF files of a model type: keys of the metadata, names of tensors.

Both are as llama.cpp's converters write them
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
from typing import Any

Keys = Mapping[str, Any]

INNER, KV_HEADS = 'feed_forward_length', 'attention.head_count_kv'
ROPE_FACTORS = 'rope_freqs.weight'
# Keys of the metadata, after the architecture, and keys of config.json.
KEYS = {
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'block_count': 'num_hidden_layers',
  'attention.head_count': 'num_attention_heads',
  KV_HEADS: 'num_key_value_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'attention.key_length': 'head_dim',
  'attention.sliding_window': 'sliding_window',
  INNER: 'intermediate_size',
  'expert_count': 'num_local_experts',
  'expert_used_count': 'num_experts_per_tok',
  'expert_feed_forward_length': 'moe_intermediate_size',
  'attn_logit_softcapping': 'attn_logit_softcapping',
  'final_logit_softcapping': 'final_logit_softcapping',
}
MULTIPLIER_KEYS = KEYS | {
  'embedding_scale': 'embedding_multiplier',
  'logit_scale': 'logits_scaling',
  'residual_scale': 'residual_multiplier',
}
GRANITE_KEYS = MULTIPLIER_KEYS | {'attention.scale': 'attention_multiplier'}
# Names of tensors, and their canonical names (`model_type.ModelType`). A name
# without a leaf, such as `weight`, stands for all of its leaves.
NAMES = {
  'token_embd': 'embed_tokens',
  'output_norm': 'norm',
  'output': 'lm_head',
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'ffn_norm': 'post_attention_layernorm',
  'post_ffw_norm': 'post_feedforward_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
  'ffn_gate_inp': 'mlp.gate',
  'ffn_gate_exps': 'mlp.experts.gate_proj',
  'ffn_up_exps': 'mlp.experts.up_proj',
  'ffn_down_exps': 'mlp.experts.down_proj',
  'ffn_gate_shexp': 'mlp.shared_expert.gate_proj',
  'ffn_up_shexp': 'mlp.shared_expert.up_proj',
  'ffn_down_shexp': 'mlp.shared_expert.down_proj',
}
POST_NORM_NAMES = NAMES | {'post_attention_norm': 'post_attention_layernorm'}
# Drafting heads and block drafters have these, too.
DRAFTER_NAMES = NAMES | {
  'fc': 'fc',
  'attn_norm_2': 'hidden_norm',
  'enc.output_norm': 'hidden_norm',
  'markov_w1': 'markov_head.markov_w1',
  'markov_w2': 'markov_head.markov_w2',
  'conf_proj': 'confidence_head.proj',
  'attn_conv_base': 'attention_conv.base_kernel',
  'attn_conv_proj': 'attention_conv.kernel_projection',
  'ffn_conv_base': 'mlp_conv.base_kernel',
  'ffn_conv_proj': 'mlp_conv.kernel_projection',
  'selector_predecessor': 'markov_head.markov_w1',
  'selector_successor': 'markov_head.markov_w2',
  'selector_hidden': 'markov_head.hidden_projection',
}


@dataclasses.dataclass(frozen=True)
class Architecture:
  """The files of an architecture, by default as a Llama's."""

  name: str
  _: dataclasses.KW_ONLY
  # The `model_type` of files with experts. None: there are none; the type that
  # has this record: there are no others.
  experts: str | None = None
  # The `model_type` if layers have a window, None if it is the same.
  windowed: str | None = None

  keys: Mapping[str, str] = dataclasses.field(default_factory=KEYS.copy)
  needed: Collection[str] = ()  # Keys that are optional elsewhere.
  lists: Collection[str] = ()  # Keys that may differ between layers.
  # Further keys of config.json that all files have.
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Default n if a file does not say it: every n-th layer has no window. 0: all
  # layers have a window; None: there is no default.
  pattern: int | None = None
  # Default base of the rotation of layers with a window; None: the base is the
  # same for all layers.
  local_base: float | None = None
  # A model with this number of layers divides its scores by the square root of
  # the width over the number of heads; others by the root of a head's width.
  head_from_width: int | None = None
  # Maps keys of config.json, and the metadata, to further keys or other values.
  finish: Callable[[Keys, Keys], dict[str, Any]] = lambda keys, metadata: {}

  names: Mapping[str, str] = dataclasses.field(default_factory=NAMES.copy)
  layers: str = 'layers'  # Canonical name of the list of layers.
  # Whether rows of queries and keys have llama.cpp's order.
  swaps_rows: bool = False


def canonical_name(
  name: str, names: Mapping[str, str], layers: str = 'layers'
) -> str | None:
  """The canonical name of a tensor; None if it is not among the names."""
  block, layer, rest = (*name.split('.', 2), '', '')[:3]
  if block != 'blk':
    rest = name
  stem, _, leaf = rest.rpartition('.')
  ours = names.get(rest)
  if ours is None and stem in names:
    ours = f'{names[stem]}.{leaf}'
  return ours and (f'{layers}.{layer}.{ours}' if block == 'blk' else ours)
