"""The keys and tensors that GGUF files of an architecture have.

Names of keys and tensors are those that llama.cpp's converters write
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from collections.abc import Collection
from collections.abc import Mapping
import re
import types
from typing import Any
from typing import NamedTuple

import numpy as np

from specdec.models.checkpoints.gguf_parts import gguf_header
from specdec.text import text_files

# Keys of the metadata, after the architecture, and keys of config.json.
_GPT2_KEYS = {
  'context_length': 'n_positions',
  'embedding_length': 'n_embd',
  'block_count': 'n_layer',
  'attention.head_count': 'n_head',
  'feed_forward_length': 'n_inner',
  'attention.layer_norm_epsilon': 'layer_norm_epsilon',
}
LLAMA_KEYS = {
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'block_count': 'num_hidden_layers',
  'attention.head_count': 'num_attention_heads',
  'attention.head_count_kv': 'num_key_value_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'attention.key_length': 'head_dim',
  'attention.sliding_window': 'sliding_window',
  'feed_forward_length': 'intermediate_size',
  'expert_count': 'num_local_experts',
  'expert_used_count': 'num_experts_per_tok',
  'expert_feed_forward_length': 'moe_intermediate_size',
  'attn_logit_softcapping': 'attn_logit_softcapping',
  'final_logit_softcapping': 'final_logit_softcapping',
}
_GEMMA4_KEYS = LLAMA_KEYS | {
  'attention.key_length': 'global_head_dim',
  'attention.key_length_swa': 'head_dim',
  'attention.shared_kv_layers': 'num_kv_shared_layers',
  'embedding_length_per_layer_input': 'hidden_size_per_layer_input',
}
_GRANITE_KEYS = LLAMA_KEYS | {
  'attention.scale': 'attention_multiplier',
  'embedding_scale': 'embedding_multiplier',
  'logit_scale': 'logits_scaling',
  'residual_scale': 'residual_multiplier',
}
_MINICPM_KEYS = {
  key: name for key, name in _GRANITE_KEYS.items() if key != 'attention.scale'
}
_SHARED = 'expert_shared_feed_forward_length'
_LFM2_KEYS = LLAMA_KEYS | {
  'attention.layer_norm_rms_epsilon': 'norm_eps',
  'shortconv.l_cache': 'conv_L_cache',
}
_DELTA_KEYS = LLAMA_KEYS | {
  'full_attention_interval': 'full_attention_interval',
  'ssm.conv_kernel': 'linear_conv_kernel_dim',
  'ssm.state_size': 'linear_key_head_dim',
  'ssm.group_count': 'linear_num_key_heads',
  'ssm.time_step_rank': 'linear_num_value_heads',
}
# Keys that 0 turns off, as in llama.cpp, and the values that do so here.
_OFF_AT_ZERO: dict[str, float | None] = {
  'attention.scale': None,
  'attention.sliding_window': None,
  'attn_logit_softcapping': None,
  'embedding_scale': 1.0,
  'final_logit_softcapping': None,
  'logit_scale': 1.0,
  'residual_scale': 1.0,
}
# Keys that a file may lack, besides the keys of experts.
_OPTIONAL_KEYS = {'attention.head_count_kv', 'attention.key_length'}
_OPTIONAL_KEYS |= _OFF_AT_ZERO.keys()
# Parts that a model may have: prefixes of their keys, and texts in the names of
# their tensors. Converters write these keys for models without the part, too: a
# Granite 4 without Mamba layers is a `granite`.
_OPTIONAL_PARTS = {
  'ssm.': '.ssm_',
  'shortconv.': '.shortconv.',
  'expert_shared_': 'shexp.',
}
_NEXTN = 'nextn_predict_layers'
# For each layer, whether it has the window; or every how many has not.
PATTERN = 'attention.sliding_window_pattern'
KV_HEADS = 'attention.head_count_kv'
INNER = 'feed_forward_length'
# Keys that are read elsewhere, or that change nothing.
_OTHER_KEYS = {
  PATTERN,
  _NEXTN,
  'attention.temperature_scale',
  'attention.value_length',
  'attention.value_length_swa',
  'rope.dimension_count',
  'rope.dimension_count_swa',
  'rope.dimension_sections',
  'rope.freq_base',
  'rope.freq_base_swa',
  'rope.scaling.attn_factor',
  'rope.scaling.factor',
  'rope.scaling.finetuned',
  'rope.scaling.original_context_length',
  'rope.scaling.type',
  'rope.scaling.yarn_attn_factor',
  'rope.scaling.yarn_beta_fast',
  'rope.scaling.yarn_beta_slow',
  'rope.scaling.yarn_ext_factor',
  'rope.scaling.yarn_log_multiplier',
  'ssm.inner_size',
  'tensor_data_layout',
  'vocab_size',
}

# Types of keys that are not integers; a key with a part from `_NUMBERS` is a
# number.
_LISTS: dict[str, Any] = {
  PATTERN: int | list[bool] | list[int],
  'extract_layers': list[int],
  'rope.dimension_sections': list[int],
  'target_layers': list[int],
}
_TYPES = _LISTS | {
  'rope.scaling.type': str,
  'tensor_data_layout': str,
  'rope.scaling.finetuned': bool,
  'norm_before_residual': bool,
  'attention.causal': bool,
  'sample_from_anchor': bool,
  'rope_is_neox_style': bool,
  INNER: int | list[int],
}
_NUMBERS = re.compile(r'epsilon|scale|softcapping|freq_base|factor|beta|multi')

ROPE_FACTORS = 'rope_freqs.weight'
# By which longrope divides the frequencies of pairs.
LONGROPE = {
  'short_factor': 'rope_factors_short.weight',
  'long_factor': 'rope_factors_long.weight',
}
# Names of tensors, and their canonical names (`models/checkpoints/families`);
# `{}` is the number of an expert. A model that has other tensors refuses them.
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
  'ffn_gate_exps': 'mlp.experts.{}.gate_proj',
  'ffn_up_exps': 'mlp.experts.{}.up_proj',
  'ffn_down_exps': 'mlp.experts.{}.down_proj',
  'ffn_gate_shexp': 'mlp.shared_expert.gate_proj',
  'ffn_up_shexp': 'mlp.shared_expert.up_proj',
  'ffn_down_shexp': 'mlp.shared_expert.down_proj',
  'shortconv.conv': 'conv.conv',
  'shortconv.in_proj': 'conv.in_proj',
  'shortconv.out_proj': 'conv.o_proj',
  'attn_gate': 'linear_attn.in_proj_z',
  'ssm_beta': 'linear_attn.in_proj_b',
  'ssm_alpha': 'linear_attn.in_proj_a',
  'ssm_conv1d': 'linear_attn.conv1d',
  'ssm_norm': 'linear_attn.norm',
  'ssm_out': 'linear_attn.o_proj',
  'per_layer_token_embd': 'embed_tokens_per_layer',
  'per_layer_model_proj': 'per_layer_model_projection',
  'per_layer_proj_norm': 'per_layer_projection_norm',
  'inp_gate': 'per_layer_input_gate',
  'proj': 'per_layer_projection',
  'post_norm': 'post_per_layer_input_norm',
  # Drafting heads and block drafters have these.
  'fc': 'fc',
  'attn_norm_2': 'hidden_norm',
  'enc.output_norm': 'hidden_norm',
  'markov_w1': 'markov_head.markov_w1',
  'markov_w2': 'markov_head.markov_w2',
  'conf_proj': 'confidence_head.proj',
  'attn_conv_proj': 'attention_conv.kernel_projection',
  'ffn_conv_proj': 'mlp_conv.kernel_projection',
  'selector_predecessor': 'markov_head.markov_w1',
  'selector_successor': 'markov_head.markov_w2',
  'selector_hidden': 'markov_head.hidden_projection',
}
# Names that end otherwise than the canonical names.
_WHOLE_NAMES = {
  'attn_conv_base': 'attention_conv.base_kernel',
  'attn_sinks.weight': 'self_attn.sinks',
  'ffn_conv_base': 'mlp_conv.base_kernel',
  'layer_output_scale.weight': 'layer_scalar',
  'ssm_a': 'linear_attn.rate',
  'ssm_dt.bias': 'linear_attn.dt_bias',
}
_GPT2_NAMES = {
  'token_embd': 'wte',
  'position_embd': 'wpe',
  'output_norm': 'ln_f',
  'output': 'lm_head',
  'attn_norm': 'ln_1',
  'attn_qkv': 'attn.c_attn',
  'attn_output': 'attn.c_proj',
  'ffn_norm': 'ln_2',
  'ffn_up': 'mlp.c_fc',
  'ffn_down': 'mlp.c_proj',
}
# Several matrices as one, see `models/checkpoints/tensor_names`.
_FUSED_NAMES = NAMES | {
  'attn_qkv': 'self_attn.qkv_proj',
  'ffn_up': 'mlp.gate_up_proj',
}
_POST_NORM_NAMES = NAMES | {'post_attention_norm': 'post_attention_layernorm'}
_GEMMA_NAMES = _POST_NORM_NAMES | {'ffn_norm': 'pre_feedforward_layernorm'}


_PROJECTOR = 'the projector (mmproj) of a vision model, without the model'
# Files with other contents, by their `general.type` or architecture.
_NO_MODELS = {
  'adapter': 'an adapter (LoRA) of one; merge it into the model it is for',
  **dict.fromkeys(('clip', 'mmproj'), _PROJECTOR),
  'controlvector': 'a control vector of one; give the file of the model',
  'imatrix': 'an importance matrix, with which models are rounded',
  'vocab': 'a vocabulary without a model; give the file of the model',
}


class Architecture(NamedTuple):
  """The properties of the files of an architecture.

  Attributes:
    plain: the `model_type` without experts; None: all files have experts.
    mixture: the `model_type` with experts.
    windowed: the `model_type` if layers have a window, None if it is the same.
    keys: of the metadata.
    names: of the tensors.
    layers: canonical name of the list of layers.
    swaps_rows: whether rows of queries and keys have llama.cpp's order.
    pattern: default n if a file does not say it: every n-th layer has no
      window. 0: all layers have a window; None: there is no default.
    local_base: default base of the rotation of layers with a window; None: the
      base is the same for all layers.
    head_from_width: a model with this number of layers divides its scores by
      the square root of the width over the number of heads; others by the
      square root of a head's width.
    state_layers: the entry of `layer_types` of layers that keep a state; they
      have 0 heads of keys and values. None: no layer keeps a state.
    fixed: keys of config.json that all files have.
  """

  plain: str | None
  mixture: str | None = None
  windowed: str | None = None
  keys: Mapping[str, str] = LLAMA_KEYS
  names: Mapping[str, str] = NAMES
  layers: str = 'layers'
  swaps_rows: bool = False
  pattern: int | None = None
  local_base: float | None = None
  head_from_width: int | None = None
  state_layers: str | None = None
  fixed: Mapping[str, Any] = types.MappingProxyType({})


ARCHITECTURES = {
  'gpt2': Architecture('gpt2', keys=_GPT2_KEYS, names=_GPT2_NAMES, layers='h'),
  'llama': Architecture('llama', 'mixtral', swaps_rows=True, pattern=0),
  'gemma': Architecture('gemma'),
  'gemma2': Architecture(
    'gemma2', names=_GEMMA_NAMES, pattern=2, head_from_width=46
  ),
  'gemma3': Architecture(
    'gemma3_text',
    names=_GEMMA_NAMES,
    pattern=6,
    local_base=10000.0,
    head_from_width=62,
  ),
  'gemma4': Architecture(
    'gemma4_text', keys=_GEMMA4_KEYS, names=_GEMMA_NAMES, local_base=10000.0
  ),
  'gpt-oss': Architecture(None, 'gpt_oss', names=_POST_NORM_NAMES, pattern=2),
  'lfm2': Architecture(
    'lfm2',
    keys=_LFM2_KEYS,
    names=NAMES | {'token_embd_norm': 'norm'},
    state_layers='conv',
    fixed={'block_auto_adjust_ff_dim': False},
  ),
  'granite': Architecture('granite', keys=_GRANITE_KEYS, swaps_rows=True),
  'granitemoe': Architecture(
    None,
    'granitemoehybrid',
    keys=_GRANITE_KEYS | {_SHARED: 'shared_intermediate_size'},
    swaps_rows=True,
  ),
  'minicpm': Architecture('granite', keys=_MINICPM_KEYS, swaps_rows=True),
  'mistral3': Architecture('ministral3', swaps_rows=True, pattern=0),
  'olmo2': Architecture('olmo2', windowed='olmo3', names=_POST_NORM_NAMES),
  'phi3': Architecture('phi3', names=_FUSED_NAMES, pattern=0),
  'qwen2': Architecture('qwen2'),
  'qwen3': Architecture('qwen3'),
  # Heads of values are stored in the order in which ggml repeats keys.
  'qwen35': Architecture(
    'qwen3_5_text',
    keys=_DELTA_KEYS,
    names=_POST_NORM_NAMES | {'attn_qkv': 'linear_attn.in_proj_qkv'},
    fixed={'linear_heads_tiled': True},
  ),
  'qwen3moe': Architecture(None, 'qwen3_moe'),
  'smollm3': Architecture('smollm3', swaps_rows=True),
}


def canonical_name(
  name: str, names: Mapping[str, str], layers: str = 'layers'
) -> str | None:
  """The canonical name of a tensor; None if it is not among the names."""
  block, layer, rest = (*name.split('.', 2), '', '')[:3]
  if block != 'blk':
    rest = name
  stem, _, leaf = rest.rpartition('.')
  ours = _WHOLE_NAMES.get(rest)
  if ours is None and stem in names:
    ours = f'{names[stem]}.{leaf}'
  return ours and (f'{layers}.{layer}.{ours}' if block == 'blk' else ours)


def check_is_model(header: gguf_header.Header) -> None:
  """Refuses a file that holds something else, or a part of a model."""
  for key in ('general.type', 'general.architecture'):
    if other := _NO_MODELS.get(str(header.metadata.get(key))):
      raise ValueError(f'it is no model, but {other}')
  if (num_files := header.metadata.get('split.count', 0)) > 1:  # 0: merged.
    raise ValueError(
      f'it is one of {num_files} parts of a model; merge them with'
      ' llama-gguf-split --merge'
    )


def architecture_of(header: gguf_header.Header) -> str:
  """The name of the architecture; ValueError if it is not known."""
  check_is_model(header)
  name = header.metadata.get('general.architecture')
  if name not in ARCHITECTURES:
    raise ValueError(
      f'architecture {name!r} is not known; choose from {sorted(ARCHITECTURES)}'
    )
  return name


def _shortest(value: Any) -> Any:
  """1e-05 in place of 9.99999974737875e-06, which is the same in float32."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


