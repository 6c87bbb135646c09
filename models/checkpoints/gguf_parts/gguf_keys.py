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
  architecture = gguf_config.ARCHITECTURES[name]
  metadata = gguf_config.own_keys(header, name)
  num_experts = metadata.get('expert_count', 0)
  model_type = architecture.mixture if num_experts > 0 else architecture.plain
  if model_type is None:
    raise ValueError(f'{name} with {num_experts} experts is not supported')
  gguf_config.check_keys(name, metadata)
  if 'token_embd.weight' not in header.tensors:
    raise ValueError('lacks the tensor token_embd.weight')
  keys = {
    theirs: metadata[key]
    for key, theirs in architecture.keys.items()
    if key in metadata and (num_experts > 0 or not key.startswith('expert_'))
  }
  vocab_size = header.tensors['token_embd.weight'].shape[0]
  if metadata.get('vocab_size', vocab_size) != vocab_size:
    raise ValueError(
      f'{name}.vocab_size={metadata["vocab_size"]} contradicts the'
      f' {vocab_size} rows of token_embd.weight'
    )
  keys |= {
    'model_type': model_type,
    'vocab_size': vocab_size,
    'tie_word_embeddings': 'output.weight' not in header.tensors,
  }
  keys |= architecture.fixed
  if architecture.state_layers:
    keys['layer_types'] = _layer_types(name, header)
  if name == 'qwen35':
    inner, heads = (
      metadata.get(key, 0) for key in ('ssm.inner_size', 'ssm.time_step_rank')
    )
    keys['linear_value_head_dim'] = inner // max(heads, 1)
  if num_experts > 0:
    keys |= {'norm_topk_prob': True, 'num_experts': num_experts}
  if name != 'gpt2':
    # Classes of transformers have other defaults.
    keys.setdefault('num_key_value_heads', keys['num_attention_heads'])
    keys['rope_parameters'] = gguf_rope.rope_parameters(metadata, header)
    keys['attention_bias'] = 'blk.0.attn_q.bias' in header.tensors
    _add_heads(name, metadata, keys)
    _add_windows(name, metadata, keys)
    _add_own(name, metadata, keys)
  if name == 'gemma4':
    _add_layers(keys)
  return keys


def _add_own(
  name: str, metadata: Mapping[str, Any], keys: dict[str, Any]
) -> None:
  """Adds what follows from the architecture alone."""
  rope, original = keys['rope_parameters'], 'original_max_position_embeddings'
  if name == 'phi3' and original in rope:  # Phi-3 has this key outside, too.
    keys[original] = rope[original]
  if name == 'gpt-oss' and rope.get('rope_type') == 'yarn':
    rope['truncate'] = False  # No file says that pairs are not rounded.
  if name in ('granite', 'granitemoe', 'minicpm') and not keys.get(
    'attention_multiplier'
  ):
    keys['attention_multiplier'] = 1 / math.sqrt(keys['head_dim'])
  if name == 'mistral3' and 'llama_4_scaling_beta' not in rope:
    keys['model_type'] = 'mistral'  # Such as Mistral Small 3.
  if name in ('granite', 'granitemoe'):
    _add_rotation(metadata, keys)


def _add_layers(keys: dict[str, Any]) -> None:
  """Adds what differs between the layers of a Gemma 4.

  Raises:
    ValueError: a Gemma 4 has no layers of these sizes, or the rotation is
      missing.
  """
  rope = keys['rope_parameters'].get('full_attention', {})
  if rope.get('rope_type') != 'proportional':
    raise ValueError(f'lacks the tensor {gguf_config.ROPE_FACTORS}')
  sizes, shared = keys['intermediate_size'], keys['num_kv_shared_layers']
  if isinstance(sizes, list):
    first = len(sizes) - shared
    if sizes != [sizes[0]] * first + [2 * sizes[0]] * shared:
      raise ValueError(
        f'gemma4.{gguf_config.INNER}={sizes!r:.60} is not supported,'
        f' only one size, and twice that in the last {shared} layers'
      )
    keys |= {'intermediate_size': sizes[0], 'use_double_wide_mlp': True}
  keys['vocab_size_per_layer_input'] = keys['vocab_size']


