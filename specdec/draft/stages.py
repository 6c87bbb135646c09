"""What all stages of a drafter carry: at the start, and from step to step."""

import jax
import jax.numpy as jnp

from specdec.draft.drafter import Drafter
from specdec.draft.drafter import StageCounters
from specdec.draft.drafter import StageState
from specdec.draft.drafter import TreeConfig


def forward_width(config: TreeConfig) -> int:
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
        num_scored=max(num_forwards * forward_width(config), max_depth + 1),
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
