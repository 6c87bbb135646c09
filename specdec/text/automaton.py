"""Automata over tokens, made from automata over bytes.

An expression describes a text, byte by byte, and a token is a few bytes. So the
state after a token is found by reading its bytes, for all tokens at once along
their trie (`specdec.text.stop_strings` does the same). Tokens that do the same
in every state are of one kind, and the table has a row for each state and a
column for each kind; 152,000 tokens have some hundred kinds.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from specdec.text import constraint as constraint_lib
from specdec.text import effects as effects_lib

MAX_STATES = 2**14 - 1
"""The most states of an automaton."""
MAX_BYTES = 2**29
"""The most bytes of its tables."""
MAX_EFFECTS = 2**15 - 1
"""The most effects of its tokens on counts."""

# The smallest tables, so that few shapes are compiled; larger ones have four
# times more.
_LEAST_STATES = 256
_LEAST_KINDS = 256
_LEAST_EFFECTS = 256

# The states of an automaton over bytes that are read at once.
_BLOCK = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """An automaton over tokens, on the host; see `constraint.Tables`.

  State 0 allows everything and is never left; a text begins in state 1.
  """

  after: np.ndarray  #: `[Q, C]` int16, the state after a token of each kind.
  kinds: np.ndarray  #: `[V]` int32, the kind of each token.
  counts: effects_lib.OfTokens | None = None  #: None: it does not count.

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
  while 0 < least < size:
    least *= 4
  return least


def _check_size(
  num_states: int, num_kinds: int, vocab_size: int, *, counts: bool
) -> None:
  """Refuses an automaton that is too large; `counts`: it has a second table.

  Raises:
    TooLarge: the message has its size, and the sizes that are possible.
  """
  states = _padded(num_states, _LEAST_STATES)
  kinds = _padded(num_kinds, _LEAST_KINDS)
  words = -(-vocab_size // 32)
  size = states * ((4 if counts else 2) * kinds + 4 * words) + 4 * vocab_size
  if num_states > MAX_STATES or size > MAX_BYTES:
    raise TooLarge(
      f'{num_states:,} states with tables of {size / 2**20:,.0f} MiB; at most'
      f' {MAX_STATES:,} states and {MAX_BYTES >> 20} MiB are possible'
    )


def of_bytes(
  delta: np.ndarray,
  accepting: np.ndarray,
  token_bytes: Sequence[bytes],
  vocab_size: int,
  eos_ids: Sequence[int],
  counts: effects_lib.OfBytes | None = None,
) -> Automaton:
  """The automaton over tokens that allows what one over bytes allows.

  Tokens that end a text are allowed where the text may end; where it cannot go
  on, only they are. Other tokens without bytes are forbidden, and so are tokens
  after which no text could be completed.

  Args:
    delta: `[S, 256]` int32, the state after a byte, or `FORBIDDEN`. The first
      state is 0.
    accepting: `[S]` bool, where the text may end.
    token_bytes: of each token; ends before the tokens at the end of the
      vocabulary that have no bytes.
    vocab_size: V.
    eos_ids: the tokens that end a text, at least one.
    counts: the effects of bytes on counts, if it counts. A text must always be
      able to go on then with tokens of one byte.

  Raises:
    TooLarge: there are too many states, counts, or kinds of tokens.
    Unspeakable: no sequence of tokens is a text that is allowed.
  """
  num_states = len(delta)
  check_size = functools.partial(_check_size, counts=counts is not None)
  check_size(num_states + 1, 1, vocab_size)
  # The last state is the one after forbidden bytes.
  delta = np.where(delta < 0, num_states, delta).astype(np.int32)
  delta = np.pad(delta, ((0, 1), (0, 0)), constant_values=num_states)
  # The bytes of tokens that end a text are not part of the text.
  pieces = list(token_bytes)
  for token in eos_ids:
    pieces[token : token + 1] = [b''] if token < len(pieces) else []
  reader = effects_lib.Reader(delta, counts)
  examples, kinds = _kinds(reader, num_states, pieces, vocab_size)
  check_size(num_states + 1, len(examples) + 1, vocab_size)
  chosen = [pieces[token] for token in examples.tolist()]
  first = np.arange(num_states, dtype=np.int32)
  after, effects = _read(reader, first, chosen)
  after[after == num_states] = constraint_lib.FORBIDDEN
  kinds[list(eos_ids)] = len(examples)
  kept, made = _trimmed(after, accepting, kinds)
  return _with_counts(made, effects[kept], counts, kept) if counts else made


def _with_counts(
  automaton: Automaton,
  effects: np.ndarray,
  counts: effects_lib.OfBytes,
  kept: np.ndarray,
) -> Automaton:
  """The automaton with the effects of tokens, `[Q - 1, C - 2]`."""
  ends = counts.at_end[kept].tolist()
  table = np.full(automaton.after.shape, effects_lib.NOTHING, np.int32)
  table[1:, :-2] = effects
  table[1:, -2] = [counts.effects.forgetting(end) for end in ends]
  table[automaton.after < 0] = effects_lib.NOTHING
  counted = effects_lib.of_tokens(counts, table)
  _check_counts(counted, len(table))
  return dataclasses.replace(automaton, counts=counted)


def _check_counts(counts: effects_lib.OfTokens, num_states: int) -> None:
  """Refuses more counts, or effects, than their numbers have room for."""
  total = num_states * math.prod(counts.sizes)
  if total > constraint_lib.LARGEST or len(counts.effects) > MAX_EFFECTS:
    raise TooLarge(
      f'{total:,} states with their counts and {len(counts.effects):,} effects'
      f' of tokens on them; at most {constraint_lib.LARGEST:,} and'
      f' {MAX_EFFECTS:,} are possible'
    )


def can_spell(
  delta: np.ndarray, token_bytes: Sequence[bytes], eos_ids: Sequence[int]
) -> bool:
  """Whether each byte that `delta [S, 256]` allows is a token of its own."""
  single = {
    piece
    for token, piece in enumerate(token_bytes)
    if len(piece) == 1 and token not in eos_ids
  }
  used = np.flatnonzero(np.any(delta >= 0, axis=0)).tolist()
  return all(bytes([byte]) in single for byte in used)


def _token_trie(
  token_bytes: Sequence[bytes], vocab_size: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
  """The trie of all tokens; each distinct prefix is read once.

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
  reader: effects_lib.Reader,
  num_states: int,
  token_bytes: Sequence[bytes],
  vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
  """A token of each kind that is allowed somewhere, and `[V]`, the kinds.

  Kind -1 is forbidden everywhere. Tokens are of one kind if the sum of random
  numbers for each state before, state after and effect is the same; of 64 bits,
  so that no two kinds are ever taken for one. State `num_states` is the one
  after forbidden bytes.
  """
  levels, node = _token_trie(token_bytes, vocab_size)
  sums = np.zeros(1 + sum(len(parents) for parents, _ in levels), np.uint64)
  dead = num_states
  rng = np.random.default_rng(0)
  of_state, of_next = rng.integers(2**64, size=(2, dead + 1), dtype=np.uint64)
  of_next[dead] = 0
  of_effect = rng.integers(2**64, dtype=np.uint64)
  for first in range(0, dead, _BLOCK):
    states = np.arange(first, min(first + _BLOCK, dead), dtype=np.int32)
    above, effects = states[:, None], np.zeros((len(states), 1), np.int32)
    above_start, start = 0, 1
    for parents, byte in levels:
      parents = parents - above_start
      alive = np.flatnonzero(np.any(above != dead, axis=0)[parents])
      if not alive.size:
        break  # Nothing longer is allowed either.
      before = parents[alive]
      after, changed = reader.read(
        above[:, before], effects[:, before], byte[alive]
      )
      numbers = of_next[after]
      if np.any(changed):
        numbers += of_effect * changed.astype(np.uint64)
      sums[start + alive] += of_state[states] @ numbers
      above = np.full((len(states), len(parents)), dead, np.int32)
      effects = np.zeros_like(above)
      above[:, alive], effects[:, alive] = after, changed
      above_start, start = start, start + len(parents)
  distinct, examples, kinds = np.unique(
    sums[node], return_index=True, return_inverse=True
  )
  if distinct[0] == 0:
    return examples[1:], kinds - 1
  return examples, kinds


