"""Masked attention to the slots of a key-value cache.

The mask alone decides what a query sees, so the same functions serve prefill, a
chain, a token tree and training.
"""

from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.models.nn import contraction
from specdec.models.nn import layers
from specdec.models.nn import rope as rope_lib
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


class Operands(NamedTuple):
  """The operands of `attend`.

  Attributes:
    query: `[B, Hq, L, Dh]`, in the dtype of the cache.
    key: `[B, H, S, Dh]`, the keys of the whole cache.
    value: the same.
    mask: see `self_attention`.
    sinks: `[Hq]` float32, for each head the score of a slot without a value,
      which every query sees (gpt-oss); or None.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  mask: jax.Array
  sinks: jax.Array | None = None


def _grouped(operands: Operands) -> Operands:
  """Query heads as further queries of their key head, which is read once."""
  query, key, value, mask, sinks = operands
  rows = query.reshape(*key.shape[:2], -1, query.shape[3])
  mask = jnp.tile(mask, (1, query.shape[1] // key.shape[1], 1))
  if sinks is not None:
    sinks = jnp.repeat(sinks, query.shape[2])
  return Operands(rows, key, value, mask, sinks)


def _attend(
  operands: Operands, *, scale: float, cap: float | None = None
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


def _attend_padded(operands: Operands, **options: Any) -> jax.Array:
  """Attention of a single query, computed as two equal ones."""
  query = operands.query
  query = jnp.broadcast_to(query, (*query.shape[:2], 2, query.shape[3]))
  return _attend(operands._replace(query=query), **options)[:, :, :1]


def attend(
  operands: Operands, *, scale: float, cap: float | None = None
) -> jax.Array:
  """Softmax attention `[B, Hq, L, Dh]`, computed in float32.

  Args:
    operands: see `Operands`.
    scale: factor of the scores.
    cap: see `layers.soft_cap`, of the scores (Gemma 2).
  """
  shape = operands.query.shape
  if shape[1] > operands.key.shape[1]:
    operands = _grouped(operands)
  plain = functools.partial(_attend, scale=scale, cap=cap)
  if operands.query.shape[2] > 1 or operands.value.dtype == jnp.float32:
    return plain(operands).reshape(shape)
  # A bfloat16 product of a single row misses the fast CPU kernel
  # (187 ms, against 12.5 ms with two rows, AMD EPYC Zen 5).
  padded = functools.partial(_attend_padded, scale=scale, cap=cap)
  out = lax.platform_dependent(operands, cpu=padded, default=plain)
  return out.reshape(shape)


def _attend_by_sums(
  operands: Operands, *, scale: float, cap: float | None
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


def _attend_by_library(operands: Operands, scale: float) -> jax.Array:
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
  operands: Operands, *, scale: float, cap: float | None = None
) -> jax.Array:
  """`attend` to slots that are stored among the slots of other layers."""
  query, key, _, _, sinks = operands
  if sinks is None and query.size * key.shape[2] <= _MOST_SUMS:
    out = _attend_by_sums(_grouped(operands), scale=scale, cap=cap)
    return out.reshape(query.shape)
  takes = cap is None and sinks is None and key.shape[2] % 8 == 0
  if takes and _library_takes(key.shape[3], key.dtype):
    return _attend_by_library(operands, scale)
  return attend(operands, scale=scale, cap=cap)


class Heads(NamedTuple):
  """How projections become heads, and how these attend.

  Attributes:
    layer: index of the layer in the cache.
    num_kv_heads: H, the heads of keys. Hq is a multiple, and each run of Hq / H
      consecutive heads of queries shares one (arXiv 2305.13245).
    width: Dh.
    dtype: of keys and values.
    scale: factor of the scores.
    norms: of queries, keys and values, each a norm or None.
    joint_norms: whether a norm is over all heads together, not each by itself.
    writes: whether there are keys and values; else the cache has them already.
    cap: see `attend`.
    sinks: see `Operands`.
  """

  layer: int
  num_kv_heads: int
  width: int
  dtype: jax.typing.DTypeLike
  scale: float
  norms: tuple[layers.Norm | None, ...] = (None, None, None)
  joint_norms: bool = False
  writes: bool = True
  cap: float | None = None
  sinks: jax.Array | None = None


def _apart(
  projections: Sequence[jax.Array], heads: Heads
) -> Sequence[jax.Array]:
  """Projections for queries and, if there are any, for keys and for values."""
  if len(projections) == 3 or not heads.writes:
    return projections
  rows = jnp.concatenate(projections, axis=-1)
  queries = rows.shape[-1] - 2 * heads.num_kv_heads * heads.width
  ends = queries, queries + heads.num_kv_heads * heads.width
  return jnp.split(rows, ends, axis=-1)


def self_attention(
  projections: Sequence[jax.Array],
  mask: jax.Array,
  cache: cache_lib.KVCache | None,
  heads: Heads,
  rotation: rope_lib.Rotation | None = None,
) -> tuple[jax.Array, cache_lib.KVCache | None]:
  """Writes the keys and values of L positions to a cache, then attends to it.

  Args:
    projections: `[B, L, Hq Dh]` float32 for queries and, if `heads.writes`,
      `[B, L, H Dh]` for keys and for values. Arrays may be concatenated.
    mask: `[B, L, S]` bool over the slots of the cache, true where a query may
      look; `[B, L, L]` without a cache.
    cache: see `specdec.cache.write`. Without one (training), the L positions
      attend to one another only.
    heads: what the projections are.
    rotation: of queries and keys; None rotates nothing.

  Returns:
    `[B, L, Hq Dh]` float32, and the cache with the new entries.
  """
  norms = heads.norms
  if heads.joint_norms:
    apart = _apart(projections, heads)
    projections = [
      norm(rows) if norm else rows
      for rows, norm in zip(apart, norms, strict=False)
    ]
    norms = (None, None, None)
  # No kernel caps scores or has sinks.
  plain = heads.cap is None and heads.sinks is None
  if contraction.backend().kernels and plain:
    return _by_kernel(projections, mask, cache, heads, norms, rotation)

  def split(rows: jax.Array, norm: layers.Norm | None) -> jax.Array:
    split_rows = rows.reshape(*rows.shape[:2], -1, heads.width).swapaxes(1, 2)
    return norm(split_rows) if norm else split_rows

  rows = projections[0]
  if (
    rows.shape[-1] == 3 * heads.num_kv_heads * heads.width
    and len(projections) == 1
    and rotation is None
    and not any(norms)
  ):
    # As in GPT-2. One transposition takes fewer kernels than three.
    shape = (*rows.shape[:2], 3, heads.num_kv_heads, heads.width)
    in_thirds = rows.astype(heads.dtype).reshape(shape)
    query, *entries = in_thirds.transpose(2, 0, 3, 1, 4)
  else:
    query, *entries = map(split, _apart(projections, heads), norms)
  query = rope_lib.rotate(query, rotation)
  if rotation is not None and rotation.query_scale is not None:
    query *= rotation.query_scale[:, None, :, None]
  if entries:
    key, value = rope_lib.rotate(entries[0], rotation), entries[1]
    key, value = key.astype(heads.dtype), value.astype(heads.dtype)
  function = attend
  if cache is not None:
    if entries:
      cache = cache_lib.write(cache, heads.layer, key, value)
    key, value = cache.layer(heads.layer)
    function = attend if cache.heads_together is None else _attend_for_gpu
  operands = Operands(query.astype(heads.dtype), key, value, mask, heads.sinks)
  out = function(operands, scale=heads.scale, cap=heads.cap)
  return out.swapaxes(1, 2).reshape(*projections[0].shape[:2], -1), cache


def _by_kernel(
  projections: Sequence[jax.Array],
  mask: jax.Array,
  cache: cache_lib.KVCache | None,
  heads: Heads,
  norms: Sequence[layers.Norm | None],
  rotation: rope_lib.Rotation | None,
) -> tuple[jax.Array, cache_lib.KVCache | None]:
  """`self_attention` with the kernels of `models/nn/cpu`, in one call."""
  rows = jnp.concatenate(projections, axis=-1)
  if rotation is not None and rotation.query_scale is not None:
    # A rotation keeps factors; norms, which would not, are refused.
    entries = 2 * heads.num_kv_heads * heads.width if heads.writes else 0
    is_query = jnp.arange(rows.shape[-1]) < rows.shape[-1] - entries
    scale = rotation.query_scale[..., None]
    rows *= jnp.where(is_query[None, None], scale, 1.0)
  if cache is None:
    shape = len(rows), heads.num_kv_heads, mask.shape[2], heads.width
    keys = values = jnp.zeros(shape, heads.dtype)
    start = jnp.zeros(len(rows), jnp.int32)
  else:
    keys, values = cache.layer(heads.layer)
    start = cache.write_at
  out, keys, values = ops.attend(
    rows,
    mask,
    start if heads.writes else None,
    keys,
    values,
    scale=heads.scale,
    norms=tuple(None if norm is None else norm.operand for norm in norms),
    rotation=None if rotation is None else rotation[:2],
  )
  if cache is not None:
    cache = cache_lib.with_layer(cache, heads.layer, keys, values)
  return out, cache
