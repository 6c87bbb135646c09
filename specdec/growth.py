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

import jax
from jax import lax
import jax.numpy as jnp

from specdec.drafter import Drafter
from specdec.drafter import StageCounters
from specdec.drafter import StageState
from specdec.drafter import Step
from specdec.placing import add_up
from specdec.ranking import IMPOSSIBLE
from specdec.tree import accumulate
from specdec.tree import add_children
from specdec.tree import best_nodes
from specdec.tree import NO_NODE
from specdec.tree import place_children
from specdec.tree import ROOT
from specdec.tree import TokenTree
from specdec.tree_config import TreeConfig


def _forward_width(config: TreeConfig) -> int:
  """Room for a node and for what a stage had no time to look at before."""
  return max(config.width, 2)


def init_stages(
  drafter: Drafter,
  prompt: jax.Array,
  prompt_length: jax.Array,
  *,
  num_slots: int,
  drawn_from: int | None = None,
) -> StageState:
  """The state of a drafter and of all inside it, before the first step.

  Args:
    drafter: the outermost.
    prompt: `[B, P]` int32.
    prompt_length: `[B]` int32.
    num_slots: the longest text.
    drawn_from: V if the outermost stage draws children, else None.
  """
  capacity, max_depth = drafter.config.capacity, drafter.max_depth
  batch_size = prompt.shape[0]

  def init(stage: Drafter, num_growths: int) -> StageState:
    config = stage.config
    num_forwards = num_growths * config.rounds
    zeros = jnp.zeros(batch_size, jnp.int32)
    return StageState(
      scorer=stage.scorer.init(
        prompt,
        prompt_length,
        num_slots=num_slots,
        # A whole path must fit when it is committed.
        num_scored=max(num_forwards * _forward_width(config), max_depth + 1),
      ),
      scored=jnp.zeros((batch_size, capacity), bool),
      proposals=None
      if drawn_from is None
      else jnp.zeros((batch_size, capacity, drawn_from)),
      counters=StageCounters(
        forwards=jnp.zeros((), jnp.int32), row_forwards=zeros, slots_read=zeros
      ),
      # Guesses before each growth and after each forward.
      inner=None
      if stage.inner is None
      else init(stage.inner, num_growths + num_forwards),
    )

  return init(drafter, 1)


def catch_up_stages(
  drafter: Drafter, state: StageState, tokens: jax.Array, length: jax.Array
) -> StageState:
  """Between steps: lets all stages see text that was decoded without them.

  Args:
    drafter: the outermost stage.
    state: of it and of those inside.
    tokens: `[B, T]` int32, the texts.
    length: `[B]` int32, of the texts.
  """
  inner = state.inner
  if drafter.inner is not None and inner is not None:
    inner = catch_up_stages(drafter.inner, inner, tokens, length)
  scorer, forwards = drafter.scorer.catch_up(state.scorer, tokens, length)
  counters = state.counters.replace(
    forwards=state.counters.forwards + forwards,
    row_forwards=state.counters.row_forwards + forwards,
  )
  return state.replace(scorer=scorer, counters=counters, inner=inner)


def commit_stages(
  drafter: Drafter, state: StageState, path: jax.Array, num_kept: jax.Array
) -> StageState:
  """Ends a step of all stages, see `drafter.Scorer.commit`."""
  inner = state.inner
  if drafter.inner is not None and inner is not None:
    inner = commit_stages(drafter.inner, inner, path, num_kept)
  return state.replace(
    scorer=drafter.scorer.commit(state.scorer, path, num_kept),
    scored=jnp.zeros_like(state.scored),
    inner=inner,
  )


def _in_context(drafter, tree, step):
  """`[B, M]` bool: nodes at positions that the stage can score."""
  longest = drafter.scorer.max_positions
  if longest is None:
    return jnp.ones(tree.depth.shape, bool)
  return (step.length - 1)[:, None] + tree.depth < longest


def _open_nodes(drafter, state, tree, step, closed):
  """`[B, M]` bool: what the stage has yet to score."""
  used = jnp.arange(tree.capacity)[None] < tree.size[:, None]
  still_open = used & ~state.scored & _in_context(drafter, tree, step)
  # The keys of a closed node may be needed by its descendants.
  return still_open if drafter.scorer.needs_ancestors else still_open & ~closed


