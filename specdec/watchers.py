"""Watchers of the text of a decode: ends of texts, and values per token.

A watcher is a record of pure functions with a state per batch. Every step shows
it the tokens that the target chose; it says where the text ends, and then keeps
what it found about the tokens that were emitted (`specdec.carried`).
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec import carried as carried_lib
from specdec import sampling as sampling_lib
from specdec.text import stop_strings
from specdec.verify import accept


class Observation(flax.struct.PyTreeNode):
  """Results of a step that watchers see."""

  verdict: accept.Verdict  #: Its `chosen` tokens are those that may be emitted.
  #: `[B, N, V]` float32, the target's, as the model gave them.
  logits: jax.Array

  @property
  def no_end(self) -> jax.Array:
    """`[B, D + 1]` int32, that the text ends with none of the tokens."""
    return jnp.full(self.verdict.chosen.shape, accept.RUNNING)


class Watcher:
  """Base of watchers: pure functions over a state, which is any pytree."""

  def start(self, texts: carried_lib.Texts) -> Any:
    """The state after texts; by default there is none."""
    del texts
    return ()

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    """Looks at the chosen tokens of a step.

    Returns:
      `[B, D + 1]` int32, why the text ends with each token (`EOS`, `STOP`, or
      `RUNNING` if it does not), and what `keep` needs.
    """
    raise NotImplementedError

  def keep(self, state: Any, added: carried_lib.Added) -> Any:
    """The state after a step, from what `observe` returned."""
    del added
    return state


class EndOfText(flax.struct.PyTreeNode, Watcher):
  """Ends a row after any of some tokens."""

  #: `[B, K]` int32, the tokens of each row, or `[1, K]`; -1 is none.
  ids: jax.Array

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    chosen = seen.verdict.chosen
    is_eos = jnp.any(chosen[:, :, None] == self.ids[:, None], axis=-1)
    return jnp.where(is_eos, accept.EOS, accept.RUNNING), state


class StopStrings(flax.struct.PyTreeNode, Watcher):
  """Ends a row when a stop string is complete; the state is `[B]` int32."""

  table: stop_strings.StopTable  #: See `specdec.text.stop_strings`.

  def start(self, texts: carried_lib.Texts) -> jax.Array:
    del texts
    return self.table.start

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    is_stop, states = self.table.follow(state, seen.verdict.chosen)
    return jnp.where(is_stop, accept.STOP, accept.RUNNING), states

  def keep(self, state: Any, added: carried_lib.Added) -> jax.Array:
    return jnp.take_along_axis(state, added.count[:, None], axis=1)[:, 0]


class LogProbs(flax.struct.PyTreeNode, Watcher):
  """The log-probability of each new token in the target's own distribution.

  It is taken before bias, penalty, temperature and filters. The state is
  `[B, T]` float32, aligned with the tokens of the text.
  """

  def start(self, texts: carried_lib.Texts) -> jax.Array:
    return jnp.zeros((texts.tokens.shape[0], texts.num_slots))

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    logits = seen.verdict.along_path(seen.logits)
    log_probs = sampling_lib.log_softmax(logits)
    chosen = seen.verdict.chosen[..., None]
    chosen_log_probs = jnp.take_along_axis(log_probs, chosen, axis=-1)[..., 0]
    return seen.no_end, (state, chosen_log_probs)

  def keep(self, state: Any, added: carried_lib.Added) -> jax.Array:
    log_probs, new = state
    (appended,) = added.append((log_probs,), (new,))
    return appended


def in_sections(
  watchers: tuple[Watcher, ...], sections: Sequence[int] | np.ndarray
) -> tuple[Watcher, ...]:
  """The watchers of new texts that begin in other sections, one per row."""
  return tuple(
    StopStrings(watcher.table.in_sections(sections))
    if isinstance(watcher, StopStrings)
    else watcher
    for watcher in watchers
  )


def observe(
  watchers: tuple[Watcher, ...], states: tuple[Any, ...], seen: Observation
) -> tuple[jax.Array, tuple[Any, ...]]:
  """All watchers look at a step; where several end the text, the first counts.

  Returns:
    `[B, D + 1]` int32, why the text ends with each token, and what `keep`
    needs.
  """
  ends, new_states = seen.no_end, []
  for watcher, state in zip(watchers, states, strict=True):
    reasons, state = watcher.observe(state, seen)
    ends = jnp.where(ends == accept.RUNNING, reasons, ends)
    new_states.append(state)
  return ends, tuple(new_states)


def keep(
  watchers: tuple[Watcher, ...],
  states: tuple[Any, ...],
  added: carried_lib.Added,
) -> tuple[Any, ...]:
  """The states of all watchers after a step; `states` come from `observe`."""
  return tuple(
    watcher.keep(state, added)
    for watcher, state in zip(watchers, states, strict=True)
  )


def log_probs(
  watchers: tuple[Watcher, ...], states: tuple[Any, ...]
) -> jax.Array | None:
  """The state of `LogProbs`, if it is among the watchers."""
  for watcher, state in zip(watchers, states, strict=True):
    if isinstance(watcher, LogProbs):
      return state
  return None
