"""The keys of config.json that follow from a GGUF file."""

from collections.abc import Mapping
import math
from typing import Any

from specdec.models.checkpoints.gguf_parts import gguf_config
from specdec.models.checkpoints.gguf_parts import gguf_header
from specdec.models.checkpoints.gguf_parts import gguf_rope
from specdec.models.checkpoints.keys import model_types


def config_keys(header: gguf_header.Header) -> dict[str, Any]:
  """Makes the keys that the `config.json` of the same model would have.

  Raises:
    ValueError: the architecture or one of its keys is not known, or a key is
      missing; the message names it.
  """
  name = gguf_config.architecture_of(header)
  kind = gguf_config.ARCHITECTURES[name]
  metadata = gguf_config.own_keys(header, name)
  num_experts = metadata.get('expert_count', 0)
  model_type = kind.mixture if num_experts > 0 else kind.plain
  if model_type is None:
    raise ValueError(f'{name} with {num_experts} experts is not supported')
  gguf_config.check_keys(name, metadata)
  if 'token_embd.weight' not in header.tensors:
    raise ValueError('lacks the tensor token_embd.weight')
  found = {
    theirs: metadata[key]
    for key, theirs in kind.keys.items()
    if key in metadata and (num_experts > 0 or not key.startswith('expert_'))
  }
  vocab_size = header.tensors['token_embd.weight'].shape[0]
  if metadata.get('vocab_size', vocab_size) != vocab_size:
    raise ValueError(
      f'{name}.vocab_size={metadata["vocab_size"]} contradicts the'
      f' {vocab_size} rows of token_embd.weight'
    )
  found |= {
    'model_type': model_type,
    'vocab_size': vocab_size,
    'tie_word_embeddings': 'output.weight' not in header.tensors,
  }
  found |= kind.fixed
  if kind.state_layers:
    found['layer_types'] = _layer_types(name, header)
  if name == 'qwen35':
    inner, heads = (
      metadata.get(key, 0) for key in ('ssm.inner_size', 'ssm.time_step_rank')
    )
    found['linear_value_head_dim'] = inner // max(heads, 1)
  if num_experts > 0:
    found |= {'norm_topk_prob': True, 'num_experts': num_experts}
  if name != 'gpt2':
    # Classes of transformers have other defaults.
    found.setdefault('num_key_value_heads', found['num_attention_heads'])
    found['rope_parameters'] = gguf_rope.rope_parameters(metadata, header)
    found['attention_bias'] = 'blk.0.attn_q.bias' in header.tensors
    _add_heads(name, metadata, found)
    _add_windows(name, metadata, found)
    _add_own(name, metadata, found)
  if name == 'gemma4':
    _add_layers(found)
  return found


def _add_own(
  name: str, metadata: Mapping[str, Any], found: dict[str, Any]
) -> None:
  """Adds what follows from the architecture alone."""
  rope, original = found['rope_parameters'], 'original_max_position_embeddings'
  if name == 'phi3' and original in rope:  # It has a default beside these.
    found[original] = rope[original]
  if name == 'gpt-oss' and rope.get('rope_type') == 'yarn':
    rope['truncate'] = False  # No file says that pairs are not rounded.
  if name in ('granite', 'granitemoe', 'minicpm') and not found.get(
    'attention_multiplier'
  ):
    found['attention_multiplier'] = 1 / math.sqrt(found['head_dim'])
  if name == 'mistral3' and 'llama_4_scaling_beta' not in rope:
    found['model_type'] = 'mistral'  # Such as Mistral Small 3.
  if name in ('granite', 'granitemoe'):
    _add_rotation(metadata, found)


def _add_layers(found: dict[str, Any]) -> None:
  """Adds what differs between the layers of a Gemma 4.

  Raises:
    ValueError: their sizes are not those of such a model, or its rotation is
      missing.
  """
  rope = found['rope_parameters'].get('full_attention', {})
  if rope.get('rope_type') != 'proportional':
    raise ValueError(f'lacks the tensor {gguf_config.ROPE_FACTORS}')
  sizes, shared = found['intermediate_size'], found['num_kv_shared_layers']
  if isinstance(sizes, list):
    first = len(sizes) - shared
    if sizes != [sizes[0]] * first + [2 * sizes[0]] * shared:
      raise ValueError(
        f'gemma4.{gguf_config.INNER}={sizes!r:.60} is not supported,'
        f' only one size, and twice that in the last {shared} layers'
      )
    found |= {'intermediate_size': sizes[0], 'use_double_wide_mlp': True}
  found['vocab_size_per_layer_input'] = found['vocab_size']


