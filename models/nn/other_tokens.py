"""A draft with another tokenizer, as a model with the target's vocabulary.

Token-level intersection (TLI, arXiv 2502.05202, section 4.3): a token of the
target with the bytes of a draft token gets the logit of that token, all others
-inf. Verification knows nothing of it, so the text is the target's under every
rule.

A token that the draft lacks is read as several draft tokens, its parts. Every
token therefore has R slots in the draft's cache and uses the last of them:

    target's tokens      'def'          ' quicksort'    '('
    slots, R = 3         .   .   def    . ' quick' sort .   .   (
    draft's positions            0          1      2            3

R slots of width Dh are one slot of width R * Dh, without a copy, so `specdec`
moves and keeps the slots of whole tokens as for any other model. The number of
slots that a token uses is kept next to them, as a layer of width 1.
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
    rows, length, num_parts = parts.shape
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
    part = jnp.arange(num_parts)
    offset = jnp.maximum(part[None, None] - (num_parts - count)[:, :, None], 0)
    is_used = part[None, None] >= num_parts - used[:, :, None]  # [B, S, R]
    causal = part[:, None] >= part[None]  # [R, R]
    sees = mask[:, :, None, :, None] & is_used[:, None, None]
    sees &= causal[None, None, :, None] | ~is_own[:, :, None, :, None]
    self.tokens = jnp.maximum(parts, 0).reshape(rows, -1)
    self.positions = (before[:, :, None] + offset).reshape(rows, -1)
    self.mask = sees.reshape(rows, length * num_parts, -1)


def _joined(array: jax.Array, num_parts: int) -> jax.Array:
  """`[B, H, S * R, Dh]` as `[B, H, S, R * Dh]`."""
  rows, heads, slots, width = array.shape
  return array.reshape(rows, heads, slots // num_parts, num_parts * width)


def _divided(array: jax.Array, num_parts: int) -> jax.Array:
  """`[B, H, S, R * Dh]` as `[B, H, S * R, Dh]`."""
  rows, heads, slots, width = array.shape
  return array.reshape(rows, heads, slots * num_parts, width // num_parts)


def _read_several(apply: _Apply, num_parts: int) -> _Apply:
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
    inputs = _Read(parts, mask, counts, cache)
    divided = cache.replace(
      keys=tuple(_divided(array, num_parts) for array in keys),
      values=tuple(_divided(array, num_parts) for array in cache.values),
      start=cache.write_at * num_parts,
      num_slots=cache.num_slots * num_parts,
    )
    logits, divided = apply(
      params, inputs.tokens, inputs.positions, inputs.mask, divided
    )
    joined = cache.replace(
      keys=(
        *(_joined(array, num_parts) for array in divided.keys),
        inputs.counts,
      ),
      values=tuple(_joined(array, num_parts) for array in divided.values),
    )
    # The last part is in the last place.
    return logits[:, num_parts - 1 :: num_parts], joined

  return read


def _init_several(init_cache: _InitCache, num_parts: int) -> _InitCache:
  """`init_cache` with R slots per token, and how many of them are used."""

  def init(batch_size: int, num_slots: int) -> cache_lib.KVCache:
    cache = init_cache(batch_size, num_slots * num_parts)
    keys = tuple(_joined(array, num_parts) for array in cache.keys)
    like = keys[0] if keys else jnp.zeros((batch_size, 1, num_slots, 1))
    counts = cache.ops.place(jnp.zeros_like(like[..., :1]))
    return cache.replace(
      keys=(*keys, counts),
      values=tuple(_joined(array, num_parts) for array in cache.values),
      num_slots=num_slots,
    )

  return init


@functools.cache
def _spec(
  spec: model_lib.ModelSpec, vocab_size: int, num_parts: int
) -> model_lib.ModelSpec:
  read, init = spec.apply, spec.init_cache
  if num_parts > 1:
    read = _read_several(spec.apply, num_parts)
    init = _init_several(spec.init_cache, num_parts)

  def apply(params: Any, tokens: jax.Array, *others: Any) -> _Scores:
    parts = params['parts'][tokens]
    parts = parts if num_parts > 1 else parts[:, :, 0]
    logits, cache = read(params['draft'], parts, *others)
    return matrices_lib.scatter_outputs(logits, params['same']), cache

  return dataclasses.replace(
    spec,
    apply=apply,
    init_cache=init,
    vocab_size=vocab_size,
    cache_bytes_per_slot=num_parts * spec.cache_bytes_per_slot,
    parameters=num_parts * spec.parameters,
  )


def with_other_tokens(
  draft: model_lib.LanguageModel, same: jax.Array, parts: jax.Array
) -> model_lib.LanguageModel:
  """A draft that reads and proposes the tokens of another vocabulary.

  Its context is the draft's, counted in tokens of the target. A text may have
  more of the draft's tokens; then the positions go on beyond the context.

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
