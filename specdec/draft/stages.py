"""States of the stages of a drafter: at the start, and from step to step."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec import carried as carried_lib
from specdec import total as total_lib
from specdec.draft import drafter as drafter_lib
from specdec.tree import tree as tree_lib


class StageCounters(flax.struct.PyTreeNode):
  """Counters of a stage."""

  forwards: total_lib.Total  #: `[]`, batched forwards.
  row_forwards: total_lib.Total  #: `[B]`, those in which the row was not done.
  slots_read: total_lib.Total  #: `[B]`, visible cache slots, summed over these.

  @classmethod
  def zeros(cls, batch_size: int) -> 'StageCounters':
    """Counters of zero."""
    of_rows = total_lib.Total.zeros(batch_size)
    return cls(total_lib.Total.zeros(), of_rows, of_rows)


class StageState(flax.struct.PyTreeNode):
  """State of one stage, carried from step to step."""

  scorer: Any  #: The state of the scorer.
  scored: jax.Array  #: `[B, M]` bool, nodes that it has scored in this step.
  #: `[B, M, V]` float32, the distributions that the children of each node were
  #: drawn from in this step; of size 0 if none are drawn.
  proposals: jax.Array
  #: `[B, 2]` int32, forwards and visible cache slots of this step.
  counted: jax.Array
  counters: StageCounters  #: The counters of the steps before.


def _num_scored(drafter: drafter_lib.Drafter) -> list[int]:
  """The most nodes that each stage scores in one step."""
  sizes, growths = [], 1
  for index, stage in enumerate(drafter.stages):
    forwards = growths * stage.config.rounds
    has_inner = index + 1 < len(drafter.stages)
    width = stage.forward_width(drafter.max_depth, has_inner)
    # A whole path must fit when it is committed.
    sizes.append(max(forwards * width, drafter.max_depth + 1))
    growths += forwards  # before each growth and after each forward
  return sizes


def start(
  drafter: drafter_lib.Drafter, texts: carried_lib.Texts, drawn_from: int = 0
) -> tuple[StageState, ...]:
  """The states of all stages before the first step; see `Scorer.start`.

  `drawn_from` is V if children are drawn, else 0.
  """
  batch_size, capacity = texts.tokens.shape[0], drafter.shape.capacity

  def of_stage(stage: drafter_lib.Stage, num_scored: int) -> StageState:
    return StageState(
      scorer=stage.scorer.start(texts, num_scored),
      scored=jnp.zeros((batch_size, capacity), bool),
      proposals=jnp.zeros((batch_size, capacity, drawn_from)),
      counted=jnp.zeros((batch_size, 2), jnp.int32),
      counters=StageCounters.zeros(batch_size),
    )

  return tuple(map(of_stage, drafter.stages, _num_scored(drafter)))


def restart(
  drafter: drafter_lib.Drafter,
  states: tuple[StageState, ...],
  texts: carried_lib.Texts,
) -> tuple[StageState, ...]:
  """`Scorer.restart` of all stages; rows of length 0 have nothing to read."""

  def of_stage(
    stage: drafter_lib.Stage, state: StageState, num_scored: int
  ) -> StageState:
    scorer, forwards = stage.scorer.restart(state.scorer, texts, num_scored)
    counters = state.counters.replace(
      forwards=state.counters.forwards + forwards,
      row_forwards=state.counters.row_forwards
      + jnp.where(texts.length > 0, forwards, 0),
    )
    return state.replace(scorer=scorer, counters=counters)

  return tuple(map(of_stage, drafter.stages, states, _num_scored(drafter)))


def observe(
  drafter: drafter_lib.Drafter,
  states: tuple[StageState, ...],
  seen: carried_lib.Verified,
) -> tuple[StageState, ...]:
  """`Scorer.observe` of all stages that the drafter has."""
  observed = tuple(
    state.replace(scorer=stage.scorer.observe(state.scorer, seen))
    for stage, state in zip(drafter.stages, states, strict=False)
  )
  return observed + states[len(observed) :]


def keep(
  drafter: drafter_lib.Drafter,
  before: tuple[StageState, ...],
  states: tuple[StageState, ...],
  added: carried_lib.Added,
  active: jax.Array,
) -> tuple[StageState, ...]:
  """`Scorer.keep` of all stages; `active [B]` bool are the rows not done.

  The states of stages that the drafter does not have stay as they are: a plain
  step between speculative ones. Fields that last for one step are passed on as
  they were `before` it, because an array that changes costs a GPU a kernel.
  """

  def count(state: StageState) -> StageCounters:
    of_rows = jnp.where(active[:, None], state.counted, 0)
    before = state.counters
    return StageCounters(
      forwards=before.forwards + state.counted[0, 0],
      row_forwards=before.row_forwards + of_rows[:, 0],
      slots_read=before.slots_read + of_rows[:, 1],
    )

  kept = tuple(
    old.replace(
      scorer=stage.scorer.keep(state.scorer, added),
      counters=count(state),
    )
    for stage, old, state in zip(drafter.stages, before, states, strict=False)
  )
  return kept + states[len(kept) :]


def proposals_of(
  drafter: drafter_lib.Drafter,
  states: tuple[StageState, ...],
  tree: tree_lib.TokenTree,
) -> jax.Array:
  """`[B, M, V]`, the proposals of the outermost stage in this step.

  Without stages there are none, and the array is of size 0; in a plain step
  between speculative ones they are zeros.
  """
  if drafter.stages:
    return states[0].proposals
  size = states[0].proposals.shape[2] if states else 0
  return jnp.zeros((*tree.token.shape, size))