def _add_rotation(metadata: Mapping[str, Any], found: dict[str, Any]) -> None:
  """Adds the keys of a Granite that has experts or rotates nothing."""
  rotates = metadata.get('rope.scaling.finetuned', True)
  if rotates and found['model_type'] == 'granite':
    return
  number = found.pop('num_experts', 0)
  size = 0 if number else found['intermediate_size']
  found |= {
    'model_type': 'granitemoehybrid',
    'num_local_experts': number,
    'shared_intermediate_size': found.get('shared_intermediate_size', size),
    'layer_types': ['attention'] * found['num_hidden_layers'],
    'position_embedding_type': 'rope' if rotates else None,
  }


def _layer_types(name: str, header: gguf_header.Header) -> list[str]:
  """Which layers have a state in place of keys and values."""
  key = f'{name}.{gguf_config.KV_HEADS}'
  heads = header.metadata.get(key)
  if not isinstance(heads, list):
    raise ValueError(
      f'{key} must say for each layer how many heads it has, got {heads!r:.60}'
    )
  states = str(gguf_config.ARCHITECTURES[name].state_layers)
  types = ['full_attention' if one else states for one in heads]
  return types[: gguf_config.num_layers(header, name)]


def _add_heads(
  name: str, metadata: Mapping[str, Any], found: dict[str, Any]
) -> None:
  """Adds the width of a head, and what its scores are divided by."""
  from_width = found['hidden_size'] // max(found['num_attention_heads'], 1)
  head_width = found.setdefault('head_dim', from_width)
  special = gguf_config.ARCHITECTURES[name].head_from_width
  if special is not None:
    found['query_pre_attn_scalar'] = (
      from_width if special == found['num_hidden_layers'] else head_width
    )
  rotated = metadata.get('rope.dimension_count', head_width)
  whole = found.get('global_head_dim', head_width)
  is_partial = model_types.MODEL_TYPES[found['model_type']].is_partial
  if is_partial and rotated < head_width:
    fraction = gguf_rope.part_of(rotated, head_width)
    found['rope_parameters']['partial_rotary_factor'] = fraction
  count, values = 'rope.dimension_count', 'attention.value_length'
  widths = {values: whole} if is_partial else {values: whole, count: whole}
  widths |= {f'{values}_swa': head_width, f'{count}_swa': head_width}
  gguf_config.check_widths(name, metadata, widths)


def _add_windows(
  name: str, metadata: Mapping[str, Any], found: dict[str, Any]
) -> None:
  """Adds which layers have the window, and how those rotate."""
  kind, number = gguf_config.ARCHITECTURES[name], found['num_hidden_layers']
  stated, theta = metadata.get(gguf_config.PATTERN), 'rope.freq_base_swa'
  window = found.get('sliding_window')
  if window and kind.windowed:
    found['model_type'] = kind.windowed
  is_local = model_types.MODEL_TYPES[found['model_type']].ropes == 'kinds'
  base = found['rope_parameters']['rope_theta']
  if not is_local and metadata.get(theta, base) != base:
    raise ValueError(
      f'{name}.{theta}={metadata[theta]} is not supported, since all'
      f' layers rotate by the base {base}'
    )
  if not window:
    found.pop('sliding_window', None)
    if stated is not None:
      raise ValueError(
        f'{name}.{gguf_config.PATTERN} says which layers have a window,'
        f' but {name}.attention.sliding_window lacks or is 0'
      )
    return
  pattern = kind.pattern if stated is None else stated
  if pattern is None:
    raise ValueError(
      f'{name}.attention.sliding_window={window}, but no'
      f' {name}.{gguf_config.PATTERN} says which layers have it'
    )
  if not isinstance(pattern, list):
    pattern = [pattern == 0 or (at + 1) % pattern for at in range(number)]
  if name == 'llama' and found['model_type'] == 'llama':
    found['model_type'] = 'mistral' if all(pattern) else 'ministral'
  types = ['sliding_attention' if one else 'full_attention' for one in pattern]
  found |= {'layer_types': types, 'use_sliding_window': True}
  if is_local:
    local = {'rope_theta': metadata.get(theta, kind.local_base or base)}
    found['rope_parameters'] = {
      'full_attention': found['rope_parameters'],
      'sliding_attention': local | {'rope_type': 'default'},
    }
