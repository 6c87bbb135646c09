"""Watchers of the text of a decode: ends of texts, seen tokens, log-probs.

A watcher is a record of pure functions with a state per batch. Every step shows
it the tokens that the target chose; it says where the text ends, and then keeps
what it found about the tokens that were emitted.
"""

from collections.abc import Sequence
from typing import Any
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec import constraint as constraint_lib
from specdec import sampling as sampling_lib
from specdec import stop_strings
from specdec.verify import accept


def append(
  array: jax.Array, length: jax.Array, new: jax.Array, count: jax.Array
) -> jax.Array:
  """Writes the first `count [B]` of `new [B, n]` behind `array [B, T]`.

  `length`: `[B]` int32, the entries of the array that are in use.
  """
  offsets = jnp.arange(new.shape[1])[None]
  # What is out of range is dropped.
  index = jnp.where(
    offsets < count[:, None], length[:, None] + offsets, array.shape[1]
  )
  rows = jnp.arange(array.shape[0])[:, None]
  return array.at[rows, index].set(new, mode='drop')


class Observation(flax.struct.PyTreeNode):
  """Results of a step that watchers see."""

  verdict: accept.Verdict  #: Its `chosen` tokens are those that may be emitted.
  #: `[B, N, V]` float32, the target's, as the model gave them.
  logits: jax.Array
  length: jax.Array  #: `[B]` int32, of the texts before the step.
  #: `[B, D + 1]` int32, the states of the constraint after the nodes of the
  #: path; None without a constraint.
  states: jax.Array | None = None


class Watcher(Protocol):
  """Pure functions over a state, which is any pytree."""

  def init(
    self, prompt: jax.Array, prompt_length: jax.Array, num_slots: int
  ) -> Any:
    """The state before the first step.

    From `prompt [B, P]` and `prompt_length [B]` int32; `num_slots` is T, the
    longest text, in tokens.
    """

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    """Looks at the chosen tokens of a step.

    Returns:
      `[B, D + 1]` int32, why the text ends with each token (`EOS`, `STOP`, or
      `RUNNING` if it does not), and what `commit` needs.
    """

  def commit(self, pending: Any, emitted: jax.Array) -> Any:
    """The state after the step, of whose tokens `emitted [B]` were emitted."""


class Stateless:
  """Base of watchers without a state, and default of `init`."""

  def init(
    self, prompt: jax.Array, prompt_length: jax.Array, num_slots: int
  ) -> Any:
    del prompt, prompt_length, num_slots
    return ()

  def commit(self, pending: Any, emitted: jax.Array) -> Any:
    del emitted
    return pending


def _no_end(seen: Observation) -> jax.Array:
  return jnp.full(seen.verdict.chosen.shape, accept.RUNNING)


class EndOfText(flax.struct.PyTreeNode, Stateless):
  """Ends a row after any of some tokens."""

  #: `[B, K]` int32, the tokens of each row, or `[1, K]`; -1 is none.
  ids: jax.Array

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    chosen = seen.verdict.chosen
    is_eos = jnp.any(chosen[:, :, None] == self.ids[:, None], axis=-1)
    return jnp.where(is_eos, accept.EOS, accept.RUNNING), state


class _Automaton:
  """Base of watchers that read the text, of whose states one stays."""

  def commit(self, pending: Any, emitted: jax.Array) -> jax.Array:
    return jnp.take_along_axis(pending, emitted[:, None], axis=1)[:, 0]


class StopStrings(flax.struct.PyTreeNode, _Automaton):
  """Ends a row when a stop string is complete; the state is `[B]` int32."""

  table: stop_strings.StopTable  #: See `specdec.stop_strings`.

  def init(
    self, prompt: jax.Array, prompt_length: jax.Array, num_slots: int
  ) -> jax.Array:
    del prompt, prompt_length, num_slots
    return self.table.start

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    is_stop, states = self.table.follow(state, seen.verdict.chosen)
    return jnp.where(is_stop, accept.STOP, accept.RUNNING), states


class SeenTokens(flax.struct.PyTreeNode):
  """The tokens of each text, for the repetition penalty; `[B, V]` bool."""

  vocab_size: int = flax.struct.field(pytree_node=False)  #: V; static.

  def init(
    self, prompt: jax.Array, prompt_length: jax.Array, num_slots: int
  ) -> jax.Array:
    del num_slots
    nothing = jnp.zeros((prompt.shape[0], self.vocab_size), bool)
    return sampling_lib.add_seen(nothing, prompt, prompt_length)

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    return _no_end(seen), (state, seen.verdict.chosen)

  def commit(self, pending: Any, emitted: jax.Array) -> jax.Array:
    seen, chosen = pending
    return sampling_lib.add_seen(seen, chosen, emitted)


