"""Automata over bytes, from the trees of expressions.

A state is the set of all that may follow (Antimirov, "Partial derivatives of
regular expressions and finite automaton constructions", 1996), so all branches
are followed at once and no match hides a longer one. States are found with
classes of characters, which are few; then UTF-8 spells the characters.
"""

import collections
from collections.abc import Iterable

import numpy as np

from models.text import expression as expression_lib
from specdec.text import automaton as automaton_lib

# The set of characters of each tree of one character, by its number.
_Sets = dict[expression_lib.Tree, int]

# The number of a set of characters, and the rest after one of them.
_Way = tuple[int, int]

# A bound of time and memory, for states that are few and large.
_MAX_WORK = 2**22

# By the number of bytes of a character, 2 to 4: the first of the first bytes,
# how many of these there are, and the first character.
_FIRST_BYTES = (0xC0, 32, 0x80), (0xE0, 16, 0x800), (0xF0, 5, 0x10000)


def of_tree(tree: expression_lib.Tree) -> tuple[np.ndarray, np.ndarray]:
  """The automaton over bytes of a tree, see `specdec.text.automaton.of_bytes`.

  Returns:
    `[S, 256]` int64, the state after a byte, or -1; the first state is 0. And
    `[S]` bool, where a text may end.

  Raises:
    specdec.text.automaton.TooLarge: it has too many states.
  """
  set_of, members, class_of = _classes(tree)
  after, accepting = _determinized(tree, set_of, members, class_of.max() + 1)
  delta = _spelled(after, class_of)
  return delta, np.pad(accepting, (0, len(delta) - len(accepting)))


def _too_large() -> automaton_lib.TooLarge:
  return automaton_lib.TooLarge(
    f'at most {automaton_lib.MAX_STATES:,} states are possible, and it has more'
    ' or takes too much work'
  )


def _classes(
  tree: expression_lib.Tree,
) -> tuple[_Sets, list[list[int]], np.ndarray]:
  """Classes of characters; those of one class are in the same sets.

  Returns:
    The set of each leaf of the tree, by its number; the classes of each set;
    and `[0x110000]` int64, the class of each code point. Class 0 is in no set.
  """
  numbers: dict[tuple[tuple[int, int], ...], int] = {(): 0}
  set_of, known, waiting = _Sets(), {tree}, [tree]
  while waiting:
    one = waiting.pop()
    if isinstance(one, expression_lib.Character):
      set_of[one] = numbers.setdefault(one.ranges, len(numbers))
    waiting += {*one.parts} - known
    known.update(one.parts)
  bounds = [
    (number, first, last + 1)
    for ranges, number in numbers.items()
    for first, last in ranges
  ]
  end = expression_lib.ANY.ranges[-1][-1] + 1
  cuts = np.unique([0, end, *(cut for _, *both in bounds for cut in both)])
  is_in = np.zeros((len(numbers), len(cuts) - 1), bool)
  for number, *both in bounds:
    is_in[number, slice(*np.searchsorted(cuts, both))] = True
  # The first of them is that of surrogates, which are in no set.
  columns, inverse = np.unique(is_in, axis=1, return_inverse=True)
  members = [np.flatnonzero(row).tolist() for row in columns]
  return set_of, members, np.repeat(inverse, np.diff(cuts))


