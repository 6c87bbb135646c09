"""States of the stages of a drafter: at the start, and from step to step."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec import carried as carried_lib
from specdec import total as total_lib
from specdec.draft import drafter as drafter_lib


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


def keep(
  drafter: drafter_lib.Drafter,
  before: tuple[StageState, ...],
  states: tuple[StageState, ...],
  seen: carried_lib.Verified,
  added: carried_lib.Added,
  active: jax.Array,
) -> tuple[StageState, ...]:
  """`Scorer.observe` and `Scorer.keep` of all stages that the drafter has.

  `active [B]` bool are the rows that are not done. The states of stages that
  the drafter does not have stay as they are: a plain step between speculative
  ones. Fields that last for one step are passed on as they were `before` it,
  because an array that changes costs a GPU a kernel.
  """

  def of_stage(
    stage: drafter_lib.Stage, old: StageState, state: StageState
  ) -> StageState:
    of_rows = jnp.where(active[:, None], state.counted, 0)
    counters = state.counters
    counters = StageCounters(
      forwards=counters.forwards + state.counted[0, 0],
      row_forwards=counters.row_forwards + of_rows[:, 0],
      slots_read=counters.slots_read + of_rows[:, 1],
    )
    scorer = stage.scorer.observe(state.scorer, seen)
    scorer = stage.scorer.keep(scorer, added)
    return old.replace(scorer=scorer, counters=counters)

  kept = tuple(map(of_stage, drafter.stages, before, states))
  return kept + states[len(kept) :]
