"""Mixtures of experts: each token is computed by k of E MLPs.

    token    0 1 2 3        experts of each token: 1,3  0,1  3,1  1,0
    sorted   1 3 | 0 1 2 3 | | 0 2        rows of expert 0 | 1 | 2 | 3

Tokens are sorted by expert. Each expert multiplies its own rows in blocks; the
weights of an expert without rows are not read.

The weights of each expert are separate arrays with a loop of their own. XLA's
CPU backend copies the slices of a stacked array `[experts, out, in]` and misses
its fast products for them: two of eight experts on 16 bfloat16 rows take 107 ms
instead of 1.6 ms, and `jax.lax.ragged_dot`, which computes all experts there,
188 ms (throw-away program, AMD EPYC Zen 4).
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from specdec.models.nn.cpu import ops

_MAX_BLOCK = 128  # Rows computed at once, at most.
_BLOCK_STEP = 16

# From the weights of an expert (any pytree) and rows `[n, width]` to its
# outputs `[n, width]`.
Expert = Callable[[Any, jax.Array], jax.Array]


class Routing(NamedTuple):
  """Assignment of the tokens of one layer to experts.

  Attributes:
    experts: `[..., k]` int32, distinct, the most probable first.
    weights: `[..., k]` float32, weights of the experts' outputs in the sum.
  """

  experts: jax.Array
  weights: jax.Array


def route(
  logits: jax.Array, count: int, *, renormalize: bool, kernels: bool = False
) -> Routing:
  """Routing of each token to its most probable experts (arXiv 2401.04088, 2.1).

  Args:
    logits: `[..., E]` float32.
    count: k, experts per token.
    renormalize: whether the weights of the k experts sum to 1.
    kernels: whether to use the kernels of `models/nn/cpu`.
  """
  if kernels:
    return Routing(*ops.route(logits, count, renormalize=renormalize))
  probs = jax.nn.softmax(logits, axis=-1)
  weights, experts = lax.top_k(probs, count)
  if renormalize:
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
  return Routing(experts, weights)


def _tokens_per_expert(experts: jax.Array, num_experts: int) -> jax.Array:
  """Number of tokens of each expert, `[E]` int32; `experts` of any shape."""
  chosen = experts.reshape(-1, 1) == jnp.arange(num_experts)[None]
  return jnp.sum(chosen, axis=0, dtype=jnp.int32)


def _block_size(num_tokens: int, per_token: int, num_experts: int) -> int:
  """Rows per block: the mean share of an expert, rounded up."""
  steps = -(-num_tokens * per_token // (num_experts * _BLOCK_STEP))
  return min(num_tokens, steps * _BLOCK_STEP, _MAX_BLOCK)


def _apply(
  expert: Expert,
  block: int,
  weights: Sequence[Any],
  x: jax.Array,
  counts: jax.Array,
) -> jax.Array:
  """Applies each expert to its own of the rows `x [P + block, width]`.

  Rows are sorted by expert, `counts [E]` of each, then padding. A last block
  extends into the rows of the next expert; that expert overwrites them later.
  """
  out = jnp.zeros(x.shape, jnp.float32)
  starts = jnp.cumsum(counts) - counts
  for expert_weights, begin, count in zip(weights, starts, counts, strict=True):

    def compute(
      index: jax.Array,
      out: jax.Array,
      expert_weights: Any = expert_weights,
      begin: jax.Array = begin,
    ) -> jax.Array:
      start = begin + index * block
      result = expert(expert_weights, lax.dynamic_slice_in_dim(x, start, block))
      return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out = lax.fori_loop(0, (count + block - 1) // block, compute, out)
  return out


def mix(
  expert: Expert,
  weights: Sequence[Any],
  x: jax.Array,
  routing: Routing,
  *,
  kernels: bool = False,
) -> jax.Array:
  """Weighted sum of the outputs of each token's experts.

  The terms of a token are added in the order of its own choices, so its sum
  does not depend on the other tokens; nor on their number, with the kernels.

  Args:
    expert: the function that all experts compute.
    weights: weights of each of the E experts.
    x: `[T, width]` float32.
    routing: routing of the T tokens.
    kernels: whether to use the kernels of `models/nn/cpu` for the sum.

  Returns:
    `[T, width]` float32.
  """
  num_tokens, per_token = routing.experts.shape
  chosen = routing.experts.reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  block = _block_size(num_tokens, per_token, len(weights))
  rows = jnp.pad(x[order // per_token], ((0, block), (0, 0)))
  counts = _tokens_per_expert(chosen, len(weights))
  out = _apply(expert, block, tuple(weights), rows, counts)
  back = jnp.argsort(order).reshape(num_tokens, per_token)
  return weighted_sum(out, back, routing.weights, kernels=kernels)


def weighted_sum(
  rows: jax.Array, index: jax.Array, weights: jax.Array, *, kernels: bool
) -> jax.Array:
  """Weighted sums `[T, width]` of rows, see `ops.sum_rows`."""
  if kernels:
    return ops.sum_rows(rows, index, weights)
  return jnp.sum(rows[index] * weights[..., None], axis=1)