def num_layers(header: gguf_header.Header, name: str) -> int:
  """The number of layers, without those that predict further tokens.

  The last ones of a file may be such (MTP), and are not read.
  """
  keys = f'{name}.block_count', f'{name}.{_NEXTN}'
  text_files.check_types(header.metadata, dict.fromkeys(keys, int))
  num_blocks, others = (header.metadata.get(key, 0) for key in keys)
  if not 0 <= others <= num_blocks:
    raise ValueError(f'{keys[1]}={others} contradicts {keys[0]}={num_blocks}')
  return num_blocks - others


def of_further_tokens(header: gguf_header.Header, name: str) -> set[str]:
  """The tensors of the layers that `num_layers` does not count."""
  last = header.metadata.get(f'{name}.block_count', 0)
  blocks = range(num_layers(header, name), last)
  prefixes = tuple(f'blk.{block}.' for block in blocks)
  return {tensor for tensor in header.tensors if tensor.startswith(prefixes)}


def _is_left_over(
  key: str, keys: Collection[str], header: gguf_header.Header
) -> bool:
  """Whether a key is of a part that the tensors do not have."""
  return key not in keys and any(
    key.startswith(prefix) and not any(part in name for name in header.tensors)
    for prefix, part in _OPTIONAL_PARTS.items()
  )


