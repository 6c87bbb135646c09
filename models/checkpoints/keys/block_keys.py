"""The keys of the configurations of block drafters, by who writes them.

    z-lab, SpecForge, Liquid  `dflash_config` next to the keys of the layers
    DeepSpec, GGUF            all keys in one object
    speculators               the layers in `transformer_layer_config`

The lists of layers differ: `target_layer_ids` names the layers that write a
state, `aux_hidden_state_layer_ids` of speculators the layers that read it, each
one more.
"""

from collections.abc import Mapping
from typing import Any

from specdec.models.checkpoints.keys import head_keys

_NESTED = 'dflash_config'
_SPECULATORS = 'speculators_model_type'
_WRITTEN, _READ = 'target_layer_ids', 'aux_hidden_state_layer_ids'
_NUMBERS = (
  'block_size',
  'mask_token_id',
  'markov_rank',
  'draft_vocab_size',
  'target_hidden_size',
  'num_target_layers',
  'conv_kernel_size',
  'conv_group_size',
  'selector_rank',
  'selector_top_k',
  'vocab_size',
)
_FLAGS = (
  'sample_from_anchor',
  'is_causal',
  'causal',
  'causal_head',
  'sliding_window_non_causal',
  'enable_confidence_head',
  'confidence_head_with_markov',
  'rope_is_neox_style',
  'use_sliding_window',
)
_FACTORS = (
  'output_multiplier',
  'input_embedding_scale',
  'final_logit_softcapping',
)
_TEXTS = ('markov_head_type', 'projector_type', 'attention_mode', _SPECULATORS)
_TYPES: dict[str, Any] = {
  **dict.fromkeys(_NUMBERS, int | None),
  **dict.fromkeys(_FLAGS, bool | None),
  **dict.fromkeys(_FACTORS, float | None),
  **dict.fromkeys(_TEXTS, str | None),
  **dict.fromkeys((_WRITTEN, _READ), list[int] | None),
}
# Keys of the training, and of how others run a drafter.
_IDLE = (
  'num_anchors',
  'confidence_head_alpha',
  'runtime_block_size',
  'block_size_policy',
  'prefer_requested_block_size',
  'loss_decay_gamma',
)
# Values of keys that name what is supported.
_SUPPORTED = {
  'projector_type': ('dflash', 'dflash2', 'dspark'),
  'attention_mode': ('gqa', 'mha'),
  _SPECULATORS: ('dflash', 'dflash2', 'dspark'),
  'markov_head_type': ('vanilla', 'gated'),
  'model_type': ('qwen3', 'qwen2', 'llama', 'mistral'),
}
_LAYERS = {'vocab_size', 'use_sliding_window'}  # Keys of layers, too.
SIZES = (
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'head_dim',
  'vocab_size',
)
"""Keys of layers that the tensors or the target say."""


def flat(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of all objects of a config.json as one, see `head_keys.flat`."""
  return head_keys.flat(raw, _NESTED, _TYPES)


def merged(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of `flat`, checked: a block drafter with them is supported.

  Raises:
    ValueError: a key is missing, has another type or a value that is not
      supported, or contradicts another one.
  """
  keys = flat(raw)
  for key, supported in _SUPPORTED.items():
    if key == 'markov_head_type' and not keys.get('markov_rank'):
      continue  # Without a rank the drafter has no such term.
    if keys.get(key) not in (None, *supported):
      raise ValueError(
        f'{key}={keys[key]!r} is not supported; choose a block drafter with one'
        f' of {supported}'
      )
  for key in ('block_size', 'mask_token_id', 'num_attention_heads'):
    if keys.get(key) is None:
      raise ValueError(f'lacks the key {key}')
  return keys


def reads(keys: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
  """The states of a target that a drafter reads, keys of `KVCache.hidden`.

  Raises:
    ValueError: the keys do not say, or the target has no such layer.
  """
  name = _READ if keys.get(_SPECULATORS) else _WRITTEN
  stated = keys.get(name)
  if not stated:
    raise ValueError(
      f'lacks the key {name}, the layers of the target whose states are read;'
      ' they cannot be guessed'
    )
  read = [layer + (name == _WRITTEN) for layer in stated]
  if num_layers in read:
    raise ValueError(
      f'{name}={stated!r} has the last of {num_layers} layers of the target;'
      ' some take its state before the final norm and some after it, so it is'
      ' not supported'
    )
  if not all(0 <= layer < num_layers for layer in read):
    raise ValueError(
      f'{name}={stated!r}: the target has {num_layers} layers; is this a'
      ' drafter for another target?'
    )
  return tuple(read)


def _uses_window(keys: Mapping[str, Any]) -> bool:
  """Whether layers of the kind `sliding_attention` have a window.

  Among the classes of transformers only Qwen's have a switch. It is off if a
  file does not have it.
  """
  has_switch = keys.get('model_type') in (None, 'qwen2', 'qwen3')
  is_on = not has_switch or bool(keys.get('use_sliding_window'))
  return is_on and bool(keys.get('sliding_window'))


def fields(keys: Mapping[str, Any], slides: tuple[bool, ...]) -> dict[str, Any]:
  """Fields of a `BlockDrafterConfig`; `slides`: which layers have a window."""
  of_speculators = bool(keys.get(_SPECULATORS))
  # Without a window, layers of speculators see the whole block.
  causal: bool | tuple[bool, ...] = slides
  if of_speculators:
    all_see = keys.get('sliding_window_non_causal')
    if all_see is None:
      all_see = keys[_SPECULATORS] == 'dflash2'
    if all_see or not _uses_window(keys):
      causal = False
  for key in ('is_causal', 'causal', 'causal_head'):
    if keys.get(key) is not None:
      causal = keys[key]
  from_root = keys.get('sample_from_anchor')
  if from_root is None:
    from_root = not of_speculators and bool(keys.get('markov_rank'))
  return {
    'block_size': keys['block_size'],
    'mask_token': keys['mask_token_id'],
    'samples_root': from_root,
    'causal': causal,
    'window_from_root': of_speculators,
    'embedding_scale': keys.get('input_embedding_scale') or 1.0,
    'logit_divisor': 1 / (keys.get('output_multiplier') or 1.0),
    'logit_cap': keys.get('final_logit_softcapping') or None,
    'num_candidates': keys.get('selector_top_k'),
  }


def of_layers(keys: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of a Qwen 3 of the layers of a drafter; see `families`.

  Ignores `model_type`, which is often copied from the target.
  """
  others = {*_TYPES, *_IDLE} - _LAYERS
  layers = {key: keys[key] for key in keys if key not in others}
  layers['use_sliding_window'] = _uses_window(keys)
  return layers | {'model_type': 'qwen3', 'tie_word_embeddings': False}
