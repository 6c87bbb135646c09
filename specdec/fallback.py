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

Look-ups draft at no cost. So where they alone draft, every step grows its tree.
It is plain while the account is empty, and if the tree is expected to yield
fewer than `break_even` tokens.

The fallback changes the speed, never the tokens of match verification, nor the
distribution of the tokens of the other rules.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import total as total_lib
from specdec.tree import tree as tree_lib

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
  state: FallbackState, break_even: jax.typing.ArrayLike, *, stages_lag: bool
) -> FallbackState:
  """The state after a plain step; `break_even` as above.

  The credit grows only if the account was empty: other plain steps are chosen
  by `Slots` for the size of the batch, or by `tree_pays`. `stages_lag`: whether
  the stages have not read what was decoded.
  """
  credit = state.credit + jnp.where(state.speculating, 0.0, _PREMIUM)
  is_paid = credit >= _STEPS_PER_TRIAL * (break_even - 1.0)
  return FallbackState(
    credit=credit,
    speculating=state.speculating | is_paid,
    plain_steps=state.plain_steps + 1,
    stages_lag=state.stages_lag | stages_lag,
  )


def tree_pays(
  tree: tree_lib.TokenTree,
  nodes: jax.Array,
  active: jax.Array,
  break_even: jax.typing.ArrayLike,
) -> jax.Array:
  """Whether to verify trees: they are expected to yield enough tokens.

  Args:
    tree: grown, `[B, M]` per field.
    nodes: `[B, N]` int32, the chosen nodes. The root among them counts for the
      target's own token, which is certain.
    active: `[B]` bool, rows that are not done.
    break_even: as above.

  Returns:
    `[]` bool, for all rows.
  """
  log_probs = jax.vmap(tree_lib.pick)(tree.log_prob, nodes)
  chosen = (nodes >= 0) & active[:, None]
  expected = jnp.sum(jnp.where(chosen, jnp.exp(log_probs), 0.0))
  return expected >= break_even * jnp.sum(active)
