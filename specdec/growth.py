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

import jax
from jax import lax
import jax.numpy as jnp

from specdec.drafter import Drafter
from specdec.drafter import StageState
from specdec.drafter import Step
from specdec.extension import extend
from specdec.extension import Growing
from specdec.extension import mark
from specdec.outlook import look_ahead
from specdec.outlook import Outlook
from specdec.outlook import Reach
from specdec.ranking import IMPOSSIBLE
from specdec.stages import forward_width
from specdec.tree import NO_NODE
from specdec.tree import place_children
from specdec.tree import ROOT
from specdec.tree import TokenTree


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
