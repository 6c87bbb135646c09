"""Rejection verification: draft tokens are accepted with a probability.

A draft token x that was drawn from the draft's distribution is accepted with
probability min(1, target(x) / draft(x)); if it is rejected, the target's
distribution becomes the normalised positive part of target - draft, and the
next sibling is tried (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318; with several siblings SpecInfer, arXiv 2305.09781, and Sequoia,
arXiv 2402.12374). If none is accepted, the bonus token is drawn from what is
left.

A token that was *not* drawn, such as that of an n-gram or the likeliest child,
counts as a draw from the point mass on itself: it is accepted with the target's
probability, which is removed if it is rejected. To treat it as a draw from the
draft's softmax would be wrong.

The emitted tokens have the target's distribution, but they are not those of
plain decoding with the same seed. `specdec.verify.match` gives those.
"""

import dataclasses

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import sampling as sampling_lib
from specdec.tree import tree as tree_lib
from specdec.verify import accept


def normalized(mass: jax.Array, fallback: jax.Array) -> jax.Array:
  """`mass [..., V]` as distributions; the fallback where there is none.

  In exact arithmetic no mass is left only if nothing could be rejected. By
  rounding it happens, where target and draft are all but equal; then the target
  itself is as good as what is left of it.
  """
  largest = jnp.max(mass, axis=-1, keepdims=True)
  mass = mass / jnp.where(largest > 0, largest, 1.0)
  return jnp.where(largest > 0, mass / sampling_lib.total(mass), fallback)


def acceptance_probs(
  target: jax.Array, draft: jax.Array, token: jax.Array
) -> jax.Array:
  """The probability that a draft token is accepted, `[B]` float32.

  Args:
    target: `[B, V]`, the target's distribution, or what is left of it.
    draft: `[B, V]`, the distribution that the token was drawn from.
    token: `[B]` int32, the draft token.
  """
  at = lambda probs: jnp.take_along_axis(probs, token[:, None], axis=1)[:, 0]
  return jnp.minimum(at(target) / jnp.maximum(at(draft), 1e-37), 1.0)


def after_rejection(
  target: jax.Array, draft: jax.Array, token: jax.Array, children: str
) -> tuple[jax.Array, jax.Array]:
  """The rest of both distributions after a draft token was rejected.

  The arguments are those of `acceptance_probs`.

  Returns:
    `[B, V]` float32, the target's, and `[B, V]` float32, the one that the next
    sibling was drawn from.
  """
  left = normalized(jnp.maximum(target - draft, 0.0), target)
  if children == sampling_lib.WITHOUT_REPLACEMENT:
    drawn = jax.nn.one_hot(token, draft.shape[1], dtype=bool)
    draft = normalized(jnp.where(drawn, 0.0, draft), draft)
  return left, draft


def draw(probs: jax.Array, noise: jax.Array) -> jax.Array:
  """A token from each of `probs [B, V]`, `[B]` int32; `noise [B, V]` Gumbel."""
  return sampling_lib.best_token(jnp.log(probs) + noise)


class _Walk(flax.struct.PyTreeNode):
  """Position of each row on its way down the tree."""

  node: jax.Array  # [B] int32, the last accepted node
  accepted: jax.Array  # [B] int32, the number of accepted nodes
  target: jax.Array  # [B, V], what is left of the target's distribution
  draft: jax.Array  # [B, V], what the next child was drawn from
  index: jax.Array  # [B, D + 1] int32, see `Verdict`
  chosen: jax.Array  # [B, D + 1] int32, see `Verdict`

  def after(
    self,
    token: jax.Array,
    is_child: jax.Array,
    is_accepted: jax.Array,
    left: tuple[jax.Array, jax.Array],
  ) -> '_Walk':
    """After `token [B]` was tried in the rows of which it `is_child [B]`.

    `left` is the result of `after_rejection`.
    """
    rejected = (is_child & ~is_accepted)[:, None]
    is_accepted &= is_child
    return self.replace(
      chosen=_put(self.chosen, self.accepted, token, is_accepted),
      accepted=self.accepted + is_accepted,
      target=jnp.where(rejected, left[0], self.target),
      draft=jnp.where(rejected, left[1], self.draft),
    )


