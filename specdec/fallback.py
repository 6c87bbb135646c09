"""Adaptive fallback to plain decoding while speculation does not pay.

A speculative step takes as long as `break_even` plain ones, so it pays if it
emits more tokens than that. An account is kept, in tokens per row:

    a speculative step   adds what it emitted, subtracts `break_even`
    a plain step         adds a small premium

When the account is empty decoding goes on plainly, until the premiums have paid
for another trial. So speculation with the worst of drafts takes at most the
initial credit, the premiums and one last step longer than plain decoding: under
5 % of 512 tokens. The balance is capped, so that a draft that turns bad late is
noticed soon.

The fallback changes the speed, never the tokens of match verification, nor the
distribution of the tokens of the other rules.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import total as total_lib

_INITIAL_CREDIT = 8.0
_MAX_CREDIT = 16.0
_PREMIUM = 0.02
_STEPS_PER_TRIAL = 2.0


class FallbackState(flax.struct.PyTreeNode):
  """The account of a batch. Its rows step together."""

  credit: jax.Array  #: `[]` float32, tokens per row.
  speculating: jax.Array  #: `[]` bool, whether the next step is speculative.
  plain_steps: total_lib.Total  #: `[]`, plain steps so far.
  #: `[]` bool, whether a plain step decoded text that the stages have not read.
  stages_lag: jax.Array


def init_fallback() -> FallbackState:
  """The state before the first step: speculating, with some credit."""
  return FallbackState(
    credit=jnp.full((), _INITIAL_CREDIT, jnp.float32),
    speculating=jnp.ones((), bool),
    plain_steps=total_lib.Total.zeros(),
    stages_lag=jnp.zeros((), bool),
  )


def after_speculative_step(
  state: FallbackState,
  emitted: jax.Array,
  active: jax.Array,
  break_even: jax.typing.ArrayLike,
) -> FallbackState:
  """The state after a speculative step that emitted `emitted [B]` tokens.

  `active`: `[B]` bool, rows that were not done before; `break_even`: `[]`
  float32, the time of a speculative step in plain ones.
  """
  rows = jnp.maximum(jnp.sum(active), 1)
  per_row = jnp.sum(jnp.where(active, emitted, 0)) / rows
  credit = jnp.minimum(state.credit + per_row - break_even, _MAX_CREDIT)
  return state.replace(credit=credit, speculating=credit > 0)


def after_plain_step(
  state: FallbackState, break_even: jax.typing.ArrayLike
) -> FallbackState:
  """The state after a plain step; `break_even` as above.

  If `Slots` chose a plain step because of the batch size, the credit does not
  change.
  """
  credit = state.credit + jnp.where(state.speculating, 0.0, _PREMIUM)
  is_paid = credit >= _STEPS_PER_TRIAL * (break_even - 1.0)
  return FallbackState(
    credit=credit,
    speculating=state.speculating | is_paid,
    plain_steps=state.plain_steps + 1,
    stages_lag=jnp.ones((), bool),
  )