class Constrained(flax.struct.PyTreeNode, _Automaton):
  """Follows the constraint; the state is that of the constraint, `[B]`."""

  constraint: constraint_lib.Constraint

  def init(
    self, prompt: jax.Array, prompt_length: jax.Array, num_slots: int
  ) -> jax.Array:
    del prompt_length, num_slots
    return self.constraint.start(prompt.shape[0]).astype(jnp.int32)

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    assert seen.states is not None
    after = constraint_lib.follow(
      self.constraint, seen.states, seen.verdict.chosen
    )
    return _no_end(seen), jnp.concatenate([state[:, None], after], axis=1)


class LogProbs(flax.struct.PyTreeNode):
  """The log-probability of each new token in the target's own distribution.

  That is before bias, penalty, temperature and filters. The state is `[B, T]`
  float32, aligned with the tokens of the text.
  """

  def init(
    self, prompt: jax.Array, prompt_length: jax.Array, num_slots: int
  ) -> jax.Array:
    del prompt_length
    return jnp.zeros((prompt.shape[0], num_slots))

  def observe(self, state: Any, seen: Observation) -> tuple[jax.Array, Any]:
    logits = seen.verdict.along_path(seen.logits)
    log_probs = sampling_lib.log_softmax(logits)
    chosen = seen.verdict.chosen[..., None]
    chosen_log_probs = jnp.take_along_axis(log_probs, chosen, axis=-1)[..., 0]
    return _no_end(seen), (state, seen.length, chosen_log_probs)

  def commit(self, pending: Any, emitted: jax.Array) -> jax.Array:
    log_probs, length, new = pending
    return append(log_probs, length, new, emitted)


def make_watchers(
  *,
  eos_ids: Sequence[int] | np.ndarray = (),
  stop: stop_strings.StopTable | None = None,
  penalty_vocab_size: int = 0,
  log_probs: bool = False,
  constraint: constraint_lib.Constraint | None = None,
) -> tuple[Watcher, ...]:
  """The watchers that a request needs.

  `eos_ids` are those of all rows, or an array of `EndOfText`;
  `penalty_vocab_size` is V if there is a repetition penalty, else 0.
  """
  watchers: list[Watcher] = []
  if len(eos_ids):
    ids = np.atleast_2d(np.asarray(eos_ids, np.int32))
    watchers.append(EndOfText(jnp.asarray(ids)))
  if stop is not None:
    watchers.append(StopStrings(stop))
  if penalty_vocab_size:
    watchers.append(SeenTokens(penalty_vocab_size))
  if log_probs:
    watchers.append(LogProbs())
  if constraint is not None:
    watchers.append(Constrained(constraint))
  return tuple(watchers)


def find(kind: type, watchers: tuple[Watcher, ...]) -> Any:
  """The watcher of a kind, or None if there is none."""
  return next((one for one in watchers if isinstance(one, kind)), None)


def state_of(
  kind: type, watchers: tuple[Watcher, ...], states: tuple[Any, ...]
) -> Any:
  """The state of the watcher of a kind, or None if there is none."""
  for watcher, state in zip(watchers, states, strict=True):
    if isinstance(watcher, kind):
      return state
  return None


def observe(
  watchers: tuple[Watcher, ...], states: tuple[Any, ...], seen: Observation
) -> tuple[jax.Array, tuple[Any, ...]]:
  """All watchers look at a step; where several end the text, the first counts.

  Returns:
    `[B, D + 1]` int32, why the text ends with each token, and what `commit`
    needs.
  """
  ends, pending = _no_end(seen), []
  for watcher, state in zip(watchers, states, strict=True):
    reasons, kept = watcher.observe(state, seen)
    ends = jnp.where(ends == accept.RUNNING, reasons, ends)
    pending.append(kept)
  return ends, tuple(pending)


def commit_watchers(
  watchers: tuple[Watcher, ...], pending: tuple[Any, ...], emitted: jax.Array
) -> tuple[Any, ...]:
  """The states of all watchers after a step."""
  return tuple(
    watcher.commit(found, emitted)
    for watcher, found in zip(watchers, pending, strict=True)
  )
