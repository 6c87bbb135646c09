"""Rejection verification: draft tokens are accepted with a probability.

A draft token x that was drawn from the draft's distribution is accepted with
probability min(1, target(x) / draft(x)); if it is rejected, the target's
distribution becomes the normalised positive part of target - draft, and the
next sibling is tried (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318; with several siblings SpecInfer, arXiv 2305.09781, and Sequoia,
arXiv 2402.12374). If none is accepted, the bonus token is drawn from what is
left.

A token that was *not* drawn, such as an n-gram's or the most likely child,
counts as a draw from the point mass on itself: it is accepted with the
target's probability, which is removed if it is rejected. To treat it as a draw
from the draft's softmax would be wrong. Both kinds may be siblings (arXiv
2502.18779).

Traversal verification accepts a tree from its leaves to its root (Weng et al.,
arXiv 2505.12398). Rejection verification goes token by token, and forgets by
how much earlier tokens exceeded what was needed. Here a node has a *weight*,
the probability that it or a node below it is accepted; a node is tried after
all that is below it, and accepted with all in front of it. On a chain this is
block verification (Sun et al., arXiv 2403.10444, algorithm 2).

The emitted tokens have the target's distribution, but plain decoding with the
same seed emits others. `accept.MatchRule` emits the same.
"""

import dataclasses
import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import best as best_lib
from specdec import randomness as randomness_lib
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

  For the arguments see `acceptance_probs`.

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
  return best_lib.best_token(jnp.log(probs) + noise)


_at = jax.vmap(tree_lib.pick)
_write = jax.vmap(
  lambda row, index, value: row.at[index].set(value, mode='clip')
)