def _init_walk(batch_size: int, vocab_size: int, path_length: int) -> _Walk:
  """A walk at the root, which is not entered yet."""
  nothing = jnp.zeros((batch_size, vocab_size))
  path_shape = (batch_size, path_length)
  return _Walk(
    node=jnp.full(batch_size, tree_lib.ROOT, jnp.int32),
    accepted=jnp.zeros(batch_size, jnp.int32),
    target=nothing,
    draft=nothing,
    index=jnp.full(path_shape, tree_lib.NO_NODE, jnp.int32),
    chosen=jnp.zeros(path_shape, jnp.int32),
  )


def _put(
  array: jax.Array, at: jax.Array, value: jax.Array, where: jax.Array
) -> jax.Array:
  """Sets `array [B, n]` at `at [B]` in some rows."""
  here = jnp.arange(array.shape[1])[None] == at[:, None]
  return jnp.where(here & where[:, None], value[:, None], array)


@dataclasses.dataclass(frozen=True)
class RejectionRule:
  """Tries the children of each accepted node in turn; see `Rule`.

  The children of a node all come after it, so one pass over the nodes in order
  tries every child of every node that is reached.
  """

  #: One of `sampling.CHILDREN`. Siblings must come in the order in which they
  #: were drawn. In rows at temperature 0 children are the best.
  children: str = sampling_lib.BEST

  shares_noise = False
  needs_chain = False
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
    batch_size, num_nodes, vocab_size = logits.shape
    is_drawn = self.children != sampling_lib.BEST
    at = jax.vmap(tree_lib.pick)
    tokens, parents = at(tree.token, nodes), at(tree.parent, nodes)
    depths = at(tree.depth, nodes)
    parents = jnp.where(nodes >= 0, parents, tree_lib.NO_NODE)

    def enter(walk: _Walk, index: jax.Array, where: jax.Array) -> _Walk:
      """Goes on from the node at `index [B]`, in some rows."""
      of_row = lambda array: at(array, index)
      replace = lambda new, old: jnp.where(where[:, None], new, old)
      node = of_row(nodes)
      target = sampling_lib.token_probs(of_row(logits)[:, None], sampling)[:, 0]
      draft = (
        replace(at(proposals, node), walk.draft) if is_drawn else walk.draft
      )
      return walk.replace(
        node=jnp.where(where, node, walk.node),
        target=replace(target, walk.target),
        draft=draft,
        index=_put(walk.index, of_row(depths), index, where),
      )

    def attempt(index: jax.Array, walk: _Walk) -> _Walk:
      """Accepts or rejects the child at `index` of N, in rows that reach it."""
      is_child = parents[:, index] == walk.node
      token = tokens[:, index]
      draft = jax.nn.one_hot(token, vocab_size)
      if is_drawn:
        draft = jnp.where(sampling.is_stochastic[:, None], walk.draft, draft)
      probs = acceptance_probs(walk.target, draft, token)
      is_accepted = randomness.uniforms[:, index] < probs
      left = after_rejection(walk.target, draft, token, self.children)
      walk = walk.after(token, is_child, is_accepted, left)
      return enter(walk, jnp.full_like(token, index), is_accepted & is_child)

    def body(index: jax.Array, walk: _Walk) -> _Walk:
      reached = jnp.any(parents[:, index] == walk.node)
      return lax.cond(reached, attempt, lambda _, walk: walk, index, walk)

    everywhere = jnp.ones(batch_size, bool)
    walk = _init_walk(batch_size, vocab_size, randomness.noise.shape[1])
    walk = enter(walk, walk.node, everywhere)
    walk = lax.fori_loop(1, num_nodes, body, walk)
    bonus = draw(walk.target, randomness.residual_noise)
    return accept.Verdict(
      index=walk.index,
      accepted=walk.accepted,
      chosen=_put(walk.chosen, walk.accepted, bonus, everywhere),
    )
