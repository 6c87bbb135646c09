"""Mixtures of experts: every token is computed by a few of many perceptrons.

    token    0 1 2 3        experts of each token: 1,3  0,1  3,1  1,0
    sorted   1 3 | 0 1 2 3 | | 0 2        rows of expert 0 | 1 | 2 | 3

Tokens are sorted by expert, and each expert multiplies its own rows, a block at
a time, as many blocks as it has rows for: an expert without any is not read.

The weights of an expert are arrays of their own, and the loops are one per
expert. From an array `[experts, out, in]`, XLA's CPU backend copies the slice
that it multiplies, and misses its fast products (docs/models.md has the
figures); `jax.lax.ragged_dot` computes all experts there.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

# Rows computed at once, at most.
_MAX_BLOCK = 128
_BLOCK_STEP = 16

# An expert's weights, any pytree, and its rows `[n, width]` to `[n, width]`.
Expert = Callable[[Any, jax.Array], jax.Array]


class Routing(NamedTuple):
  """Which experts the tokens of one layer go to.

  Attributes:
    experts: `[..., k]` int32, different ones, the likeliest first.
    weights: `[..., k]` float32, of their outputs in the sum.
    probs: `[..., E]` float32, of all experts.
  """

  experts: jax.Array
  weights: jax.Array
  probs: jax.Array


def route(logits: jax.Array, count: int, *, renormalize: bool) -> Routing:
  """The likeliest experts of each token (Mixtral, arXiv 2401.04088, 2.1).

  Args:
    logits: `[..., E]` float32.
    count: k, experts per token.
    renormalize: whether the weights of the k add up to one.
  """
  probs = jax.nn.softmax(logits, axis=-1)
  weights, experts = lax.top_k(probs, count)
  if renormalize:
    weights /= jnp.sum(weights, axis=-1, keepdims=True)
  return Routing(experts, weights, probs)


def tokens_per_expert(experts: jax.Array, num_experts: int) -> jax.Array:
  """How many tokens chose each expert, `[E]` int32; `experts` of any shape."""
  chosen = experts.reshape(-1, 1) == jnp.arange(num_experts)[None]
  return jnp.sum(chosen, axis=0, dtype=jnp.int32)


def distinct_experts(experts: jax.Array, num_experts: int) -> jax.Array:
  """How many experts a forward touches, `[]` int32."""
  counts = tokens_per_expert(experts, num_experts)
  return jnp.sum(counts > 0, dtype=jnp.int32)


def balance_loss(routing: Routing) -> jax.Array:
  """Load balancing (Switch Transformers, arXiv 2101.03961, eq. 4 to 6).

  Args:
    routing: of one layer.

  Returns:
    `[]` float32: E times the sum over experts of the share of choices that fell
    on it and its mean probability; 1 when all are used alike.
  """
  num_experts = routing.probs.shape[-1]
  counts = tokens_per_expert(routing.experts, num_experts)
  share = counts / routing.experts.size
  mean = jnp.mean(routing.probs.reshape(-1, num_experts), axis=0)
  return num_experts * jnp.sum(share * mean)


def _rows(array, start, size):
  return lax.dynamic_slice_in_dim(array, start, size)


def _put(array, rows, start):
  return lax.dynamic_update_slice_in_dim(array, rows, start, 0)


def _blocks_of_share(num_tokens, per_token, num_experts):
  """About as many rows as an expert has: on CPU arithmetic is what counts."""
  steps = -(-num_tokens * per_token // (num_experts * _BLOCK_STEP))
  return min(num_tokens, steps * _BLOCK_STEP, _MAX_BLOCK)


def _blocks_of_all(num_tokens, per_token, num_experts):
  """All of a forward, so that an expert is read once: elsewhere bytes count."""
  del per_token, num_experts
  return min(num_tokens, _MAX_BLOCK)


def _num_blocks(count, block):
  return (count + block - 1) // block


def _grouped(expert, block, weights, x, counts):
  """See `_apply`.

  A last block reaches into the rows of the next expert, whose own blocks come
  later, and at the end into padding.
  """
  out = jnp.zeros(x.shape, jnp.float32)
  start = jnp.zeros((), counts.dtype)
  for index, one in enumerate(weights):

    def compute(number, out, start=start, one=one):
      at = start + number * block
      return _put(out, expert(one, _rows(x, at, block)), at)

    out = lax.fori_loop(0, _num_blocks(counts[index], block), compute, out)
    start = start + counts[index]
  return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(
  expert: Expert,
  block: int,
  weights: Sequence[Any],
  x: jax.Array,
  counts: jax.Array,
) -> jax.Array:
  """Each expert on its own rows.

  Args:
    expert: the function.
    block: rows at once.
    weights: of each expert.
    x: `[P + block, width]`, P rows sorted by expert, then padding.
    counts: `[E]` int32, rows of each expert; P in all.
  """
  return _grouped(expert, block, weights, x, counts)


def _apply_fwd(expert, block, weights, x, counts):
  out = _grouped(expert, block, weights, x, counts)
  return out, (tuple(weights), x, counts)


def _apply_bwd(expert, block, residuals, grad):
  # Loops of as many rounds as there happen to be have no derivative of their
  # own; this is the same walk once more.
  weights, x, counts = residuals
  grad_x = jnp.zeros_like(x)
  grad_weights = []
  start = jnp.zeros((), counts.dtype)
  for index, one in enumerate(weights):

    def compute(number, carry, start=start, one=one, count=counts[index]):
      grad_x, grad_one = carry
      at = start + number * block
      own = number * block + jnp.arange(block) < count
      grad_rows = jnp.where(own[:, None], _rows(grad, at, block), 0.0)
      _, pull = jax.vjp(expert, one, _rows(x, at, block))
      more, grad_rows = pull(grad_rows)
      grad_one = jax.tree.map(jnp.add, grad_one, more)
      return _put(grad_x, grad_rows, at), grad_one

    # Summed over the blocks in float32, whatever the weights are.
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), one)
    grad_x, grad_one = lax.fori_loop(
      0, _num_blocks(counts[index], block), compute, (grad_x, nothing)
    )
    grad_weights.append(
      jax.tree.map(lambda leaf, grad: grad.astype(leaf.dtype), one, grad_one)
    )
    start = start + counts[index]
  return tuple(grad_weights), grad_x, None


_apply.defvjp(_apply_fwd, _apply_bwd)


def mix(
  expert: Expert,
  weights: Sequence[Any],
  x: jax.Array,
  routing: Routing,
) -> jax.Array:
  """The weighted sum of what its experts make of each token.

  The terms of a token are added in the order of its own choices, so its sum
  does not depend on the tokens beside it.

  Args:
    expert: the function that all experts are.
    weights: of each of the E experts.
    x: `[T, width]` float32.
    routing: of the T tokens.

  Returns:
    `[T, width]` float32.
  """
  num_tokens, per_token = routing.experts.shape
  chosen = routing.experts.reshape(-1)
  order = jnp.argsort(chosen, stable=True)
  counts = tokens_per_expert(chosen, len(weights))

  def apply(block, weights, rows, counts):
    padded = jnp.pad(rows, ((0, block), (0, 0)))
    return _apply(expert, block, weights, padded, counts)[: len(rows)]

  sizes = [
    blocks(num_tokens, per_token, len(weights))
    for blocks in (_blocks_of_share, _blocks_of_all)
  ]
  on_cpu, elsewhere = (functools.partial(apply, size) for size in sizes)
  args = (tuple(weights), x[order // per_token], counts)
  if sizes[0] == sizes[1]:  # One program less to trace.
    out = on_cpu(*args)
  else:
    out = lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)
  back = jnp.argsort(order).reshape(num_tokens, per_token)
  return jnp.sum(out[back] * routing.weights[..., None], axis=1)
