"""One growth loop for every drafter: batched best-first search.

    guess                                inner drafters guess below open nodes
    score    W likeliest open nodes      in ONE forward of this stage
             their children              guessed ones get this stage's numbers,
                                         its own K likeliest join the tree
    ... again, up to `rounds` times, as long as it pays

A node is open until the stage has scored it. Without an inner drafter a round
goes one level deeper (section 3.1 of arXiv 2308.04623). With one it goes as
deep as the guesses were good, so the same tree takes fewer forwards (section
3.2). What was guessed after the last forward stays in the tree: the target may
well verify what the draft had no time to look at.
"""

import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.draft.drafter import Drafter
from specdec.draft.drafter import Scores
from specdec.draft.drafter import StageState
from specdec.draft.drafter import Step
from specdec.draft.ranking import IMPOSSIBLE
from specdec.draft.stages import forward_width
from specdec.tree.tree import accumulate
from specdec.tree.tree import add_children
from specdec.tree.tree import add_up
from specdec.tree.tree import best_nodes
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import place_children
from specdec.tree.tree import ROOT
from specdec.tree.tree import TokenTree


class Growing(flax.struct.PyTreeNode):
  """A tree, as one stage sees it.

  Attributes:
    tree: `[B, M]` per field.
    scored: `[B, M]` bool, nodes that the stage has scored.
    closed: `[B, M]` bool, nodes that need no more children: a stage outside has
      scored them; None if there is no such stage.
  """

  tree: TokenTree
  scored: jax.Array
  closed: jax.Array | None

  @property
  def closed_for_all(self) -> jax.Array:
    """`[B, M]` bool: where a stage inside need not look."""
    return self.scored if self.closed is None else self.closed | self.scored


def _rescore(tree, scores, closed, *, max_depth):
  """This stage knows better than those inside it; unbatched."""
  of_parent = tree.parent[:, None] == scores.nodes[None]
  of_parent &= (scores.nodes >= 0)[None]
  known = jnp.any(of_parent, axis=1)
  if closed is not None:
    known &= ~closed[tree.parent]
  tree = tree.replace(edge=jnp.where(known, scores.given, tree.edge))
  return accumulate(tree, max_depth)


def _add(tree, scores, closed, *, label, max_depth):
  """The stage's own children; unbatched."""
  nodes = scores.nodes
  may_have = (nodes >= 0) & (tree.depth[nodes] < max_depth)
  if closed is not None:
    may_have &= ~closed[nodes]
  wanted = may_have[:, None] & (scores.edges > IMPOSSIBLE / 2)
  return add_children(
    tree, nodes, scores.tokens, scores.edges, scores.origins(label), wanted
  )


def mark(scored: jax.Array, nodes: jax.Array) -> jax.Array:
  """`scored [B, M]`, and `nodes [B, W]` too."""
  entries = jnp.arange(scored.shape[1])[None, :, None]
  return scored | jnp.any(entries == nodes[:, None], axis=2)


def extend(
  growing: Growing,
  scores: Scores,
  *,
  label: int,
  max_depth: int,
  rescores: bool,
) -> Growing:
  """Adds the guesses of a stage below the nodes that it has scored.

  Args:
    growing: before.
    scores: of W nodes.
    label: origin of the nodes that the stage's first label proposes.
    max_depth: D, no node is deeper.
    rescores: whether children that those nodes have already get the numbers of
      this stage.
  """
  tree, closed = growing.tree, growing.closed
  if rescores:
    rescore = functools.partial(_rescore, max_depth=max_depth)
    tree = jax.vmap(rescore)(tree, scores, closed)
  add = functools.partial(_add, label=label, max_depth=max_depth)
  tree = jax.vmap(add)(tree, scores, closed)
  return growing.replace(tree=tree, scored=mark(growing.scored, scores.nodes))


class Reach(flax.struct.PyTreeNode):
  """How deep a stage gets.

  Attributes:
    depth: `[B]` int32, nodes at most so deep can be scored; -1: none.
    active: `[B]` bool, rows that are not done.
    max_depth: D, no node is deeper; static.
  """

  depth: jax.Array
  active: jax.Array
  max_depth: int = flax.struct.field(pytree_node=False)


class Outlook(flax.struct.PyTreeNode):
  """See the module.

  Attributes:
    nodes: `[B, W]` int32, the likeliest nodes to score, `NO_NODE` where there
      are fewer.
    can_grow: `[B]` bool, whether any node could get children.
    gain: `[B]` float32, tokens that scoring them is expected to add.
    expected: `[B]` float32, tokens that the tree is expected to yield as it is.
      The root is certain, and stands for the target's bonus token.
  """

  nodes: jax.Array
  can_grow: jax.Array
  gain: jax.Array
  expected: jax.Array


