"""GGUF files of tiny models, as the converter of llama.cpp writes them.

Keys and layouts are those of convert_hf_to_gguf.py
(github.com/ggml-org/llama.cpp); names of tensors are in tables of `gguf`.
"""

from collections.abc import Iterator
import json
import math
import pathlib
from typing import Any

import gguf
import numpy as np
from safetensors import numpy as safetensors_numpy
import tiny_blocks

from models.checkpoints import hub
from models.nn import lfm2 as lfm2_lib
from models.nn import mixtral as mixtral_lib
from models.nn import rope as rope_lib

# Architectures whose rows of queries and keys are permuted.
SWAPPED = ('llama', 'granite', 'granitemoe', 'minicpm', 'mistral3', 'smollm3')
_MULTIPLIED = ('granite', 'granitemoe', 'minicpm')
# Parts of names in folders, and names that are in the tables.
_RENAMED = {
  'granite': {
    'shared_mlp.input_linear': 'mlp.gate_up_proj',
    'shared_mlp.output_linear': 'mlp.down_proj',
  },
  'granitemoe': {
    'shared_mlp.input_linear': 'mlp.shared_expert.gate_up_proj',
    'block_sparse_moe.input_linear': 'mlp.experts.gate_up_proj',
  },
}


def _rope_keys(
  writer: gguf.GGUFWriter, rope: rope_lib.Rope, head_width: int
) -> None:
  scaling = rope.scaling
  writer.add_rope_freq_base(rope.theta)
  writer.add_rope_dimension_count(int(rope.fraction * head_width))
  if isinstance(scaling, rope_lib.LinearScaling | rope_lib.YarnScaling):
    kind = gguf.RopeScalingType(scaling.rope_type)
    writer.add_rope_scaling_type(kind)
    writer.add_rope_scaling_factor(scaling.factor)
  if isinstance(scaling, rope_lib.YarnScaling | rope_lib.LongRopeScaling):
    original = scaling.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(int(original))
  if isinstance(scaling, rope_lib.LongRopeScaling):
    writer.add_rope_scaling_attn_factors(scaling.attention_factor)
  if rope.query_growth:
    writer.add_attn_temperature_scale(rope.query_growth)
  if isinstance(scaling, rope_lib.YarnScaling) and scaling.attention_factor:
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
  writer.add_shared_kv_layers(sum(one is not None for one in sources))
  writer.add_embedding_length_per_layer_input(config.layer_width)
  if config.logit_cap:
    writer.add_final_logit_softcapping(config.logit_cap)


def metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
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
  windows = [one for one in config.of_layers('window') if one]
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
  ropes = [one for one in config.of_layers('rope') if one] or [rope_lib.Rope()]
  scaled = [one for one in ropes if one.scaling]
  _rope_keys(writer, (scaled or ropes)[0], width)
  if arch == 'gemma4':
    _gemma4_keys(writer, config)
  if arch == 'qwen35':
    _delta_keys(writer, config)
  if isinstance(config, mixtral_lib.MixtralConfig):
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.experts_per_token)
    writer.add_expert_feed_forward_length(config.inner_width)
    if config.shared_width:
      writer.add_expert_shared_feed_forward_length(config.shared_width)


def rope_factors(config: Any) -> dict[str, np.ndarray]:
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
  if isinstance(scaling, rope_lib.ProportionalScaling):
    width = config.of_layers('head_width')[-1]
    kept = int(scaling.partial_rotary_factor * width / 2)
    factors = np.where(np.arange(width // 2) < kept, 1, 1e30)
    return {'rope_freqs.weight': factors.astype(np.float32)}
  return {}


def permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
  """Queries and keys of a Llama, whose pairs become neighbours."""
  halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
  return halves.swapaxes(1, 2).reshape(array.shape)


def _parts(
  name: str, array: np.ndarray, arch: str
) -> Iterator[tuple[str, str, np.ndarray]]:
  """The tensors that are made of one: names of the table, leaves, arrays."""
  for theirs, plain in _RENAMED.get(arch, {}).items():
    name = name.replace(theirs, plain)
  stem, _, leaf = name.rpartition('.')
  if leaf not in ('weight', 'bias'):  # gpt-oss has such names.
    stem, leaf = name.removesuffix('_bias'), 'weight'
    leaf = 'bias' if stem != name else leaf
  is_expert = arch == 'gpt-oss' and '.experts.' in stem
  if is_expert and leaf == 'weight':
    array = array.swapaxes(1, 2)
  if not stem.endswith('gate_up_proj') or arch == 'phi3':
    yield stem, leaf, array
    return
  halves = [array[:, at::2] for at in (0, 1)]  # In turn.
  if not is_expert:
    halves = np.split(array, 2, axis=-2)
  for own, half in zip(('gate_proj', 'up_proj'), halves, strict=True):
    yield stem.replace('gate_up_proj', own), leaf, half


def from_folder(folder: pathlib.Path, path: pathlib.Path, arch: str) -> None:
  """Writes the file of a folder whose model has an architecture."""
  config = hub.locate(folder).config
  raw = json.loads((folder / 'config.json').read_text())
  writer = gguf.GGUFWriter(path, arch)
  metadata(writer, config, arch)
  keys = {'context_length': raw['max_position_embeddings']}
  if raw.get('sliding_window'):
    keys['attention.sliding_window'] = raw['sliding_window']
  tiny_blocks.set_keys(writer, arch, keys)
  if arch == 'minicpm':  # It is the whole context, and no factor is known.
    for key in ('attn_factor', 'original_context_length'):
      writer.kv_data[0].pop(f'{arch}.rope.scaling.{key}', None)
  architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
  table = gguf.get_tensor_name_map(architectures[arch], config.num_layers)
  heads = {'q_proj': config.num_heads, 'k_proj': config.num_kv_heads}
  stored = safetensors_numpy.load_file(folder / 'model.safetensors')
  for whole, tensor in stored.items():
    for stem, leaf, part in _parts(whole, tensor, arch):
      own = stem.rsplit('.', 1)[-1]
      if arch in SWAPPED and own in heads:
        part = permuted(part, heads[own])
      known = table.get_name(stem)
      assert known, stem
      writer.add_tensor(f'{known}.{leaf}', np.ascontiguousarray(part))
  for name, factors in rope_factors(config).items():
    writer.add_tensor(name, factors)
  tiny_blocks.finish(writer)
