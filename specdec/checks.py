"""Arguments as users give them: checked, and as `decode` wants them.

What cannot be used is a `ValueError` that names the argument and the remedy.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.draft.drafter import Drafter
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.verify.rejection import BEST
from specdec.verify.rejection import WITHOUT_REPLACEMENT
from specdec.verify.stop_strings import StopTable


def check_names(options: Mapping[str, Any], known: Iterable[str]) -> None:
  """Refuses keyword arguments that are not known, or a missing limit.

  Args:
    options: by name.
    known: names.

  Raises:
    TypeError: says which.
  """
  unknown = set(options) - set(known)
  if unknown:
    raise TypeError(
      f'unexpected arguments {sorted(unknown)}; there are {sorted(known)}'
    )
  if 'max_new_tokens' not in options:
    raise TypeError('max_new_tokens is needed')


def check_drafter(target: Model, drafter: Drafter) -> None:
  """Refuses stages that share a name, or have another vocabulary."""
  ours = target.definition.vocab_size
  labels = ('target', 'plain', *drafter.labels)
  if len(set(labels)) < len(labels):
    raise ValueError(
      'every stage needs a name of its own, neither target nor plain, got'
      f' {drafter.labels}'
    )
  for stage in drafter.stages:
    theirs = stage.scorer.vocab_size
    if theirs not in (None, ours):
      raise ValueError(
        f'the target has a vocabulary of {ours} tokens, the {stage.name} of'
        f' {theirs}; choose one that was made with the tokenizer of the target'
      )


def check_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
  """Token ids as a list."""
  array = np.asarray(list(ids)) if isinstance(ids, Iterable) else np.zeros(())
  if array.ndim != 1 or (array.size and array.dtype.kind not in 'iu'):
    raise ValueError(f'{name} must be a list of token ids, got {ids!r}')
  outside = array[(array < 0) | (array >= vocab_size)]
  if outside.size:
    raise ValueError(
      f'{name} has token {outside[0]}, outside the vocabulary of {vocab_size}'
    )
  return [int(token) for token in array]


def check_prompts(prompts: Any, vocab_size: int) -> list[list[int]]:
  """The prompts as lists."""
  if not isinstance(prompts, Iterable):
    raise ValueError(f'prompts must be lists of token ids, got {prompts!r}')
  checked = []
  for row, prompt in enumerate(prompts):
    checked.append(check_ids(f'prompt {row}', prompt, vocab_size))
    if not checked[row]:
      raise ValueError(
        f'prompt {row} is empty; give at least one token, e.g. the EOS'
      )
  if not checked:
    raise ValueError('prompts is empty; give at least one')
  return checked


def check_limits(
  prompts: Sequence[Sequence[int]],
  max_new_tokens: Any,
  room: Any,
  context: int,
) -> np.ndarray:
  """The limits as `[B]` int32.

  Args:
    prompts: B of them, checked.
    max_new_tokens: one limit, or one per row.
    room: for new tokens, or None.
    context: of the target.
  """
  limits = np.asarray(max_new_tokens)
  if limits.shape not in ((), (len(prompts),)) or limits.dtype.kind not in 'iu':
    raise ValueError(
      'max_new_tokens must be an integer, or one per row'
      f' ({len(prompts)}), got {max_new_tokens}'
    )
  limits = np.broadcast_to(limits, len(prompts))
  if limits.min() < 0:
    raise ValueError(f'max_new_tokens must be at least 0, got {max_new_tokens}')
  is_integer = isinstance(room, numbers.Integral)
  if room is not None and not (is_integer and limits.max() <= room <= context):
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
  return limits.astype(np.int32)


def _dense_bias(bias: Any, batch_size: int, vocab_size: int) -> np.ndarray:
  """A mapping, or one per row, or an array, as `[V]` or `[B, V]`."""
  if bias is None:
    return np.zeros(vocab_size, np.float32)
  if isinstance(bias, Mapping):
    dense = np.zeros(vocab_size, np.float32)
    tokens = check_ids('logit_bias', bias, vocab_size)
    try:
      dense[tokens] = [float(value) for value in bias.values()]
    except (TypeError, ValueError) as error:
      raise ValueError(
        f'logit_bias must map tokens to numbers, got {bias}'
      ) from error
    return dense
  if isinstance(bias, Sequence) and any(
    one is None or isinstance(one, Mapping) for one in bias
  ):
    if len(bias) != batch_size:
      raise ValueError(
        f'logit_bias must be one mapping or one per row ({batch_size}), got'
        f' {len(bias)}'
      )
    return np.stack([_dense_bias(one, batch_size, vocab_size) for one in bias])
  shape = np.shape(bias)
  if shape not in ((vocab_size,), (batch_size, vocab_size)):
    raise ValueError(
      'logit_bias must be a mapping from token to number, or an array of shape'
      f' {(vocab_size,)} or {(batch_size, vocab_size)}, got shape {shape}'
    )
  return bias


def check_sampling(
  sampling: Sampling, batch_size: int, vocab_size: int
) -> Sampling:
  """As `decode` wants it: validated, one value per row, biases as arrays.

  Args:
    sampling: as users give it.
    batch_size: B.
    vocab_size: V.

  Raises:
    ValueError: a value is out of range or of another shape; says which.
  """
  if sampling.logit_bias is not None:
    sampling = sampling.replace(
      logit_bias=_dense_bias(sampling.logit_bias, batch_size, vocab_size)
    )
  names = ('temperature', 'repetition_penalty', 'top_k', 'top_p', 'min_p')
  for name in names:
    value = getattr(sampling, name)
    shape = () if value is None or isinstance(value, str) else np.shape(value)
    if shape not in ((), (batch_size,)):
      raise ValueError(
        f'{name} must be one number or one per row ({batch_size}), got an'
        f' array of shape {shape}'
      )
  sampling = sampling.validated()
  # One per row in any case: one program for both.
  per_row = {
    name: jnp.broadcast_to(getattr(sampling, name), batch_size)
    for name in names
    if getattr(sampling, name) is not None
  }
  return sampling.replace(**per_row)


def check_break_even(break_even: Any) -> jax.Array | None:
  """As `[]` float32, or None."""
  if break_even is None:
    return None
  is_number = isinstance(break_even, numbers.Real) and break_even is not True
  if not (is_number and 0 < break_even < np.inf):
    raise ValueError(
      'break_even must be a positive number, how many plain steps a speculative'
      f' one takes, or None; got {break_even!r}'
    )
  return jnp.asarray(break_even, jnp.float32)


def check_stop(stop: StopTable, batch_size: int, vocab_size: int) -> None:
  """Refuses a table that was built for other shapes."""
  rows, tokens = stop.start.shape[0], stop.next_state.shape[1]
  if (rows, tokens) != (batch_size, vocab_size):
    raise ValueError(
      f'stop was built for {rows} rows and {tokens} tokens, but there are'
      f' {batch_size} prompts and a vocabulary of {vocab_size}'
    )


def check_rule(
  verify: str, children: str | None, drafter: Drafter | None
) -> str:
  """What `children` is to be."""
  topology, can_draw = None, False
  if drafter is not None:
    topology, can_draw = drafter.config.topology, drafter.scorer.can_draw
  is_chain = topology is not None and topology.branching == 1
  if verify == 'block' and drafter is not None and not is_chain:
    raise ValueError(
      'verify=block is for chains; choose a chain as the topology of the'
      ' drafter, or verify=rejection'
    )
  if children is None:
    can_draw &= topology is not None and topology.has_all_siblings
    return WITHOUT_REPLACEMENT if can_draw and verify != 'match' else BEST
  if children == BEST:
    return children
  if topology is None or not can_draw:
    raise ValueError(
      f'children={children} needs a drafter with a distribution to draw from'
      f' and a fixed topology; choose children={BEST} or a topology'
    )
  if children == WITHOUT_REPLACEMENT and not topology.has_all_siblings:
    raise ValueError(
      f'children={children} needs a topology in which every rank is there with'
      ' all ranks before it: the draws are tried in their order'
    )
  return children


def row_keys(rng_key: jax.Array, batch_size: int) -> jax.Array:
  """One key per row: `[B]` keys as given, or one key folded with the row."""
  dtype = getattr(rng_key, 'dtype', type(rng_key))
  if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    raise ValueError(
      'rng_key must be made by jax.random.key, whose keys are scalars, got'
      f' {dtype}'
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


_SMALLEST_PROMPT_BUCKET = 32
_NEW_TOKENS_BUCKET = 64


def _prompt_bucket(length: int) -> int:
  return max(_SMALLEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def padded_room(room: int) -> int:
  """Slots for so many new tokens."""
  return -(-max(room, 1) // _NEW_TOKENS_BUCKET) * _NEW_TOKENS_BUCKET


def padded_shape(
  prompts: Sequence[Sequence[int]], room: int
) -> tuple[int, int]:
  """The slots of a decode: of its prompts, P, and of new tokens.

  Args:
    prompts: of a batch.
    room: for new tokens, see `Options`.
  """
  return _prompt_bucket(max(map(len, prompts))), padded_room(room)


def pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
  """`[B, P]` int32, padded with zeros at the end, and the lengths, `[B]`."""
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  bucket = _prompt_bucket(int(lengths.max()))
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  return padded, lengths
