"""Constraints: which tokens may follow a text, such as one of a grammar.

A constraint is an automaton that reads tokens. Its state is an integer, so
every node of a tree has one: the state after its token, from the state of its
parent. Target and drafts give no probability to forbidden tokens, so drafted
tokens equal the tokens of plain decoding under the same constraint.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec import adjusters as adjusters_lib
from specdec import carried as carried_lib
from specdec import sampling as sampling_lib

FORBIDDEN = -1
"""The state after a token that must not follow."""
LARGEST = 2**31 - 1
"""The largest number of a state."""


class Constraint(adjusters_lib.Adjuster):
  """Base of constraints: pure functions, and a pytree of what they need.

  A subclass needs `next_state` alone. At least one token must be possible in
  every state that a text can reach: a token that ends the text where it may
  end, see `eos_ids`.
  """

  excludes = True

  def first_state(self, batch_size: int) -> jax.Array:
    """`[B]` int32, the states before the first new token; by default 0."""
    return jnp.zeros(batch_size, jnp.int32)

  def next_state(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
    """The states after tokens; works element by element.

    Args:
      state: `[B, ...]` int32, at least 0.
      tokens: int32 of the same shape.

    Returns:
      int32 of the same shape: at least 0, or `FORBIDDEN`.
    """
    raise NotImplementedError

  def allowed(self, state: jax.Array, vocab_size: int) -> jax.Array:
    """`[..., V]` bool, the tokens that may follow each `state [...]`.

    By default those that `next_state` does not forbid.
    """
    shape = (*state.shape, vocab_size)
    tokens = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    state = jnp.broadcast_to(state[..., None], shape)
    return self.next_state(state, tokens) >= 0

  def start(self, texts: carried_lib.Texts) -> jax.Array:
    return self.first_state(texts.tokens.shape[0]).astype(jnp.int32)

  def at_root(self, state: jax.Array) -> jax.Array:
    return state

  def after(self, node_state: jax.Array, tokens: jax.Array) -> jax.Array:
    """`next_state`, also from `FORBIDDEN`, which is never left."""
    after = self.next_state(jnp.maximum(node_state, 0), tokens)
    return jnp.where(node_state < 0, FORBIDDEN, after).astype(jnp.int32)

  def adjust(
    self,
    logits: jax.Array,
    state: Any,
    node_state: jax.Array,
    nodes: adjusters_lib.Nodes,
  ) -> jax.Array:
    """The logits, `EXCLUDED` for tokens that must not follow.

    Those of a node that is `FORBIDDEN` do not change: it is never chosen.
    """
    del state, nodes
    allowed = self.allowed(jnp.maximum(node_state, 0), logits.shape[-1])
    allowed |= (node_state < 0)[..., None]
    # It is added, so that NaN stays NaN, as with a bias.
    return logits + jnp.where(allowed, 0.0, sampling_lib.EXCLUDED)

  def adjust_few(
    self, log_probs: jax.Array, tokens: jax.Array, node_state: jax.Array
  ) -> jax.Array:
    """The log-probabilities, given that the tokens may follow."""
    state = jnp.broadcast_to(node_state[..., None], tokens.shape)
    may_follow = self.after(state, tokens) >= 0
    lost = jnp.where(may_follow, 0.0, jnp.exp(log_probs))
    left = 1.0 - jnp.sum(lost, axis=-1, keepdims=True)
    conditioned = log_probs - jnp.log(jnp.maximum(left, 1e-6))
    conditioned = jnp.minimum(conditioned, 0.0)
    return jnp.where(may_follow, conditioned, sampling_lib.EXCLUDED)

  def keep(
    self, state: jax.Array, node_state: jax.Array, added: carried_lib.Added
  ) -> jax.Array:
    after = self.after(node_state, added.tokens)
    states = jnp.concatenate([state[:, None], after], axis=1)
    return jnp.take_along_axis(states, added.count[:, None], axis=1)[:, 0]


class Counting(flax.struct.PyTreeNode):
  """Effects of the tokens of `Tables` on counts of repetitions (`effects`)."""

  #: `[G, Q, C]` int16, the effect of a token of each kind.
  changes: jax.Array
  #: `[G, E, K, 4]` int32, `low`, `high`, `keep` and `more` of each effect at
  #: each level.
  effects: jax.Array
  #: `[G, 1 + K]` int32: how many states the automaton has, then how many counts
  #: each level has. The state of a text is a number whose digits have these
  #: bases, the lowest first: a state of the automaton, then the counts.
  bases: jax.Array

  def digits(
    self, automaton: jax.Array, state: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The states of the automaton, `[...]`, and the counts, `[..., K]`."""
    digits = []
    for base in jnp.moveaxis(self.bases[automaton], -1, 0):
      digits.append(state % base)
      state = state // base
    return digits[0], jnp.stack(digits[1:], axis=-1)

  def number(
    self, automaton: jax.Array, state: jax.Array, counts: jax.Array
  ) -> jax.Array:
    """The numbers of states with their counts, which may be too large."""
    bases = self.bases[automaton]
    place = jnp.cumprod(bases[..., :-1], axis=-1)
    counts = jnp.minimum(counts, bases[..., 1:] - 1)
    return state + jnp.sum(counts * place, axis=-1)


