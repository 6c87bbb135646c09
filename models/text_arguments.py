"""What users of text pass, checked."""

from collections.abc import Iterable
from collections.abc import Sequence
import numbers
from typing import Any
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np

import specdec

# As the user may give them: one text, one list of ids, or several of either.
Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
Stops = str | Sequence[str] | Sequence[Sequence[str]]


class TextOptions(TypedDict, total=False):
  """Keyword arguments of `Generator.generate` and `Generator.stream`.

  Attributes:
    max_new_tokens: the limit, one for all or one per row; 128 by default.
    room_for_new_tokens: see `specdec.generation.Options`.
    sampling: how to choose tokens, each value one for all or one per row;
      greedy by default.
    seed: of the sampling, 0 by default. One per row gives a row the same tokens
      in any batch; row 0 of a single seed has those of that seed alone.
    stop: stop strings: one, several, or a list of them per row. The text ends
      before the first of them.
    eos_ids: tokens that end a row; by default those of the target. `()` goes on
      up to the limit.
    verify: see `specdec.generation.Options`.
    children: likewise.
    log_probs: likewise.
    break_even: likewise.
  """

  max_new_tokens: int | Sequence[int]
  room_for_new_tokens: int | None
  sampling: specdec.Sampling
  seed: int | Sequence[int]
  stop: Stops
  eos_ids: Sequence[int]
  verify: str
  children: str | None
  log_probs: bool
  break_even: float | None


def row_keys(seed: int | Sequence[int], batch_size: int) -> jax.Array:
  """The keys of each row, `[B]`; see `TextOptions.seed`.

  Raises:
    ValueError: there are other than B seeds, or one is no integer.
  """
  seeds = list(seed) if isinstance(seed, Sequence) else [seed]
  for one in seeds:
    is_integer = isinstance(one, numbers.Integral) and not isinstance(one, bool)
    # Of larger ones JAX would take the lower 32 bits without a word.
    if not (is_integer and -(2**31) <= one < 2**32):
      raise ValueError(
        f'seed must be an integer of 32 bits, or one per row, got {seed!r}'
      )
  if not isinstance(seed, Sequence):
    return specdec.row_keys(jax.random.key(seeds[0]), batch_size)
  if len(seeds) != batch_size:
    raise ValueError(
      f'seed must be one integer or one per row ({batch_size}), got'
      f' {len(seeds)}'
    )
  one_key = lambda one: specdec.row_keys(jax.random.key(one), 1)[0]
  return jnp.stack([one_key(one) for one in seeds])


def _is_ids(prompt) -> bool:
  # Arrays say that they can be an index, whatever their shape.
  return not isinstance(prompt, str) and all(
    hasattr(token, '__index__') and np.ndim(token) == 0 for token in prompt
  )


def as_list(prompts: Any) -> list[Any]:
  """`Prompts` as a list of texts and lists of ids.

  Raises:
    ValueError: it is neither.
  """
  if isinstance(prompts, str):
    return [prompts]
  if not isinstance(prompts, Iterable):
    raise ValueError(
      f'prompts must be a text, a list of ids or several of them, got'
      f' {prompts!r}'
    )
  prompts = list(prompts)
  return [prompts] if prompts and _is_ids(prompts) else prompts


def _are_texts(values: Any) -> bool:
  """Whether it is a list of strings."""
  return (
    isinstance(values, Sequence)
    and not isinstance(values, str)
    and all(isinstance(one, str) for one in values)
  )


def stops_of_rows(stop: Any, batch_size: int) -> tuple[tuple[str, ...], ...]:
  """`Stops` as the stop strings of each row.

  Raises:
    ValueError: there are other than B lists, or one has what is no text.
  """
  if isinstance(stop, str):
    stop = [stop]
  if _are_texts(stop):
    stop = [stop] * batch_size
  is_list = isinstance(stop, Sequence) and all(map(_are_texts, stop))
  if not is_list or len(stop) != batch_size:
    raise ValueError(
      'stop must be a string, a list of strings, or one list of strings per row'
      f' ({batch_size}), got {stop!r}'
    )
  for row, strings in enumerate(stop):
    for one in strings:
      if not one or any('\ud800' <= letter <= '\udfff' for letter in one):
        raise ValueError(f'row {row} has the stop string {one!r}; give text')
  return tuple(tuple(strings) for strings in stop)