def _gain(growing: Growing, can_grow: jax.Array, width: int) -> jax.Array:
  """Unbatched.

  That is the probability of the nodes that would be scored, as far as their
  children in the tree do not have it yet, times the share that scoring has
  brought into the tree so far: K children do not have all of their parent's
  probability.
  """
  tree, scored = growing.tree, growing.scored
  prob = jnp.exp(tree.log_prob)
  parent = jnp.where(tree.parent >= 0, tree.parent, tree.capacity)
  of_children = jnp.minimum(add_up(parent, prob, tree.capacity), prob)
  of_scored = jnp.sum(jnp.where(scored, prob, 0.0))
  share = jnp.sum(jnp.where(scored, of_children, 0.0))
  share = jnp.where(of_scored > 0, share / jnp.maximum(of_scored, 1e-6), 1.0)
  nodes, _ = best_nodes(tree, can_grow, width)
  new = jnp.maximum(share * prob - of_children, 0.0)[nodes]
  return jnp.sum(jnp.where(nodes >= 0, new, 0.0))


def _expected(tree: TokenTree, num_nodes: int) -> jax.Array:
  """Unbatched."""
  used = tree.log_prob > -jnp.inf
  _, log_prob = best_nodes(tree, used, num_nodes)
  return jnp.sum(jnp.exp(log_prob))


def _of_row(growing, reach, *, width, num_nodes, needs_ancestors):
  tree = growing.tree
  candidates = (
    (tree.log_prob > -jnp.inf) & ~growing.scored & (tree.depth <= reach.depth)
  )
  can_grow = candidates & (tree.depth < reach.max_depth) & reach.active
  if growing.closed is not None:
    can_grow &= ~growing.closed
    if not needs_ancestors:
      candidates &= ~growing.closed
  nodes, _ = best_nodes(tree, candidates, width)
  return Outlook(
    nodes=nodes,
    can_grow=jnp.any(can_grow),
    gain=_gain(growing, can_grow, width),
    expected=_expected(tree, num_nodes),
  )


def look_ahead(
  growing: Growing,
  reach: Reach,
  *,
  width: int,
  num_nodes: int,
  needs_ancestors: bool,
) -> Outlook:
  """What one stage could do next.

  Args:
    growing: the trees.
    reach: of the stage.
    width: W, nodes that are scored in a round.
    num_nodes: N, nodes that the target verifies.
    needs_ancestors: whether closed nodes are to be scored too, since the keys
      of a node may be needed by its descendants.
  """
  of_row = functools.partial(
    _of_row, width=width, num_nodes=num_nodes, needs_ancestors=needs_ancestors
  )
  return jax.vmap(of_row)(growing, reach)


def _reach(drafter: Drafter, step: Step) -> Reach:
  """How deep the stage gets within its context."""
  longest = drafter.scorer.max_positions
  depth = jnp.full(step.length.shape, step.max_depth)
  if longest is not None:  # a node of depth d is at position length - 1 + d
    depth = jnp.minimum(depth, jnp.maximum(longest - step.length, -1))
  return Reach(depth=depth, active=step.active, max_depth=step.max_depth)


def _pays(
  drafter: Drafter,
  outlook: Outlook,
  reach: Reach,
  begun: jax.Array,
  step: Step,
  rounds_done: jax.Array,
) -> jax.Array:
  """Whether another round is expected to be worth its cost, `[]` bool.

  `begun [B]`: whether the stage has scored the root.
  """
  config = drafter.config
  cost = config.cost_ratio
  if cost is None:
    cost = drafter.scorer.bytes_per_forward(config.width) / step.target_bytes
  if cost == 0 and config.min_gain == 0:
    return jnp.any(outlook.can_grow)
  # The same cost at the rate of tokens per cost so far.
  price = cost * outlook.expected / (1.0 + rounds_done * cost)
  price = jnp.maximum(price, config.min_gain)
  # Rows share their forwards, so it is their sums that count.
  total = lambda values: jnp.sum(jnp.where(step.active, values, 0.0))
  # A stage that has not scored the root yet has no say so far.
  can_begin = step.active & (reach.depth >= 0)
  has_say = jnp.all(begun | ~can_begin)
  return (total(outlook.gain) > total(price)) | ~has_say