def _are_possible(effects: jax.Array, counts: jax.Array) -> jax.Array:
  """Whether `effects [..., K, 4]` are possible from `counts [..., K]`."""
  is_possible = (effects[..., 0] <= counts) & (counts <= effects[..., 1])
  return jnp.all(is_possible, axis=-1)


class Tables(flax.struct.PyTreeNode, Constraint):
  """Automata over tokens: one that all rows follow, or one for each row.

  State 0 allows everything and is never left; texts that have ended are in it.
  A text begins in state 1. In rows without a constraint it leads to state 0.
  `automaton.stack` makes the tables.
  """

  #: `[G, Q, C]` int16, the state after a token of each kind; G is 1 or B.
  following: jax.Array
  kinds: jax.Array  #: `[G, V]` int32, the kind of each token.
  #: `[G, Q, ceil(V / 32)]` uint32, the tokens that may follow: bit i of word j
  #: belongs to token `i * ceil(V / 32) + j`.
  masks: jax.Array
  counting: Counting | None = None  #: None: the automata do not count.

  @property
  def sizes(self) -> tuple[int, ...]:
    """Q, C, E and K; without counts E and K are 0."""
    counting = self.counting
    counted = counting.effects.shape[1:3] if counting else (0, 0)
    return (*self.following.shape[1:], *counted)

  def first_state(self, batch_size: int) -> jax.Array:
    return jnp.ones(batch_size, jnp.int32)

  def _automaton(self, state: jax.Array) -> jax.Array:
    """The automaton of each entry of `state [B, ...]`."""
    if self.kinds.shape[0] == 1:
      return jnp.zeros_like(state)
    return jax.lax.broadcasted_iota(jnp.int32, state.shape, 0)

  def next_state(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
    automaton, counting = self._automaton(state), self.counting
    kind = self.kinds[automaton, tokens]
    if counting is None:
      return self.following[automaton, state, kind].astype(jnp.int32)
    state, counts = counting.digits(automaton, state)
    after = self.following[automaton, state, kind].astype(jnp.int32)
    change = counting.changes[automaton, state, kind].astype(jnp.int32)
    effects = counting.effects[automaton, change]
    is_possible = (after >= 0) & _are_possible(effects, counts)
    counts = effects[..., 2] * counts + effects[..., 3]
    after = counting.number(automaton, after, counts)
    return jnp.where(is_possible, after, FORBIDDEN)

  def allowed(self, state: jax.Array, vocab_size: int) -> jax.Array:
    del vocab_size  # `decode_options.check_constraint` compares it.
    automaton, counting = self._automaton(state), self.counting
    if counting is None:
      return self._bits(automaton, state)
    state, counts = counting.digits(automaton, state)
    changes = counting.changes[automaton, state].astype(jnp.int32)
    effects = counting.effects[automaton[..., None], changes]
    is_possible = _are_possible(effects, counts[..., None, :])
    may_follow = self._bits(automaton, state)
    return jax.lax.cond(
      jnp.all(is_possible),
      lambda: may_follow,
      lambda: may_follow & self._of_kinds(is_possible),
    )

  def _of_kinds(self, of_kinds: jax.Array) -> jax.Array:
    """`[B, ..., V]`, the entry of each token's kind in `[B, ..., C]`."""
    if self.kinds.shape[0] == 1:
      return jnp.take(of_kinds, self.kinds[0], axis=-1)
    return jax.vmap(lambda entries, kinds: jnp.take(entries, kinds, axis=-1))(
      of_kinds, self.kinds
    )

  def _bits(self, automaton: jax.Array, state: jax.Array) -> jax.Array:
    """`[..., V]` bool, the bits of the masks of states."""
    words = self.masks[automaton, state]
    # Without the barrier XLA's CPU backend reads a word once for each bit, by
    # an index of its own.
    words = jax.lax.optimization_barrier(words)[..., None, :]
    shape = (*state.shape, 32, words.shape[-1])
    bit = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    bits = jnp.right_shift(jnp.broadcast_to(words, shape), bit) & 1
    flat = bits.reshape(*state.shape, 32 * words.shape[-1])
    return flat[..., : self.kinds.shape[1]] != 0
