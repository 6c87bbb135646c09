"""Checks of arguments that users pass; what cannot be used is a `ValueError`.

The error names the argument, its value and the remedy.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_text(name: str, text: str) -> None:
  """Refuses half of a surrogate pair, which no tokenizer can encode."""
  for position, letter in enumerate(text):
    if '\ud800' <= letter <= '\udfff':
      raise ValueError(
        f'{name} has the lone surrogate {letter!r} at position {position} of'
        f' {text[max(position - 8, 0) : position + 8]!r}; give valid Unicode'
      )


def is_integer(value: Any) -> bool:
  """Whether a value is an integer of Python or NumPy, and no bool."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(
  name: str, value: Any, largest: float = np.inf, least: int = 1
) -> None:
  """Refuses what is no integer from the least to the largest."""
  if not (is_integer(value) and least <= value <= largest):
    bound = '' if largest == np.inf else f' and at most {largest}'
    raise ValueError(
      f'{name} must be an integer of at least {least}{bound}, got {value!r}'
    )


def to_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
  """Token ids as a list."""
  is_list = isinstance(ids, Iterable) and not isinstance(ids, Mapping)
  array = np.asarray(list(ids)) if is_list else np.zeros(())
  if array.ndim != 1 or (array.size and array.dtype.kind not in 'iu'):
    raise ValueError(f'{name} must be a list of token ids, got {ids!r}')
  outside = array[(array < 0) | (array >= vocab_size)]
  if outside.size:
    raise ValueError(
      f'{name} has token {outside[0]}, outside the vocabulary of {vocab_size}'
    )
  return [int(token) for token in array]


def to_prompt(name: str, prompt: Any, vocab_size: int) -> list[int]:
  """The token ids of a prompt as a list."""
  ids = to_ids(name, prompt, vocab_size)
  if not ids:
    raise ValueError(f'{name} is empty; give at least one token, e.g. the EOS')
  return ids


def to_prompts(prompts: Any, vocab_size: int) -> list[list[int]]:
  """The prompts as lists."""
  if not isinstance(prompts, Iterable):
    raise ValueError(f'prompts must be lists of token ids, got {prompts!r}')
  checked = [
    to_prompt(f'prompt {row}', prompt, vocab_size)
    for row, prompt in enumerate(prompts)
  ]
  if not checked:
    raise ValueError('prompts is empty; give at least one')
  return checked


def to_limits(
  prompts: Sequence[Sequence[int]],
  max_new_tokens: Any,
  room: Any,
  context: int,
) -> tuple[np.ndarray, int]:
  """The limits as `[B]` int32, and the room for new tokens."""
  limits = np.asarray(max_new_tokens)
  if limits.shape not in ((), (len(prompts),)) or limits.dtype.kind not in 'iu':
    raise ValueError(
      'max_new_tokens must be an integer, or one per row'
      f' ({len(prompts)}), got {max_new_tokens}'
    )
  limits = np.broadcast_to(limits, len(prompts))
  if limits.min() < 0:
    raise ValueError(f'max_new_tokens must be at least 0, got {max_new_tokens}')
  fits = is_integer(room) and limits.max() <= room <= context
  if room is not None and not fits:
    raise ValueError(
      f'room_for_new_tokens must be an integer from max_new_tokens='
      f'{max_new_tokens} to the context of the target, {context} tokens; got'
      f' {room!r}'
    )
  for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
    if len(prompt) + limit > context:
      raise ValueError(
        f'prompt {row} of {len(prompt)} tokens and max_new_tokens={limit}'
        f' exceed the context of the target, {context} tokens'
      )
  largest = int(limits.max())
  return limits.astype(np.int32), largest if room is None else int(room)


def row_keys(rng_key: jax.Array, batch_size: int) -> jax.Array:
  """`[B]` keys: as given, or one key folded with the number of the row."""
  dtype = getattr(rng_key, 'dtype', type(rng_key))
  if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    raise ValueError(
      'rng_key must be made by jax.random.key, whose keys are scalars, got'
      f' {dtype}'
    )
  if 'rbg' in str(jax.random.key_impl(rng_key)):
    raise ValueError(
      f'rng_key is of the kind {jax.random.key_impl(rng_key)}, whose draws'
      ' under vmap depend on the first key alone; make it by'
      " jax.random.key(seed, impl='threefry2x32'), and leave"
      ' jax_default_prng_impl as it is'
    )
  if rng_key.shape == (batch_size,):
    return rng_key
  if rng_key.shape:
    raise ValueError(
      f'rng_key must be one key or one per row ({batch_size}), got'
      f' {rng_key.shape}'
    )
  rows = jnp.arange(batch_size)
  return jax.vmap(jax.random.fold_in, (None, 0))(rng_key, rows)
