"""Children of nodes, by how likely the target is to choose each token.

The target chooses `argmax(filter(logits / temperature) + noise)`. A drafter
knows the noise, which belongs to the position, and has logits of its own, which
are the target's plus an error. If that error were Gumbel noise of scale 1/b,
the token x would be chosen with the probability

    softmax(b * (filter(own logits / temperature) + noise))[x]

(the Gumbel-max trick, applied to the error). So b, `StageConfig.calibration`,
says how reliable a drafter is, and one formula serves greedy decoding (where
the noise is zero) and sampling.

For rejection verification children may be drawn instead. Their noise is a
stream of its own, keyed by step and node: verification does not use it.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import best as best_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib

# The mean of a standard Gumbel variable.
_EULER_GAMMA = 0.5772157

# A token less likely than this, e^-69, is never drawn. What remains of the
# draft's distribution when its most likely tokens were rejected must not
# underflow.
_LEAST_LOG_PROB = -69.0


def _normalise(scores: jax.Array, log_total: jax.Array) -> jax.Array:
  log_probs = jnp.minimum(scores - log_total, 0.0)
  return jnp.where(jnp.isfinite(log_total), log_probs, sampling_lib.EXCLUDED)


class Ranking(flax.struct.PyTreeNode):
  """Log-probability of every token to be the target's choice.

  Vocabularies are large, so scores are computed only where they are wanted.
  """

  kept: sampling_lib.Kept  #: The logits, `[B, W, V]`.
  noise: randomness_lib.Noise  #: At the children of W nodes.
  #: `[B, W, 1]` float32, the logarithm of the sum of all exponentiated scores;
  #: not finite where the logits were not.
  log_total: jax.Array
  #: `[B, W, K]` float32, the highest scores, in descending order.
  best: jax.Array
  tokens: jax.Array  #: `[B, W, K]` int32, the tokens that have them.
  calibration: float = flax.struct.field(pytree_node=False)  #: b; static.

  @property
  def best_log_probs(self) -> jax.Array:
    """`[B, W, K]` float32, at most 0; `EXCLUDED` where nothing is known."""
    return _normalise(self.best, self.log_total)

  def log_prob_of(self, index: jax.Array, tokens: jax.Array) -> jax.Array:
    """`[B, M]`, of `tokens [B, M]` after the nodes at `index [B, M]` of W."""
    tokens = tokens[..., None]
    of_nodes = lambda array: jnp.take_along_axis(array, index[..., None], 1)
    of_row = lambda logits, index, tokens: logits[index[:, None], tokens]
    logits = jax.vmap(of_row)(self.kept.logits, index, tokens)
    kept = self.kept._replace(
      logits=logits,
      best=of_nodes(self.kept.best),
      threshold=of_nodes(self.kept.threshold),
    )
    scores = kept.filtered() + self.noise.at(index).of_tokens(tokens)
    scores = _normalise(self.calibration * scores, of_nodes(self.log_total))
    return scores[..., 0]


def _best(
  scores: jax.Array, number: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The best of `scores [..., n]`, their places, and the log-sum-exp of all."""
  best, places = best_lib.top_k(scores, number)
  # Without searching for the largest once more.
  total = jnp.sum(jnp.exp(scores - best[..., :1]), axis=-1, keepdims=True)
  return best, places, best[..., :1] + jnp.log(total)


