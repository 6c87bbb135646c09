"""Masked attention over a row's visible slots, shaped for the machine.

What a query may see is decided by the mask alone, so the same function serves
prefill, a chain, a token tree and training.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from models.matmul import precision

# Finite, so that a row that sees nothing (padding) gives numbers, not NaN.
_MASKED_SCORE = -1e30

# Up to so many queries times heads, one product of all heads beats the batched
# product on CPU although most of its multiplications are by zero (docs/cpu.md).
_MAX_BLOCK_DIAGONAL_ROWS = 160


def _probabilities(scores: jax.Array, mask: jax.Array) -> jax.Array:
  return jax.nn.softmax(jnp.where(mask, scores, _MASKED_SCORE), axis=-1)


def _batched(query, key, value, mask, *, scale):
  scores = scale * jnp.einsum(
    'blhd,bshd->bhls',
    query,
    key,
    precision=precision(value.dtype),
    preferred_element_type=jnp.float32,
  )
  probs = _probabilities(scores, mask[:, None]).astype(value.dtype)
  return jnp.einsum(
    'bhls,bshd->blhd',
    probs,
    value,
    precision=precision(value.dtype),
    preferred_element_type=jnp.float32,
  )


def _batched_as_eight_queries(query, key, value, mask, *, scale):
  """A single query on accelerators: as a row alone it misses the matrix unit.

  XLA turns its products into sums, on GPU in more kernels too.
  """
  query = jnp.broadcast_to(query, (query.shape[0], 8, *query.shape[2:]))
  return _batched(query, key, value, mask, scale=scale)[:, :1]


def _block_diagonal(query, key, value, mask, *, scale):
  """Two plain matrix products per row of the batch, whatever the heads.

  The queries of a token become a block-diagonal matrix, one block per head:

      q0 .  .          k0 k1 k2   (slot 0)          q0.k0 q0.k0' ...  (head 0)
      .  q1 .    x    (k0 k1 k2)' (slot 1) ...  =   q1.k1 q1.k1' ...  (head 1)
      .  .  q2                                      q2.k2 q2.k2' ...  (head 2)

  so the cache is read as it lies, slot by slot, with no slice per head.
  """
  length, heads, width = query.shape[1:]
  own = jnp.eye(heads, dtype=bool)[:, :, None]  # [H, H, 1]

  def attend_row(query, key, value, mask):
    queries = jnp.where(own, query[:, :, None], 0)  # [L, H, H, Dh]
    scores = scale * lax.dot_general(
      queries.reshape(length * heads, heads * width),
      key.reshape(-1, heads * width),
      (((1,), (1,)), ((), ())),
      precision=precision(value.dtype),
      preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(length, heads, -1)
    probs = _probabilities(scores, mask[:, None]).astype(value.dtype)
    mixed = lax.dot_general(
      probs.reshape(length * heads, -1),
      value.reshape(-1, heads * width),
      (((1,), (0,)), ((), ())),
      precision=precision(value.dtype),
      preferred_element_type=jnp.float32,
    )
    mixed = mixed.reshape(length, heads, heads, width)
    return jnp.sum(jnp.where(own, mixed, 0.0), axis=2)  # [L, H, Dh]

  rows = zip(query, key, value, mask, strict=True)
  return jnp.stack([attend_row(*row) for row in rows])


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
    query: `[B, L, H, Dh]`.
    key: `[B, S, H, Dh]`, same dtype as `query`.
    value: `[B, S, H, Dh]`, same dtype as `query`.
    mask: `[B, L, S]` bool, true where a query may look.
    scale: multiplies the scores.

  Returns:
    `[B, L, H, Dh]` float32.
  """
  operands = (query, key, value, mask)
  batched = functools.partial(_batched, scale=scale)
  if query.shape[1] * query.shape[2] > _MAX_BLOCK_DIAGONAL_ROWS:
    return batched(*operands)
  single = functools.partial(_batched_as_eight_queries, scale=scale)
  return lax.platform_dependent(
    *operands,
    cpu=functools.partial(_block_diagonal, scale=scale),
    default=single if query.shape[1] == 1 else batched,
  )
