r"""Patterns of JSON schemas: expressions of ECMA-262, as trees.

A pattern is read with the flag `u`, as JSON Schema asks: characters are code
points. That flag refuses some spellings which have one meaning without it, such
as `\-` for a hyphen and `{` for a brace; they have this meaning here (Annex B).
What means something else in Python's `re`, such as `\A` or `(?i)`, is refused
by name.
"""

from collections.abc import Iterable
import re
from re import _constants as ops  # type: ignore[attr-defined]
from typing import Any
from typing import NoReturn

from specdec.models.text import expression as expression_lib

_Ranges = list[tuple[int, int]]

_LAST = 0x10FFFF
_LINE_ENDS = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_SETS: dict[str, _Ranges] = {
  'd': [(0x30, 0x39)],
  'w': [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
  's': [
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
  ],
}
_CONTROLS = {'t': 9, 'n': 10, 'v': 11, 'f': 12, 'r': 13}

_GROUP = re.compile(r'\((?:\?:|\?<[A-Za-z_$][\w$]*>)?(?!\?)')
_LOOK_AROUND = re.compile(r'\(\?<?[=!]')
_QUANTIFIER = re.compile(r'(?:([*+?])|\{([0-9]+)(?:(,)([0-9]*))?\})\??')
_PYTHON_QUANTIFIER = re.compile(r'\{,[0-9]*\}')
_OTHER_GROUP = re.compile(r'\(\?[^:)]*[:)]?')
# A pair of surrogates is one character.
_CODE = re.compile(
  r'u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})'
  r'|u\{([0-9a-f]+)\}|x([0-9a-f]{2})',
  re.IGNORECASE | re.ASCII,
)
_NUMBERS = {'*': (0, None), '+': (1, None), '?': (0, 1)}


def parse(pattern: str) -> expression_lib.Tree:
  """The tree of the texts that have a match of a pattern anywhere.

  Raises:
    ValueError: the pattern is invalid, or a part of it is not supported.
    RecursionError: its groups are nested too deeply.
  """
  reader = _Reader(pattern)
  items = reader.disjunction()
  if not reader.is_at_end:
    raise ValueError('unbalanced parenthesis )')
  around = expression_lib.Repetition((expression_lib.ANY,))
  return expression_lib.sequence(items, 0, around, around)


def _complement(ranges: Iterable[tuple[int, int]]) -> _Ranges:
  """All characters that are not in some ranges; in order, without overlaps."""
  gaps, start = [], 0
  for first, last in sorted(ranges):
    if first > start:
      gaps.append((start, first - 1))
    start = max(start, last + 1)
  return [*gaps, (start, _LAST)] if start <= _LAST else gaps


def _set(letter: str) -> _Ranges | None:
  """The characters of an escape such as `d`; None for other letters."""
  ranges = _SETS.get(letter.lower())
  return ranges if letter.islower() or not ranges else _complement(ranges)


class _Reader:
  """Reads a pattern into parts as `re` represents them.

  Characters are trees already.
  """

  def __init__(self, pattern: str):
    self._pattern, self._position = pattern, 0

  @property
  def is_at_end(self) -> bool:
    return self._position == len(self._pattern)

  def disjunction(self) -> list[tuple[Any, Any]]:
    branches = [self._alternative()]
    while self._take('|'):
      branches.append(self._alternative())
    return [(ops.BRANCH, (None, branches))] if branches[1:] else branches[0]

  def _alternative(self) -> list[tuple[Any, Any]]:
    items = []
    while not self.is_at_end and self._pattern[self._position] not in '|)':
      item = self._atom()
      quantifier = None if item[0] is ops.AT else self._match(_QUANTIFIER)
      items.append(self._repeated(item, quantifier) if quantifier else item)
    return items

  def _repeated(
    self, item: tuple[Any, Any], quantifier: re.Match[str]
  ) -> tuple[Any, Any]:
    sign, least, comma, most = quantifier.groups()
    if sign:
      numbers = _NUMBERS[sign]
    else:
      limit = most if comma else least
      numbers = int(least), int(limit) if limit else None
    if numbers[1] is not None and numbers[1] < numbers[0]:
      self._refuse(f'{quantifier[0]} has its numbers out of order')
    most = ops.MAXREPEAT if numbers[1] is None else numbers[1]
    return ops.MAX_REPEAT, (numbers[0], most, [item])

  def _atom(self) -> tuple[Any, Any]:
    if self._at('('):
      return self._group()
    if match := self._match(_PYTHON_QUANTIFIER):
      self._refuse(
        f'{match[0]} is not a number of repetitions in ECMA-262; write'
        f' {{0{match[0][1:]} or \\{match[0]}'
      )
    if match := self._match(_QUANTIFIER):
      self._refuse(f'{match[0]} has nothing to repeat')
    letter = self._next()
    if letter == '^':
      return ops.AT, ops.AT_BEGINNING
    if letter == '$':
      return ops.AT, ops.AT_END_STRING
    if letter == '.':
      return self._characters(_complement(_LINE_ENDS))
    if letter == '[':
      return self._characters(self._class())
    if letter == '\\':
      return self._characters(self._escape())
    return self._characters([(ord(letter), ord(letter))])

  def _group(self) -> tuple[Any, Any]:
    if self._match(_LOOK_AROUND):
      self._refuse('look-around is not supported')
    if not self._match(_GROUP):
      match = _OTHER_GROUP.match(self._pattern, self._position)
      named = match[0] if match else '(?'
      self._refuse(f'{named} is not a group of ECMA-262, or has flags')
    items = self.disjunction()
    if not self._take(')'):
      self._refuse('missing ), unterminated group')
    return ops.SUBPATTERN, (None, 0, 0, items)

  def _class(self) -> _Ranges:
    is_negated, ranges = self._take('^'), list[tuple[int, int]]()
    if not is_negated and self._at(']'):
      self._refuse('[] is an empty class in ECMA-262; write \\] in a class')
    while not self._take(']'):
      first = self._of_class()
      if not self._at('-') or self._at('-]'):
        ranges += first
        continue
      self._next()
      last = self._of_class()
      if any(len(end) > 1 or end[0][0] != end[0][1] for end in (first, last)):
        ranges += [*first, (0x2D, 0x2D), *last]
      elif first[0] > last[0]:
        self._refuse('a range of a class is out of order')
      else:
        ranges.append((first[0][0], last[0][0]))
    outside = _complement(ranges)
    return outside if is_negated else _complement(outside)

  def _of_class(self) -> _Ranges:
    """A member of a class: one character, or the set of an escape."""
    if self.is_at_end:
      self._refuse('unterminated class ]')
    letter = self._next()
    if letter != '\\':
      return [(ord(letter), ord(letter))]
    return [(8, 8)] if self._take('b') else self._escape()

  def _escape(self) -> _Ranges:
    """The characters of an escape, after its backslash."""
    if match := self._match(_CODE):
      high, low, *others = match.groups()
      (code,) = [int(digits, 16) for digits in others if digits] or [
        0x10000 + ((int(high, 16) & 0x3FF) << 10 | int(low, 16) & 0x3FF)
      ]
      if code > _LAST:
        self._refuse(f'\\{match[0]} is not a character')
      return [(code, code)]
    if self.is_at_end:
      self._refuse('bad escape \\ at the end')
    letter = self._next()
    if ranges := _set(letter):
      return ranges
    code = _CONTROLS.get(letter, ord(letter))
    if letter == 'c' and re.match('[A-Za-z]', self._rest()):
      code = ord(self._next()) % 32
    elif letter == '0' and not re.match('[0-9]', self._rest()):
      code = 0
    elif letter in 'bB':
      self._refuse(f'\\{letter} is not supported')
    elif letter == 'k' or letter in '123456789':
      self._refuse('back references are not supported')
    elif letter in 'pP':
      self._refuse(f'classes of Unicode, \\{letter}, are not supported')
    elif letter not in _CONTROLS and letter.isascii() and letter.isalnum():
      self._refuse(f'\\{letter} is not an escape of ECMA-262')
    return [(code, code)]

  def _characters(self, ranges: _Ranges) -> tuple[Any, Any]:
    return ops.IN, expression_lib.character(ranges)

  def _rest(self) -> str:
    return self._pattern[self._position : self._position + 1]

  def _at(self, text: str) -> bool:
    return self._pattern.startswith(text, self._position)

  def _take(self, text: str) -> bool:
    """Whether `text` is next; if so, reads it."""
    is_next = self._at(text)
    self._position += len(text) if is_next else 0
    return is_next

  def _next(self) -> str:
    self._position += 1
    return self._pattern[self._position - 1]

  def _match(self, what: re.Pattern[str]) -> re.Match[str] | None:
    match = what.match(self._pattern, self._position)
    self._position = match.end() if match else self._position
    return match

  def _refuse(self, message: str) -> NoReturn:
    raise ValueError(f'{message} (before position {self._position})')
