"""Automata over bytes, from the trees of expressions.

A state is the set of all that may follow (Antimirov, "Partial derivatives of
regular expressions and finite automaton constructions", 1996), so all branches
are followed at once and no match hides a longer one. A character is followed as
UTF-8 spells it: a byte, and then the bits of the bytes that are left.
"""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from specdec.models.text import expression as expression_lib
from specdec.text import automaton as automaton_lib

_Ranges = tuple[tuple[int, int], ...]

# A set of bytes as the bits of an integer, and the rest after one of them.
_Way = tuple[int, int]

# A bound of time and memory, for states that are few and large.
_MAX_WORK = 2**22

# By the number of bytes after the first one: the first and the last character,
# and the bits with which the first byte begins.
_LEADS = (
  (0, 0x7F, 0),
  (0x80, 0x7FF, 0xC0),
  (0x800, 0xFFFF, 0xE0),
  (0x10000, 0x10FFFF, 0xF0),
)


@dataclasses.dataclass(frozen=True)
class _Tail(expression_lib.Tree):
  """The last bytes of characters, of which each has six bits of a number."""

  length: int = 0
  ranges: _Ranges = ()  # First and last numbers in order.


def _split(
  ranges: _Ranges, length: int, lead: int
) -> list[tuple[int, tuple[_Tail, ...]]]:
  """The first bytes of numbers that have `length` bytes more, and the rest.

  Bytes after which the same numbers follow are one set.
  """
  after = collections.defaultdict[int, list[tuple[int, int]]](list)
  for first, last in ranges:
    for bits in range(first >> 6 * length, (last >> 6 * length) + 1):
      start = bits << 6 * length
      end = min(last - start, 64**length - 1)
      after[lead | bits].append((max(first - start, 0), end))
  alike = collections.defaultdict[_Ranges, int](int)
  for byte, rest in after.items():
    alike[tuple(rest)] |= 1 << byte
  return [
    (some, (_Tail(length=length, ranges=rest),) if length else ())
    for rest, some in alike.items()
  ]


@functools.lru_cache(maxsize=4096)
def _indices(some: int) -> np.ndarray:
  """The bytes of a set."""
  return np.flatnonzero([some >> byte & 1 for byte in range(256)])


@functools.lru_cache(maxsize=4096)
def _spelled(
  tree: expression_lib.Character | _Tail,
) -> list[tuple[int, tuple[_Tail, ...]]]:
  """The first bytes of a set of characters or of tails, and what follows."""
  if isinstance(tree, _Tail):
    return _split(tree.ranges, tree.length - 1, 0x80)
  found = []
  for length, (first, last, lead) in enumerate(_LEADS):
    cut = [(max(low, first), min(high, last)) for low, high in tree.ranges]
    own = tuple((low, high) for low, high in cut if low <= high)
    found += _split(own, length, lead)
  return found


class _Rests:
  """The rests of a text that may follow: a tree and then another rest.

  Rest 0 is the end of the text.
  """

  def __init__(self) -> None:
    self._rests: list[tuple[expression_lib.Tree, int]] = []
    self._numbers: dict[tuple[expression_lib.Tree, int], int] = {}
    self._fewer: dict[tuple[object, ...], expression_lib.Repetition] = {}
    self._opened: dict[int, tuple[Sequence[_Way], tuple[int, ...]]] = {
      0: ((), ())
    }
    self._work = 0

  def of(self, trees: Iterable[expression_lib.Tree], rest: int) -> int:
    """The rest of trees that follow each other, and then another one."""
    for tree in reversed([*trees]):
      key = tree, rest
      if key not in self._numbers:
        self._rests.append(key)
        self._numbers[key] = len(self._rests)
      rest = self._numbers[key]
    return rest

  def _open(self, number: int) -> tuple[Sequence[_Way], tuple[int, ...]]:
    """The bytes that begin a rest, or the rests that it may be."""
    tree, rest = self._rests[number - 1]
    if isinstance(tree, (expression_lib.Character, _Tail)):
      begun = _spelled(tree)
      return [(some, self.of(trees, rest)) for some, trees in begun], ()
    if isinstance(tree, expression_lib.Alternation):
      return (), tuple(self.of((part,), rest) for part in tree.parts)
    if not isinstance(tree, expression_lib.Repetition):
      return (), (self.of(tree.parts, rest),)
    found: tuple[int, ...] = () if tree.least else (rest,)
    if tree.most != 0:
      most = None if tree.most is None else tree.most - 1
      key = tree.parts, max(tree.least - 1, 0), most
      if key not in self._fewer:
        self._fewer[key] = expression_lib.Repetition(*key)
      found += (self.of((*tree.parts, self._fewer[key]), rest),)
    return (), found

  def state(self, rests: Iterable[int]) -> tuple[frozenset[_Way], bool]:
    """The bytes that begin one of the rests; whether the text may end."""
    ways, waiting = set[_Way](), [*rests]
    known = {*waiting}
    for rest in waiting:
      if rest not in self._opened:
        self._opened[rest] = self._open(rest)
      new, others = self._opened[rest]
      ways.update(new)
      waiting += [one for one in others if one not in known]
      known.update(others)
    self._work += len(known)
    if self._work > _MAX_WORK:
      raise _too_large()
    return frozenset(ways), 0 in known


def _too_large() -> automaton_lib.TooLarge:
  return automaton_lib.TooLarge(
    f'at most {automaton_lib.MAX_STATES:,} states are possible, and it has more'
    ' or takes too much work'
  )


def _by_rests(
  ways: Iterable[_Way],
) -> Iterator[tuple[int, tuple[int, ...]]]:
  """Yields sets of bytes, at most 256, and the rests that follow each."""
  of_rests = collections.Counter[int]()
  for some, rest in ways:
    of_rests[rest] |= some
  blocks: list[tuple[int, list[int]]] = [(2**256 - 1, [])]
  for rest, some in sorted(of_rests.items()):
    for index, (known, following) in enumerate([*blocks]):
      if both := some & known:
        if both != known:
          blocks.append((known ^ both, [*following]))
          blocks[index] = both, following
        following.append(rest)
  for some, following in blocks:
    yield some, tuple(following)


def of_tree(tree: expression_lib.Tree) -> tuple[np.ndarray, np.ndarray]:
  """The automaton over bytes of a tree, see `specdec.text.automaton.of_bytes`.

  Returns:
    `[S, 256]` int64, the state after a byte, or -1; the first state is 0. And
    `[S]` bool, where a text may end.

  Raises:
    specdec.text.automaton.TooLarge: it has too many states.
  """
  rests = _Rests()
  states = {rests.state([rests.of((tree,), 0)]): 0}
  waiting, table = [*states], []
  targets: dict[tuple[int, ...], int] = {(): -1}
  for ways, _ in waiting:
    row = np.full(256, -1)
    for some, following in _by_rests(ways):
      if following not in targets:
        state = rests.state(following)
        targets[following] = states.setdefault(state, len(states))
        waiting += [state] if len(states) > len(waiting) else []
      row[_indices(some)] = targets[following]
    table.append(row)
    if len(states) > automaton_lib.MAX_STATES:
      raise _too_large()
  return np.stack(table), np.array([ends for _, ends in waiting])
