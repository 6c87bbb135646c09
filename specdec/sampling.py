"""From logits to a token, with randomness attached to positions.

The token at absolute position t is

    argmax(filter(logits / temperature) + gumbel(row key, t))

which is a draw from the filtered softmax (the Gumbel-max trick), and plain
argmax at temperature 0. The draw depends on (logits, seed, row, position) and
on nothing else: not on who drafted the token, nor on how many were verified
together. That is what makes speculative decoding reproduce plain decoding
token for token at any temperature (Gumbel coupling, arXiv 2408.07978).
"""

import math
import numbers

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Finite: -inf plus noise is fine, but -inf minus -inf in a softmax is not.
_FILTERED = -1e30


class Sampling(flax.struct.PyTreeNode, kw_only=True):
  """How to choose a token. Filters apply in the order of the fields.

  Values are arrays, so changing one does not recompile; switching a filter on
  or off does, so that a filter which is off costs nothing. Each is one number,
  or one per row `[B]`.

  Attributes:
    temperature: at least 0; 0 is greedy.
    top_k: keep the k most likely tokens, and ties with the last of them; static
      and shared by all rows. None keeps all.
    top_p: keep the most likely tokens until their probability reaches top_p, in
      (0, 1]. None keeps all.
    min_p: keep tokens at least min_p times as likely as the likeliest, in
      [0, 1]. None keeps all.
  """

  temperature: float | jax.Array = 0.0
  top_k: int | None = flax.struct.field(default=None, pytree_node=False)
  top_p: float | jax.Array | None = None
  min_p: float | jax.Array | None = None

  def validated(self) -> 'Sampling':
    """Returns itself with arrays as float32.

    Raises:
      ValueError: a value is outside its range or not a number.
    """
    if self.top_k is not None and (
      not isinstance(self.top_k, numbers.Integral) or self.top_k < 1
    ):
      raise ValueError(f'top_k must be a positive integer, got {self.top_k}')
    ranges: dict[str, tuple[float, float]] = {
      'temperature': (0.0, math.inf),
      'top_p': (float(np.finfo(np.float32).tiny), 1.0),
      'min_p': (0.0, 1.0),
    }
    arrays = {}
    for name, (low, high) in ranges.items():
      value = getattr(self, name)
      if value is None:
        continue
      array = np.asarray(value, np.float32)
      if not np.all(np.isfinite(array) & (array >= low) & (array <= high)):
        bounds = 'at least 0' if high == math.inf else 'between 0 and 1'
        if name == 'top_p':
          bounds = 'above 0 and at most 1'
        raise ValueError(f'{name} must be {bounds}, got {value}')
      arrays[name] = jnp.asarray(array)
    return self.replace(**arrays)


def per_row(value: jax.typing.ArrayLike, logits: jax.Array) -> jax.Array:
  """A number or `[B]` numbers, to broadcast against `[B, ..., V]`."""
  shape = jnp.shape(value) + (1,) * (logits.ndim - jnp.ndim(value))
  return jnp.reshape(value, shape)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """Temperature, then top-k, top-p and min-p.

  Every filter keeps the tokens whose logit reaches some threshold, so together
  they are one threshold. At temperature 0 the logits are filtered as at 1,
  which leaves the argmax what it was.

  Args:
    logits: `[B, ..., V]` float32.
    sampling: validated.

  Returns:
    `[B, ..., V]` float32: the log-probabilities up to a constant, with a
    large negative number for tokens filtered out.
  """
  temperature = per_row(sampling.temperature, logits)
  # Relative to the best, so that a tiny temperature cannot overflow.
  logits = logits - jnp.max(logits, axis=-1, keepdims=True)
  logits = logits / jnp.where(temperature > 0, temperature, 1.0)
  vocab_size = logits.shape[-1]
  threshold = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
  top_k = min(sampling.top_k or vocab_size, vocab_size)
  if top_k < vocab_size or sampling.top_p is not None:
    # Descending. Without the barrier XLA's CPU backend sees that only a slice
    # is used, and sorts the whole vocabulary instead: 100 times slower.
    ranked = lax.optimization_barrier(lax.top_k(logits, top_k)[0])
    threshold = ranked[..., -1:]
    if sampling.top_p is not None:
      probs = jax.nn.softmax(ranked, axis=-1)
      before = jnp.cumsum(probs, axis=-1) - probs
      top_p = per_row(sampling.top_p, logits)
      # At 1 all are kept, though rounding may bring the sum there early.
      kept = (before < top_p) | (top_p >= 1)
      # The likeliest token is always kept, whatever the rounding of `before`.
      last = jnp.maximum(jnp.sum(kept, axis=-1, keepdims=True) - 1, 0)
      threshold = jnp.take_along_axis(ranked, last, axis=-1)
  if sampling.min_p is not None:
    floor = jnp.log(per_row(sampling.min_p, logits))  # the best logit is 0
    threshold = jnp.maximum(threshold, floor)
  return jnp.where(logits >= threshold, logits, _FILTERED)


def position_noise(
  row_keys: jax.Array,
  positions: jax.Array,
  vocab_size: int,
  sampling: Sampling,
) -> jax.Array:
  """The noise of the tokens at the given absolute positions.

  Args:
    row_keys: `[B]` keys; not consumed, the same keys serve every position.
    positions: `[B, L]` int32.
    vocab_size: V.
    sampling: rows at temperature 0 get zeros; if all are, none is drawn.

  Returns:
    `[B, L, V]` float32, standard Gumbel.
  """

  def draw(row_key, position):
    return jax.random.gumbel(
      jax.random.fold_in(row_key, position), (vocab_size,)
    )

  shape = (*positions.shape, vocab_size)
  hot = jnp.asarray(sampling.temperature) > 0
  noise = lax.cond(
    jnp.any(hot),
    lambda: jax.vmap(jax.vmap(draw, (None, 0)))(row_keys, positions),
    lambda: jnp.zeros(shape),
  )
  return jnp.where(per_row(hot, noise), noise, 0.0)


def choose(
  logits: jax.Array, noise: jax.Array, sampling: Sampling
) -> jax.Array:
  """The token of each position; target and drafts choose alike.

  Args:
    logits: `[B, ..., V]` float32.
    noise: `[B, ..., V]` float32 from `position_noise`, for the position of the
      token to be chosen.
    sampling: validated.

  Returns:
    `[B, ...]` int32.
  """
  scores = filter_logits(logits, sampling) + noise
  return jnp.argmax(scores, axis=-1).astype(jnp.int32)
