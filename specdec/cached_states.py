"""Recurrent layers of a cache: made, written in a forward, and marked.

`specdec.cache` lengthens and rewinds them with everything else.
"""

from collections.abc import Mapping

import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import recurrent as recurrent_lib


def with_recurrent(
  cache: cache_lib.KVCache, layers: Mapping[int, recurrent_lib.Recurrent]
) -> cache_lib.KVCache:
  """An empty cache that also has recurrent layers."""
  marked = jnp.zeros_like(cache.length) if layers else None
  return cache.replace(recurrent=layers, marked=marked)


def with_window(cache: cache_lib.KVCache, num_slots: int) -> cache_lib.KVCache:
  """The cache with empty windows of so many slots in its recurrent layers."""
  resized = {
    layer: one.with_window(num_slots) for layer, one in cache.recurrent.items()
  }
  return cache.replace(recurrent=resized)


def enter_window(
  cache: cache_lib.KVCache | None,
  layer: int,
  mask: jax.Array,
  empty: recurrent_lib.Recurrent,
) -> tuple[recurrent_lib.Recurrent, jax.Array, jax.Array]:
  """A recurrent layer at the beginning of a forward over L tokens.

  Args:
    cache: the cache; without one (training), the L tokens are the whole text.
    layer: a key of `KVCache.recurrent`.
    mask: `[B, L, S]` bool over the slots of the cache, `[B, L, L]` without one.
    empty: the layer before any token, used without a cache.

  Returns:
    The layer, `[B, L, T]` bool, the slots of the window that each token sees,
    and `[B]` int32, the slot of the first one. A forward of T tokens or more
    has a window of its own.
  """
  one = empty if cache is None else cache.recurrent[layer]
  if mask.shape[1] >= one.num_slots:
    one = one.with_window(mask.shape[1])
  if cache is None:
    return one, mask, jnp.zeros(mask.shape[0], jnp.int32)
  window = lambda row, at: lax.dynamic_slice_in_dim(
    row, at, one.num_slots, axis=1
  )
  sees = jax.vmap(window)(mask, cache.length)
  return one, sees, cache.write_at - cache.length


def write_inputs(
  cache: cache_lib.KVCache | None,
  one: recurrent_lib.Recurrent,
  new: Mapping[str, jax.Array],
  first: jax.Array,
) -> recurrent_lib.Recurrent:
  """Writes inputs `[B, L, width]` to the window, from slots `first [B]` on.

  NaN and inf are written as zeros. Other inputs stay as they are.
  """
  inputs = dict(one.inputs)
  for name, array in new.items():
    array = cache_lib.finite(array)[:, None]
    if array.shape[2] < one.num_slots:
      assert cache is not None
      array = cache.ops.write(inputs[name], array, first)
    inputs[name] = array
  return one.replace(inputs=inputs)


def with_recurrent_layer(
  cache: cache_lib.KVCache | None, layer: int, one: recurrent_lib.Recurrent
) -> cache_lib.KVCache | None:
  """The cache with another recurrent layer; None without a cache."""
  if cache is None:
    return None
  return cache.replace(recurrent={**cache.recurrent, layer: one})


def mark(cache: cache_lib.KVCache) -> cache_lib.KVCache:
  """Marks the states of recurrent layers, so that `cache.rewind` finds them."""
  if not cache.recurrent:
    return cache
  marks = {
    layer: one.replace(mark=one.state) for layer, one in cache.recurrent.items()
  }
  return cache.replace(recurrent=marks, marked=cache.length)
