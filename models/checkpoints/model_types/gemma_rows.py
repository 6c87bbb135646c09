"""Gemma 1 to 4 (text)."""

import itertools
import re
from typing import Any

import numpy as np
import transformers

from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import gemma as gemma_lib

_Keys = model_type.Keys
_SHARED = 'num_kv_shared_layers'
_GEMMA4_FIXED = {
  'post_norm': True,
  'qk_norm': True,
  'value_norm': True,
  'attention_scale': 1.0,
}
_GEMMA4_EXTRA = {
  'global_head_dim': int | None,
  'per_layer_config': dict | None,
  _SHARED: int,
  'use_double_wide_mlp': bool,
  'vocab_size_per_layer_input': int,
}
_NAMES = model_type.POST_NORM_NAMES | {'ffn_norm': 'pre_feedforward_layernorm'}
_GEMMA4_NAMES = _NAMES | {
  'per_layer_token_embd': 'embed_tokens_per_layer',
  'per_layer_model_proj': 'per_layer_model_projection',
  'per_layer_proj_norm': 'per_layer_projection_norm',
  'inp_gate': 'per_layer_input_gate',
  'proj': 'per_layer_projection',
  'post_norm': 'post_per_layer_input_norm',
  'layer_output_scale.weight': 'layer_scalar',
}
_GEMMA4_KEYS = model_type.KEYS | {
  'attention.key_length': 'global_head_dim',
  'attention.key_length_swa': 'head_dim',
  'attention.shared_kv_layers': _SHARED,
  'embedding_length_per_layer_input': 'hidden_size_per_layer_input',
}
# Tensors that make the keys and values of attention.
_ENTRIES = re.compile(r'layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\..*')


def shift_norms(name: str, rows: np.ndarray) -> np.ndarray:
  """The scales of norms, from which folders subtract one."""
  is_norm = name.endswith('norm.weight')
  return rows.astype(np.float32) + np.float32(1) if is_norm else rows


def _reads_another(name: str, shape: gemma_lib.Gemma4Config) -> bool:
  """Whether a tensor makes keys of a layer that reads another layer's keys."""
  match, sources = _ENTRIES.fullmatch(name), shape.of_layers('kv_source')
  layer = int(match[1]) if match else len(sources)
  return layer < len(sources) and sources[layer] is not None


def _of_layers(config: Any) -> dict[str, Any]:
  """Fields of single layers of a Gemma 4."""
  overrides = config.to_dict().get('per_layer_config') or {}
  if others := {*itertools.chain(*overrides.values())} - {'head_dim'}:
    raise ValueError(
      f'per_layer_config has {sorted(others)}, but only head_dim may differ'
      ' between layers'
    )
  num_layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
  types, first = config.layer_types, num_layers - shared
  if not 0 < first <= num_layers:
    raise ValueError(
      f'{_SHARED}={shared} must lie between 0 and {num_layers - 1}, one below'
      f' num_hidden_layers'
    )
  sources: list[int | None] = [None] * first
  for layer_type in types[first:]:
    if layer_type not in types[:first]:
      raise ValueError(
        f'{_SHARED}={shared}: none of the others is of {layer_type}'
      )
    sources.append(max(at for at in range(first) if types[at] == layer_type))
  width, words = config.hidden_size_per_layer_input, config.vocab_size
  stated = config.vocab_size_per_layer_input
  if width and stated != words:
    raise ValueError(
      f'vocab_size_per_layer_input={stated} is not supported, only the'
      f' vocab_size, {words}'
    )
  size = config.intermediate_size
  wide = size * (2 if config.use_double_wide_mlp else 1)
  return {
    'kv_source': tuple(sources),
    'inner_width': (size,) * first + (wide,) * shared,
    'head_width': tuple(layer.head_dim for layer in config.per_layer_config),
  }


def _gemma4_layers(keys: _Keys, _: _Keys) -> dict[str, Any]:
  """The fields that differ between the layers of a Gemma 4."""
  rope = keys['rope_parameters'].get(model_type.FULL, {})
  if rope.get('rope_type') != 'proportional':
    raise ValueError(f'lacks the tensor {model_type.ROPE_FACTORS}')
  sizes, shared = keys['intermediate_size'], keys[_SHARED]
  words = {'vocab_size_per_layer_input': keys['vocab_size']}
  if not isinstance(sizes, list):
    return words
  first = len(sizes) - shared
  if sizes != [sizes[0]] * first + [2 * sizes[0]] * shared:
    raise ValueError(
      f'gemma4.{model_type.INNER}={sizes!r:.60} is not supported,'
      f' only one size, and twice that in the last {shared} layers'
    )
  return words | {'intermediate_size': sizes[0], 'use_double_wide_mlp': True}


ROWS = (
  model_type.ModelType(
    'gemma',
    transformers.GemmaConfig,
    shape=gemma_lib.GemmaConfig,
    convert=shift_norms,
    gguf=model_type.Architecture('gemma'),
  ),
  model_type.ModelType(
    'gemma2',
    transformers.Gemma2Config,
    shape=gemma_lib.GemmaConfig,
    fixed={'post_norm': True},
    convert=shift_norms,
    gguf=model_type.Architecture(
      'gemma2', names=_NAMES, pattern=2, head_from_width=46
    ),
  ),
  model_type.ModelType(
    'gemma3_text',
    transformers.Gemma3TextConfig,
    shape=gemma_lib.GemmaConfig,
    whole='gemma3',
    fixed={'post_norm': True, 'qk_norm': True},
    ropes='kinds',
    extra={
      'sliding_window_pattern': int,
      'rope_local_base_freq': float | None,
    },
    convert=shift_norms,
    gguf=model_type.Architecture(
      'gemma3',
      names=_NAMES,
      pattern=6,
      local_base=10000.0,
      head_from_width=62,
    ),
  ),
  model_type.ModelType(
    'gemma4_text',
    transformers.Gemma4TextConfig,
    shape=gemma_lib.Gemma4Config,
    module=gemma_lib.Gemma4,
    whole='gemma4',
    fixed=_GEMMA4_FIXED,
    ropes='kinds',
    extra=_GEMMA4_EXTRA,
    constants={'enable_moe_block': False, 'attention_k_eq_v': False},
    read=_of_layers,
    is_unused=_reads_another,
    gguf=model_type.Architecture(
      'gemma4',
      keys=_GEMMA4_KEYS,
      names=_GEMMA4_NAMES,
      local_base=10000.0,
      lists={model_type.INNER},
      finish=_gemma4_layers,
    ),
  ),
)