def _where(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
  """`new [B, ...]` in some rows, else `old`."""
  return jnp.where(sampling_lib.per_row(rows, new), new, old)


def _put(
  array: jax.Array, at: jax.Array, value: jax.Array, where: jax.Array
) -> jax.Array:
  """Sets `array [B, n]` at `at [B]` in some rows."""
  here = jnp.arange(array.shape[1])[None] == at[:, None]
  return jnp.where(here & where[:, None], value[:, None], array)


class _Nodes(flax.struct.PyTreeNode):
  """The facts about the N verified nodes of each row."""

  node: jax.Array  # [B, N] int32, in the tree
  token: jax.Array  # [B, N] int32
  parent: jax.Array  # [B, N] int32, in the tree
  turn: jax.Array  # [B, N] int32, how many siblings are tried before
  is_drawn: jax.Array  # [B] bool; others are as drawn from point masses
  uniform: jax.Array  # [B, N]
  logits: jax.Array  # [B, N, V]
  drawn_from: jax.Array  # [B, M, V]; of size 0 if nothing is drawn
  sampling: sampling_lib.SamplingParams

  def target_after(self, place: jax.Array) -> jax.Array:
    """The target's distribution after the node at `place [B]`, `[B, V]`."""
    logits = _at(self.logits, place)[:, None]
    return sampling_lib.token_probs(logits, self.sampling)[:, 0]

  def child(
    self, place: jax.Array, turn: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Whether a node has a child of this turn, and its place or the node's."""
    below = self.parent == _at(self.node, place)[:, None]
    below &= self.turn == turn[:, None]
    exists = jnp.any(below, axis=1)
    return exists, jnp.where(exists, jnp.argmax(below, axis=1), place)

  def begin(
    self,
    where: jax.Array,
    place: jax.Array,
    target: jax.Array,
    draft: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Both distributions; in some rows those at a node before any child."""
    if self.drawn_from.shape[2]:
      draft = _where(where, _at(self.drawn_from, _at(self.node, place)), draft)
    return _where(where, self.target_after(place), target), draft


class _Walk(flax.struct.PyTreeNode):
  """Position of each row in its tree, and what is left along the path to it."""

  depth: jax.Array  # [B] int32
  path: jax.Array  # [B, D + 1] int32, see `Verdict.index`
  turn: jax.Array  # [B] int32, of the child that is tried next
  done: jax.Array  # [B] bool, whether the node at `place` is accepted
  weight: jax.Array  # [B, D + 1], the chance to accept a node or one below it
  # [B, D + 1, V], at nodes of which a child was tried; [B, 1, V], at the last
  # of them, under a rule that leaves no node.
  target: jax.Array
  draft: jax.Array  # the same, of what the next child was drawn from

  @property
  def place(self) -> jax.Array:
    """`[B]` int32, the place of the node among the N."""
    return _at(self.path, self.depth)


def _init_walk(shape: tuple[int, int], num_kept: int, vocab_size: int) -> _Walk:
  """A walk at the root; `shape` is B and D + 1."""
  is_root = jnp.broadcast_to(jnp.arange(shape[1]) == 0, shape)
  zeros = jnp.zeros(shape[0], jnp.int32)
  nothing = jnp.zeros((shape[0], num_kept, vocab_size))
  return _Walk(
    depth=zeros,
    path=jnp.where(is_root, tree_lib.ROOT, tree_lib.NO_NODE),
    turn=zeros,
    done=zeros > 0,
    weight=is_root.astype(jnp.float32),
    target=nothing,
    draft=nothing,
  )


@dataclasses.dataclass(frozen=True)
class RejectionRule(accept.Rule):
  """Tries the children of each accepted node in turn; see `Rule`."""

  #: One of `sampling.CHILDREN`. Siblings must come in the order in which they
  #: were drawn, or the one that was drawn after the best. In rows at
  #: temperature 0 children are the best.
  children: str = sampling_lib.BEST

  may_draw = True
  leaves_nodes = False  #: Whether a node is entered before it is accepted.

  def enter(
    self, chance: jax.Array, uniform: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Whether a child is entered, and its weight then; `[B]` each."""
    return uniform < chance, jnp.ones_like(chance)

  def weight_left(
    self, weight: jax.Array, target: jax.Array, draft: jax.Array
  ) -> jax.Array:
    """The weight of a node, `[B]`, after a child was rejected.

    `target [B, V]` is multiplied with the `weight [B]` before; the child was
    drawn from `draft [B, V]`.
    """
    del target, draft
    return weight

  def _move(self, nodes: _Nodes, walk: _Walk) -> _Walk:
    """Tries the next child of a node, or accepts or leaves the node."""
    tries, child = nodes.child(walk.place, walk.turn)
    fails = _at(nodes.uniform, walk.place) >= _at(walk.weight, walk.depth)
    leaves = ~tries & fails & (walk.depth > 0)
    moves = tries | leaves
    depth, token = walk.depth - leaves, _at(nodes.token, child)  # of the parent
    weight, target, draft = (
      _at(array, depth) for array in (walk.weight, walk.target, walk.draft)
    )
    is_first = tries & (walk.turn == 0)
    begin = functools.partial(nodes.begin, is_first, walk.place)
    keep = lambda *given: given
    target, draft = lax.cond(jnp.any(is_first), begin, keep, target, draft)
    point = jax.nn.one_hot(token, target.shape[1])
    proposed = _where(nodes.is_drawn, draft, point)
    given = weight[:, None] * target, proposed, token
    chance = acceptance_probs(*given)
    enters, weight_below = self.enter(chance, _at(nodes.uniform, child))
    enters &= tries
    rejects = moves & ~enters

    def reject(*kept: jax.Array) -> tuple[jax.Array, ...]:
      left = (
        self.weight_left(weight, *given[:2]),
        *after_rejection(*given, self.children),
      )
      return tuple(map(functools.partial(_where, rejects), left, kept))

    weight, target, draft = lax.cond(
      jnp.any(rejects), reject, keep, weight, target, draft
    )
    entered = jnp.where(enters, child, tree_lib.NO_NODE)
    weights = _put(walk.weight, depth, weight, rejects)
    return _Walk(
      depth=depth + enters,
      path=_put(walk.path, depth + 1, entered, moves),
      turn=jnp.where(rejects, _at(nodes.turn, child) + 1, walk.turn * ~moves),
      done=~moves,
      weight=_put(weights, depth + 1, weight_below, enters),
      target=_write(walk.target, depth, target),
      draft=_write(walk.draft, depth, draft),
    )

  def __call__(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    logits: jax.Array,
    drawn_from: jax.Array,
    randomness: randomness_lib.Randomness,
    sampling: sampling_lib.SamplingParams,
  ) -> accept.Verdict:
    parent = jnp.where(nodes >= 0, _at(tree.parent, nodes), tree_lib.NO_NODE)
    draws = self.children != sampling_lib.BEST
    before = jnp.tril(parent[:, :, None] == parent[:, None], -1)
    facts = _Nodes(
      node=nodes,
      token=_at(tree.token, nodes),
      parent=parent,
      turn=jnp.sum(before, axis=2, dtype=jnp.int32),
      is_drawn=draws & sampling.is_stochastic,
      uniform=randomness.uniforms,
      logits=logits,
      drawn_from=drawn_from if draws else drawn_from[:, :, :0],
      sampling=sampling,
    )
    shape = (nodes.shape[0], randomness.noise.num_positions)
    num_kept = shape[1] if self.leaves_nodes else 1
    walk = lax.while_loop(
      lambda walk: ~jnp.all(walk.done),
      functools.partial(self._move, facts),
      _init_walk(shape, num_kept, logits.shape[2]),
    )
    left = _at(walk.target, walk.depth)
    left = _where(walk.turn == 0, facts.target_after(walk.place), left)
    bonus = draw(left, randomness.residual_noise)
    following = jnp.pad(_at(facts.token, walk.path)[:, 1:], ((0, 0), (0, 1)))
    at_end = jnp.arange(shape[1])[None] == walk.depth[:, None]
    return accept.Verdict(
      index=walk.path,
      accepted=walk.depth,
      chosen=jnp.where(at_end, bonus[:, None], following),
    )


@dataclasses.dataclass(frozen=True)
class TraversalRule(RejectionRule):
  """Accepts the first node that passes, each after those below it; see `Rule`.

  The weight of the root is 1, and it is the last to be tried.
  """

  #: Whether trees must be chains: block verification.
  needs_chain: bool = False

  leaves_nodes = True

  def enter(
    self, chance: jax.Array, uniform: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Every child is; its weight is min(1, weight target(x) / draft(x))."""
    del uniform
    return jnp.ones(chance.shape, bool), chance

  def weight_left(
    self, weight: jax.Array, target: jax.Array, draft: jax.Array
  ) -> jax.Array:
    """It is s / (s + 1 - weight), s = sum of (weight target - draft)+."""
    mass = sampling_lib.total(jnp.maximum(target - draft, 0.0))[:, 0]
    whole = mass + (1.0 - weight)  # in this order a weight of 1 remains 1
    return jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1.0), weight)