def _gain(
  drafter: Drafter,
  state: StageState,
  tree: TokenTree,
  can_grow: jax.Array,
) -> jax.Array:
  """Tokens that another round is expected to add, `[B]` float32.

  That is the probability of the nodes it would score, as far as their children
  in the tree do not have it yet, times the share that scoring has brought into
  the tree so far: K children do not have all of their parent's probability.
  """
  prob = jnp.exp(tree.log_prob)
  parent = jnp.where(tree.parent >= 0, tree.parent, tree.capacity)
  of_children = jax.vmap(add_up, (0, 0, None))(parent, prob, tree.capacity)
  of_children = jnp.minimum(of_children, prob)
  sum_of = lambda mass: jnp.sum(jnp.where(state.scored, mass, 0.0), axis=1)
  of_scored = sum_of(prob)
  share = sum_of(of_children) / jnp.maximum(of_scored, 1e-6)
  share = jnp.where(of_scored > 0, share, 1.0)
  width = drafter.config.width
  nodes, _ = jax.vmap(best_nodes, (0, 0, None))(tree, can_grow, width)
  new = jnp.maximum(share[:, None] * prob - of_children, 0.0)
  new = jnp.take_along_axis(new, nodes, axis=1)
  return jnp.sum(jnp.where(nodes >= 0, new, 0.0), axis=1)


def _expected(tree: TokenTree, num_nodes: int) -> jax.Array:
  """Tokens that the tree is expected to yield as it is, `[B]` float32.

  The root is certain, and stands for the target's bonus token.
  """
  used = tree.log_prob > -jnp.inf
  _, log_prob = jax.vmap(best_nodes, (0, 0, None))(tree, used, num_nodes)
  return jnp.sum(jnp.exp(log_prob), axis=1)


def _pays(
  drafter: Drafter,
  state: StageState,
  tree: TokenTree,
  step: Step,
  closed: jax.Array,
  rounds_done: jax.Array,
) -> jax.Array:
  """Whether another round is expected to be worth its cost, `[]` bool."""
  config = drafter.config
  can_grow = _open_nodes(drafter, state, tree, step, closed) & ~closed
  can_grow &= (tree.depth < step.max_depth) & step.active[:, None]
  cost = config.cost_ratio
  if cost is None:
    cost = drafter.scorer.bytes_per_forward(config.width) / step.target_bytes
  if cost == 0 and config.min_gain == 0:
    return jnp.any(can_grow)
  # The same cost at the rate of tokens per cost so far.
  price = cost * _expected(tree, config.num_nodes) / (1.0 + rounds_done * cost)
  price = jnp.maximum(price, config.min_gain)
  # Rows share their forwards, so it is their sums that count.
  total = lambda values: jnp.sum(jnp.where(step.active, values, 0.0))
  gain = _gain(drafter, state, tree, can_grow)
  # A stage that has not scored the root yet has no say so far.
  can_begin = step.active & _in_context(drafter, tree, step)[:, ROOT]
  begun = jnp.all(state.scored[:, ROOT] | ~can_begin)
  return (total(gain) > total(price)) | ~begun


