"""Hugging Face's GPT-2 format: its config keys and its tensor names."""

from collections.abc import Mapping
import re
from typing import Any

import transformers

from models.checkpoints.family import Family
from models.checkpoints.family import parameter_name
from models.checkpoints.family import Path
from models.nn.gpt2 import GPT2
from models.nn.gpt2 import GPT2Config
from models.nn.layers import ACTIVATIONS

# Buffers of old checkpoints: the causal mask, which is an argument here.
_BUFFERS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')
_PREFIX = 'transformer.'


def read_config(raw: Mapping[str, Any]) -> GPT2Config:
  """Reads the keys of a `config.json`.

  `reorder_and_upcast_attn` asks for float32 attention scores; here they always
  are, so the key needs nothing.

  Raises:
    ValueError: they describe something that is not a plain GPT-2.
  """
  config = transformers.GPT2Config.from_dict(dict(raw))
  if config.activation_function not in ACTIVATIONS:
    raise ValueError(
      f'activation_function={config.activation_function!r} is not known;'
      f' choose from {sorted(ACTIVATIONS)}'
    )
  return GPT2Config(
    vocab_size=config.vocab_size,
    num_positions=config.n_positions,
    width=config.n_embd,
    num_layers=config.n_layer,
    num_heads=config.n_head,
    inner_width=config.n_inner,
    activation=config.activation_function,
    norm_epsilon=config.layer_norm_epsilon,
    scale_attention=config.scale_attn_weights,
    scale_attention_by_layer=config.scale_attn_by_inverse_layer_idx,
    tie_embeddings=config.tie_word_embeddings,
  )


def to_hugging_face(
  config: GPT2Config, *, dtype: str, eos_token_id: int | None
) -> transformers.GPT2Config:
  """The inverse of `read_config`."""
  return transformers.GPT2Config(
    architectures=['GPT2LMHeadModel'],
    vocab_size=config.vocab_size,
    n_positions=config.num_positions,
    n_embd=config.width,
    n_layer=config.num_layers,
    n_head=config.num_heads,
    n_inner=config.inner_width,
    activation_function=config.activation,
    layer_norm_epsilon=config.norm_epsilon,
    scale_attn_weights=config.scale_attention,
    scale_attn_by_inverse_layer_idx=config.scale_attention_by_layer,
    tie_word_embeddings=config.tie_embeddings,
    bos_token_id=eos_token_id,
    eos_token_id=eos_token_id,
    dtype=dtype,
  )


def canonical_name(stored: str, config: GPT2Config) -> str | None:
  """The name a stored tensor goes by here, or None for a known buffer.

  Checkpoints of `GPT2Model` lack the `transformer.` prefix of those of
  `GPT2LMHeadModel`. A tied head may be stored too; it is the token embedding.

  Args:
    stored: the name in the file.
    config: of the model.

  Returns:
    E.g. `h.0.attn.c_attn.weight`.
  """
  name = stored.removeprefix(_PREFIX)
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and config.tie_embeddings:
    return 'wte.weight'
  return name


def _stored_name(path: Path, config: GPT2Config) -> str:
  """As `GPT2LMHeadModel` writes it."""
  del config
  name = parameter_name(path)
  return name if path == ('lm_head',) else _PREFIX + name


def _is_transposed(path: Path) -> bool:
  """The four `Conv1D` matrices of each block."""
  return path[0] == 'h' and path[-1] == 'weight'


FAMILY = Family(
  name='GPT-2',
  model_types=frozenset({'gpt2'}),
  module=GPT2,
  config=GPT2Config,
  read_config=read_config,
  to_hugging_face=to_hugging_face,
  canonical_name=canonical_name,
  stored_name=_stored_name,
  is_transposed=_is_transposed,
  stays_float=lambda path: path[0] == 'wpe',
)
