"""The host boundary: lists of token ids in, lists out, bad input refused."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.decode import decode
from specdec.decode import DecodeConfig
from specdec.drafter import Drafter
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.statistics import summarize

_SMALLEST_PROMPT_BUCKET = 32
_NEW_TOKENS_BUCKET = 64


@dataclasses.dataclass(frozen=True)
class Generation:
  """What was generated.

  Attributes:
    tokens: the new ids of each row, EOS included if one ended it.
    origins: of each of them, an index of `labels`.
    labels: who may have proposed a token: `target`, whose own it is, then the
      proposers of each stage, from the outermost in.
    stats: the figures of `specdec.statistics.summarize`.
  """

  tokens: list[list[int]]
  origins: list[list[int]]
  labels: tuple[str, ...]
  stats: dict[str, Any]


def _check_drafter(target, drafter):
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


def _check_prompts(prompts, vocab_size):
  if not prompts:
    raise ValueError('prompts is empty; give at least one')
  for row, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(
        f'prompt {row} is empty; give at least one token, e.g. the EOS'
      )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
      raise ValueError(
        f'prompt {row} has token {low if low < 0 else high}, outside the'
        f' vocabulary of {vocab_size}'
      )


def _check_eos_ids(eos_ids, vocab_size):
  for eos in eos_ids:
    if not 0 <= eos < vocab_size:
      raise ValueError(
        f'eos_ids has {eos}, outside the vocabulary of {vocab_size}'
      )


def _check_limits(prompts, max_new_tokens, room, contexts):
  least = min(max_new_tokens, room)
  if least < 0:
    raise ValueError(f'max_new_tokens must be at least 0, got {least}')
  if room < max_new_tokens:
    raise ValueError(
      f'room_for_new_tokens must be at least max_new_tokens={max_new_tokens},'
      f' got {room}'
    )
  longest = max(len(prompt) for prompt in prompts)
  for name, context in contexts.items():
    if longest + max_new_tokens > context:
      raise ValueError(
        f'a prompt of {longest} tokens and max_new_tokens={max_new_tokens}'
        f' exceed the context of the {name}, {context} tokens'
      )


def _check_sampling(sampling: Sampling, batch_size: int) -> Sampling:
  for name in ('temperature', 'top_p', 'min_p'):
    shape = np.shape(getattr(sampling, name))
    if shape not in ((), (batch_size,)):
      raise ValueError(
        f'{name} must be one number or one per row ({batch_size}), got an'
        f' array of shape {shape}'
      )
  return sampling.validated()


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


def _round_up(number: int, multiple: int) -> int:
  return -(-number // multiple) * multiple


def _prompt_bucket(length: int) -> int:
  return max(_SMALLEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def generate(
  target: Model,
  rng_key: jax.Array,
  prompts: Sequence[Sequence[int]],
  *,
  max_new_tokens: int,
  room_for_new_tokens: int | None = None,
  drafter: Drafter | None = None,
  sampling: Sampling = Sampling(),
  eos_ids: Sequence[int] = (),
) -> Generation:
  """Continues each prompt; the drafter changes the speed, never the tokens.

  Prompts are padded to powers of two and the room for new tokens to multiples
  of 64, so other prompts, limits, seeds and temperatures rarely recompile.

  Args:
    target: the model to decode.
    rng_key: one key, from which each row's is folded by its index, or `[B]`
      keys, one per row (a row then gives the same tokens in any batch).
      Consumed. Unused at temperature 0.
    prompts: B lists of token ids, of any lengths, none empty.
    max_new_tokens: the limit per row; 0 compiles, decodes nothing.
    room_for_new_tokens: size of the buffers, at least `max_new_tokens`, which
      is the default. Calls with one room share a program, whatever the limit.
    drafter: guesses for the target; None is plain decoding.
    sampling: how to choose tokens; greedy by default.
    eos_ids: tokens that end a row.

  Returns:
    The new tokens and the statistics.

  Raises:
    ValueError: an argument cannot be used; says which and why.
  """
  _check_prompts(prompts, target.definition.vocab_size)
  _check_eos_ids(eos_ids, target.definition.vocab_size)
  contexts = {'target': target.definition.max_positions}
  if drafter is not None:
    _check_drafter(target, drafter)
    contexts |= {
      stage.name: stage.scorer.max_positions
      for stage in drafter.stages
      if stage.scorer.max_positions is not None
    }
  room = max_new_tokens if room_for_new_tokens is None else room_for_new_tokens
  _check_limits(prompts, max_new_tokens, room, contexts)
  sampling = _check_sampling(sampling, len(prompts))

  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  bucket = _prompt_bucket(int(lengths.max()))
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  result = decode(
    target,
    drafter,
    row_keys(rng_key, len(prompts)),
    padded,
    lengths,
    np.full(len(prompts), max_new_tokens, np.int32),
    sampling,
    config=DecodeConfig(
      max_new_tokens=_round_up(max(room, 1), _NEW_TOKENS_BUCKET),
      eos_ids=tuple(int(eos) for eos in eos_ids),
    ),
  )
  tokens, origins, ends = jax.device_get(
    (result.tokens, result.origins, result.length)
  )
  new = [slice(*span) for span in zip(lengths, ends, strict=True)]
  cut = lambda array: [array[row, span] for row, span in enumerate(new)]
  return Generation(
    tokens=[row.tolist() for row in cut(tokens)],
    origins=[row.tolist() for row in cut(origins)],
    labels=('target', *(drafter.labels if drafter is not None else ())),
    stats=summarize(
      result.counters,
      result.stage_counters,
      np.concatenate(cut(origins)),
      lengths,
      ends - lengths,
      target=target.definition,
      drafter=drafter,
    ),
  )
