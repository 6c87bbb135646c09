"""How likely the target is to choose a token, as far as a drafter can tell.

The target will choose `argmax(filter(logits / temperature) + noise)`. A drafter
knows the noise, which belongs to the position, and has logits of its own, which
are the target's plus an error. If that error were Gumbel noise of scale 1/b,
the token x would be chosen with the probability

    softmax(b * (filter(own logits / temperature) + noise))[x]

(the Gumbel-max trick, applied to the error). So b, the calibration exponent,
says how much a drafter is to be trusted, and one formula serves greedy decoding
(where the noise is zero) and sampling.
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.sampling import filter_logits
from specdec.sampling import per_row
from specdec.sampling import Sampling

# Of the largest of many perturbed logits: the mean of a Gumbel variable.
_EULER_GAMMA = 0.5772157

IMPOSSIBLE = -1e30
"""Finite stand-in for the log-probability 0 of a token that is no guess."""


class Ranking(flax.struct.PyTreeNode):
  """How likely every token is to be the target's choice.

  Vocabularies are large, so log-probabilities are made of scores only where
  they are wanted.

  Attributes:
    scores: `[B, W, V]` float32, the log-probabilities up to a constant.
    log_total: `[B, W, 1]` float32, that constant; not finite where nothing is
      known.
    best: `[B, W, K]` float32, the highest scores, in descending order.
    tokens: `[B, W, K]` int32, whose they are.
  """

  scores: jax.Array
  log_total: jax.Array
  best: jax.Array
  tokens: jax.Array

  def log_probs(self, scores: jax.Array) -> jax.Array:
    """Of some of the scores; see `normalise`."""
    return normalise(scores, self.log_total)


def normalise(scores: jax.Array, log_total: jax.Array) -> jax.Array:
  """Log-probabilities, at most 0, of scores up to a constant.

  Args:
    scores: any shape.
    log_total: the constant, of a shape that fits; where it is not finite,
      nothing is known, and they are `IMPOSSIBLE`.
  """
  log_probs = jnp.minimum(scores - log_total, 0.0)
  return jnp.where(jnp.isfinite(log_total), log_probs, IMPOSSIBLE)


def rank_logits(
  logits: jax.Array,
  noise: jax.Array | None,
  sampling: Sampling,
  calibration: float,
  number: int,
) -> Ranking:
  """Ranks all tokens.

  Args:
    logits: `[B, W, V]` float32, adjusted. Of NaN or inf among them, or of -inf
      alone, nothing follows.
    noise: `[B, W, V]` float32, of the positions of the tokens to be chosen;
      None if the choice will not depend on it.
    sampling: validated; the target's.
    calibration: b above.
    number: K, of the best; at most V.
  """
  scores = filter_logits(logits, sampling)
  scores = calibration * (scores if noise is None else scores + noise)
  # The barrier is for XLA's CPU backend, see `sampling.filter_logits`.
  best, tokens = lax.optimization_barrier(lax.top_k(scores, number))
  # The log-sum-exp of all, without looking for the largest once more.
  total = jnp.sum(jnp.exp(scores - best[..., :1]), axis=-1, keepdims=True)
  # NaN or inf in any of them, or -inf in all; filtering leaves no trace of it.
  usable = jnp.isfinite(jnp.max(logits, axis=-1, keepdims=True))
  return Ranking(
    scores=scores,
    log_total=jnp.where(usable, best[..., :1] + jnp.log(total), jnp.inf),
    best=best,
    tokens=tokens,
  )


def rank_candidates(
  log_probs: jax.Array,
  noise: jax.Array | None,
  sampling: Sampling,
  calibration: float,
) -> jax.Array:
  """Ranks a few tokens whose probabilities are known.

  All other tokens count as one more, with the remaining probability.

  Args:
    log_probs: `[B, W, C]` float32, of distinct tokens, adding up to at most 1;
      `IMPOSSIBLE` for entries that are no guess.
    noise: `[B, W, C]` float32, of these tokens; None as in `rank_logits`.
    sampling: validated; the target's. Filters other than the temperature are
      not applied, the probability of a filtered token being small.
    calibration: b above.

  Returns:
    `[B, W, C]` float32, log-probabilities, at most 0.
  """
  temperature = per_row(sampling.temperature, log_probs)
  hot = temperature > 0
  rest = 1.0 - jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
  rest = jnp.log(jnp.maximum(rest, 1e-6))
  others = rest / jnp.where(hot, temperature, 1.0)
  scores = log_probs / jnp.where(hot, temperature, 1.0)
  if noise is not None:
    others = others + jnp.where(hot, _EULER_GAMMA, 0.0)
    scores = scores + noise
  scores = calibration * jnp.concatenate([scores, others], axis=-1)
  ranked = jax.nn.log_softmax(scores, axis=-1)[..., :-1]
  possible = log_probs > IMPOSSIBLE / 2
  return jnp.where(possible, jnp.minimum(ranked, 0.0), IMPOSSIBLE)


# Less likely than this, e^-69, a token is never drawn. What is left of the
# draft's distribution when its likeliest tokens have fallen must not underflow.
_LEAST_LOG_PROB = -69.0


class Draws(flax.struct.PyTreeNode):
  """How to draw in one step.

  Attributes:
    keys: `[B]`, of the step, for drafting alone.
    replacement: whether siblings are drawn with replacement; static.
  """

  keys: jax.Array
  replacement: bool = flax.struct.field(pytree_node=False)


def draw_children(
  logits: jax.Array,
  nodes: jax.Array,
  draws: Draws,
  sampling: Sampling,
  number: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws children of W nodes.

  Without replacement these are the largest of log-probabilities and Gumbel
  noise (arXiv 1903.06059), in the order of the draws.

  Args:
    logits: `[B, W, V]` float32, adjusted.
    nodes: `[B, W]` int32; `NO_NODE` draws something nobody uses.
    draws: see `Draws`.
    sampling: validated; the target's. Rows at temperature 0 draw nothing and
      get the likeliest tokens.
    number: K, at most V.

  Returns:
    `[B, W, K]` int32 tokens; `[B, W, K]` float32, their log-probabilities, very
    small for those that cannot be drawn; and `[B, W, V]` float32, the
    distributions that they were drawn from.
  """
  filtered = filter_logits(logits, sampling)
  log_probs = jax.nn.log_softmax(filtered, axis=-1)
  log_probs = jnp.where(log_probs > _LEAST_LOG_PROB, log_probs, IMPOSSIBLE)
  hot = jnp.asarray(sampling.temperature) > 0
  shape = (number, logits.shape[2]) if draws.replacement else logits.shape[2:]

  def noise_of(key, node):
    return jax.random.gumbel(jax.random.fold_in(key, node), shape)

  noise = jax.vmap(jax.vmap(noise_of, (None, 0)))(draws.keys, nodes)
  noise = jnp.where(per_row(hot, noise), noise, 0.0)
  if draws.replacement:
    drawn = jnp.argmax(log_probs[:, :, None] + noise, axis=-1)
    _, best = lax.top_k(log_probs, number)
    tokens = jnp.where(per_row(hot, best), drawn, best)
  else:
    _, tokens = lax.top_k(log_probs + noise, number)
  return (
    tokens.astype(jnp.int32),
    jnp.take_along_axis(log_probs, tokens, axis=-1),
    jnp.exp(log_probs),
  )