def read_tokens(
  delta: np.ndarray, states: np.ndarray, tokens: Sequence[bytes]
) -> np.ndarray:
  """`[states, tokens]`, the state of `delta` after the bytes of each token."""
  return _read(effects_lib.Reader(delta, None), states, tokens)[0]


def _read(
  reader: effects_lib.Reader, states: np.ndarray, tokens: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """`[states, tokens]`, the state after each token, and the effect."""
  after = np.repeat(states[:, None], len(tokens), 1)
  effects = np.zeros(after.shape, np.int32)
  lengths = np.array([len(token) for token in tokens], np.int64)
  first = np.cumsum(lengths) - lengths
  text = np.frombuffer(b''.join(tokens), np.uint8)
  for position in range(lengths.max(initial=0)):
    longer = np.flatnonzero(lengths > position)
    byte = text[first[longer] + position]
    after[:, longer], effects[:, longer] = reader.read(
      after[:, longer], effects[:, longer], byte[None]
    )
  return after, effects


def _order(edges: np.ndarray, size: int, first: np.ndarray) -> np.ndarray:
  """The nodes that `edges [2, n]` reach from the nodes `first`; these first."""
  # One more node leads to all of them.
  extra = np.stack([np.full_like(first, size), first])
  rows, columns = np.concatenate([edges, extra], axis=1)
  ones = np.ones(len(rows), np.int8)
  graph = sparse.csr_array((ones, (rows, columns)), (size + 1, size + 1))
  order = csgraph.breadth_first_order(
    graph, size, directed=True, return_predecessors=False
  )
  return order[1:]


def _trimmed(
  after: np.ndarray, accepting: np.ndarray, kinds: np.ndarray
) -> tuple[np.ndarray, Automaton]:
  """The automaton of the states that are on a way from the first to an end.

  Also `[Q - 1]`, these states.

  Raises:
    Unspeakable: no end can be reached.
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
  # Entry -1 belongs to `FORBIDDEN`.
  renamed = np.full(num_states + 1, constraint_lib.FORBIDDEN)
  renamed[kept] = 1 + np.arange(len(kept))
  # One kind more for ends of texts, and one for tokens that are never allowed.
  last = after.shape[1]
  table = np.full((1 + len(kept), last + 2), constraint_lib.FORBIDDEN, np.int16)
  table[0] = 0
  table[1:, :last] = renamed[after[kept]]
  table[1:, last] = np.where(accepting[kept], 0, constraint_lib.FORBIDDEN)
  kinds = np.where(kinds < 0, last + 1, kinds).astype(np.int32)
  return kept, Automaton(table, kinds)


def _dense(
  automaton: Automaton | None, sizes: tuple[int, ...], vocab_size: int
) -> constraint_lib.Tables:
  """The tables of one automaton, of the sizes `Tables.sizes`, in NumPy."""
  num_states, num_kinds, num_effects, num_levels = sizes
  after: Any = np.zeros((num_states, num_kinds), np.int16)
  kinds: Any = np.zeros(vocab_size, np.int32)
  words = -(-vocab_size // 32)
  masks: Any = np.full((num_states, words), 2**32 - 1, np.uint32)
  changes = np.zeros_like(after)
  same = np.array(effects_lib.SAME, np.int32)
  effects = np.tile(same, (num_effects, num_levels, 1))
  bases = np.array([constraint_lib.LARGEST] + [1] * num_levels, np.int32)
  if automaton is not None:
    states, used_kinds = automaton.after.shape
    after[:states, :used_kinds] = automaton.after
    kinds[:], masks[:states] = automaton.kinds, automaton.masks
    if automaton_counts := automaton.counts:
      used_effects, levels, _ = automaton_counts.effects.shape
      changes[:states, :used_kinds] = automaton_counts.after
      effects[:used_effects, :levels] = automaton_counts.effects
      bases[: 1 + levels] = states, *automaton_counts.sizes
  counts: list[Any] = [changes, effects, bases]
  counting = constraint_lib.Counting(*counts) if num_levels else None
  return constraint_lib.Tables(after, kinds, masks, counting)


def _sizes(
  automata: Sequence[Automaton | None], sizes: tuple[int, ...]
) -> tuple[int, ...]:
  """The sizes of tables for some automata, at least `sizes`."""
  for automaton in automata:
    if automaton is not None:
      counts = automaton.counts
      effects = counts.effects.shape[:2] if counts else (0, 0)
      sizes = tuple(map(max, sizes, (*automaton.after.shape, *effects)))
  least = _LEAST_STATES, _LEAST_KINDS, _LEAST_EFFECTS if sizes[3] else 0
  return (*map(_padded, sizes[:3], least), sizes[3])


def stack(
  automata: Sequence[Automaton | None],
  vocab_size: int,
  least: tuple[int, ...] = (0,) * 4,
) -> constraint_lib.Tables:
  """The tables of an automaton for each row, or of one for all rows.

  None allows everything; `vocab_size` is V. The `Tables.sizes` are at least
  `least`.
  """
  sizes = _sizes(automata, least)
  dense = [_dense(automaton, sizes, vocab_size) for automaton in automata]
  return jax.tree.map(lambda *arrays: jnp.asarray(np.stack(arrays)), *dense)


def with_row(
  tables: constraint_lib.Tables,
  row: int,
  automata: Sequence[Automaton | None],
  vocab_size: int,
) -> constraint_lib.Tables:
  """The tables of the automata of B rows, all but one row as in `tables`.

  They grow if the automaton of the row is larger than all before. The states of
  texts stay valid, since no padded state is ever reached.
  """
  sizes = _sizes(automata[row : row + 1], tables.sizes)
  if sizes != tables.sizes:
    return stack(automata, vocab_size, sizes)
  new = _dense(automata[row], sizes, vocab_size)
  return _replaced(tables, np.int32(row), new)


@jax.jit
def _replaced(
  tables: constraint_lib.Tables,
  row: jax.Array,
  row_tables: constraint_lib.Tables,
) -> constraint_lib.Tables:
  return jax.tree.map(
    lambda all_rows, values: all_rows.at[row].set(values), tables, row_tables
  )
