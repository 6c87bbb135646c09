"""A draft with another tokenizer, as a model with the target's vocabulary.

Token-level intersection (TLI, arXiv 2502.05202, section 4.3): a token of the
target with the bytes of a draft token gets the logit of that token, all others
-inf. Verification knows nothing of it, so the text is the target's under every
rule.

A token that the draft lacks is read as several draft tokens, its parts. Every
token therefore has R slots in the draft's cache, of which the last are used:

    target's tokens      'def'          ' quicksort'    '('
    slots, R = 3         .   .   def    . ' quick' sort .   .   (
    draft's positions            0          1      2            3

R slots of width Dh are one slot of width R * Dh, without a copy, so `specdec`
moves and keeps the slots of whole tokens as those of any other model. How many
of them a token uses is kept beside them, as a layer of width 1.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec.models.nn import matrices as matrices_lib

_Scores = tuple[jax.Array, cache_lib.KVCache]
_Apply = Callable[..., _Scores]
_InitCache = Callable[[int, int], cache_lib.KVCache]


class _Read:
  """Tokens as the draft reads them: L tokens of R parts each are L * R.

  Attributes:
    tokens: `[B, L * R]` int32, of the draft; arbitrary before the first part.
    positions: `[B, L * R]` int32.
    mask: `[B, L * R, S * R]` bool.
    counts: `[B, H, S, 1]`, how many parts each slot has.
  """

  def __init__(
    self,
    parts: jax.Array,
    mask: jax.Array,
    counts: jax.Array,
    cache: cache_lib.KVCache,
  ):
    rows, length, number = parts.shape
    count = jnp.sum(parts >= 0, axis=2)  # [B, L]
    shape = (rows, counts.shape[1], length, 1)
    new = jnp.broadcast_to(count[:, None, :, None], shape)
    self.counts = cache.ops.write(
      counts, new.astype(counts.dtype), cache.write_at
    )
    used = self.counts[:, 0, :, 0].astype(jnp.int32)  # [B, S]
    slot = cache.write_at[:, None] + jnp.arange(length)[None]
    is_own = slot[:, :, None] == jnp.arange(mask.shape[2])[None, None]
    # The draft's tokens before this one are counted, whatever their slots.
    before = jnp.sum(jnp.where(mask & ~is_own, used[:, None], 0), axis=2)
    part = jnp.arange(number)
    own = jnp.maximum(part[None, None] - (number - count)[:, :, None], 0)
    is_used = part[None, None] >= number - used[:, :, None]  # [B, S, R]
    causal = part[:, None] >= part[None]  # [R, R]
    sees = mask[:, :, None, :, None] & is_used[:, None, None]
    sees &= causal[None, None, :, None] | ~is_own[:, :, None, :, None]
    self.tokens = jnp.maximum(parts, 0).reshape(rows, -1)
    self.positions = (before[:, :, None] + own).reshape(rows, -1)
    self.mask = sees.reshape(rows, length * number, -1)


def _joined(array: jax.Array, number: int) -> jax.Array:
  """`[B, H, S * R, Dh]` as `[B, H, S, R * Dh]`."""
  rows, heads, slots, width = array.shape
  return array.reshape(rows, heads, slots // number, number * width)


def _divided(array: jax.Array, number: int) -> jax.Array:
  """`[B, H, S, R * Dh]` as `[B, H, S * R, Dh]`."""
  rows, heads, slots, width = array.shape
  return array.reshape(rows, heads, slots * number, width // number)


def _read_several(apply: _Apply, number: int) -> _Apply:
  """`apply` of a draft that reads a token as up to R of its own."""

  def read(
    params: Any,
    parts: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> _Scores:
    del positions
    *keys, counts = cache.keys
    found = _Read(parts, mask, counts, cache)
    divided = cache.replace(
      keys=tuple(_divided(one, number) for one in keys),
      values=tuple(_divided(one, number) for one in cache.values),
      start=cache.write_at * number,
      num_slots=cache.num_slots * number,
    )
    logits, divided = apply(
      params, found.tokens, found.positions, found.mask, divided
    )
    joined = cache.replace(
      keys=(*(_joined(one, number) for one in divided.keys), found.counts),
      values=tuple(_joined(one, number) for one in divided.values),
    )
    # The last part is in the last place.
    return logits[:, number - 1 :: number], joined

  return read


def _init_several(init_cache: _InitCache, number: int) -> _InitCache:
  """`init_cache` with R slots per token, and how many of them are used."""

  def init(batch_size: int, num_slots: int) -> cache_lib.KVCache:
    cache = init_cache(batch_size, num_slots * number)
    keys = tuple(_joined(one, number) for one in cache.keys)
    like = keys[0] if keys else jnp.zeros((batch_size, 1, num_slots, 1))
    counts = cache.ops.place(jnp.zeros_like(like[..., :1]))
    return cache.replace(
      keys=(*keys, counts),
      values=tuple(_joined(one, number) for one in cache.values),
      num_slots=num_slots,
    )

  return init


@functools.cache
def _spec(
  own: model_lib.ModelSpec, vocab_size: int, number: int
) -> model_lib.ModelSpec:
  read, init = own.apply, own.init_cache
  if number > 1:
    read = _read_several(own.apply, number)
    init = _init_several(own.init_cache, number)

  def apply(params: Any, tokens: jax.Array, *others: Any) -> _Scores:
    parts = params['parts'][tokens]
    parts = parts if number > 1 else parts[:, :, 0]
    logits, cache = read(params['draft'], parts, *others)
    return matrices_lib.scatter_outputs(logits, params['same']), cache

  return dataclasses.replace(
    own,
    apply=apply,
    init_cache=init,
    vocab_size=vocab_size,
    cache_bytes_per_slot=number * own.cache_bytes_per_slot,
    parameters=number * own.parameters,
  )


def with_other_tokens(
  draft: model_lib.LanguageModel, same: jax.Array, parts: jax.Array
) -> model_lib.LanguageModel:
  """A draft that reads and proposes the tokens of another vocabulary.

  Its context is that of the draft, counted in tokens of the target; beyond it,
  where a text has more of the draft's tokens, the positions go on.

  Args:
    draft: with a vocabulary of its own.
    same: `[V]` int32, the draft token that each token is, or -1.
    parts: `[V, R]` int32, the draft tokens that each token is read as, at least
      one, the last of them in the last place; -1 before the first.

  Raises:
    ValueError: the draft has layers with states, and R is above 1.
  """
  if draft.spec.state_bytes and parts.shape[1] > 1:
    raise ValueError(
      'a draft whose layers have states cannot read a token of the target as'
      f' {parts.shape[1]} of its own; choose one with the tokenizer of the'
      ' target'
    )
  spec = _spec(draft.spec, *parts.shape)
  params = {'draft': draft.params, 'same': same, 'parts': parts}
  return model_lib.LanguageModel(params=params, spec=spec)