def _add_rotation(metadata: Mapping[str, Any], keys: dict[str, Any]) -> None:
  """Adds the keys of a Granite that has experts or rotates nothing."""
  rotates = metadata.get('rope.scaling.finetuned', True)
  if rotates and keys['model_type'] == 'granite':
    return
  num_experts = keys.pop('num_experts', 0)
  size = 0 if num_experts else keys['intermediate_size']
  keys |= {
    'model_type': 'granitemoehybrid',
    'num_local_experts': num_experts,
    'shared_intermediate_size': keys.get('shared_intermediate_size', size),
    'layer_types': ['attention'] * keys['num_hidden_layers'],
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
  types = ['full_attention' if num_heads else states for num_heads in heads]
  return types[: gguf_config.num_layers(header, name)]


def _add_heads(
  name: str, metadata: Mapping[str, Any], keys: dict[str, Any]
) -> None:
  """Adds the width of a head, and what its scores are divided by."""
  from_width = keys['hidden_size'] // max(keys['num_attention_heads'], 1)
  head_width = keys.setdefault('head_dim', from_width)
  special = gguf_config.ARCHITECTURES[name].head_from_width
  if special is not None:
    keys['query_pre_attn_scalar'] = (
      from_width if special == keys['num_hidden_layers'] else head_width
    )
  rotated = metadata.get('rope.dimension_count', head_width)
  whole = keys.get('global_head_dim', head_width)
  is_partial = model_types.MODEL_TYPES[keys['model_type']].is_partial
  if is_partial and rotated < head_width:
    fraction = gguf_rope.part_of(rotated, head_width)
    keys['rope_parameters']['partial_rotary_factor'] = fraction
  count, values = 'rope.dimension_count', 'attention.value_length'
  widths = {values: whole} if is_partial else {values: whole, count: whole}
  widths |= {f'{values}_swa': head_width, f'{count}_swa': head_width}
  gguf_config.check_widths(name, metadata, widths)


def _add_windows(
  name: str, metadata: Mapping[str, Any], keys: dict[str, Any]
) -> None:
  """Adds which layers have the window, and how those rotate."""
  architecture, num_layers = (
    gguf_config.ARCHITECTURES[name],
    keys['num_hidden_layers'],
  )
  stated, theta = metadata.get(gguf_config.PATTERN), 'rope.freq_base_swa'
  window = keys.get('sliding_window')
  if window and architecture.windowed:
    keys['model_type'] = architecture.windowed
  is_local = model_types.MODEL_TYPES[keys['model_type']].ropes == 'kinds'
  base = keys['rope_parameters']['rope_theta']
  if not is_local and metadata.get(theta, base) != base:
    raise ValueError(
      f'{name}.{theta}={metadata[theta]} is not supported, since all'
      f' layers rotate by the base {base}'
    )
  if not window:
    keys.pop('sliding_window', None)
    if stated is not None:
      raise ValueError(
        f'{name}.{gguf_config.PATTERN} says which layers have a window,'
        f' but {name}.attention.sliding_window lacks or is 0'
      )
    return
  pattern = architecture.pattern if stated is None else stated
  if pattern is None:
    raise ValueError(
      f'{name}.attention.sliding_window={window}, but no'
      f' {name}.{gguf_config.PATTERN} says which layers have it'
    )
  if not isinstance(pattern, list):
    pattern = [pattern == 0 or (at + 1) % pattern for at in range(num_layers)]
  if name == 'llama' and keys['model_type'] == 'llama':
    keys['model_type'] = 'mistral' if all(pattern) else 'ministral'
  types = [
    'sliding_attention' if has_window else 'full_attention'
    for has_window in pattern
  ]
  keys |= {'layer_types': types, 'use_sliding_window': True}
  if is_local:
    local = {'rope_theta': metadata.get(theta, architecture.local_base or base)}
    keys['rope_parameters'] = {
      'full_attention': keys['rope_parameters'],
      'sliding_attention': local | {'rope_type': 'default'},
    }
