"""Hugging Face's GPT-2 format: its config keys and its tensor names."""

import json
import pathlib
import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
import jax
import transformers

from models.gpt2 import ACTIVATIONS
from models.gpt2 import GPT2Config

# Buffers of old checkpoints: the causal mask, which is an argument here.
_BUFFERS = re.compile(r'h\.\d+\.attn\.(bias|masked_bias)')
_PREFIX = 'transformer.'

# Config keys that change the computation in ways this module does not know,
# each with the only values that leave it alone.
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
  'add_cross_attention': (False, None),
  'auto_map': (None,),
  'pruned_heads': ({}, None),
  'quantization_config': (None,),
}


def read_config(path: pathlib.Path) -> GPT2Config:
  """Reads a `config.json`.

  `reorder_and_upcast_attn` asks for float32 attention scores; here they always
  are, so the key needs nothing.

  Args:
    path: of the file.

  Returns:
    The shape of the model.

  Raises:
    ValueError: the file describes something that is not a plain GPT-2; names
      the key and its value.
  """
  try:
    raw = json.loads(path.read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON: {error}') from error
  if not isinstance(raw, dict) or raw.get('model_type') != 'gpt2':
    kind = raw.get('model_type') if isinstance(raw, dict) else raw
    raise ValueError(f'{path}: model_type {kind!r} is not known, only gpt2 is')
  for key, harmless in _REFUSED_UNLESS.items():
    if raw.get(key) not in harmless:
      raise ValueError(f'{path}: {key}={raw[key]!r} is not supported')
  try:
    config = transformers.GPT2Config.from_dict(raw)
  except StrictDataclassError as error:
    raise ValueError(f'{path}: {error}') from error
  if config.activation_function not in ACTIVATIONS:
    raise ValueError(
      f'{path}: activation_function={config.activation_function!r} is not'
      f' known; choose from {sorted(ACTIVATIONS)}'
    )
  try:
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
  except (TypeError, ValueError) as error:
    raise ValueError(f'{path}: {error}') from error


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


def stored_name(path: tuple[Any, ...]) -> str:
  """The canonical name of a parameter path such as `('h', 0, 'ln_1', 'scale')`.

  Embeddings call their array `embedding`, norms `scale`; checkpoints `weight`.
  """
  *parents, leaf = (str(part) for part in path)
  if path == ('lm_head',):
    return 'lm_head.weight'
  leaf = 'weight' if leaf in ('embedding', 'scale') else leaf
  return '.'.join([*parents, leaf])


def stored_full_name(path: tuple[Any, ...]) -> str:
  """`stored_name` as `GPT2LMHeadModel` writes it."""
  name = stored_name(path)
  return name if name.startswith('lm_head') else _PREFIX + name


def is_transposed(path: tuple[Any, ...]) -> bool:
  """Whether a checkpoint stores `[in, out]` where this library has `[out, in]`.

  True for the four `Conv1D` matrices of each block.
  """
  return path[0] == 'h' and path[-1] == 'weight'


def stored_shape(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct):
  """The shape that a parameter has in the checkpoint."""
  return leaf.shape[::-1] if is_transposed(path) else leaf.shape
