"""GGUF files of tiny models, as the converter of llama.cpp writes them.

Keys and layouts are the same as in convert_hf_to_gguf.py
(github.com/ggml-org/llama.cpp); names of tensors are in tables of `gguf`.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Kind
import numpy as np
import tiny_blocks
import transformers

from specdec.models.checkpoints import families
from specdec.models.checkpoints import hub
from specdec.models.nn import adapter
from specdec.models.nn import lfm2 as lfm2_lib
from specdec.models.nn import mixtral as mixtral_lib
from specdec.models.nn import rope as rope_lib

# Architectures whose rows of queries and keys are permuted.
_SWAPPED = ('llama', 'granite', 'granitemoe', 'minicpm', 'mistral3', 'smollm3')
_MULTIPLIED = ('granite', 'granitemoe', 'minicpm')
# Names that the table has not.
_VECTORS = {'rate': 'ssm_a', 'dt_bias': 'ssm_dt.bias'}
# Parts of canonical names that the table has otherwise.
_RENAMES = {
  'lfm2': {
    r'conv\.o_proj': 'conv.out_proj',
    r'model\.norm': 'model.embedding_norm',
  },
  'phi3': {r'\b[qkv]_proj': 'qkv_proj', r'\b(gate|up)_proj': 'gate_up_proj'},
  'qwen35': {r'linear_attn\.o_proj': 'linear_attn.out_proj'},
}

Tensors = dict[str, tuple[np.ndarray, Kind]]
"""The bytes of each tensor, and their type."""


def _rope_keys(
  writer: gguf.GGUFWriter, rope: rope_lib.Rope, head_width: int, arch: str
) -> None:
  scaling = rope.scaling
  writer.add_rope_freq_base(rope.theta)
  writer.add_rope_dimension_count(int(rope.fraction * head_width))
  if isinstance(scaling, rope_lib.LinearScaling | rope_lib.YarnScaling):
    kind = gguf.RopeScalingType(scaling.rope_type)
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_factor(scaling.factor)
  is_long = isinstance(scaling, rope_lib.LongRopeScaling) and arch != 'minicpm'
  if isinstance(scaling, rope_lib.YarnScaling) or is_long:
    original = scaling.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(int(original))
  if is_long:  # For a MiniCPM it is the whole context, and no factor is known.
    writer.add_rope_scaling_attn_factors(scaling.attention_factor)
  if rope.query_growth:
    writer.add_attn_temperature_scale(rope.query_growth)
  if arch == 'olmo2' and scaling:
    writer.add_rope_scaling_attn_factors(scaling.attention_factor)
  elif isinstance(scaling, rope_lib.YarnScaling) and scaling.attention_factor:
    # The factor is (log + 1) / (log * mscale_all_dim + 1).
    log = 0.1 * math.log(scaling.factor)
    multiplier = ((log + 1) / scaling.attention_factor - 1) / log
    writer.add_rope_scaling_yarn_log_mul(round(multiplier, 6))


def _delta_keys(writer: gguf.GGUFWriter, config: Any) -> None:
  writer.add_rope_dimension_sections([11, 11, 10, 0])
  writer.add_ssm_conv_kernel(config.conv_size)
  writer.add_ssm_state_size(config.key_width)
  writer.add_ssm_group_count(config.key_heads)
  writer.add_ssm_time_step_rank(config.value_heads)
  writer.add_ssm_inner_size(config.value_heads * config.value_width)
  writer.add_full_attention_interval(2)


def _gemma4_keys(writer: gguf.GGUFWriter, config: Any) -> None:
  windows, widths = map(config.of_layers, ('window', 'head_width'))
  local = next(at for at, window in enumerate(windows) if window)
  writer.add_sliding_window_pattern([window is not None for window in windows])
  writer.add_key_length_swa(widths[local])
  writer.add_value_length_swa(widths[local])
  writer.add_rope_dimension_count_swa(widths[local])
  writer.add_rope_freq_base_swa(config.of_layers('rope')[local].theta)
  sources = config.of_layers('kv_source')
  writer.add_shared_kv_layers(sum(source is not None for source in sources))
  writer.add_embedding_length_per_layer_input(config.layer_width)
  if config.logit_cap:
    writer.add_final_logit_softcapping(config.logit_cap)


def _metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
  """Writes the keys of a shape."""
  writer.add_uint16('split.count', 0)  # As in files that were merged.
  writer.add_context_length(config.num_positions)
  writer.add_embedding_length(config.width)
  writer.add_block_count(config.num_layers)
  writer.add_head_count(config.num_heads)
  inner = config.inner_width
  writer.add_feed_forward_length(
    [*inner] if isinstance(inner, tuple) else inner
  )
  if arch == 'gpt2':
    writer.add_layer_norm_eps(config.norm_epsilon)
    return
  if isinstance(config, lfm2_lib.Lfm2Config):
    heads = [0] * config.num_layers
    heads[1] = config.num_kv_heads
    writer.add_head_count_kv(heads)
    writer.add_shortconv_l_cache(config.conv_size)
  elif config.num_kv_heads != config.num_heads:  # It is the default.
    writer.add_head_count_kv(config.num_kv_heads)
  writer.add_layer_norm_rms_eps(config.norm_epsilon)
  windows = [window for window in config.of_layers('window') if window]
  if windows or arch == 'phi3':
    writer.add_sliding_window(windows[0] if windows else 0)
  if config.score_cap:
    writer.add_attn_logit_softcapping(config.score_cap)
    writer.add_final_logit_softcapping(config.logit_cap)
  if arch in ('granite', 'granitemoe'):
    scale = config.attention_scale or config.head_width**-0.5
    writer.add_attention_scale(scale)
    writer.add_rope_scaling_finetuned(config.rope is not None)
  if arch in _MULTIPLIED:
    writer.add_embedding_scale(config.embedding_scale)
    writer.add_residual_scale(config.residual_scale)
    writer.add_logit_scale(config.logit_divisor)
  *_, width = config.of_layers('head_width')
  for add_width in (writer.add_key_length, writer.add_value_length):
    add_width(width)
  ropes = [rope for rope in config.of_layers('rope') if rope]
  ropes = ropes or [rope_lib.Rope()]
  scaled = [rope for rope in ropes if rope.scaling]
  _rope_keys(writer, (scaled or ropes)[0], width, arch)
  if arch == 'gemma4':
    _gemma4_keys(writer, config)
  if arch == 'olmo2' and windows:
    slides = [window is not None for window in config.of_layers('window')]
    writer.add_sliding_window_pattern(slides)
  if arch == 'qwen35':
    _delta_keys(writer, config)
  if isinstance(config, mixtral_lib.MixtralConfig):
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.experts_per_token)
    writer.add_expert_feed_forward_length(config.inner_width)
    if config.shared_width:
      writer.add_expert_shared_feed_forward_length(config.shared_width)


def _rope_factors(config: Any) -> dict[str, np.ndarray]:
  """The tensors of a rotation whose frequencies are divided by factors."""
  if getattr(config, 'rope', None) is None:
    return {}
  rope = config.of_layers('rope')[-1]
  scaling = rope and rope.scaling
  if isinstance(scaling, rope_lib.LongRopeScaling):
    return {
      f'rope_factors_{key}.weight': np.float32(
        getattr(scaling, f'{key}_factor')
      )
      for key in ('short', 'long')
    }
  if isinstance(scaling, rope_lib.Llama3Scaling):
    plain, scaled = (
      each_rope.frequencies(config.head_width)
      for each_rope in (dataclasses.replace(rope, scaling=None), rope)
    )
    return {'rope_freqs.weight': plain / scaled}
  if isinstance(scaling, rope_lib.ProportionalScaling):
    width = config.of_layers('head_width')[-1]
    kept = int(scaling.partial_rotary_factor * width / 2)
    factors = np.where(np.arange(width // 2) < kept, 1, 1e30)
    return {'rope_freqs.weight': factors.astype(np.float32)}
  return {}


def _permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Queries and keys of a Llama; pairs become neighbours."""
  halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)


