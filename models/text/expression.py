r"""Expressions in the syntax of Python's `re`, as trees.

`re` itself parses an expression. The characters that a part of it matches are
found by trying all of Unicode. So classes, escapes and flags mean what they
mean in `re`, and a tree describes the texts that `re.fullmatch` accepts. Parts
that no such tree can express are refused by name.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import re

# `re` has no public names for the parts of an expression.
from re import _compiler  # type: ignore[attr-defined]
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

Range = tuple[int, int]
"""The first and the last number."""
Ranges = tuple[Range, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
  """Base of the trees; a tree describes a set of texts."""

  parts: tuple['Tree', ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenation(Tree):
  """The parts, one after the other."""


@dataclasses.dataclass(frozen=True, eq=False)
class Alternation(Tree):
  """One of the parts."""


@dataclasses.dataclass(frozen=True, eq=False)
class Repetition(Tree):
  """The parts, one after the other, and all of that several times."""

  least: int = 0
  most: int | None = None  #: None: there is no limit.
  name: str = ''  #: For messages.


@dataclasses.dataclass(frozen=True, eq=False)
class Character(Tree):
  """One character of a set; it has no parts."""

  #: First and last code points in order, without surrogates.
  ranges: Ranges = ()


# Code points except surrogates, which UTF-8 cannot spell.
_SCALARS = (0, 0xD800), (0xE000, 0x110000)
ANY = Character(ranges=tuple((first, end - 1) for first, end in _SCALARS))
"""Any character."""
NOTHING = Alternation()
"""No text."""
_EMPTY = Concatenation()

_STARTS = (ops.AT, ops.AT_BEGINNING), (ops.AT, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT, ops.AT_END), (ops.AT, ops.AT_END_STRING)
_CHARACTERS = (ops.ANY, ops.IN, ops.LITERAL, ops.NOT_LITERAL)
_ANCHOR = 'anchors, except at the beginning and the end of a text, are'
# By names; their values are not unique.
_REFUSED = {
  'ASSERT': 'look-around is',
  'ASSERT_NOT': 'look-around is',
  'AT_BOUNDARY': r'\b is',
  'AT_NON_BOUNDARY': r'\B is',
  'ATOMIC_GROUP': 'atomic groups are',
  'GROUPREF': 'back references are',
  'GROUPREF_EXISTS': 'conditional groups are',
  'POSSESSIVE_REPEAT': 'possessive quantifiers are',
}


def literal(text: str) -> Tree:
  """The tree of one text."""
  return Concatenation(tuple(_literal(ord(letter)) for letter in text))


@functools.lru_cache(maxsize=1024)
def _literal(code: int) -> Character:
  return character([(code, code)])


def common(ranges: Iterable[Range], others: Sequence[Range]) -> Ranges:
  """The common part of two lists of ranges; both are in order."""
  cut = [
    (max(first, low), min(last, high))
    for first, last in ranges
    for low, high in others
  ]
  return tuple((first, last) for first, last in cut if first <= last)


def character(ranges: Iterable[Range]) -> Character:
  """One character of some ranges in order, which may have surrogates."""
  return Character(ranges=common(ranges, ANY.ranges))


def parse(expression: str) -> Tree:
  """The tree of an expression in the syntax of `re`.

  Raises:
    ValueError: the expression is invalid, or a part of it is not supported.
    RecursionError: its groups are nested too deeply.
  """
  # `\z` is what Python 3.14 calls `\Z`.
  expression = re.sub(
    r'\\.', lambda escape: escape[0].replace('z', 'Z'), expression, flags=re.S
  )
  try:
    parsed = _parser.parse(expression)
  except (re.error, OverflowError) as error:
    raise ValueError(str(error)) from error
  return sequence(parsed, parsed.state.flags, _EMPTY, _EMPTY)


def sequence(
  items: Iterable[tuple[Any, Any]],
  flags: int,
  before: Tree | None,
  after: Tree | None,
) -> Tree:
  """The tree of parts that follow each other.

  Args:
    items: the parts, as `re` represents them; `IN` may have a tree.
    flags: the flags that hold for them.
    before: what may precede the parts, unless they begin with an anchor. None:
      other parts precede them.
    after: the same for what follows the parts.
  """
  rest = list(items)
  while rest and before and rest[0] in _STARTS:
    before, rest = _EMPTY, rest[1:]
  while rest and after and rest[-1] in _ENDS:
    after, rest = _EMPTY, rest[:-1]
  if not rest:
    return Concatenation((before or _EMPTY, after or _EMPTY))
  last = len(rest) - 1
  return Concatenation(
    tuple(
      _part(
        op,
        argument,
        flags,
        None if index else before,
        after if index == last else None,
      )
      for index, (op, argument) in enumerate(rest)
    )
  )


def _part(
  op: Any, argument: Any, flags: int, before: Tree | None, after: Tree | None
) -> Tree:
  if op is ops.SUBPATTERN:
    _, added, removed, items = argument
    if added & _parser.TYPE_FLAGS:
      flags &= ~_parser.TYPE_FLAGS
    return sequence(items, (flags | added) & ~removed, before, after)
  if op is ops.BRANCH:
    _, branches = argument
    trees = (sequence(items, flags, before, after) for items in branches)
    return Alternation(tuple(trees))
  part: Tree
  if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
    least, most, items = argument
    inner = sequence(items, flags, None, None)
    limit = None if most == ops.MAXREPEAT else most
    name = f'{{{least},{"" if limit is None else limit}}}'
    part = Repetition((inner,), least, limit, name)
  elif isinstance(argument, Tree):
    part = argument
  elif op is ops.LITERAL and not flags & re.IGNORECASE:
    part = _literal(argument)
  elif op in _CHARACTERS:
    part = _matched(op, tuple(argument) if op is ops.IN else argument, flags)
  else:
    name = argument.name if op is ops.AT else op.name
    refused = _REFUSED.get(name, _ANCHOR if op is ops.AT else f'{name} is')
    raise ValueError(f'{refused} not supported')
  return Concatenation((before or _EMPTY, part, after or _EMPTY))


@functools.lru_cache(maxsize=256)
def _matched(op: Any, argument: Any, flags: int) -> Character:
  """The characters that a part matches; all of Unicode is tried."""
  state = _parser.State()
  state.flags = flags
  part = _parser.SubPattern(state, [(op, argument)])
  run = (ops.MAX_REPEAT, (1, ops.MAXREPEAT, part))
  compiled = _compiler.compile(_parser.SubPattern(state, [run]), flags)
  runs = [
    (match.start(), match.end() - 1)
    for bounds in _SCALARS
    for match in compiled.finditer(_every_character(), *bounds)
  ]
  return Character(ranges=tuple(runs))


@functools.cache
def _every_character() -> str:
  return ''.join(map(chr, range(_SCALARS[-1][1])))