def grow(
  drafter: Drafter,
  state: StageState,
  tree: TokenTree,
  step: Step,
  *,
  closed: jax.Array,
  label: int = 1,
) -> tuple[StageState, TokenTree]:
  """Grows the trees of a batch.

  Args:
    drafter: the stage that guesses.
    state: of it and of those inside.
    tree: `[B, M]` per field.
    step: see `Step`.
    closed: `[B, M]` bool, nodes that need no more children: a stage outside has
      scored them.
    label: origin of the nodes that the stage's first label proposes.

  Returns:
    State and trees.
  """
  config, inner = drafter.config, drafter.inner
  topology = config.topology
  active = step.active.astype(jnp.int32)

  def guess(state, tree):
    if inner is None:
      return state, tree
    inner_state, tree = grow(
      inner,
      state.inner,
      tree,
      step,
      closed=closed | state.scored,
      label=label + len(drafter.scorer.labels),
    )
    return state.replace(inner=inner_state), tree

  def pick(state, tree, round_number):
    """The nodes to score, `[B, W]`."""
    if topology is None:
      candidates = _open_nodes(drafter, state, tree, step, closed)
      best, _ = jax.vmap(best_nodes, (0, 0, None))(
        tree, candidates, config.width
      )
      return best
    nodes = jnp.asarray(topology.schedule)[round_number]
    # A scorer may have had fewer guesses than the shape has places.
    exists = (nodes == ROOT)[None] | (tree.parent[:, nodes] >= 0)
    exists &= _in_context(drafter, tree, step)[:, nodes]
    return jnp.where(exists & (nodes >= 0)[None], nodes[None], NO_NODE)

  def rescore(tree, scores, closed):
    """This stage knows better than those inside it; unbatched."""
    of_parent = tree.parent[:, None] == scores.nodes[None]
    of_parent &= (scores.nodes >= 0)[None]
    known = jnp.any(of_parent, axis=1) & ~closed[tree.parent]
    tree = tree.replace(edge=jnp.where(known, scores.given, tree.edge))
    return accumulate(tree, step.max_depth)

  def add(tree, scores, closed):
    """The stage's own children; unbatched."""
    nodes, origins = scores.nodes, label + scores.sources
    is_node = (nodes >= 0)[:, None]
    if topology is not None:
      table = jnp.asarray(topology.children)
      index = table[nodes][:, : scores.tokens.shape[1]]
      placed = is_node & (scores.edges > IMPOSSIBLE / 2)
      index = jnp.where(placed, index, tree.capacity)
      return place_children(
        tree, index, nodes, scores.tokens, scores.edges, origins
      )
    may_have = ~closed[nodes] & (tree.depth[nodes] < step.max_depth)
    wanted = is_node & may_have[:, None] & (scores.edges > IMPOSSIBLE / 2)
    return add_children(
      tree, nodes, scores.tokens, scores.edges, origins, wanted
    )

  def score(state, tree, round_number):
    nodes = pick(state, tree, round_number)
    padding = ((0, 0), (0, _forward_width(config) - config.width))
    nodes = jnp.pad(nodes, padding, constant_values=NO_NODE)
    scores, scorer = drafter.scorer.score(
      state.scorer, tree, step, nodes, config
    )
    if inner is not None:
      tree = jax.vmap(rescore)(tree, scores, closed)
    tree = jax.vmap(add)(tree, scores, closed)
    is_node = jnp.arange(tree.capacity)[None, :, None] == scores.nodes[:, None]
    counters = state.counters
    if scores.drawn_from is not None:
      entries = jnp.where(scores.nodes >= 0, scores.nodes, tree.capacity)
      put = lambda one, at, probs: one.at[at].set(probs, mode='drop')
      state = state.replace(
        proposals=jax.vmap(put)(state.proposals, entries, scores.drawn_from)
      )
    state = state.replace(
      scorer=scorer,
      scored=state.scored | jnp.any(is_node, axis=2),
      counters=counters.replace(
        slots_read=counters.slots_read + active * scores.slots_read
      ),
    )
    return state, tree

  def goes_on(carry):
    rounds_done, state, tree = carry
    more = rounds_done < config.rounds
    if topology is not None:
      can_begin = step.active & _in_context(drafter, tree, step)[:, ROOT]
      return more & jnp.any(can_begin)
    return more & _pays(drafter, state, tree, step, closed, rounds_done)

  def body(carry):
    rounds_done, state, tree = carry
    return rounds_done + 1, *guess(*score(state, tree, rounds_done))

  carry = (jnp.zeros((), jnp.int32), *guess(state, tree))
  with jax.named_scope(f'grow_{drafter.name}'):
    rounds_done, state, tree = lax.while_loop(goes_on, body, carry)
  counters = state.counters
  counters = counters.replace(
    forwards=counters.forwards + rounds_done,
    row_forwards=counters.row_forwards + active * rounds_done,
  )
  return state.replace(counters=counters), tree