def _put_in_places(tree, scores, *, topology, label):
  """The children that a fixed topology has room for; unbatched."""
  nodes = scores.nodes
  index = jnp.asarray(topology.children)[nodes][:, : scores.tokens.shape[1]]
  placed = (nodes >= 0)[:, None] & (scores.edges > IMPOSSIBLE / 2)
  index = jnp.where(placed, index, tree.capacity)
  return place_children(
    tree, index, nodes, scores.tokens, scores.edges, scores.origins(label)
  )


def grow(
  drafter: Drafter,
  state: StageState,
  tree: TokenTree,
  step: Step,
  *,
  closed: jax.Array | None = None,
  label: int = 1,
) -> tuple[StageState, TokenTree]:
  """Grows the trees of a batch.

  Args:
    drafter: the stage that guesses.
    state: of it and of those inside.
    tree: `[B, M]` per field.
    step: see `Step`.
    closed: see `Growing`.
    label: origin of the nodes that the stage's first label proposes.

  Returns:
    State and trees.
  """
  config, inner = drafter.config, drafter.inner
  topology = config.topology
  reach = _reach(drafter, step)

  def growing(state, tree):
    return Growing(tree=tree, scored=state.scored, closed=closed)

  def guess(state, tree):
    if inner is None:
      return state, tree
    inner_state, tree = grow(
      inner,
      state.inner,
      tree,
      step,
      closed=growing(state, tree).closed_for_all,
      label=label + len(drafter.scorer.labels),
    )
    return state.replace(inner=inner_state), tree

  def plan(state, tree, rounds_done):
    """The nodes to score next, `[B, W]`, and whether to."""
    more = rounds_done < config.rounds
    if topology is None:
      outlook = look_ahead(
        growing(state, tree),
        reach,
        width=config.width,
        num_nodes=config.num_nodes,
        needs_ancestors=drafter.scorer.needs_ancestors,
      )
      begun = state.scored[:, ROOT]
      pays = _pays(drafter, outlook, reach, begun, step, rounds_done)
      return outlook.nodes, more & pays
    schedule = jnp.asarray(topology.schedule)
    # After the last round there is no next one.
    nodes = schedule[jnp.minimum(rounds_done, schedule.shape[0] - 1)]
    # A scorer may have had fewer guesses than the shape has places.
    exists = (nodes == ROOT)[None] | (tree.parent[:, nodes] >= 0)
    exists &= tree.depth[:, nodes] <= reach.depth[:, None]
    nodes = jnp.where(exists & (nodes >= 0)[None], nodes[None], NO_NODE)
    return nodes, more & jnp.any(step.active & (reach.depth >= 0))

  def if_active(number):
    return jnp.where(step.active, number, 0)

  def score(state, tree, nodes):
    padding = ((0, 0), (0, forward_width(config) - config.width))
    nodes = jnp.pad(nodes, padding, constant_values=NO_NODE)
    scores, scorer = drafter.scorer.score(
      state.scorer, tree, step, nodes, config
    )
    if topology is None:
      grown = extend(
        growing(state, tree),
        scores,
        label=label,
        max_depth=step.max_depth,
        rescores=inner is not None,
      )
      tree, scored = grown.tree, grown.scored
    else:
      tree = jax.vmap(
        functools.partial(_put_in_places, topology=topology, label=label)
      )(tree, scores)
      scored = mark(state.scored, scores.nodes)
    counters = state.counters
    if scores.drawn_from is not None:
      entries = jnp.where(scores.nodes >= 0, scores.nodes, tree.capacity)
      put = lambda one, at, probs: one.at[at].set(probs, mode='drop')
      state = state.replace(
        proposals=jax.vmap(put)(state.proposals, entries, scores.drawn_from)
      )
    state = state.replace(
      scorer=scorer,
      scored=scored,
      counters=counters.replace(
        forwards=counters.forwards + 1,
        row_forwards=counters.row_forwards + if_active(1),
        slots_read=counters.slots_read + if_active(scores.slots_read),
      ),
    )
    return state, tree

  def body(carry):
    rounds_done, state, tree, nodes, _ = carry
    rounds_done += 1
    state, tree = guess(*score(state, tree, nodes))
    return rounds_done, state, tree, *plan(state, tree, rounds_done)

  rounds_done = jnp.zeros((), jnp.int32)
  state, tree = guess(state, tree)
  carry = (rounds_done, state, tree, *plan(state, tree, rounds_done))
  with jax.named_scope(f'grow_{drafter.name}'):
    _, state, tree, *_ = lax.while_loop(lambda carry: carry[-1], body, carry)
  return state, tree
