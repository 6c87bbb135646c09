"""Masked attention to the slots of a key-value cache.

The mask alone decides what a query sees, so the same functions serve prefill, a
chain, a token tree and training.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.models.nn import contraction
from specdec.models.nn import layers
from specdec.models.nn.cpu import ops

# The most products that a GPU sums up at once in attention of few queries. Each
# query reads the slots again, from the second cache.
_MOST_SUMS = 1 << 23

# Finite, so that a query that sees nothing (padding) does not become NaN.
_MASKED_SCORE = -1e30


def _batched_matmul(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
  """`x [B, H, n, k]` times `y [B, H, ., .]` over axis `contract` of `y`."""
  return lax.dot_general(
    x,
    y,
    (((3,), (contract,)), ((0, 1), (0, 1))),
    precision=contraction.precision(y.dtype),
    preferred_element_type=jnp.float32,
  )


def within_window(mask: jax.Array, window: int | None) -> jax.Array:
  """A mask `[B, L, S]` whose queries see their last `window` positions only.

  What a query sees is its text and its ancestors in a tree, in the order of
  their slots, itself the last. So positions are counted along its own path,
  whatever slots lie between.
  """
  if window is None:
    return mask
  counted = lax.cumsum(mask.astype(jnp.int32), axis=2, reverse=True)
  return mask & (counted <= window)


class _Operands(NamedTuple):
  """The operands of `attend`."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  mask: jax.Array
  sinks: jax.Array | None = None


