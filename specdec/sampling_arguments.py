"""Checked parameters of sampling, as arrays, from `specdec.Sampling`."""

from collections.abc import Mapping
from collections.abc import Sequence
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import arguments as arguments_lib
from specdec import sampling as sampling_lib


def _dense_bias(bias: Any, batch_size: int, vocab_size: int) -> Any:
  """A mapping, or one per row, or an array, as `[V]` or `[B, V]`."""
  if isinstance(bias, Mapping):
    dense = np.zeros(vocab_size, np.float32)
    tokens = arguments_lib.to_ids('logit_bias', list(bias), vocab_size)
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


# Stands for all tokens, where other rows have a k.
_ALL = np.iinfo(np.int32).max


def _top_k_params(top_k: Any, batch_size: int) -> dict[str, Any]:
  """As `[B]` int32, and a power of two that is at least as large."""
  if hasattr(top_k, 'dtype'):
    top_k = np.asarray(top_k).tolist()
  single = isinstance(top_k, (numbers.Number, str))
  entries = [top_k] if single else list(top_k)
  for entry in entries:
    if entry is not None and not (
      arguments_lib.is_integer(entry) and entry >= 1
    ):
      raise ValueError(f'top_k must be a positive integer, got {top_k}')
  counts = [_ALL if entry is None else min(entry, _ALL) for entry in entries]
  array = _per_row(
    'top_k', counts[0] if single else counts, batch_size, np.int32
  )
  if min(counts) == _ALL:
    return {}
  largest = max(counts)
  bound = None if largest == _ALL else 1 << (largest - 1).bit_length()
  return {'top_k': jnp.asarray(array), 'max_top_k': bound}


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
  """As `decode` takes it: one value per row, biases as arrays.

  Raises:
    ValueError: a value is out of range or of another shape; says which.
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
