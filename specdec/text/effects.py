"""Counts of repetitions, for automata that count instead of having more states.

A text may be in several repetitions, one inside another, and has a count for
each of these levels. What a byte or a token does to the counts is its *effect*.
For each level it is possible from counts of at least `low` and at most `high`,
and the next count is `keep * count + more`; `keep` is 0 or 1.
"""

from collections.abc import Collection
import dataclasses

import numpy as np

UNLIMITED = 2**30
"""A `high` that every count is below."""
IMPOSSIBLE = -1
"""The number of an effect that is possible from no count."""
NOTHING = 0
"""The number of the effect that is always possible and changes nothing."""

# `low`, `high`, `keep` and `more` at each level.
_AtLevel = tuple[int, int, int, int]
_Effect = tuple[_AtLevel, ...]
SAME: _AtLevel = (0, UNLIMITED, 1, 0)
"""The effect `NOTHING` at each level."""

_UNKNOWN = -2


def _then(first: _AtLevel, second: _AtLevel) -> _AtLevel | None:
  """One effect and then another; None if that is impossible."""
  low, high, keep, more = first
  if keep:
    low = max(low, second[0] - more)
    if second[1] < UNLIMITED:
      high = min(high, second[1] - more)
  elif not second[0] <= more <= second[1]:
    return None
  if low > high:
    return None
  return low, high, keep * second[2], more * second[2] + second[3]


class Effects:
  """The effects of an automaton, by number."""

  def __init__(self, num_levels: int):
    self._same: _Effect = (SAME,) * num_levels
    self._effects = [self._same]
    self._numbers = {self._same: NOTHING}
    self._then: dict[tuple[int, int], int] = {}

  def __len__(self) -> int:
    return len(self._effects)

  def __getitem__(self, number: int) -> _Effect:
    return self._effects[number]

  def _number(self, effect: _Effect) -> int:
    number = self._numbers.setdefault(effect, len(self._effects))
    self._effects += [effect] if number == len(self._effects) else []
    return number

  def at_level(
    self,
    level: int,
    *,
    low: int = 0,
    high: int = UNLIMITED,
    keep: int = 1,
    more: int = 0,
  ) -> int:
    """An effect on a single level."""
    before, after = self._same[:level], self._same[level + 1 :]
    return self._number((*before, (low, high, keep, more), *after))

  def forgetting(self, number: int) -> int:
    """An effect after which all counts are 0."""
    return self._number(
      tuple((low, high, 0, 0) for low, high, _, _ in self._effects[number])
    )

  def then(self, first: int, second: int) -> int:
    """One effect and then another."""
    if NOTHING in (first, second):
      return first or second
    key = first, second
    if key not in self._then:
      levels = [*map(_then, self._effects[first], self._effects[second])]
      possible = tuple(level for level in levels if level is not None)
      is_possible = len(possible) == len(levels)
      self._then[key] = self._number(possible) if is_possible else IMPOSSIBLE
    return self._then[key]

  def together(self, steps: Collection[tuple[int, Collection[int]]]) -> int:
    """The effect of several effects that happen at once, in one text.

    Args:
      steps: effects, and the levels that the text is in after each. Counts of
        other levels do not matter.

    Returns:
      `IMPOSSIBLE` if they differ.
    """
    levels: list[_AtLevel] = []
    for level in range(len(self._same)):
      pairs = [
        (self._effects[number][level], inside) for number, inside in steps
      ]
      bounds = {effect[:2] for effect, _ in pairs}
      changes = {effect[2:] for effect, inside in pairs if level in inside}
      changes = changes or {SAME[2:]}
      if len(bounds) > 1 or len(changes) > 1:
        return IMPOSSIBLE
      levels.append((*bounds.pop(), *changes.pop()))
    return self._number(tuple(levels))


@dataclasses.dataclass(frozen=True, eq=False)
class OfBytes:
  """Effects of the bytes of an automaton on counts."""

  effects: Effects
  #: How many counts each level has, from 0 on. The last one includes all larger
  #: counts.
  sizes: tuple[int, ...]
  after: np.ndarray  #: `[S, 256]` int32, the effect of each byte.
  #: `[S]` int32, the effect of the end of the text, where it is possible.
  at_end: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class OfTokens:
  """Effects of tokens on counts, as `automaton.Automaton` has them."""

  #: `[E, K, 4]` int32: `low`, `high`, `keep` and `more` of each effect.
  effects: np.ndarray
  sizes: tuple[int, ...]  #: See `OfBytes`.
  after: np.ndarray  #: `[Q, C]` int32, the effect of each kind of token.


class Reader:
  """Follows bytes in many places at once, with their effects.

  Args:
    delta: `[S, 256]` int32, the state after a byte; the last state is the one
      after forbidden bytes.
    counts: the effects of bytes; None: none has any.
  """

  def __init__(self, delta: np.ndarray, counts: OfBytes | None):
    self._delta, self._counts = delta, counts
    self._width = len(counts.effects) if counts else 1
    self._known = np.full(0, _UNKNOWN, np.int32)
    # No byte follows a forbidden one.
    self._changes = np.pad(counts.after, ((0, 1), (0, 0))) if counts else None

  def read(
    self, states: np.ndarray, effects: np.ndarray, byte: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """The states after bytes, and the effects up to there.

    Args:
      states: `[...]` int32.
      effects: `[...]` int32, the effects until these states.
      byte: the next bytes; broadcasts with them.
    """
    after = self._delta[states, byte]
    if self._counts is None or self._changes is None:
      return after, effects
    pairs = effects * self._width + self._changes[states, byte]
    missing = len(self._counts.effects) * self._width - len(self._known)
    if missing > 0:
      self._known = np.pad(self._known, (0, missing), constant_values=_UNKNOWN)
    effects = self._known[pairs]
    if np.any(effects == _UNKNOWN):
      for pair in np.unique(pairs[effects == _UNKNOWN]).tolist():
        self._known[pair] = self._counts.effects.then(
          *divmod(pair, self._width)
        )
      effects = self._known[pairs]
    is_possible = (effects >= 0) & (after < len(self._delta) - 1)
    dead = len(self._delta) - 1
    return np.where(is_possible, after, dead), np.where(is_possible, effects, 0)


def of_tokens(counts: OfBytes, after: np.ndarray) -> OfTokens:
  """The counts of tokens, with only the effects that are used.

  Args:
    counts: the counts of bytes.
    after: `[Q, C]`, the effect of each kind of token; `NOTHING` is one of them.
  """
  used, numbers = np.unique(after, return_inverse=True)
  rows = [counts.effects[number] for number in used.tolist()]
  numbers = numbers.reshape(after.shape).astype(np.int32)
  return OfTokens(np.array(rows, np.int32), counts.sizes, numbers)
