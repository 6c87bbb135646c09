"""Arguments that users pass, checked, and as arrays of padded sizes.

A value that cannot be used raises a `ValueError`, which names the argument, the
value and the remedy.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling as sampling_lib


def check_text(name: str, text: str) -> None:
  """Refuses half of a surrogate pair, which no tokenizer can encode."""
  for position, letter in enumerate(text):
    if '\ud800' <= letter <= '\udfff':
      raise ValueError(
        f'{name} has the lone surrogate {letter!r} at position {position} of'
        f' {text[max(position - 8, 0) : position + 8]!r}; give valid Unicode'
      )


def is_integer(value: Any) -> bool:
  """Whether a value is an integer of Python or NumPy, but not a bool."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(
  name: str, value: Any, largest: float = np.inf, least: int = 1
) -> None:
  """Refuses everything but integers from `least` to `largest`."""
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
      f'rng_key must be a scalar key, made by jax.random.key, got {dtype}'
    )
  if 'rbg' in str(jax.random.key_impl(rng_key)):
    raise ValueError(
      f'rng_key is of the kind {jax.random.key_impl(rng_key)}; under vmap its'
      ' draws depend on the first key alone; make it by'
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


# Few shapes, so that few programs are compiled.
_SMALLEST_PROMPT_BUCKET = 32
_NEW_TOKENS_BUCKET = 64


def padded_length(length: int) -> int:
  """The number of slots for a prompt of `length` tokens."""
  return max(_SMALLEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def padded_room(room: int) -> int:
  """The number of slots for `room` new tokens."""
  return -(-max(room, 1) // _NEW_TOKENS_BUCKET) * _NEW_TOKENS_BUCKET


def padded_shape(
  prompts: Sequence[Sequence[int]], room: int
) -> tuple[int, int]:
  """P, the slots for the prompts of a batch, and the slots for new tokens."""
  return padded_length(max(map(len, prompts))), padded_room(room)


def pad(
  prompts: Sequence[Sequence[int]], num_slots: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """`[B, P]` int32, padded with zeros at the end, and the lengths, `[B]`.

  P is `num_slots`; None: as the prompts need, a power of two.
  """
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  bucket = num_slots or padded_length(int(lengths.max()))
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  return padded, lengths


def _dense_bias(bias: Any, batch_size: int, vocab_size: int) -> Any:
  """A mapping, or one per row, or an array, as `[V]` or `[B, V]`."""
  if isinstance(bias, Mapping):
    dense = np.zeros(vocab_size, np.float32)
    tokens = to_ids('logit_bias', list(bias), vocab_size)
    try:
      dense[tokens] = [float(value) for value in bias.values()]
    except (OverflowError, TypeError, ValueError) as error:
      raise ValueError(
        f'logit_bias must map tokens to numbers, got {bias}'
      ) from error
    return dense
  if isinstance(bias, Sequence) and any(
    row is None or isinstance(row, Mapping) for row in bias
  ):
    if len(bias) != batch_size:
      raise ValueError(
        f'logit_bias must be one mapping or one per row ({batch_size}), got'
        f' {len(bias)}'
      )
    return np.stack(
      [_dense_bias(row or {}, batch_size, vocab_size) for row in bias]
    )
  shape = np.shape(bias)
  if shape not in ((vocab_size,), (batch_size, vocab_size)):
    raise ValueError(
      'logit_bias must be a mapping from token to number, or an array of shape'
      f' {(vocab_size,)} or {(batch_size, vocab_size)}, got shape {shape}'
    )
  return bias


def _per_row(name: str, value: Any, batch_size: int, dtype: Any) -> np.ndarray:
  """A number, or one per row, as `[B]` of a dtype."""
  try:
    if value is None:  # NumPy would take it for NaN
      raise TypeError
    array = np.asarray(value, dtype)
  except (OverflowError, TypeError, ValueError) as error:
    raise ValueError(
      f'{name} must be a number or one per row, got {value!r:.60}'
    ) from error
  if array.shape not in ((), (batch_size,)):
    raise ValueError(
      f'{name} must be one number or one per row ({batch_size}), got an array'
      f' of shape {array.shape}'
    )
  return np.broadcast_to(array, batch_size)


_TINY = float(np.finfo(np.float32).tiny)


_RANGES: dict[str, tuple[float, float, str]] = {
  'repetition_penalty': (1e-3, 1e3, 'between 0.001 and 1000'),
  'temperature': (0.0, 1e6, 'between 0 and 1000000'),
  'top_p': (_TINY, 1.0, 'above 0 and at most 1'),
  'min_p': (0.0, 1.0, 'between 0 and 1'),
}


def sampling_value(name: str, value: Any, batch_size: int = 1) -> np.ndarray:
  """A number of `Sampling`, or one per row, as `[B]` float32."""
  low, high, bounds = _RANGES[name]
  array = _per_row(name, value, batch_size, np.float32)
  if not np.all(np.isfinite(array) & (array >= low) & (array <= high)):
    raise ValueError(f'{name} must be {bounds}, got {value}')
  return array


ALL_TOKENS = np.iinfo(np.int32).max
"""A `top_k` of rows that keep all tokens, where other rows have a k."""


def _top_k_params(top_k: Any, batch_size: int) -> dict[str, Any]:
  """As `[B]` int32, and a power of two that is at least as large."""
  if hasattr(top_k, 'dtype'):
    top_k = np.asarray(top_k).tolist()
  single = isinstance(top_k, (numbers.Number, str))
  entries = [top_k] if single else list(top_k)
  for entry in entries:
    if entry is not None and not (is_integer(entry) and entry >= 1):
      raise ValueError(f'top_k must be a positive integer, got {top_k}')
  counts = [
    ALL_TOKENS if entry is None else min(entry, ALL_TOKENS) for entry in entries
  ]
  array = _per_row(
    'top_k', counts[0] if single else counts, batch_size, np.int32
  )
  if min(counts) == ALL_TOKENS:
    return {}
  largest = max(count for count in counts if count < ALL_TOKENS)
  return {
    'top_k': jnp.asarray(array),
    'max_top_k': 1 << (largest - 1).bit_length(),
    'some_keep_all': max(counts) == ALL_TOKENS,
  }


def _checked_bias(bias: Any, batch_size: int, vocab_size: int) -> jax.Array:
  """As `[V]` or `[B, V]` float32."""
  bias = _dense_bias(bias, batch_size, vocab_size)
  try:
    array = np.asarray(bias, np.float32)
  except (TypeError, ValueError) as error:
    raise ValueError('logit_bias must be numbers or -inf') from error
  if np.any(np.isnan(array) | (array == np.inf)):
    raise ValueError('logit_bias must be numbers or -inf')
  if np.any(np.all(array == sampling_lib.EXCLUDED, axis=-1)):
    raise ValueError('logit_bias bans every token; leave one at least')
  return jnp.asarray(array)


def to_params(
  sampling: sampling_lib.Sampling, batch_size: int, vocab_size: int
) -> sampling_lib.SamplingParams:
  """`Sampling` as `decode` takes it: one value per row, biases as arrays.

  Raises:
    ValueError: a value is out of range or has another shape; names it.
  """
  if not isinstance(sampling, sampling_lib.Sampling):
    raise ValueError(f'sampling must be a specdec.Sampling, got {sampling!r}')
  arrays: dict[str, Any] = {}
  for name in _RANGES:
    value = getattr(sampling, name)
    if value is not None or name == 'temperature':
      arrays[name] = jnp.asarray(sampling_value(name, value, batch_size))
  if sampling.logit_bias is not None:
    bias = _checked_bias(sampling.logit_bias, batch_size, vocab_size)
    arrays['logit_bias'] = bias
  if sampling.top_k is not None:
    arrays |= _top_k_params(sampling.top_k, batch_size)
  return sampling_lib.SamplingParams(**arrays)
