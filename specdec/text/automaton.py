"""Automata over tokens, made from automata over bytes.

An expression describes a text, byte by byte, and a token is a few bytes. So the
state after a token is found by reading its bytes, for all tokens at once along
their trie (as stop strings are, `specdec.text.stop_strings`). Tokens that do
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

from specdec.text import constraint as constraint_lib

MAX_STATES = 2**14 - 1
"""The most states of an automaton."""
MAX_BYTES = 2**29
"""The most bytes of its tables."""

# The smallest tables, so that few shapes are compiled; larger ones have four
# times more.
_LEAST_STATES = 256
_LEAST_KINDS = 256

# Automata over bytes are read in blocks of so many states.
_BLOCK = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """An automaton over tokens, on the host; see `constraint.Tables`.

  State 0 allows everything and is never left; a text begins in state 1.
  """

  after: np.ndarray  #: `[Q, C]` int16, the state after a token of each kind.
  kinds: np.ndarray  #: `[V]` int32, the kind of each token.

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


class TooLarge(ValueError):
  """An automaton has too many states or bytes."""


class Unspeakable(ValueError):
  """No sequence of tokens is allowed."""


def _padded(size: int, least: int) -> int:
  while least < size:
    least *= 4
  return least


def _check_size(num_states: int, num_kinds: int, vocab_size: int) -> None:
  """Refuses what is too large.

  Raises:
    TooLarge: says how large it is, and what is allowed.
  """
  states = _padded(num_states, _LEAST_STATES)
  kinds = _padded(num_kinds, _LEAST_KINDS)
  words = -(-vocab_size // 32)
  size = states * (2 * kinds + 4 * words) + 4 * vocab_size
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
  _check_size(num_states + 1, 1, vocab_size)
  # The last state is the one after forbidden bytes.
  delta = np.where(delta < 0, num_states, delta).astype(np.int32)
  delta = np.pad(delta, ((0, 1), (0, 0)), constant_values=num_states)
  # Their bytes are not read, as those of no text.
  pieces = list(token_bytes)
  for token in eos_ids:
    pieces[token : token + 1] = [b''] if token < len(pieces) else []
  examples, kinds = _kinds(delta, pieces, vocab_size)
  _check_size(num_states + 1, len(examples) + 1, vocab_size)
  chosen = [pieces[token] for token in examples.tolist()]
  after = read_tokens(delta, np.arange(num_states, dtype=np.int32), chosen)
  after[after == num_states] = constraint_lib.FORBIDDEN
  kinds[list(eos_ids)] = len(examples)
  return _trimmed(after, accepting, kinds)


def _token_trie(
  token_bytes: Sequence[bytes], vocab_size: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
  """The trie of all tokens, in which each distinct prefix is read once.

  Returns:
    A list with, for each prefix length from 1, `[nodes]` parents and `[nodes]`
    last bytes; and `[V]`, the node of each token. Nodes are numbered in the
    order of the list, after node 0, the empty prefix.
  """
  tokens = token_bytes[:vocab_size]
  lengths = np.zeros(vocab_size, np.int64)
  lengths[: len(tokens)] = [len(token) for token in tokens]
  first = np.cumsum(lengths) - lengths
  text = np.frombuffer(b''.join(tokens), np.uint8)
  levels: list[tuple[np.ndarray, np.ndarray]] = []
  node, num_nodes = np.zeros(vocab_size, np.int64), 1
  for position in range(lengths.max(initial=0)):
    longer = np.flatnonzero(lengths > position)
    keys = node[longer] * 256 + text[first[longer] + position]
    distinct, inverse = np.unique(keys, return_inverse=True)
    node[longer] = num_nodes + inverse
    num_nodes += len(distinct)
    levels.append((distinct // 256, distinct % 256))
  return levels, node


def _kinds(
  delta: np.ndarray, token_bytes: Sequence[bytes], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """A token of each kind that is allowed somewhere, and `[V]`, the kinds.

  Kind -1 is forbidden everywhere. Tokens are of one kind if the sum of random
  numbers for each pair of states, before and after, is the same; of 64 bits,
  so that no two kinds are ever taken for one.
  """
  levels, node = _token_trie(token_bytes, vocab_size)
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


def read_tokens(
  delta: np.ndarray, states: np.ndarray, tokens: Sequence[bytes]
) -> np.ndarray:
  """`[states, tokens]`, the state of `delta` after the bytes of each token."""
  after = np.repeat(states[:, None], len(tokens), 1)
  lengths = np.array([len(token) for token in tokens], np.int64)
  first = np.cumsum(lengths) - lengths
  text = np.frombuffer(b''.join(tokens), np.uint8)
  for position in range(lengths.max(initial=0)):
    longer = np.flatnonzero(lengths > position)
    byte = text[first[longer] + position]
    after[:, longer] = delta[after[:, longer], byte[None]]
  return after


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
  automaton: Automaton | None, size: int, num_kinds: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Padded tables: `[Q, C]` int16, `[V]` int32, and `[Q, words]` uint32."""
  after = np.zeros((size, num_kinds), np.int16)
  kinds = np.zeros(vocab_size, np.int32)
  masks = np.full((size, -(-vocab_size // 32)), 2**32 - 1, np.uint32)
  if automaton is not None:
    states, own = automaton.after.shape
    after[:states, :own] = automaton.after
    kinds[:], masks[:states] = automaton.kinds, automaton.masks
  return after, kinds, masks


def _sizes(
  automata: Sequence[Automaton | None], sizes: tuple[int, int]
) -> tuple[int, int]:
  """Q and C of tables for some automata, at least `sizes`."""
  shapes = [one.after.shape for one in automata if one is not None]
  return (
    max([_padded(size, _LEAST_STATES) for size, _ in shapes] + [sizes[0]]),
    max([_padded(size, _LEAST_KINDS) for _, size in shapes] + [sizes[1]]),
  )


def stack(
  automata: Sequence[Automaton | None], vocab_size: int
) -> constraint_lib.Tables:
  """The tables of an automaton for each row, or of one for all rows.

  None allows everything; `vocab_size` is V.
  """
  sizes = _sizes(automata, (_LEAST_STATES, _LEAST_KINDS))
  dense = [_dense(automaton, *sizes, vocab_size) for automaton in automata]
  return constraint_lib.Tables(
    *(jnp.asarray(np.stack(arrays)) for arrays in zip(*dense, strict=True))
  )


def with_row(
  tables: constraint_lib.Tables, row: int, automaton: Automaton | None
) -> constraint_lib.Tables:
  """The tables of B rows with another automaton in a row.

  They grow if it is larger than all before; the states of texts stay as they
  are, since no padded state is ever reached.
  """
  _, size, num_kinds = tables.following.shape
  new_size, new_kinds = _sizes([automaton], (size, num_kinds))
  more = (0, new_size - size)
  if (new_size, new_kinds) != (size, num_kinds):
    tables = tables.replace(
      following=jnp.pad(
        tables.following, ((0, 0), more, (0, new_kinds - num_kinds))
      ),
      masks=jnp.pad(tables.masks, ((0, 0), more, (0, 0))),
    )
  dense = _dense(automaton, new_size, new_kinds, tables.kinds.shape[1])
  return _replaced(tables, np.int32(row), *dense)


@jax.jit
def _replaced(
  tables: constraint_lib.Tables,
  row: jax.Array,
  following: jax.Array,
  kinds: jax.Array,
  masks: jax.Array,
) -> constraint_lib.Tables:
  return constraint_lib.Tables(
    following=tables.following.at[row].set(following),
    kinds=tables.kinds.at[row].set(kinds),
    masks=tables.masks.at[row].set(masks),
  )