def rank_logits(
  logits: jax.Array,
  noise: randomness_lib.Noise,
  sampling: sampling_lib.SamplingParams,
  calibration: float,
  number: int,
  proposed: jax.Array | None = None,
) -> Ranking:
  """Ranks all tokens.

  Args:
    logits: `[B, W, V]` float32, adjusted. Where NaN or inf is among them, or
      -inf alone, no token is possible.
    noise: of the W positions of the tokens to be chosen.
    sampling: the target's.
    calibration: b above.
    number: K, of the best; at most V.
    proposed: `[N]` int32, ascending, if all other logits are -inf; then at most
      N are ranked.
  """
  few, of_few_tokens = logits, noise
  if proposed is not None:
    few = jnp.take(logits, proposed, axis=-1)
    of_few_tokens = noise.among(proposed)
    number = min(number, len(proposed))
  kept = sampling_lib.keep(few, sampling)

  def of_all() -> tuple[jax.Array, jax.Array, jax.Array]:
    return _best(calibration * kept.scores_of(of_few_tokens), number)

  def of_few(
    scores: jax.Array, tokens: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    best, places, total = _best(calibration * scores, number)
    return best, jnp.take_along_axis(tokens, places, axis=-1), total

  best, tokens, log_total = kept.among_few(
    of_few_tokens, of_few, of_all, least=number
  )
  if proposed is not None:
    tokens = proposed[tokens]
  # Filtering leaves no trace of NaN and inf.
  usable = sampling_lib.is_usable(few)[..., None]
  return Ranking(
    kept=kept._replace(logits=logits, ranked=None),
    noise=noise,
    log_total=jnp.where(usable, log_total, jnp.inf),
    best=best,
    tokens=tokens,
    calibration=calibration,
  )


def rank_candidates(
  log_probs: jax.Array,
  noise: jax.Array,
  sampling: sampling_lib.SamplingParams,
  calibration: float,
  *,
  shares_noise: bool,
) -> jax.Array:
  """Ranks a few tokens whose probabilities are known.

  All other tokens count as one more, with the remaining probability.

  Args:
    log_probs: `[B, W, C]` float32, of distinct tokens, adding up to at most 1;
      `EXCLUDED` for entries that are no candidates.
    noise: `[B, W, C]` float32, of these tokens.
    sampling: the target's. Filters other than the temperature are not applied,
      the probability of a filtered token being small.
    calibration: b above.
    shares_noise: whether the noise is the target's, so that the other tokens
      have noise as well, on average the mean of a Gumbel variable.

  Returns:
    `[B, W, C]` float32, log-probabilities, at most 0.
  """
  stochastic = sampling_lib.per_row(sampling.is_stochastic, log_probs)
  temperature = sampling_lib.per_row(sampling.temperature, log_probs)
  temperature = jnp.where(stochastic, temperature, 1.0)
  rest = 1.0 - jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
  others = jnp.log(jnp.maximum(rest, 1e-6)) / temperature
  if shares_noise:
    others = others + jnp.where(stochastic, _EULER_GAMMA, 0.0)
  scores = log_probs / temperature + noise
  scores = calibration * jnp.concatenate([scores, others], axis=-1)
  ranked = jnp.minimum(jax.nn.log_softmax(scores, axis=-1)[..., :-1], 0.0)
  return ranked


def draw_children(
  logits: jax.Array,
  nodes: jax.Array,
  keys: jax.Array,
  sampling: sampling_lib.SamplingParams,
  number: int,
  *,
  children: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws children of W nodes.

  Without replacement these are the largest of log-probabilities plus Gumbel
  noise (arXiv 1903.06059), in the order of the draws.

  Args:
    logits: `[B, W, V]` float32, adjusted.
    nodes: `[B, W]` int32; for `NO_NODE` the results are arbitrary.
    keys: `[B]` keys, of the step, for drafting alone.
    sampling: the target's. Rows at temperature 0 draw nothing and get the
      most likely tokens.
    number: K, at most V.
    children: one of `sampling.CHILDREN` but the best.

  Returns:
    `[B, W, K]` int32 tokens; `[B, W, K]` float32, their log-probabilities, very
    small for those that cannot be drawn; and `[B, W, V]` float32, the
    distributions that they were drawn from.
  """
  filtered = sampling_lib.filter_logits(logits, sampling)
  log_probs = sampling_lib.log_softmax(filtered)
  log_probs = jnp.where(
    log_probs > _LEAST_LOG_PROB, log_probs, sampling_lib.EXCLUDED
  )
  stochastic = sampling.is_stochastic
  replacement = children == sampling_lib.WITH_REPLACEMENT
  shape = (number, logits.shape[2]) if replacement else logits.shape[2:]

  def noise_of(key: jax.Array, node: jax.Array) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(key, node), shape)

  noise = jax.vmap(jax.vmap(noise_of, (None, 0)))(keys, nodes)
  noise = jnp.where(sampling_lib.per_row(stochastic, noise), noise, 0.0)
  drawn_from = jnp.exp(log_probs)
  if children == sampling_lib.WITHOUT_REPLACEMENT:
    _, tokens = best_lib.top_k(log_probs + noise, number)
  else:
    drawn = best_lib.best_token(log_probs[:, :, None] + noise)
    _, best = best_lib.top_k(log_probs, number)
    tokens = jnp.where(sampling_lib.per_row(stochastic, best), drawn, best)
  return (
    tokens.astype(jnp.int32),
    jnp.take_along_axis(log_probs, tokens, axis=-1),
    drawn_from,
  )