class _Rests:
  """The rests of a text that may follow: a tree and then another rest.

  Rest 0 is the end of the text.
  """

  def __init__(self, set_of: _Sets):
    self._set_of = set_of
    self._rests: list[tuple[expression_lib.Tree, int]] = []
    self._numbers: dict[tuple[expression_lib.Tree, int], int] = {}
    self._fewer: dict[tuple[object, ...], expression_lib.Repetition] = {}
    self._opened: dict[int, tuple[set[_Way], tuple[int, ...]]] = {
      0: (set(), ())
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

  def _open(self, number: int) -> tuple[set[_Way], tuple[int, ...]]:
    """The characters that begin a rest, or the rests that it may be."""
    tree, rest = self._rests[number - 1]
    if tree in self._set_of:
      return {(self._set_of[tree], rest)}, ()
    if isinstance(tree, expression_lib.Alternation):
      return set(), tuple(self.of((part,), rest) for part in tree.parts)
    if not isinstance(tree, expression_lib.Repetition):
      return set(), (self.of(tree.parts, rest),)
    found: tuple[int, ...] = () if tree.least else (rest,)
    if tree.most != 0:
      most = None if tree.most is None else tree.most - 1
      key = tree.parts, max(tree.least - 1, 0), most
      if key not in self._fewer:
        self._fewer[key] = expression_lib.Repetition(*key)
      found += (self.of((*tree.parts, self._fewer[key]), rest),)
    return set(), found

  def state(
    self, rests: Iterable[int]
  ) -> tuple[frozenset[tuple[int, int]], bool]:
    """The characters that begin one of the rests; whether the text may end."""
    ways, waiting = set[_Way](), [*rests]
    known = {*waiting}
    for rest in waiting:
      if rest not in self._opened:
        self._opened[rest] = self._open(rest)
      new, others = self._opened[rest]
      ways |= new
      waiting += [one for one in others if one not in known]
      known.update(others)
    self._work += len(known)
    if self._work > _MAX_WORK:
      raise _too_large()
    return frozenset(ways), 0 in known


def _determinized(
  tree: expression_lib.Tree,
  set_of: _Sets,
  members: list[list[int]],
  num_classes: int,
) -> tuple[np.ndarray, np.ndarray]:
  """`[Q, classes]` int64, the state after a character or -1; `[Q]` bool."""
  rests = _Rests(set_of)
  states = {rests.state([rests.of((tree,), 0)]): 0}
  waiting, table = [*states], []
  targets: dict[frozenset[int], int] = {}
  for ways, _ in waiting:
    after = collections.defaultdict[int, set[int]](set)
    for number, rest in ways:
      for one in members[number]:
        after[one].add(rest)
    row = np.full(num_classes, -1)
    for one, following in after.items():
      key = frozenset(following)
      if key not in targets:
        state = rests.state(key)
        targets[key] = states.setdefault(state, len(states))
        waiting += [state] if len(states) > len(waiting) else []
      row[one] = targets[key]
    table.append(row)
    if len(states) > automaton_lib.MAX_STATES:
      raise _too_large()
  return np.array(table), np.array([ends for _, ends in waiting])


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Distinct rows, and the number of each row among them."""
  # Most rows are that before them.
  is_new = np.append(True, np.any(rows[1:] != rows[:-1], axis=1))
  numbers: dict[bytes, int] = {}
  each = [
    numbers.setdefault(row.tobytes(), len(numbers)) for row in rows[is_new]
  ]
  found = np.frombuffer(b''.join(numbers), rows.dtype)
  return found.reshape(-1, rows.shape[1]), np.array(each)[is_new.cumsum() - 1]


def _spelled(after: np.ndarray, class_of: np.ndarray) -> np.ndarray:
  """`[S, 256]` int64, the state after a byte or -1.

  Between the bytes of a character there are states of their own. They are the
  same where the same states follow.

  Args:
    after: `[Q, classes]` int64, the state after a character or -1.
    class_of: `[0x110000]` int64, the class of each code point.
  """
  spellings = [_spelling(class_of, *one) for one in enumerate(_FIRST_BYTES, 1)]
  delta = np.full((len(after), 256), -1)
  delta[:, :128] = after[:, class_of[:128]]
  between: dict[bytes, int] = {}
  beyond = np.unique(np.concatenate([levels[0] for _, levels, _ in spellings]))
  for state in np.flatnonzero(np.any(after[:, beyond] >= 0, axis=1)):
    for byte, levels, first in spellings:
      target = after[state]
      for distinct in levels:
        rows = target[distinct]
        target = np.full(len(rows), -1)
        for index in np.flatnonzero(np.any(rows >= 0, axis=1)):
          key = rows[index].tobytes()
          target[index] = between.setdefault(key, len(after) + len(between))
      delta[state, byte : byte + len(first)] = target[first]
    if len(after) + len(between) > automaton_lib.MAX_STATES:
      raise _too_large()
  inner = np.full((len(between), 256), -1)
  following = np.frombuffer(b''.join(between), after.dtype)
  inner[:, 0x80:0xC0] = following.reshape(-1, 64)
  return np.concatenate([delta, inner])


def _spelling(
  class_of: np.ndarray, length: int, first_bytes: tuple[int, int, int]
) -> tuple[int, list[np.ndarray], np.ndarray]:
  """The characters of `length` more bytes than one, as a tree from its leaves.

  Returns:
    The first byte; for each level the distinct nodes, `[nodes, 64]` nodes of
    the level below, where the lowest has classes; and the node of the last
    level after each first byte.
  """
  byte, number, first = first_bytes
  nodes = np.zeros(number << 6 * length, class_of.dtype)
  own = class_of[first : len(nodes)]
  nodes[first : first + len(own)] = own
  levels = []
  for _ in range(length):
    distinct, nodes = _distinct(nodes.reshape(-1, 64))
    levels.append(distinct)
  return byte, levels, nodes