def _stored_name(name: str, arch: str, num_layers: int) -> tuple[str, bool]:
  """The name in a file by gguf's own table; whether it is one of experts."""
  _, *layer, last = name.split('.')
  if last in _VECTORS:
    return f'blk.{layer[0]}.{_VECTORS[last]}', False
  prefix = 'transformer' if arch == 'gpt2' else 'model'
  stored = name if name == 'lm_head.weight' else f'{prefix}.{name}'
  for ours, theirs in _RENAMES.get(arch, {}).items():
    stored = re.sub(ours, theirs, stored)
  stored += '.weight' * stored.endswith(('sinks', 'layer_scalar'))
  stem, leaf = stored.rsplit('.', 1)
  stem, is_expert = re.subn(r'experts\.\d+', 'experts', stem)
  architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
  table = gguf.get_tensor_name_map(architectures[arch], num_layers)
  base = table.get_name(stem)
  assert base, stem
  return f'{base}.{leaf}', bool(is_expert)


_NEXTN = {'fc': 'eh_proj', 'norm': 'shared_head_norm'}


def nextn_name(name: str, arch: str, num_layers: int) -> str:
  """The name of a tensor of the MTP layer after `num_layers` layers."""
  if name.startswith('layers.0.'):
    renamed = name.replace('layers.0.', f'layers.{num_layers}.')
    return _stored_name(renamed, arch, num_layers + 1)[0]
  first, _, rest = name.partition('.')
  return f'blk.{num_layers}.nextn.{_NEXTN.get(first, first)}.{rest}'


