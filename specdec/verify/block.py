"""Block verification: a chain is accepted or cut as a whole.

Sun et al., arXiv 2403.10444, algorithm 2. Rejection verification goes token by
token and forgets by how much earlier tokens exceeded what was needed; a block
takes it into account, and accepts at least as many. For chains only.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec import sampling as sampling_lib
from specdec.tree import tree as tree_lib
from specdec.verify import accept
from specdec.verify import rejection


def prefix_weights(
  target: jax.Array, draft: jax.Array, tokens: jax.Array
) -> jax.Array:
  """The weights p_i of the prefixes of a chain, at most 1.

  p_i = min(p_{i-1} target_{i-1}(x_i) / draft_{i-1}(x_i), 1), p_0 = 1.

  Args:
    target: `[B, D + 1, V]`, the distributions after the root and each token.
    draft: `[B, D, V]`, those that the tokens were drawn from.
    tokens: `[B, D]` int32.

  Returns:
    `[B, D + 1]` float32.
  """
  at = lambda probs: jnp.take_along_axis(probs, tokens[..., None], 2)[..., 0]
  ratios = at(target[:, :-1]) / jnp.maximum(at(draft), 1e-37)
  weights = [jnp.ones(tokens.shape[0], target.dtype)]
  for depth in range(tokens.shape[1]):
    weights.append(jnp.minimum(weights[-1] * ratios[:, depth], 1.0))
  return jnp.stack(weights, axis=1)


def residuals(
  target: jax.Array, draft: jax.Array, weights: jax.Array
) -> jax.Array:
  """Distributions left to be drawn from after each prefix, not normalised.

  The arguments are those of `prefix_weights` and its result.

  Returns:
    `[B, D, V]` float32, of all prefixes but the whole chain.
  """
  weighted = weights[:, :-1, None] * target[:, :-1]
  return jnp.maximum(weighted - draft, 0.0)


def acceptance_probs(
  weights: jax.Array, residual: jax.Array, size: jax.Array
) -> jax.Array:
  """Acceptance probability h_i of prefix i (equation 4).

  The longest prefix i with u_i < h_i is accepted, the empty one (whose h is 1
  by definition) if no other is.

  Args:
    weights: from `prefix_weights`.
    residual: from `residuals`.
    size: `[B]` int32, tokens of the chain; longer prefixes get 0.

  Returns:
    `[B, D + 1]` float32.
  """
  depth = jnp.arange(weights.shape[1])[None]
  mass = jnp.pad(sampling_lib.total(residual)[..., 0], ((0, 0), (0, 1)))
  rest = mass + 1.0 - weights
  # Nothing is left and nothing is missing: the next prefix is accepted anyway.
  inner = jnp.where(rest > 0, mass / jnp.where(rest > 0, rest, 1.0), 1.0)
  probs = jnp.where(depth == size[:, None], weights, inner)
  probs = jnp.where(depth == 0, 1.0, probs)
  return jnp.where(depth <= size[:, None], probs, 0.0)


@dataclasses.dataclass(frozen=True)
class BlockRule:
  """Accepts a prefix of a chain; see `Rule`.

  Node d of the tree is at depth d.
  """

  #: One of `sampling.CHILDREN`; at temperature 0 the tokens are the best.
  children: str = sampling_lib.BEST

  shares_noise = False
  needs_chain = True
  may_draw = True
  keeps_tokens = False

  def __call__(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    logits: jax.Array,
    proposals: jax.Array,
    randomness: sampling_lib.Randomness,
    sampling: sampling_lib.SamplingParams,
  ) -> accept.Verdict:
    """See `specdec.verify.accept.Rule`."""
    num_nodes, vocab_size = logits.shape[1:]
    at = jax.vmap(tree_lib.pick)
    target = sampling_lib.token_probs(logits, sampling)
    tokens = at(tree.token, nodes)[:, 1:]
    draft = jax.nn.one_hot(tokens, vocab_size)
    if self.children != sampling_lib.BEST:
      drawn_from = at(proposals, nodes[:, :-1])
      draft = jnp.where(
        sampling.is_stochastic[:, None, None], drawn_from, draft
      )
    weights = prefix_weights(target, draft, tokens)
    residual = residuals(target, draft, weights)
    size = jnp.sum(nodes >= 0, axis=1) - 1
    probs = acceptance_probs(weights, residual, size)
    depth = jnp.arange(num_nodes)[None]
    is_accepted = (randomness.uniforms < probs) | (depth == 0)
    accepted = jnp.max(jnp.where(is_accepted, depth, 0), axis=1)

    whole = (accepted == size)[:, None]
    left = jnp.pad(residual, ((0, 0), (0, 1), (0, 0)))
    after_chain = at(target, accepted)
    bonus = rejection.draw(
      jnp.where(
        whole,
        after_chain,
        rejection.normalized(at(left, accepted), after_chain),
      ),
      randomness.residual_noise,
    )
    following = jnp.pad(tokens, ((0, 0), (0, 1)))
    return accept.Verdict(
      index=jnp.where(depth <= accepted[:, None], depth, tree_lib.NO_NODE),
      accepted=accepted,
      chosen=jnp.where(depth == accepted[:, None], bonus[:, None], following),
    )