def _grouped(operands: _Operands) -> _Operands:
  """Query heads as further queries of their key head, which is read once."""
  query, key, value, mask, sinks = operands
  rows = query.reshape(*key.shape[:2], -1, query.shape[3])
  mask = jnp.tile(mask, (1, query.shape[1] // key.shape[1], 1))
  if sinks is not None:
    sinks = jnp.repeat(sinks, query.shape[2])
  return _Operands(rows, key, value, mask, sinks)


def _attend(
  operands: _Operands, *, scale: float, cap: float | None = None
) -> jax.Array:
  query, key, value, mask, sinks = operands
  scores = layers.soft_cap(scale * _batched_matmul(query, key, 3), cap)
  scores = jnp.where(mask[:, None], scores, _MASKED_SCORE)
  if sinks is None:
    probs = jax.nn.softmax(scores, axis=-1)
  else:
    sinks = sinks.reshape(1, *scores.shape[1:2], -1, 1)
    largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    powers = jnp.exp(scores - largest)
    rest = jnp.exp(sinks - largest)
    probs = powers / (jnp.sum(powers, axis=-1, keepdims=True) + rest)
  return _batched_matmul(probs.astype(value.dtype), value, 2)


def _attend_padded(operands: _Operands, **options: Any) -> jax.Array:
  """Attention of a single query, computed as two equal ones."""
  query = operands.query
  query = jnp.broadcast_to(query, (*query.shape[:2], 2, query.shape[3]))
  return _attend(operands._replace(query=query), **options)[:, :, :1]


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array,
  *,
  scale: float,
  cap: float | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Softmax attention `[B, Hq, L, Dh]`, computed in float32.

  Args:
    query: see `self_attention`.
    key: `[B, H, S, Dh]`, the keys of the whole cache.
    value: the same.
    mask: see `self_attention`.
    scale: factor of the scores.
    cap: see `layers.soft_cap`, of the scores (Gemma 2).
    sinks: `[Hq]` float32, for each head the score of a slot without a value,
      which every query sees (gpt-oss).
  """
  operands = _Operands(query, key, value, mask, sinks)
  if query.shape[1] > key.shape[1]:
    operands = _grouped(operands)
  plain = functools.partial(_attend, scale=scale, cap=cap)
  if operands.query.shape[2] > 1 or value.dtype == jnp.float32:
    return plain(operands).reshape(query.shape)
  # A bfloat16 product of a single row misses the fast CPU kernel
  # (187 ms, against 12.5 ms with two rows, AMD EPYC Zen 5).
  padded = functools.partial(_attend_padded, scale=scale, cap=cap)
  out = lax.platform_dependent(operands, cpu=padded, default=plain)
  return out.reshape(query.shape)


def _attend_by_sums(
  operands: _Operands, *, scale: float, cap: float | None
) -> jax.Array:
  """Attention of few queries: two kernels of a GPU, which read slots in place.

  Products would need copies of the slots of a layer.
  """
  query, key, value = (operand.astype(jnp.float32) for operand in operands[:3])
  scores = jnp.sum(query[:, :, :, None] * key[:, :, None], axis=-1)
  scores = layers.soft_cap(scale * scores, cap)
  scores = jnp.where(operands.mask[:, None], scores, _MASKED_SCORE)
  probs = jax.nn.softmax(scores, axis=-1).astype(operands.value.dtype)
  return jnp.sum(probs.astype(jnp.float32)[..., None] * value[:, :, None], 3)


def _attend_by_library(operands: _Operands, scale: float) -> jax.Array:
  """Attention by cuDNN, in one call."""
  query, key, value = (operand.swapaxes(1, 2) for operand in operands[:3])
  out = jax.nn.dot_product_attention(
    query,
    key,
    value,
    mask=operands.mask[:, None],
    scale=scale,
    implementation='cudnn',
  )
  return out.swapaxes(1, 2).astype(jnp.float32)


@functools.cache
def _library_takes(head_width: int, dtype: jnp.dtype) -> bool:
  """Whether cuDNN is there and computes attention of such heads."""
  shape = jax.ShapeDtypeStruct((1, 2, 1, head_width), dtype)
  attend = functools.partial(
    jax.nn.dot_product_attention, implementation='cudnn'
  )
  try:
    jax.eval_shape(attend, shape, shape, shape)
  except (NotImplementedError, RuntimeError, ValueError):
    return False
  return True


def _attend_for_gpu(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array,
  *,
  scale: float,
  cap: float | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """`attend` to slots that are stored among the slots of other layers."""
  operands = _Operands(query, key, value, mask, sinks)
  if sinks is None and query.size * key.shape[2] <= _MOST_SUMS:
    out = _attend_by_sums(_grouped(operands), scale=scale, cap=cap)
    return out.reshape(query.shape)
  takes = cap is None and sinks is None and key.shape[2] % 8 == 0
  if takes and _library_takes(key.shape[3], key.dtype):
    return _attend_by_library(operands, scale)
  return attend(*operands[:4], scale=scale, cap=cap, sinks=sinks)


def self_attention(
  query: jax.Array,
  key: jax.Array | None,
  value: jax.Array | None,
  mask: jax.Array,
  cache: cache_lib.KVCache | None,
  layer: int,
  **options: Any,
) -> tuple[jax.Array, cache_lib.KVCache | None]:
  """Writes the keys and values of L positions to a cache, then attends to it.

  Args:
    query: `[B, Hq, L, Dh]`; Hq is a multiple of H, and each run of Hq / H
      consecutive query heads shares one key head (arXiv 2305.13245).
    key: `[B, H, L, Dh]`, in the dtype of the cache; None: it has them already.
    value: the same.
    mask: `[B, L, S]` bool over the slots of the cache, true where a query may
      look; `[B, L, L]` without a cache.
    cache: see `specdec.cache.write`. Without one (training), the L positions
      attend to one another only.
    layer: index of the layer in the cache.
    **options: of `attend`.

  Returns:
    `[B, Hq, L, Dh]` float32, and the cache with the new entries.
  """
  function = attend
  if cache is not None:
    if key is not None and value is not None:
      cache = cache_lib.write(cache, layer, key, value)
    key, value = cache.layer(layer)
    function = attend if cache.heads_together is None else _attend_for_gpu
  assert key is not None
  assert value is not None
  return function(query, key, value, mask, **options), cache


def attend_projections(
  projections: jax.Array,
  mask: jax.Array,
  cache: cache_lib.KVCache | None,
  layer: int,
  *,
  slots_shape: tuple[int, int],
  dtype: jax.typing.DTypeLike,
  writes: bool = True,
  **options: Any,
) -> tuple[jax.Array, cache_lib.KVCache | None]:
  """`self_attention` with the kernels of `models/nn/cpu`, in one call.

  Args:
    projections: `[B, L, (Hq + 2 H) Dh]` float32: heads of queries, of keys and
      of values.
    mask: see `self_attention`.
    cache: see `self_attention`.
    layer: see `self_attention`.
    slots_shape: `(H, Dh)`.
    dtype: of the keys and values.
    writes: whether there are keys and values; else the cache has them already.
    **options: of `ops.attend`.

  Returns:
    `[B, L, Hq Dh]` float32, and the cache with the new entries.
  """
  if cache is None:
    batch, heads, width = projections.shape[0], *slots_shape
    keys = values = jnp.zeros((batch, heads, mask.shape[2], width), dtype)
    start = jnp.zeros(batch, jnp.int32)
  else:
    keys, values = cache.layer(layer)
    start = cache.write_at
  out, keys, values = ops.attend(
    projections, mask, start if writes else None, keys, values, **options
  )
  if cache is not None:
    cache = cache_lib.with_layer(cache, layer, keys, values)
  return out, cache
