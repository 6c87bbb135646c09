"""Attention of new tokens to a cache that they become part of."""

import functools

import jax
from jax import lax

from models.attention import attend
from specdec import cache as kv


def _write_then_attend(query, key, value, mask, cache, *, layer, scale):
  cache = kv.write(cache, layer, key, value)
  keys, values = cache.keys[layer], cache.values[layer]
  return attend(query, keys, values, mask, scale=scale), cache


def _in_one_kernel(query, key, value, mask, cache, *, layer, scale):
  """On a GPU two writes, two products, softmax and reshapes are six kernels."""
  # Here, so that what reads no cache does not wait for Pallas.
  from models import gpu_attention

  if not gpu_attention.fits(query, key):
    return _write_then_attend(
      query, key, value, mask, cache, layer=layer, scale=scale
    )
  out, keys, values = gpu_attention.attend_and_write(
    query,
    kv.finite(key),
    kv.finite(value),
    mask,
    cache.keys[layer],
    cache.values[layer],
    cache.length,
    scale=scale,
  )
  return out, kv.replace_layer(cache, layer, keys, values)


def attend_and_write(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array,
  cache: kv.KVCache,
  layer: int,
  *,
  scale: float,
) -> tuple[jax.Array, kv.KVCache]:
  """Writes L new entries of a layer; their queries see the cache with them.

  Args:
    query: `[B, Hq, L, Dh]`; Hq a multiple of H, see `models.attention.attend`.
    key: `[B, H, L, Dh]`, in the dtype of the cache.
    value: `[B, H, L, Dh]`, in the dtype of the cache.
    mask: `[B, L, S]` bool over the slots, true where a query may look: at none
      behind the new entries.
    cache: see `specdec.cache.write`.
    layer: which layer.
    scale: multiplies the scores.

  Returns:
    `[B, Hq, L, Dh]` float32, and the cache as `specdec.cache.write` leaves it.
  """
  static = {'layer': layer, 'scale': scale}
  return lax.platform_dependent(
    query,
    key,
    value,
    mask,
    cache,
    cuda=functools.partial(_in_one_kernel, **static),
    default=functools.partial(_write_then_attend, **static),
  )