def tensors_of(
  module: adapter.Module, arch: str
) -> Iterator[tuple[str, np.ndarray]]:
  """Names and arrays of a file with this model."""
  config, stacks = module.config, collections.defaultdict(list)
  for path, leaf in hub.flat_params(module)[1].items():
    name = families.parameter_name(path)
    array = np.asarray(leaf, np.float32)
    if array.ndim == 3:  # A convolution.
      array = array[:, 0].T
    if arch in _SWAPPED and '.q_proj.' in name:
      array = _permuted(array, config.num_heads)
    if arch in _SWAPPED and '.k_proj.' in name:
      array = _permuted(array, config.num_kv_heads)
    stacks[_stored_name(name, arch, config.num_layers)].append(array)
  for (name, is_expert), arrays in stacks.items():
    if '_qkv' in name and arch == 'phi3':  # The module has keys first.
      arrays = [arrays[1], arrays[0], arrays[2]]
    yield name, np.stack(arrays) if is_expert else np.concatenate(arrays)


def _add_tokenizer(
  writer: gguf.GGUFWriter, tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
  words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
  merges = json.loads(tokenizer.backend_tokenizer.to_str())['model']['merges']
  filling = [f'[PAD{index}]' for index in range(3)]
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('gpt-2')
  writer.add_token_list([*words, *filling])
  special = {*tokenizer.all_special_tokens}
  kinds = [3 if word in special else 1 for word in words]
  writer.add_token_types([*kinds, *(5 for _ in filling)])
  writer.add_token_merges([' '.join(pair) for pair in merges])
  writer.add_eos_token_id(tokenizer.eos_token_id)
  writer.add_eot_token_id(7)
  writer.add_chat_template('{{ messages }}')


def write(
  path: pathlib.Path,
  module: adapter.Module,
  arch: str,
  kind: Kind = Kind.F32,
  *,
  change: Callable[[Tensors], Tensors] = dict,
  tokenizer: transformers.PreTrainedTokenizerFast | None = None,
  keys: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
  """Writes a model; returns the tensors, rounded as in the file.

  Matrices have the type `kind`; the rest is float32. The function
  `change` gets the tensors, and may change them; `keys` are further ones of the
  architecture, or other values.
  """
  config, writer = module.config, gguf.GGUFWriter(path, arch)
  _metadata(writer, config, arch)
  tiny_blocks.set_keys(writer, arch, keys or {})
  if tokenizer is not None:
    _add_tokenizer(writer, tokenizer)
  tensors, expected, rng = {}, {}, np.random.default_rng(0)
  arrays = dict(tensors_of(module, arch)) | _rope_factors(config)
  for name, array in arrays.items():
    type_ = kind if array.ndim > 1 else Kind.F32
    if type_ == Kind.Q4_K:  # gguf does not write it.
      data = tiny_blocks.raw_rows(rng, type_.name, *array.shape)
    else:
      data = gguf.quantize(array, type_)
    tensors[name], expected[name] = (data, type_), gguf.dequantize(data, type_)
  for name, (data, type_) in change(tensors).items():
    writer.add_tensor(name, data, raw_dtype=type_)
  tiny_blocks.finish(writer)
  return expected
