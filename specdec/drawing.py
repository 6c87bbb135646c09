"""Children drawn from the draft's distribution, for rejection verification.

Their noise is a stream of its own, keyed by the step and by the node: it has
nothing to do with what verification draws, and is never used again.
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.ranking import IMPOSSIBLE
from specdec.sampling import filter_logits
from specdec.sampling import per_row
from specdec.sampling import Sampling

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
