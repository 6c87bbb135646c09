"""Config keys and tensor names of the GPT-2 format of Hugging Face."""

from collections.abc import Mapping
import re
from typing import Any

import transformers

from models.checkpoints.keys import config_keys
from models.nn import gpt2 as nn_gpt2

# Buffers of old checkpoints: the causal mask, which is an argument here.
_BUFFERS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')
# The four `Conv1D` matrices of each block are stored `[in, out]`.
_TRANSPOSED = re.compile(r'h\.\d+\.(attn|mlp)\.\w+\.weight')
_PREFIX = 'transformer.'

# Fields of a `GPT2Config`, and their keys in config.json.
_KEYS = {
  'vocab_size': 'vocab_size',
  'num_positions': 'n_positions',
  'width': 'n_embd',
  'num_layers': 'n_layer',
  'num_heads': 'n_head',
  'inner_width': 'n_inner',
  'activation': 'activation_function',
  'norm_epsilon': 'layer_norm_epsilon',
  'scale_attention': 'scale_attn_weights',
  'scale_attention_by_layer': 'scale_attn_by_inverse_layer_idx',
  'tie_embeddings': 'tie_word_embeddings',
}
_READ = {*_KEYS.values(), 'bos_token_id', 'eos_token_id', 'pad_token_id'}


def read_config(raw: Mapping[str, Any]) -> nn_gpt2.GPT2Config:
  """Reads the keys of a `config.json`.

  `reorder_and_upcast_attn` requests float32 attention scores, which are always
  used here, so the key has no effect.

  Raises:
    ValueError: the keys describe something that is not a plain GPT-2.
  """
  kind = transformers.GPT2Config
  config_keys.check_types(raw, config_keys.types_of(kind))
  read = config_keys.select(kind, raw, _READ)
  config = kind.from_dict(read)
  config_keys.refuse_unread(raw, {*_READ, *read}, resolved=config)
  return nn_gpt2.GPT2Config(
    **{ours: getattr(config, key) for ours, key in _KEYS.items()}
  )


def to_hugging_face(
  config: nn_gpt2.GPT2Config, *, dtype: str, eos_token_id: int | None
) -> transformers.GPT2Config:
  """The transformers config of a shape; the inverse of `read_config`."""
  return transformers.GPT2Config(
    architectures=['GPT2LMHeadModel'],
    **{key: getattr(config, ours) for ours, key in _KEYS.items()},
    bos_token_id=eos_token_id,
    eos_token_id=eos_token_id,
    dtype=dtype,
  )


def canonical_name(stored: str, config: nn_gpt2.GPT2Config) -> str | None:
  """The canonical name of a stored tensor, or None for a known buffer.

  Checkpoints of `GPT2Model` lack the `transformer.` prefix of those of
  `GPT2LMHeadModel`. A tied head may be stored too; it is the token embedding.
  """
  name = stored.removeprefix(_PREFIX)
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and config.tie_embeddings:
    return 'wte.weight'
  return name


def stored_name(name: str, config: nn_gpt2.GPT2Config) -> str:
  """The name that `GPT2LMHeadModel` stores a canonical name under."""
  del config
  return name if name == 'lm_head.weight' else _PREFIX + name


def is_transposed(name: str) -> bool:
  """Whether a tensor is stored `[in, out]`, by its canonical name."""
  return _TRANSPOSED.fullmatch(name) is not None