def own_keys(
  header: gguf_header.Header, name: str, keys: Collection[str] = ()
) -> dict[str, Any]:
  """The keys of an architecture, without its name before them.

  A list that repeats a value, once for each layer, is this value. Only the
  widths of MLPs, and which layers have windows, may differ between layers.

  Args:
    header: of the file.
    name: of the architecture.
    keys: the keys of an architecture outside `ARCHITECTURES`.

  Raises:
    ValueError: a key is not known, a value has another type, or the values of a
      list differ or have another number than the layers.
  """
  architecture = ARCHITECTURES.get(name, Architecture(None))
  if name in ARCHITECTURES:
    keys = {*architecture.keys, *_OTHER_KEYS}
  prefix = f'{name}.'
  num_blocks = header.metadata.get(f'{prefix}block_count')
  metadata = {}
  for full, value in header.metadata.items():
    key = full.removeprefix(prefix)
    if key == full or _is_left_over(key, keys, header):
      continue
    if key not in keys:
      raise ValueError(f'{full} is not supported')
    if key == 'block_count':
      value = num_layers(header, name)
    if isinstance(value, list) and (key == PATTERN or key not in _LISTS):
      if len(value) != num_blocks:
        raise ValueError(
          f'{full} has {len(value)} values for block_count={num_blocks!r}'
        )
      value = value[: num_layers(header, name)]
    if isinstance(value, list) and key not in _LISTS:
      if key == KV_HEADS and architecture.state_layers:
        # The layers with a state have no heads.
        value = [entry or max(value) for entry in value]
      differs = not value or any(entry != value[0] for entry in value)
      if differs and (key != INNER or name != 'gemma4'):
        raise ValueError(
          f'{full} differs between layers; this is not supported'
        )
      value = value if differs else value[0]
    value_type = _TYPES.get(key, float if _NUMBERS.search(key) else int)
    text_files.check_types({full: value}, {full: value_type})
    is_off = value == 0 and key in _OFF_AT_ZERO
    metadata[key] = _OFF_AT_ZERO[key] if is_off else _shortest(value)
  return metadata


def check_widths(
  name: str, metadata: Mapping[str, Any], widths: Mapping[str, int]
) -> None:
  """Refuses keys that contradict the width of a head."""
  for key, width in widths.items():
    if metadata.get(key, width) != width:
      raise ValueError(
        f'{name}.{key}={metadata[key]} is not the width of a head, {width}'
      )


def check_keys(name: str, metadata: Mapping[str, Any]) -> None:
  """Refuses a file that lacks keys of its architecture."""
  keys, pattern = ARCHITECTURES[name].keys, ARCHITECTURES[name].pattern
  optional = {key for key in keys if key.startswith('expert_')}
  optional |= _OPTIONAL_KEYS - {'attention.sliding_window' if pattern else ''}
  if name == 'minicpm':  # llama.cpp takes the factors of one of its models.
    optional -= {*_MINICPM_KEYS} & {*_OFF_AT_ZERO} - {*LLAMA_KEYS}
  if missing := sorted(keys.keys() - metadata.keys() - optional):
    raise ValueError(f'lacks the key {name}.{missing[0]}')
