"""Automata over bytes, from the trees of expressions.

A state is the set of all that may follow (Antimirov, "Partial derivatives of
regular expressions and finite automaton constructions", 1996), so all branches
are followed at once and no match hides a longer one. A character is followed as
UTF-8 spells it: a byte, and then the bits of the bytes that are left.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Set
import dataclasses
import functools
import math

import numpy as np

from specdec.models.text import expression as expression_lib
from specdec.text import automaton as automaton_lib
from specdec.text import constraint as constraint_lib
from specdec.text import effects as effects_lib

# A rest, and the effect on counts until it begins.
_Step = tuple[int, int]

# A set of bytes as the bits of an integer, and what follows one of them.
_Way = tuple[int, _Step]

# The ways of a state, and the effect of an end of the text there, or
# `IMPOSSIBLE`.
_State = tuple[frozenset[_Way], int]

# A repetition is counted if more states than these would take its place.
_UNROLLED = 64

# A bound of time and memory, for states that are few and large.
_MAX_WORK = 2**22

# By the number of bytes after the first one: the first and the last character,
# and the leading bits of the first byte.
_LEADS = (
  (0, 0x7F, 0),
  (0x80, 0x7FF, 0xC0),
  (0x800, 0xFFFF, 0xE0),
  (0x10000, 0x10FFFF, 0xF0),
)


@dataclasses.dataclass(frozen=True)
class _Tail(expression_lib.Tree):
  """The last bytes of characters; each byte has six bits of a number."""

  length: int = 0
  ranges: expression_lib.Ranges = ()  # In order.


def _split(
  ranges: expression_lib.Ranges, length: int, lead: int
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
  alike = collections.defaultdict[expression_lib.Ranges, int](int)
  for byte, rest in after.items():
    alike[tuple(rest)] |= 1 << byte
  return [
    (byte_set, (_Tail(length=length, ranges=rest),) if length else ())
    for rest, byte_set in alike.items()
  ]


@functools.lru_cache(maxsize=4096)
def _indices(byte_set: int) -> np.ndarray:
  return np.flatnonzero([byte_set >> byte & 1 for byte in range(256)])


@functools.lru_cache(maxsize=4096)
def _spelled(
  tree: expression_lib.Character | _Tail,
) -> list[tuple[int, tuple[_Tail, ...]]]:
  """The first bytes of a set of characters or of tails, and what follows."""
  if isinstance(tree, _Tail):
    return _split(tree.ranges, tree.length - 1, 0x80)
  spellings = []
  for length, (first, last, lead) in enumerate(_LEADS):
    ranges = expression_lib.common(tree.ranges, [(first, last)])
    spellings += _split(ranges, length, lead)
  return spellings


@dataclasses.dataclass(frozen=True, eq=False)
class _Again(expression_lib.Tree):
  """The end of a part of a repetition that is counted: once more, or not.

  The repetition is its only part.
  """


class _Ambiguous(Exception):
  """A text does not say how often it went through some repetitions."""

  def __init__(self, repetitions: Iterable[expression_lib.Repetition]):
    super().__init__()
    self.repetitions = {*repetitions}


class _Rests:
  """The rests of a text that may follow: a tree and then another rest.

  Rest 0 is the end of the text. Some repetitions are counted: an effect
  (`specdec.text.effects`) says how often they may follow, and not the rest.
  """

  def __init__(
    self,
    levels: Mapping[expression_lib.Repetition, int],
    effects: effects_lib.Effects,
  ):
    self._levels, self.effects = levels, effects
    self._rests: list[tuple[expression_lib.Tree, int]] = []
    self._numbers: dict[tuple[expression_lib.Tree, int], int] = {}
    # By rest, the repetitions that are counted and end in it, the inner first.
    self._inside: list[tuple[expression_lib.Repetition, ...]] = [()]
    self._fewer: dict[tuple[object, ...], expression_lib.Repetition] = {}
    self._ends: dict[expression_lib.Repetition, _Again] = {}
    self._opened: dict[int, tuple[list[_Way], list[_Step]]] = {0: ([], [])}
    self._work = 0

  def of(self, trees: Iterable[expression_lib.Tree], rest: int) -> int:
    """The number of the rest that is `trees`, in order, and then `rest`."""
    for tree in reversed([*trees]):
      key = tree, rest
      if key not in self._numbers:
        inside = self._inside[rest]
        if isinstance(tree, _Again):
          inside = (*_repetitions(tree), *inside)
        self._rests.append(key)
        self._inside.append(inside)
        self._numbers[key] = len(self._rests)
      rest = self._numbers[key]
    return rest

  def _open(self, number: int) -> tuple[list[_Way], list[_Step]]:
    """The bytes that begin a rest, or the rests that it may be."""
    tree, rest = self._rests[number - 1]
    if isinstance(tree, (expression_lib.Character, _Tail)):
      ways: list[_Way] = []
      for byte_set, trees in _spelled(tree):
        ways.append((byte_set, (self.of(trees, rest), 0)))
      return ways, []
    if isinstance(tree, expression_lib.Alternation):
      return [], [(self.of((part,), rest), 0) for part in tree.parts]
    if isinstance(tree, _Again):
      return [], self._again(tree, number)
    if not isinstance(tree, expression_lib.Repetition):
      return [], [(self.of(tree.parts, rest), 0)]
    if tree in self._levels:
      end = self._ends.setdefault(tree, _Again((tree,)))
      start = self.effects.at_level(self._levels[tree], keep=0)
      return [], [(self.of((end,), rest), start)]
    steps: list[_Step] = [] if tree.least else [(rest, 0)]
    if tree.most != 0:
      most = None if tree.most is None else tree.most - 1
      key = tree.parts, max(tree.least - 1, 0), most
      fewer = self._fewer.setdefault(key, expression_lib.Repetition(*key))
      steps.append((self.of((*tree.parts, fewer), rest), 0))
    return [], steps

  def _again(self, tree: _Again, number: int) -> list[_Step]:
    (repetition,), rest = _repetitions(tree), self._rests[number - 1][1]
    at_level = functools.partial(
      self.effects.at_level, self._levels[repetition]
    )
    leave = at_level(low=repetition.least)
    most = repetition.most
    high = effects_lib.UNLIMITED if most is None else most - 1
    go_on = at_level(high=high, more=1)
    return [(rest, leave), (self.of(repetition.parts, number), go_on)]

  def state(self, rests: Iterable[int]) -> _State:
    """The bytes that begin one of the rests; how the text may end."""
    ways, ends = set[_Way](), set[int]()
    waiting: list[_Step] = [(rest, 0) for rest in rests]
    seen = {*waiting}
    for rest, effect in waiting:
      if rest not in self._opened:
        self._opened[rest] = self._open(rest)
      new, others = self._opened[rest]
      ways.update((byte_set, (after, effect)) for byte_set, (after, _) in new)
      ends |= set() if rest else {effect}
      for after, change in others:
        step = after, self.effects.then(effect, change)
        if step not in seen and step[1] != effects_lib.IMPOSSIBLE:
          seen.add(step)
          waiting.append(step)
    self._work += len(seen)
    if self._work > _MAX_WORK:
      raise _too_large()
    if not ends:
      return frozenset(ways), effects_lib.IMPOSSIBLE
    end = self.effects.together([(effect, ()) for effect in ends])
    if end == effects_lib.IMPOSSIBLE:
      raise self.ambiguous(rest for rest, _ in seen)
    return frozenset(ways), end

  def together(self, steps: Collection[_Step]) -> int:
    """The effect of steps that one text takes at once."""
    levels_of = lambda rest: [
      self._levels[repetition] for repetition in self._inside[rest]
    ]
    effect = self.effects.together(
      [(effect, levels_of(rest)) for rest, effect in steps]
    )
    if effect == effects_lib.IMPOSSIBLE:
      raise self.ambiguous(rest for rest, _ in steps)
    return effect

  def ambiguous(self, rests: Iterable[int]) -> _Ambiguous:
    """An error that names the innermost repetitions of some rests."""
    return _Ambiguous(
      repetition for rest in rests for repetition in self._inside[rest][:1]
    )


def _repetitions(tree: _Again) -> tuple[expression_lib.Repetition, ...]:
  return tree.parts  # type: ignore[return-value]


def _too_large() -> automaton_lib.TooLarge:
  return automaton_lib.TooLarge(
    f'at most {automaton_lib.MAX_STATES:,} states are possible, and it has more'
    ' or takes too much work'
  )


def _by_rests(ways: Iterable[_Way]) -> Iterator[tuple[int, tuple[_Step, ...]]]:
  """Yields sets of bytes, at most 256, and the rests that follow each."""
  of_rests = collections.Counter[_Step]()
  for byte_set, rest in ways:
    of_rests[rest] |= byte_set
  blocks: list[tuple[int, list[_Step]]] = [(2**256 - 1, [])]
  for rest, byte_set in sorted(of_rests.items()):
    for index, (block, following) in enumerate([*blocks]):
      if both := byte_set & block:
        if both != block:
          blocks.append((block ^ both, [*following]))
          blocks[index] = both, following
        following.append(rest)
  for block, following in blocks:
    yield block, tuple(following)


def of_tree(tree: expression_lib.Tree) -> tuple[np.ndarray, np.ndarray]:
  """The automaton over bytes of a tree, see `specdec.text.automaton.of_bytes`.

  It does not count.

  Returns:
    `[S, 256]` int64, the state after a byte, or -1; the first state is 0. And
    `[S]` bool, where a text may end.

  Raises:
    specdec.text.automaton.TooLarge: it has too many states.
  """
  return _built(tree, {})[:2]


def counting(
  tree: expression_lib.Tree,
) -> tuple[np.ndarray, np.ndarray, effects_lib.OfBytes | None]:
  """The automaton of `of_tree`, except that it counts long repetitions.

  A repetition is counted where the next byte alone says whether it goes on.
  Other repetitions have states for every number of times.

  Returns:
    What `of_tree` returns, and the effects of bytes on counts; None if there
    are no counts.

  Raises:
    specdec.text.automaton.TooLarge: it has too many states.
  """
  possible = _without_impossible(tree)
  counted = _long_ones(possible, _UNROLLED)
  while True:
    levels = _levels_of(possible, counted)
    try:
      delta, accepting, counts = _built(possible, levels)
    except _Ambiguous as error:
      counted -= error.repetitions or counted
      continue
    except automaton_lib.TooLarge as error:
      name = _longest(possible, counted)
      where = f'; {name} is the longest that is not counted' if name else ''
      raise automaton_lib.TooLarge(f'{error}{where}') from error
    # One more state allows everything.
    total = (len(delta) + 1) * math.prod(counts.sizes)
    if total <= constraint_lib.LARGEST:
      return delta, accepting, counts if counted else None
    # The shortest are unrolled, so that there are fewer counts.
    level = counts.sizes.index(min(counts.sizes))
    counted -= {
      repetition for repetition in counted if levels[repetition] == level
    }


def _built(
  tree: expression_lib.Tree,
  levels: Mapping[expression_lib.Repetition, int],
) -> tuple[np.ndarray, np.ndarray, effects_lib.OfBytes]:
  """The automaton that counts some repetitions, by their levels."""
  largest = dict[int, int]()
  for repetition, level in levels.items():
    largest[level] = max(largest.get(level, 0), _top_of(repetition))
  sizes = tuple(1 + largest[level] for level in sorted(largest))
  effects = effects_lib.Effects(len(sizes))
  rests = _Rests(levels, effects)
  states = {rests.state([rests.of((tree,), 0)]): 0}
  waiting, table, changes = [*states], [], []
  targets: dict[tuple[int, ...], int] = {(): -1}
  for ways, _ in waiting:
    row, changed = np.full(256, -1), np.zeros(256, np.int32)
    for byte_set, steps in _by_rests(ways):
      following = tuple(dict.fromkeys(rest for rest, _ in steps))
      if following not in targets:
        state = rests.state(following)
        targets[following] = states.setdefault(state, len(states))
        waiting += [state] if len(states) > len(waiting) else []
      row[_indices(byte_set)] = targets[following]
      changed[_indices(byte_set)] = rests.together(steps) if steps else 0
    table.append(row)
    changes.append(changed)
    if len(states) > automaton_lib.MAX_STATES:
      raise _too_large()
  at_end = np.array([end for _, end in waiting], np.int32)
  accepting = at_end >= 0
  counts = effects_lib.OfBytes(
    effects, sizes, np.stack(changes), np.where(accepting, at_end, 0)
  )
  return np.stack(table), accepting, counts


_Repetitions = Set[expression_lib.Repetition]

_EMPTY = expression_lib.Concatenation()


def _top_of(tree: expression_lib.Repetition) -> int:
  """The number up to which the times must be counted."""
  return tree.least if tree.most is None else tree.most


def _without_impossible(tree: expression_lib.Tree) -> expression_lib.Tree:
  """A tree of the same texts, without parts that match no text.

  `NOTHING` if the tree itself matches none.
  """

  @functools.cache
  def clean(tree: expression_lib.Tree) -> expression_lib.Tree | None:
    parts = [clean(part) for part in tree.parts]
    possible = tuple(part for part in parts if part is not None)
    if isinstance(tree, expression_lib.Character):
      return tree if tree.ranges else None
    if isinstance(tree, expression_lib.Alternation):
      return dataclasses.replace(tree, parts=possible) if possible else None
    if isinstance(tree, expression_lib.Repetition):
      if len(possible) < len(parts) or tree.most == 0:
        return None if tree.least else _EMPTY
      if tree.most is not None and tree.most < tree.least:
        return None
    if len(possible) < len(parts):
      return None
    return dataclasses.replace(tree, parts=possible)

  return clean(tree) or expression_lib.NOTHING


def _long_ones(
  tree: expression_lib.Tree, limit: int
) -> set[expression_lib.Repetition]:
  """The repetitions that would take more than `limit` states if not counted.

  The states are estimated. A part that may be empty is never counted.
  """
  repetitions = set[expression_lib.Repetition]()

  @functools.cache
  def size(tree: expression_lib.Tree) -> int:
    if isinstance(tree, expression_lib.Character):
      return 1 if tree.ranges[-1][1] < 0x80 else 8
    total = sum(map(size, tree.parts))
    if not isinstance(tree, expression_lib.Repetition):
      return total
    times = max(_top_of(tree), 1)
    if (
      times * total <= limit or times == 1 or all(map(may_be_empty, tree.parts))
    ):
      return times * total
    repetitions.add(tree)
    return total

  @functools.cache
  def may_be_empty(tree: expression_lib.Tree) -> bool:
    if isinstance(tree, expression_lib.Character):
      return False
    if isinstance(tree, expression_lib.Alternation):
      return any(map(may_be_empty, tree.parts))
    if isinstance(tree, expression_lib.Repetition) and not tree.least:
      return True
    return all(map(may_be_empty, tree.parts))

  size(tree)
  return repetitions


def _longest(tree: expression_lib.Tree, counted: _Repetitions) -> str:
  """The name of the longest repetition that is not counted, or nothing."""
  seen, trees = {tree}, [tree]
  for node in trees:
    trees += dict.fromkeys(part for part in node.parts if part not in seen)
    seen.update(node.parts)
  others = [
    node
    for node in trees
    if isinstance(node, expression_lib.Repetition) and node not in counted
  ]
  most = max(others, key=_top_of, default=None)
  return most.name if most and _top_of(most) > 1 else ''


def _levels_of(
  tree: expression_lib.Tree, counted: _Repetitions
) -> dict[expression_lib.Repetition, int]:
  """The level of each repetition that is counted.

  Levels begin at 0, and a repetition is above all that are inside it.
  """
  by_repetition: dict[expression_lib.Repetition, int] = {}

  @functools.cache
  def height(tree: expression_lib.Tree) -> int:
    level = max(map(height, tree.parts), default=0)
    if not isinstance(tree, expression_lib.Repetition) or tree not in counted:
      return level
    by_repetition[tree] = level
    return level + 1

  height(tree)
  return by_repetition
