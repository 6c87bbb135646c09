"""Masked attention over a row's visible slots, shaped for the machine.

What a query may see is decided by the mask alone, so the same function serves
prefill, a chain, a token tree and training.
"""

import jax
from jax import lax
import jax.numpy as jnp

from models import matmul

# Finite, so that a row that sees nothing (padding) gives numbers, not NaN.
_MASKED_SCORE = -1e30


def _probabilities(scores: jax.Array, mask: jax.Array) -> jax.Array:
  return jax.nn.softmax(jnp.where(mask, scores, _MASKED_SCORE), axis=-1)


def _batched(query, key, value, mask, scale):
  scores = scale * jnp.einsum(
      'blhd,bshd->bhls', query, key, preferred_element_type=jnp.float32
  )
  probs = _probabilities(scores, mask[:, None]).astype(value.dtype)
  return jnp.einsum(
      'bhls,bshd->blhd', probs, value, preferred_element_type=jnp.float32
  )


def _per_head(query, key, value, mask, scale):
  """One pair of two-dimensional products per row and head.

  XLA's CPU backend runs batched products on a slow path (docs/cpu.md).
  """

  def head(query, key, value, mask):  # [L, Dh], [S, Dh], [S, Dh], [L, S]
    probs = _probabilities(scale * matmul.rows_matmul(query, key), mask)
    return matmul.rows_matmul(probs.astype(value.dtype), value.T)

  rows, heads = query.shape[0], query.shape[2]
  return jnp.stack([
      jnp.stack(
          [
              head(query[b, :, h], key[b, :, h], value[b, :, h], mask[b])
              for h in range(heads)
          ],
          axis=1,
      )
      for b in range(rows)
  ])


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    unroll_heads: bool,
) -> jax.Array:
  """Softmax attention; scores and probabilities are computed in float32.

  Args:
    query: `[B, L, H, Dh]`.
    key: `[B, S, H, Dh]`, same dtype as `query`.
    value: `[B, S, H, Dh]`, same dtype as `query`.
    mask: `[B, L, S]` bool, true where a query may look.
    scale: multiplies the scores.
    unroll_heads: on CPU, use one product per row and head. Right for decoding;
      for training's large batches it would only bloat the program.

  Returns:
    `[B, L, H, Dh]` float32.
  """
  operands = (query, key, value, mask)
  if not unroll_heads:
    return _batched(*operands, scale)
  return lax.platform_dependent(
      *operands,
      cpu=lambda *a: _per_head(*a, scale),
      default=lambda *a: _batched(*a, scale),
  )
