"""Automata over tokens, made from automata over bytes.

An expression describes a text, byte by byte, and a token is a few bytes. So the
state after a token is found by reading its bytes, for all tokens at once along
their trie (as stop strings are, `specdec.stop_strings`). Tokens that do
the same in every state are of one kind, so the table is of states by kinds; of
152,000 tokens there are some hundred kinds.
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from specdec import constraint as constraint_lib
from specdec import token_trie

MAX_STATES = 2**14 - 1
"""The most states of an automaton."""
MAX_BYTES = 2**29
"""The most bytes of its tables."""

# Of tables, so that few shapes are compiled; larger ones have four times more.
_LEAST_STATES = 256
_LEAST_KINDS = 256

# Automata over bytes are read in blocks of so many states.
_BLOCK = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """What may follow what, on the host; see `constraint.Tables`.

  State 0 allows everything and is never left; a text begins in state 1.
  """

  after: np.ndarray  #: `[Q, C]` int16, the state after a token of each kind.
  kinds: np.ndarray  #: `[V]` int32, the kind of each token.

  @property
  def num_states(self) -> int:
    """Q, padded as in tables."""
    return _padded(len(self.after), _LEAST_STATES)

  @property
  def num_kinds(self) -> int:
    """C, padded as in tables."""
    return _padded(self.after.shape[1], _LEAST_KINDS)

  @functools.cached_property
  def masks(self) -> np.ndarray:
    """`[Q, ceil(V / 32)]` uint32, see `constraint.Tables`."""
    words = -(-len(self.kinds) // 32)
    kinds = np.zeros(32 * words, np.int64)
    kinds[: len(self.kinds)] = self.kinds
    masks = np.zeros((len(self.after), words), np.uint32)
    may_follow = self.after >= 0
    for bit, kind in enumerate(kinds.reshape(32, words)):
      masks |= may_follow[:, kind].astype(np.uint32) << np.uint32(bit)
    return masks

  @property
  def num_bytes(self) -> int:
    """Bytes of its tables."""
    num_states, num_kinds = self.after.shape
    return _num_bytes(num_states, num_kinds, len(self.kinds))


class TooLarge(ValueError):
  """An automaton has too many states or bytes."""


class Unspeakable(ValueError):
  """No sequence of tokens is allowed."""


def _padded(size: int, least: int) -> int:
  while least < size:
    least *= 4
  return least


def _num_bytes(num_states: int, num_kinds: int, vocab_size: int) -> int:
  states = _padded(num_states, _LEAST_STATES)
  kinds = _padded(num_kinds, _LEAST_KINDS)
  return states * (2 * kinds + 4 * -(-vocab_size // 32)) + 4 * vocab_size


def check_size(num_states: int, num_kinds: int, vocab_size: int) -> None:
  """Refuses what is too large.

  Raises:
    TooLarge: says how large it is, and what is allowed.
  """
  size = _num_bytes(num_states, num_kinds, vocab_size)
  if num_states > MAX_STATES or size > MAX_BYTES:
    raise TooLarge(
      f'{num_states:,} states, whose tables take {size / 2**20:,.0f} MiB; at'
      f' most {MAX_STATES:,} states and {MAX_BYTES >> 20} MiB are possible'
    )


def of_bytes(
  delta: np.ndarray,
  accepting: np.ndarray,
  token_bytes: Sequence[bytes],
  vocab_size: int,
  eos_ids: Sequence[int],
) -> Automaton:
  """The automaton over tokens of one over bytes.

  Tokens without bytes are forbidden. Those that end a text are allowed where
  the text may end, and where it cannot go on nothing else is. A token after
  which no text could be completed is forbidden.

  Args:
    delta: `[S, 256]` int32, the state after a byte, or `FORBIDDEN`. The first
      state is 0.
    accepting: `[S]` bool, where the text may end.
    token_bytes: of each token; ends before the tokens at the end of the
      vocabulary that have no bytes.
    vocab_size: V.
    eos_ids: the tokens that end a text, at least one.

  Raises:
    TooLarge: there are too many states, or kinds of tokens.
    Unspeakable: no sequence of tokens is a text that is allowed.
  """
  num_states = len(delta)
  check_size(num_states + 1, 1, vocab_size)
  # The last state is the one after forbidden bytes.
  delta = np.where(delta < 0, num_states, delta).astype(np.int32)
  delta = np.pad(delta, ((0, 1), (0, 0)), constant_values=num_states)
  # Their bytes are not read, as those of no text.
  pieces = list(token_bytes)
  for token in eos_ids:
    pieces[token : token + 1] = [b''] if token < len(pieces) else []
  examples, kinds = _kinds(delta, pieces, vocab_size)
  check_size(num_states + 1, len(examples) + 1, vocab_size)
  after = _read(delta, [pieces[token] for token in examples.tolist()])
  kinds[list(eos_ids)] = len(examples)
  return _trimmed(after, accepting, kinds)


def _kinds(
  delta: np.ndarray, token_bytes: Sequence[bytes], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """A token of each kind that is allowed somewhere, and `[V]`, the kinds.

  Kind -1 is forbidden everywhere. Tokens are of one kind if the sum of random
  numbers for each pair of states, before and after, is the same; of 64 bits,
  so that no two kinds are ever taken for one.
  """
  levels, node = token_trie.token_trie(token_bytes, vocab_size)
  sums = np.zeros(1 + sum(len(parents) for parents, _ in levels), np.uint64)
  dead = len(delta) - 1
  rng = np.random.default_rng(0)
  of_state, of_next = rng.integers(2**64, size=(2, dead + 1), dtype=np.uint64)
  of_next[dead] = 0
  for first in range(0, dead, _BLOCK):
    states = np.arange(first, min(first + _BLOCK, dead))
    above, above_start, start = states[:, None], 0, 1
    for parents, byte in levels:
      parents = parents - above_start
      alive = np.flatnonzero(np.any(above != dead, axis=0)[parents])
      if not alive.size:
        break  # Nothing longer is allowed either.
      after = delta[above[:, parents[alive]], byte[alive]]
      sums[start + alive] += of_state[states] @ of_next[after]
      above = np.full((len(states), len(parents)), dead, np.int32)
      above[:, alive] = after
      above_start, start = start, start + len(parents)
  found, examples, kinds = np.unique(
    sums[node], return_index=True, return_inverse=True
  )
  if found[0] == 0:
    return examples[1:], kinds - 1
  return examples, kinds


def _read(delta: np.ndarray, tokens: Sequence[bytes]) -> np.ndarray:
  """`[S, tokens]`, the state after each token, or `FORBIDDEN`."""
  dead = len(delta) - 1
  after = np.repeat(np.arange(dead, dtype=np.int32)[:, None], len(tokens), 1)
  lengths = np.array([len(token) for token in tokens], np.int64)
  for position in range(lengths.max(initial=0)):
    longer = np.flatnonzero(lengths > position)
    byte = np.array([tokens[token][position] for token in longer.tolist()])
    after[:, longer] = delta[after[:, longer], byte[None]]
  return np.where(after == dead, constraint_lib.FORBIDDEN, after)


def _order(edges: np.ndarray, size: int, first: np.ndarray) -> np.ndarray:
  """The nodes that are reached by `edges [2, n]`, those of `first` in front."""
  # One more node leads to all of them.
  extra = np.stack([np.full_like(first, size), first])
  rows, columns = np.concatenate([edges, extra], axis=1)
  ones = np.ones(len(rows), np.int8)
  graph = sparse.csr_array((ones, (rows, columns)), (size + 1, size + 1))
  found = csgraph.breadth_first_order(
    graph, size, directed=True, return_predecessors=False
  )
  return found[1:]


def _trimmed(
  after: np.ndarray, accepting: np.ndarray, kinds: np.ndarray
) -> Automaton:
  """The automaton of the states that are on a way from the first to an end.

  Raises:
    Unspeakable: there is no such way.
  """
  num_states = len(after)
  targets = [np.unique(row) for row in after]
  before = np.repeat(np.arange(num_states), [len(row) for row in targets])
  edges = np.stack([before, np.concatenate(targets)])
  edges = edges[:, edges[1] >= 0]
  ends = _order(edges[::-1], num_states, np.flatnonzero(accepting))
  leads = np.zeros(num_states + 1, bool)
  leads[ends] = True
  if not leads[0]:
    raise Unspeakable('no sequence of tokens is allowed')
  edges = edges[:, np.all(leads[edges], axis=0)]
  kept = _order(edges, num_states, np.zeros(1, edges.dtype))
  # Entry -1 is that of `FORBIDDEN`.
  renamed = np.full(num_states + 1, constraint_lib.FORBIDDEN)
  renamed[kept] = 1 + np.arange(len(kept))
  # One kind more for ends of texts, and one for what is always forbidden.
  last = after.shape[1]
  table = np.full((1 + len(kept), last + 2), constraint_lib.FORBIDDEN, np.int16)
  table[0] = 0
  table[1:, :last] = renamed[after[kept]]
  table[1:, last] = np.where(accepting[kept], 0, constraint_lib.FORBIDDEN)
  kinds = np.where(kinds < 0, last + 1, kinds).astype(np.int32)
  return Automaton(table, kinds)


def _dense(
  one: Automaton | None, size: int, num_kinds: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Padded tables: `[Q, C]` int16, `[V]` int32, and `[Q, words]` uint32."""
  after = np.zeros((size, num_kinds), np.int16)
  kinds = np.zeros(vocab_size, np.int32)
  masks = np.full((size, -(-vocab_size // 32)), 2**32 - 1, np.uint32)
  if one is not None:
    states, own = one.after.shape
    after[:states, :own], kinds[:], masks[:states] = (
      one.after,
      one.kinds,
      one.masks,
    )
  return after, kinds, masks


def stack(
  automata: Sequence[Automaton | None], rows: Sequence[int], vocab_size: int
) -> constraint_lib.Tables:
  """The tables of several automata.

  Args:
    automata: G of them; None allows everything.
    rows: for each row, the automaton that it follows.
    vocab_size: V.
  """
  given = [one for one in automata if one is not None]
  size = max((one.num_states for one in given), default=_LEAST_STATES)
  num_kinds = max((one.num_kinds for one in given), default=_LEAST_KINDS)
  dense = [_dense(one, size, num_kinds, vocab_size) for one in automata]
  after, kinds, masks = (
    np.stack(one, axis=-2) for one in zip(*dense, strict=True)
  )
  number = len(automata)
  return constraint_lib.Tables(
    after=jnp.asarray(after.reshape(size * number, -1)),
    kinds=jnp.asarray(kinds),
    masks=jnp.asarray(masks.reshape(size * number, -1)),
    rows=jnp.array([_first_state(automata, index) for index in rows]),
  )


def _first_state(automata: Sequence[Automaton | None], index: int) -> np.int32:
  """Where texts begin that follow an automaton, as `Tables` number states."""
  return np.int32(0 if automata[index] is None else len(automata) + index)


class Pool:
  """The tables of rows that come and go, each with an automaton or none.

  Rows with the same automaton share its tables. Other automata take the place
  of those that no row follows any more; only what is larger than all before it
  changes the shape of the tables.
  """

  def __init__(self, num_rows: int, vocab_size: int):
    self._vocab_size = vocab_size
    self._automata: list[Automaton | None] = [None] * num_rows
    self._rows = [0] * num_rows
    #: The tables; None while no row ever had an automaton.
    self.tables: constraint_lib.Tables | None = None

  def assign(
    self, row: int, automaton: Automaton | None, busy: Sequence[int]
  ) -> None:
    """Gives a row another automaton; those that are `busy` keep theirs."""
    if automaton is None and self.tables is None:
      return
    index = self._place(automaton, [self._rows[one] for one in busy])
    self._rows[row] = index
    if self._automata[index] is not automaton or self.tables is None:
      self._automata[index] = automaton
      self.tables = self._with(index)
    start = _first_state(self._automata, index)
    self.tables = self.tables.replace(rows=self.tables.rows.at[row].set(start))

  def _place(self, automaton: Automaton | None, used: Sequence[int]) -> int:
    """An index whose tables are those of the automaton, or may be replaced."""
    for index, one in enumerate(self._automata):
      if one is automaton:
        return index
    # There are as many as rows, of which one is not busy.
    return next(index for index in range(len(self._rows)) if index not in used)

  def _with(self, index: int) -> constraint_lib.Tables:
    """The tables with what is new at an index."""
    new, tables, number = self._automata[index], self.tables, len(self._rows)
    if tables is not None and new is not None:
      size, num_kinds = len(tables.after) // number, tables.after.shape[1]
      if new.num_states <= size and new.num_kinds <= num_kinds:
        dense = _dense(new, size, num_kinds, self._vocab_size)
        return _replaced(tables, np.int32(index), *dense)
    return stack(self._automata, self._rows, self._vocab_size)


@jax.jit
def _replaced(
  tables: constraint_lib.Tables,
  index: jax.Array,
  after: jax.Array,
  kinds: jax.Array,
  masks: jax.Array,
) -> constraint_lib.Tables:
  """The tables with another automaton at an index; see `_dense`."""
  put = lambda old, new: (
    old.reshape(len(new), -1, old.shape[1])
    .at[:, index]
    .set(new)
    .reshape(old.shape)
  )
  return tables.replace(
    after=put(tables.after, after),
    kinds=tables.kinds.at[index].set(kinds),
    masks=put(tables.masks, masks),
  )
