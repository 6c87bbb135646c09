"""Falls back to plain decoding while speculation does not pay.

A speculative step takes as long as `break_even` plain ones, so it pays if it
emits more tokens than that. The guard keeps an account, in tokens per row:

    a speculative step   pays in what it emitted, takes out `break_even`
    a plain step         pays in a small premium

When the account is empty decoding goes on plainly, until the premiums have
saved enough to try again. So speculation with the worst of drafts takes at most
the initial credit, the premiums and one last step longer than plain decoding:
under 5 % of 512 tokens. What has been earned is kept up to a limit, or a draft
that fails late would be borne with for long.

Tokens do not change, only who finds them; so this is for the rules that are
exact in law just as well.
"""

import flax.struct
import jax
import jax.numpy as jnp

_INITIAL_CREDIT = 8.0
_MAX_CREDIT = 16.0
_PREMIUM = 0.02
_STEPS_PER_TRIAL = 2.0


class GuardState(flax.struct.PyTreeNode):
  """Carried from step to step; of the batch, whose rows step together.

  Attributes:
    credit: `[]` float32, tokens per row.
    speculating: `[]` bool, whether the next step is speculative.
    plain_steps: `[]` int32, so far.
  """

  credit: jax.Array
  speculating: jax.Array
  plain_steps: jax.Array


def init_guard() -> GuardState:
  """Speculating, with some credit."""
  return GuardState(
    credit=jnp.full((), _INITIAL_CREDIT),
    speculating=jnp.ones((), bool),
    plain_steps=jnp.zeros((), jnp.int32),
  )


def after_speculative_step(
  guard: GuardState,
  emitted: jax.Array,
  active: jax.Array,
  break_even: jax.Array,
) -> GuardState:
  """Settles a speculative step.

  Args:
    guard: before the step.
    emitted: `[B]` int32, new tokens.
    active: `[B]` bool, rows that were not done before.
    break_even: `[]` float32, what a speculative step takes, in plain ones.
  """
  rows = jnp.maximum(jnp.sum(active), 1)
  per_row = jnp.sum(jnp.where(active, emitted, 0)) / rows
  credit = jnp.minimum(guard.credit + per_row - break_even, _MAX_CREDIT)
  return guard.replace(credit=credit, speculating=credit > 0)


def after_plain_step(guard: GuardState, break_even: jax.Array) -> GuardState:
  """Settles a plain step; `break_even` as above."""
  credit = guard.credit + _PREMIUM
  return GuardState(
    credit=credit,
    speculating=credit >= _STEPS_PER_TRIAL * (break_even - 1.0),
    plain_steps=guard.plain_steps + 1,
  )
