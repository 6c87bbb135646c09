"""Rejection verification: guesses stand by chance, and the law is kept.

A guess x that was drawn from the draft's distribution stands with probability
min(1, target(x) / draft(x)); if it falls, the target's distribution becomes the
normalised positive part of target - draft, and the next sibling is tried
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; with several
siblings SpecInfer, arXiv 2305.09781, and Sequoia, arXiv 2402.12374). If none
stands, the bonus token is drawn from what is left.

A guess that was *not* drawn, such as that of an n-gram or the likeliest child,
is a draw from a distribution that is all on it: it stands with the target's
probability, which is removed if it falls. To treat it as a draw from the
draft's softmax would be wrong.

The emitted tokens have the target's law, but they are not those of plain
decoding with the same seed. `specdec.verification.match` gives those.
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.sampling import ACCEPTANCE
from specdec.sampling import RESIDUAL
from specdec.sampling import Sampling
from specdec.sampling import step_keys
from specdec.sampling import token_probs
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import ROOT
from specdec.tree.tree import TokenTree
from specdec.verify.accept import Verdict

WITH_REPLACEMENT = 'with_replacement'
WITHOUT_REPLACEMENT = 'without_replacement'
BEST = 'best'
CHILDREN = (BEST, WITHOUT_REPLACEMENT, WITH_REPLACEMENT)
"""How the children of a node come about; all but the best are drawn."""


def normalized(mass: jax.Array, fallback: jax.Array) -> jax.Array:
  """`mass [..., V]` as distributions; the fallback where there is none.

  In exact arithmetic no mass is left only if nothing could be rejected. By
  rounding it happens, where target and draft are all but equal; then the target
  itself is as good as what is left of it.
  """
  total = jnp.sum(mass, axis=-1, keepdims=True)
  return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), fallback)


def acceptance(
  target: jax.Array, draft: jax.Array, token: jax.Array
) -> jax.Array:
  """The probability that a guess stands, `[B]` float32.

  Args:
    target: `[B, V]`, the target's distribution, or what is left of it.
    draft: `[B, V]`, the distribution that the guess was drawn from.
    token: `[B]` int32, the guess.
  """
  at = lambda probs: jnp.take_along_axis(probs, token[:, None], axis=1)[:, 0]
  return jnp.minimum(at(target) / jnp.maximum(at(draft), 1e-37), 1.0)


def after_rejection(
  target: jax.Array, draft: jax.Array, token: jax.Array, children: str
) -> tuple[jax.Array, jax.Array]:
  """What is left of both distributions when a guess has fallen.

  Args:
    target: as in `acceptance`.
    draft: likewise.
    token: likewise.
    children: one of `CHILDREN`.

  Returns:
    `[B, V]` float32, the target's, and `[B, V]` float32, the one that the next
    sibling was drawn from.
  """
  left = normalized(jnp.maximum(target - draft, 0.0), target)
  if children == WITHOUT_REPLACEMENT:
    drawn = jax.nn.one_hot(token, draft.shape[1], dtype=bool)
    draft = normalized(jnp.where(drawn, 0.0, draft), draft)
  return left, draft


class _Walk(flax.struct.PyTreeNode):
  """Where each row is on its way down."""

  node: jax.Array  # [B]
  accepted: jax.Array  # [B]
  target: jax.Array  # [B, V], what is left of it at the node
  draft: jax.Array  # [B, V]
  path: jax.Array  # [B, D + 1]
  chosen: jax.Array  # [B, D + 1]


def _put(array: jax.Array, at: jax.Array, value: jax.Array, where: jax.Array):
  """Sets `array [B, n]` at `at [B]` in some rows."""
  here = jnp.arange(array.shape[1])[None] == at[:, None]
  return jnp.where(here & where[:, None], value[:, None], array)


def reject(
  tree: TokenTree,
  logits: jax.Array,
  proposals: jax.Array | None,
  row_keys: jax.Array,
  length: jax.Array,
  sampling: Sampling,
  *,
  max_depth: int,
  children: str,
) -> Verdict:
  """Tries children one by one, in the order of their indices.

  The children of a node all have larger indices than the node, so one pass over
  the nodes tries every child of every node that is reached.

  Args:
    tree: `[B, N]` per field; siblings in the order in which they were drawn.
    logits: `[B, N, V]` float32, adjusted.
    proposals: `[B, N, V]` float32, the distributions that the children of each
      node were drawn from; None if none was. Ignored in rows at temperature 0,
      whose children are the best ones.
    row_keys: `[B]` keys; not consumed.
    length: `[B]` int32, of the text when the step began.
    sampling: validated.
    max_depth: D.
    children: one of `CHILDREN`.
  """
  batch_size, num_nodes, vocab_size = logits.shape
  chances = jax.vmap(lambda key: jax.random.uniform(key, (num_nodes,)))(
    step_keys(row_keys, ACCEPTANCE, length)
  )
  hot = jnp.broadcast_to(jnp.asarray(sampling.temperature) > 0, (batch_size,))

  def enter(walk: _Walk, node: jax.Array, where: jax.Array) -> _Walk:
    """Continues at a node, in some rows."""
    pick = lambda array: jax.vmap(lambda one, at: one[at])(array, node)
    replace = lambda new, old: jnp.where(where[:, None], new, old)
    target = token_probs(pick(logits)[:, None], sampling)[:, 0]
    return walk.replace(
      node=jnp.where(where, node, walk.node),
      target=replace(target, walk.target),
      draft=walk.draft
      if proposals is None
      else replace(pick(proposals), walk.draft),
      path=_put(walk.path, pick(tree.depth), node, where),
    )

  def attempt(index, walk: _Walk) -> _Walk:
    is_child = tree.parent[:, index] == walk.node
    token = tree.token[:, index]
    certain = jax.nn.one_hot(token, vocab_size)
    draft = certain
    if proposals is not None:
      draft = jnp.where(hot[:, None], walk.draft, certain)
    stands = chances[:, index] < acceptance(walk.target, draft, token)
    left, draft = after_rejection(walk.target, draft, token, children)
    falls = (is_child & ~stands)[:, None]
    stands &= is_child
    walk = walk.replace(
      chosen=_put(walk.chosen, walk.accepted, token, stands),
      accepted=walk.accepted + stands,
      target=jnp.where(falls, left, walk.target),
      draft=jnp.where(falls, draft, walk.draft),
    )
    return enter(walk, jnp.full(batch_size, index, jnp.int32), stands)

  def body(index, walk: _Walk) -> _Walk:
    some = jnp.any(tree.parent[:, index] == walk.node)
    return lax.cond(some, attempt, lambda _, walk: walk, index, walk)

  nothing = jnp.zeros((batch_size, vocab_size))
  root = jnp.full(batch_size, ROOT, jnp.int32)
  walk = _Walk(
    node=root,
    accepted=jnp.zeros(batch_size, jnp.int32),
    target=nothing,
    draft=nothing,
    path=jnp.full((batch_size, max_depth + 1), NO_NODE, jnp.int32),
    chosen=jnp.zeros((batch_size, max_depth + 1), jnp.int32),
  )
  walk = enter(walk, root, jnp.ones(batch_size, bool))
  walk = lax.fori_loop(1, num_nodes, body, walk)
  bonus = draw(walk.target, step_keys(row_keys, RESIDUAL, length))
  everywhere = jnp.ones(batch_size, bool)
  return Verdict(
    path=walk.path,
    accepted=walk.accepted,
    chosen=_put(walk.chosen, walk.accepted, bonus, everywhere),
  )


def draw(probs: jax.Array, keys: jax.Array) -> jax.Array:
  """One token from each of `probs [B, V]`, `[B]` int32; `keys [B]`."""
  noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:]))(keys)
  return jnp.argmax(jnp.log(probs) + noise, axis=1).astype(jnp.int32)
