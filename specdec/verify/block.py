"""Block verification: a chain is accepted or cut as a whole.

Sun et al., arXiv 2403.10444, algorithm 2. Rejection verification goes token by
token and forgets how much better than needed those before were; a block
remembers, and accepts at least as many. For chains only.
"""

import jax
import jax.numpy as jnp

from specdec.sampling import ACCEPTANCE
from specdec.sampling import RESIDUAL
from specdec.sampling import Sampling
from specdec.sampling import step_keys
from specdec.sampling import token_probs
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import TokenTree
from specdec.verify.accept import Verdict
from specdec.verify.rejection import draw
from specdec.verify.rejection import normalized


def prefix_weights(
  target: jax.Array, draft: jax.Array, tokens: jax.Array
) -> jax.Array:
  """How much of each prefix of the chain the target wants, at most 1.

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
  """What each prefix leaves to be drawn behind it, not normalised.

  Args:
    target: as in `prefix_weights`.
    draft: likewise.
    weights: from there.

  Returns:
    `[B, D, V]` float32, of all prefixes but the whole chain.
  """
  weighted = weights[:, :-1, None] * target[:, :-1]
  return jnp.maximum(weighted - draft, 0.0)


def stand_chances(
  weights: jax.Array, residual: jax.Array, size: jax.Array
) -> jax.Array:
  """The probability h_i that a prefix stands by its own lot (equation 4).

  Args:
    weights: from `prefix_weights`.
    residual: from `residuals`.
    size: `[B]` int32, tokens of the chain; what lies behind never stands.

  Returns:
    `[B, D + 1]`; the longest prefix whose lot says so is accepted, the empty
    one (1 by definition) if no other is.
  """
  depth = jnp.arange(weights.shape[1])[None]
  mass = jnp.pad(jnp.sum(residual, axis=2), ((0, 0), (0, 1)))
  rest = mass + 1.0 - weights
  # Nothing is left and nothing is missing: the next prefix stands in any case.
  inner = jnp.where(rest > 0, mass / jnp.where(rest > 0, rest, 1.0), 1.0)
  chance = jnp.where(depth == size[:, None], weights, inner)
  chance = jnp.where(depth == 0, 1.0, chance)
  return jnp.where(depth <= size[:, None], chance, 0.0)


def verify_block(
  tree: TokenTree,
  logits: jax.Array,
  proposals: jax.Array | None,
  row_keys: jax.Array,
  length: jax.Array,
  sampling: Sampling,
) -> Verdict:
  """Accepts the longest prefix of a chain whose lot says so.

  Args:
    tree: `[B, N]` per field, node d at depth d.
    logits: `[B, N, V]` float32, adjusted.
    proposals: `[B, N, V]` float32, see `rejection.reject`.
    row_keys: `[B]` keys; not consumed.
    length: `[B]` int32, of the text when the step began.
    sampling: validated.
  """
  batch_size, num_nodes, vocab_size = logits.shape
  target = token_probs(logits, sampling)
  tokens = tree.token[:, 1:]
  draft = jax.nn.one_hot(tokens, vocab_size)
  if proposals is not None:
    hot = jnp.broadcast_to(jnp.asarray(sampling.temperature) > 0, (batch_size,))
    draft = jnp.where(hot[:, None, None], proposals[:, :-1], draft)
  weights = prefix_weights(target, draft, tokens)
  residual = residuals(target, draft, weights)
  size = tree.size - 1
  chances = stand_chances(weights, residual, size)
  lots = jax.vmap(lambda key: jax.random.uniform(key, (num_nodes,)))(
    step_keys(row_keys, ACCEPTANCE, length)
  )
  depth = jnp.arange(num_nodes)[None]
  stands = (lots < chances) | (depth == 0)
  accepted = jnp.max(jnp.where(stands, depth, 0), axis=1)

  at = lambda array: jax.vmap(lambda one, index: one[index])(array, accepted)
  whole = (accepted == size)[:, None]
  left = jnp.pad(residual, ((0, 0), (0, 1), (0, 0)))
  bonus = draw(
    jnp.where(whole, at(target), normalized(at(left), at(target))),
    step_keys(row_keys, RESIDUAL, length),
  )
  following = jnp.pad(tokens, ((0, 0), (0, 1)))
  return Verdict(
    path=jnp.where(depth <= accepted[:, None], depth, NO_NODE),
    accepted=accepted,
    chosen=jnp.where(depth == accepted[:, None], bonus[:, None], following),
  )
