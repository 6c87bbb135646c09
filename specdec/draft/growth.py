"""The growth of the token tree: one batched best-first search for all drafters.

    draft    the inner stages          candidates below the nodes not yet scored
    score    the W most likely nodes   in ONE forward of this stage
             their children            drafted ones get this stage's numbers,
                                       its own K most likely join the tree
    ... again, up to `rounds` times, as long as it pays

Without inner stages a round goes one level deeper (section 3.1 of arXiv
2308.04623). With them it goes as deep as they drafted well, so the same tree
takes fewer forwards (section 3.2). What was drafted after the last forward
stays in the tree: the target may verify what the stage had no time to score.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from specdec import context as context_lib
from specdec import sampling as sampling_lib
from specdec.draft import drafter as drafter_lib
from specdec.tree import topology as topology_lib
from specdec.tree import tree as tree_lib

_States = tuple[drafter_lib.StageState, ...]
_Grown = tuple[_States, tree_lib.TokenTree]
# The nodes of the next round, and whether there is one.
_Planned = tuple[jax.Array, jax.Array]
# Rounds done, states, trees, and the next round where the loop must know it.
_Carry = tuple[jax.Array, _States, tree_lib.TokenTree, _Planned | None]


def grow(
  stages: tuple[drafter_lib.Stage, ...],
  states: _States,
  tree: tree_lib.TokenTree,
  ctx: context_lib.StepContext,
) -> _Grown:
  """Grows the trees of a batch, `[B, M]` per field; returns states and trees.

  `stages` are outermost first; without any the trees stay as they are.
  """
  if not ctx.max_depth:
    return states, tree
  nothing = jnp.zeros(tree.token.shape, bool)
  begun = tuple(
    state.replace(
      scored=jnp.zeros_like(state.scored), counted=jnp.zeros_like(state.counted)
    )
    for state in states
  )
  return _grow(stages, begun, tree, ctx, nothing, first_origin=1)


def _grow(
  stages: tuple[drafter_lib.Stage, ...],
  states: _States,
  tree: tree_lib.TokenTree,
  ctx: context_lib.StepContext,
  expanded: jax.Array,
  first_origin: int,
) -> _Grown:
  """`grow`, within other stages.

  `expanded [B, M]` bool are nodes that need no more children, because a stage
  outside of these has scored them; `first_origin` is the origin of the nodes
  that the first label proposes.
  """
  if not stages:
    return states, tree
  stage = stages[0]
  inner_origin = first_origin + len(stage.scorer.facts.labels)
  is_fixed = isinstance(ctx.shape, topology_lib.Topology)
  policy = (_FixedTopology if is_fixed else _BestFirst)(
    stage,
    ctx,
    expanded,
    bool(stages[1:]),
    first_origin,
    _depth_limit(stage, ctx),
  )

  def draft(
    states: _States, tree: tree_lib.TokenTree, pays: jax.Array | None = None
  ) -> _Grown:
    """Lets the inner stages draft below the nodes not yet scored."""
    finished = expanded | states[0].scored
    if pays is not None:
      finished |= ~pays
    inner_states, tree = _grow(
      stages[1:], states[1:], tree, ctx, finished, inner_origin
    )
    return (states[0], *inner_states), tree

  plan = lambda states, tree, rounds_done: policy.next_nodes(
    tree, states[0].scored, rounds_done
  )

  def carry_of(rounds_done: jax.Array, grown: _Grown) -> _Carry:
    ahead = not policy.takes_all_rounds
    return rounds_done, *grown, plan(*grown, rounds_done) if ahead else None

  def body(carry: _Carry) -> _Carry:
    rounds_done, states, tree, planned = carry
    nodes, pays = planned or plan(states, tree, rounds_done)
    state, tree = _score(stage, states[0], tree, nodes, ctx, policy, pays)
    masked = pays if policy.masks_rounds else None
    return carry_of(rounds_done + 1, draft((state, *states[1:]), tree, masked))

  carry = carry_of(jnp.zeros((), jnp.int32), draft(states, tree))
  with jax.named_scope(f'grow_{stage.name}'):
    _, states, tree, *_ = lax.while_loop(policy.goes_on, body, carry)
  return states, tree


def _score(
  stage: drafter_lib.Stage,
  state: drafter_lib.StageState,
  tree: tree_lib.TokenTree,
  nodes: jax.Array,
  ctx: context_lib.StepContext,
  policy: '_BestFirst',
  pays: jax.Array,
) -> tuple[drafter_lib.StageState, tree_lib.TokenTree]:
  """One forward of a stage; its candidates join the tree if it `pays`."""
  width = stage.forward_width(ctx.max_depth, policy.has_inner)
  padding = ((0, 0), (0, width - nodes.shape[1]))
  nodes = jnp.pad(nodes, padding, constant_values=tree_lib.NO_NODE)
  if policy.masks_rounds:
    nodes = jnp.where(pays, nodes, tree_lib.NO_NODE)
  scores, scorer = stage.scorer.score(
    state.scorer, tree, nodes, ctx, stage.config
  )
  tree = ctx.followed(policy.insert(tree, scores))
  entries = jnp.where(scores.nodes >= 0, scores.nodes, tree.capacity)
  put = lambda array, at, probs: array.at[at].set(probs, mode='drop')
  read = jnp.broadcast_to(scores.forwards, scores.slots_read.shape)
  read = jnp.stack([read, scores.slots_read], axis=1)
  if policy.masks_rounds:
    read = jnp.where(pays, read, 0)
  state = state.replace(
    scorer=scorer,
    scored=state.scored | _contains(scores.nodes, tree.capacity),
    drawn_from=jax.vmap(put)(state.drawn_from, entries, scores.drawn_from),
    counted=state.counted + read,
  )
  return state, tree


def _contains(nodes: jax.Array, capacity: int) -> jax.Array:
  """`[B, M]` bool, which entries are among `nodes [B, W]`."""
  # A reduction of few entries along the last axis is a kernel of a GPU; along
  # another it is part of the kernel that needs it.
  entries = jnp.arange(capacity)[None, None]
  return jnp.any(entries == nodes[:, :, None], axis=1)


def _depth_limit(
  stage: drafter_lib.Stage, ctx: context_lib.StepContext
) -> jax.Array:
  """`[B]` int32, the depth to which nodes fit the context; -1 if none does."""
  longest = stage.scorer.facts.max_positions
  depth = jnp.full(ctx.length.shape, ctx.max_depth)
  if longest is not None:  # a node of depth d is at position length - 1 + d
    depth = jnp.minimum(depth, jnp.maximum(longest - ctx.length, -1))
  return depth


@dataclasses.dataclass(frozen=True)
class _BestFirst:
  """The most likely nodes are scored, as long as it pays."""

  stage: drafter_lib.Stage
  ctx: context_lib.StepContext
  expanded: jax.Array  #: `[B, M]` bool, see `_grow`.
  has_inner: bool  #: Whether the stage has inner ones.
  first_origin: int  #: See `_grow`.
  depth_limit: jax.Array  #: See `_depth_limit`.

  @property
  def takes_all_rounds(self) -> bool:
    """Whether growth hardly ever stops before the last round; static.

    So it is if rounds cost nothing: an n-gram always has candidates.
    """
    return self.stage.config.cost_ratio == 0

  @property
  def masks_rounds(self) -> bool:
    """Whether rounds that do not pay must be told to do nothing; static."""
    return self.takes_all_rounds

  def goes_on(self, carry: _Carry) -> jax.Array:
    """Whether there is another round, `[]` bool."""
    rounds_done, states, tree, planned = carry

    def would_pay() -> jax.Array:
      _, pays = self.next_nodes(tree, states[0].scored, rounds_done)
      return pays

    if planned is not None:
      _, pays = planned
    else:
      # On a GPU the host waits for every condition, unless the length of a loop
      # is known. There, a round that does not pay has no nodes.
      pays = lax.platform_dependent(
        cuda=lambda: jnp.ones((), bool), default=would_pay
      )
    return (rounds_done < self.stage.config.rounds) & pays

  def next_nodes(
    self, tree: tree_lib.TokenTree, scored: jax.Array, rounds_done: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """`[B, W]` int32 nodes, and `[]` bool, whether it pays to score them."""
    nodes, can_grow, gain, expected = jax.vmap(self._frontier)(
      tree, scored, self.expanded, self.depth_limit, self.ctx.active
    )
    facts, config, ctx = self.stage.scorer.facts, self.stage.config, self.ctx
    cost = config.cost_ratio
    if cost is None:
      cost = facts.bytes_of(config.width) / ctx.target_bytes
    if cost == 0:
      return nodes, jnp.any(can_grow)
    # The tokens that this cost would bring at the average rate so far.
    price = cost * expected / (1.0 + rounds_done * cost)
    # Rows share their forwards, so it is their sums that count.
    total = lambda values: jnp.sum(jnp.where(ctx.active, values, 0.0))
    # Before the root is scored nothing is known of the gain: do that round.
    can_begin = ctx.active & (self.depth_limit >= 0)
    all_have_begun = jnp.all(scored[:, tree_lib.ROOT] | ~can_begin)
    return nodes, (total(gain) > total(price)) | ~all_have_begun

  def _frontier(
    self,
    tree: tree_lib.TokenTree,
    scored: jax.Array,
    expanded: jax.Array,
    depth_limit: jax.Array,
    active: jax.Array,
  ) -> tuple[jax.Array, ...]:
    """The nodes that another round would score in one row, and the gain.

    Nodes that are `expanded [M]` (see `_grow`) are scored only if the stage
    needs them as ancestors: their keys and values are seen by their
    descendants.

    Returns:
      `[W]` int32, the most likely nodes to score, then `NO_NODE`; `[]` bool,
      whether any node could get children; and `[]` float32, the tokens that
      scoring is expected to add, and those that the tree is expected to yield
      as it is. The root is certain, and stands for the target's bonus token.
      Both are 0 for a stage whose cost ratio is 0.
    """
    facts, width = self.stage.scorer.facts, self.stage.config.width
    used = tree.log_prob > -jnp.inf
    candidates = used & ~scored & (tree.depth <= depth_limit)
    if facts.needs_parents:
      candidates &= (tree.parent < 0) | scored[jnp.maximum(tree.parent, 0)]
    can_grow = candidates & (tree.depth < self.ctx.max_depth)
    can_grow &= active & ~expanded
    if not facts.needs_ancestors:
      candidates &= ~expanded
    if self.stage.config.cost_ratio == 0:
      nodes, _ = tree_lib.best_nodes(tree, candidates, width)
      nothing = jnp.zeros(())
      return nodes, jnp.any(can_grow), nothing, nothing
    (nodes, _), (growing, _), (_, log_prob) = tree_lib.best_of_sets(
      tree,
      (candidates, can_grow, used),
      (width, width, self.ctx.shape.num_nodes),
    )
    expected = jnp.sum(jnp.exp(log_prob))
    return nodes, jnp.any(can_grow), _gain(tree, scored, growing), expected

  def insert(
    self, tree: tree_lib.TokenTree, scores: drafter_lib.Scores
  ) -> tree_lib.TokenTree:
    """The trees with the candidates of the stage."""
    if self.has_inner:
      tree = _rescore(tree, scores, self.expanded)
    children = tree_lib.Children(
      scores.nodes,
      scores.tokens,
      scores.cond_log_probs,
      self.first_origin + scores.sources,
    )
    tree = jax.vmap(self.put)(tree, children, self.expanded)
    if not self.has_inner:
      return tree
    return jax.vmap(tree_lib.accumulate, (0, None))(tree, self.ctx.max_depth)

  def put(
    self,
    tree: tree_lib.TokenTree,
    children: tree_lib.Children,
    expanded: jax.Array,
  ) -> tree_lib.TokenTree:
    """The tree of a row with candidates; `expanded [M]` bool, see `_grow`."""
    nodes = children.parents
    depth = tree_lib.pick(tree.depth, nodes)
    expandable = (nodes >= 0) & (depth < self.ctx.max_depth)
    expandable &= ~tree_lib.pick(expanded, nodes)
    is_candidate = children.cond_log_probs > sampling_lib.EXCLUDED
    wanted = expandable[:, None] & is_candidate
    return tree_lib.add_children(tree, children, wanted)


class _FixedTopology(_BestFirst):
  """Every child is a node of the topology: nothing is sorted."""

  takes_all_rounds = True
  masks_rounds = False  # Rows that cannot grow have no nodes.

  @property
  def _topology(self) -> topology_lib.Topology:
    assert isinstance(self.ctx.shape, topology_lib.Topology)
    return self.ctx.shape

  def next_nodes(
    self, tree: tree_lib.TokenTree, scored: jax.Array, rounds_done: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    del scored
    schedule = jnp.asarray(self._topology.schedule)
    # After the last round there is no next one.
    nodes = schedule[jnp.minimum(rounds_done, schedule.shape[0] - 1)]
    # A scorer may have had fewer candidates than the topology has nodes.
    exists = (nodes == tree_lib.ROOT)[None] | (tree.parent[:, nodes] >= 0)
    exists &= tree.depth[:, nodes] <= self.depth_limit[:, None]
    nodes = jnp.where(
      exists & (nodes >= 0)[None], nodes[None], tree_lib.NO_NODE
    )
    return nodes, jnp.any(self.ctx.active & (self.depth_limit >= 0))

  def put(
    self,
    tree: tree_lib.TokenTree,
    children: tree_lib.Children,
    expanded: jax.Array,
  ) -> tree_lib.TokenTree:
    del expanded
    nodes, num_children = children.parents, children.tokens.shape[1]
    index = jnp.asarray(self._topology.children)[nodes][:, :num_children]
    is_candidate = children.cond_log_probs > sampling_lib.EXCLUDED
    wanted = (nodes >= 0)[:, None] & is_candidate
    index = jnp.where(wanted, index, tree.capacity)
    return tree_lib.put_children(tree, index, children)


# A child of an inner stage that the outer stage excludes stays in the tree,
# after all others: the target may choose it all the same.
_LAST = -1e30


def _rescore(
  tree: tree_lib.TokenTree,
  scores: drafter_lib.Scores,
  expanded: jax.Array,
) -> tree_lib.TokenTree:
  """Gives children that inner stages drafted the numbers of this stage.

  What follows from `cond_log_prob` is left to `accumulate`.
  """
  is_child_of = tree.parent[:, :, None] == scores.nodes[:, None]  # [B, M, W]
  is_child_of &= (scores.nodes >= 0)[:, None]
  parent = jnp.maximum(tree.parent, tree_lib.ROOT)
  is_rated = jnp.any(is_child_of, axis=2)
  is_rated &= ~jnp.take_along_axis(expanded, parent, axis=1)
  index = jnp.argmax(is_child_of, axis=2)
  log_probs = jnp.maximum(scores.log_prob_of(index, tree.token), _LAST)
  return tree.replace(
    cond_log_prob=jnp.where(is_rated, log_probs, tree.cond_log_prob)
  )


def _gain(
  tree: tree_lib.TokenTree, scored: jax.Array, nodes: jax.Array
) -> jax.Array:
  """The expected gain in tokens, `[]`, of scoring `nodes [W]`.

  The sum over the nodes of max(share * p(node) - p(its children), 0), where
  share is the fraction of the probability of scored nodes that their children
  have in the tree: K children do not have all of it.
  """
  prob = jnp.exp(tree.log_prob)
  parent = jnp.where(tree.parent >= 0, tree.parent, tree.capacity)
  of_children = jnp.minimum(
    tree_lib.scatter_sum(parent, prob, tree.capacity), prob
  )
  of_scored = jnp.sum(jnp.where(scored, prob, 0.0))
  share = jnp.sum(jnp.where(scored, of_children, 0.0))
  share = jnp.where(of_scored > 0, share / jnp.maximum(of_scored, 1e-6), 1.0)
  new = jnp.maximum(share * prob - of_children, 0.0)[nodes]
  return jnp.sum(jnp.where(nodes >= 0, new, 0.0))
