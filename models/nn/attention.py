"""Masked attention over a row's visible slots, shaped for the machine.

What a query may see is decided by the mask alone, so the same function serves
prefill, a chain, a token tree and training.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from models.nn.matmul import precision
from specdec import cache as kv

# Finite, so that a row that sees nothing (padding) gives numbers, not NaN.
MASKED_SCORE = -1e30


def _batched_matmul(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
  """`x [B, H, n, k]` with axis `contract` of `y [B, H, ., .]`, in float32."""
  return lax.dot_general(
    x,
    y,
    (((3,), (contract,)), ((0, 1), (0, 1))),
    precision=precision(y.dtype),
    preferred_element_type=jnp.float32,
  )


def _attend(query, key, value, mask, *, scale):
  scores = scale * _batched_matmul(query, key, 3)
  scores = jnp.where(mask[:, None], scores, MASKED_SCORE)
  probs = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  return _batched_matmul(probs, value, 2)


def _attend_as(rows, query, key, value, mask, *, scale):
  """A single query, several times over: alone it misses the fast path."""
  query = jnp.broadcast_to(query, (*query.shape[:2], rows, query.shape[3]))
  return _attend(query, key, value, mask, scale=scale)[:, :, :1]


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array,
  *,
  scale: float,
) -> jax.Array:
  """Softmax attention; scores and probabilities are computed in float32.

  Args:
    query: `[B, Hq, L, Dh]`; Hq a multiple of H, and the queries of consecutive
      heads share one head of keys (arXiv 2305.13245).
    key: `[B, H, S, Dh]`, same dtype as `query`.
    value: `[B, H, S, Dh]`, same dtype as `query`.
    mask: `[B, L, S]` bool, true where a query may look.
    scale: multiplies the scores.

  Returns:
    `[B, Hq, L, Dh]` float32.
  """
  group = query.shape[1] // key.shape[1]
  if group > 1:
    # As more queries of the same head, so that keys are read once.
    rows = query.reshape(*key.shape[:2], -1, query.shape[3])
    mask = jnp.tile(mask, (1, group, 1))
    return attend(rows, key, value, mask, scale=scale).reshape(query.shape)
  if query.shape[2] > 1:
    return _attend(query, key, value, mask, scale=scale)
  # In float32 a CPU does one row at the speed of memory, in bfloat16 two; the
  # matrix units of accelerators want a tile of eight.
  on_cpu = 1 if value.dtype == jnp.float32 else 2
  return lax.platform_dependent(
    query,
    key,
    value,
    mask,
    cpu=functools.partial(_attend_as, on_cpu, scale=scale),
    default=functools.partial(_attend_as, 8, scale=scale),
  )


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
    query: `[B, Hq, L, Dh]`; Hq a multiple of H, see `attend`.
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
  cache = kv.write(cache, layer, key, value)
  keys, values = cache.keys[layer], cache.values[layer]
  return attend(query, keys, values, mask, scale=scale), cache
