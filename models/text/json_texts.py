"""Trees of the texts of JSON values.

Strings and constants are spelled as `json.dumps` spells them. Between other
parts of a value there may be a space.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import json
from typing import Any

from specdec.models.text import expression as expression_lib

SCALARS = {
  'null': 'null',
  'boolean': 'true|false',
  'integer': '-?(0|[1-9][0-9]*)',
  'number': r'-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?',
}
"""Expressions of types."""

_DIVISIBLE_BY_4 = '0[48]|[2468][048]|[13579][26]'
_DATE = (
  '(([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-'
  '((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|'
  '(0[13578]|1[02])-31)|'
  f'([0-9]{{2}}({_DIVISIBLE_BY_4})|({_DIVISIBLE_BY_4})00)-02-29)'
)
_MINUTES = '([01][0-9]|2[0-3]):[0-5][0-9]'
_TIME = rf'{_MINUTES}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_MINUTES})'
_HEX = '[0-9A-Fa-f]'
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = '[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?'
_NAME = f"[A-Za-z0-9._~!$&'()*+,;=-]|%{_HEX}{{2}}"

FORMATS = {
  'date': _DATE,
  'date-time': f'{_DATE}T{_TIME}',
  'email': rf'{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*',
  'time': _TIME,
  'uri': (
    rf'[A-Za-z][A-Za-z0-9+.-]*://({_NAME})+(:[0-9]*)?(/({_NAME}|[:@])*)*'
    rf'(\?({_NAME}|[:@/?])*)?(#({_NAME}|[:@/?])*)?'
  ),
  'uuid': f'{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}',
}
"""Expressions of formats: dates and times of RFC 3339, except the year 0 and
leap seconds; mailboxes of RFC 5321 without quotes and address literals; URIs of
RFC 3986 with a host, without a user; UUIDs of RFC 9562."""

# The characters that a string has as such, and those that it has escaped.
_PLAIN = (0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)
_ESCAPED = (*range(0x20), 0x22, 0x5C)
_CHARACTER = r'[^"\\\0-\x1f]|\\(["\\bfnrt]|u00(0[0-7be-f]|1[0-9a-f]))'

parse = functools.cache(expression_lib.parse)
"""The tree of an expression that is used again."""


def join(*parts: expression_lib.Tree | str) -> expression_lib.Tree:
  """Trees, and expressions, that follow each other."""
  return expression_lib.Concatenation(
    tuple(parse(part) if isinstance(part, str) else part for part in parts)
  )


def _optional(tree: expression_lib.Tree) -> expression_lib.Tree:
  return expression_lib.Repetition((tree,), 0, 1)


def constant(value: Any) -> expression_lib.Tree:
  """A value, as `json.dumps` writes it.

  Raises:
    ValueError: it has a number that is not finite.
  """
  text = json.dumps(value, ensure_ascii=False, allow_nan=False)
  return expression_lib.literal(text)


def string(
  least: int = 0, most: int | None = None, place: str = ''
) -> expression_lib.Tree:
  """A string of `least` to `most` characters; `place` is for messages."""
  key = 'minLength' if most is None else 'maxLength'
  characters = expression_lib.Repetition(
    (parse(_CHARACTER),), least, most, f'{place}/{key}'
  )
  return join('"', characters, '"')


def string_of(
  tree: expression_lib.Tree, place: str = ''
) -> expression_lib.Tree:
  """A string that is a text of a tree; `place` is for messages."""
  return join('"', _in_string(tree, place), '"')


def _in_string(tree: expression_lib.Tree, place: str) -> expression_lib.Tree:
  if not isinstance(tree, expression_lib.Character):
    parts = tuple(_in_string(part, place) for part in tree.parts)
    if isinstance(tree, expression_lib.Repetition):
      name = f'{tree.name} of {place}'
      return dataclasses.replace(tree, parts=parts, name=name)
    return dataclasses.replace(tree, parts=parts)
  plain = expression_lib.common(tree.ranges, _PLAIN)
  escapes = (
    expression_lib.literal(json.dumps(chr(code))[1:-1])
    for code in _ESCAPED
    if any(first <= code <= last for first, last in tree.ranges)
  )
  return expression_lib.Alternation(
    (expression_lib.Character(ranges=plain), *escapes)
  )


def array(
  first: Sequence[expression_lib.Tree],
  others: expression_lib.Tree,
  least: int = 0,
  most: int | None = None,
  place: str = '',
) -> expression_lib.Tree:
  """An array of `least` to `most` elements, the first with their own trees.

  The place is for messages.
  """
  key = 'minItems' if most is None else 'maxItems'
  first = first or (others,)
  limit = None if most is None else max(most - len(first), 0)
  # A space belongs to what precedes it, so that the next byte always says
  # whether an element follows.
  tail: expression_lib.Tree = expression_lib.Repetition(
    (join(', ?', others, ' ?'),),
    max(least - len(first), 0),
    limit,
    f'{place}/{key}',
  )
  for index in reversed(range(len(first))):
    tail = join(', ?' if index else '', first[index], ' ?', tail)
    if most is not None and index >= most:
      tail = expression_lib.NOTHING
    if index >= least:
      tail = _optional(tail)
  return join(r'\[ ?', tail, r'\]')


def object_of(
  members: Iterable[tuple[str, expression_lib.Tree, bool]],
) -> expression_lib.Tree:
  """An object of names and values in their order; some are required."""
  # The rest of the object: where no member precedes it, and where one does.
  as_first = as_later = parse(r' ?\}')
  for name, value, is_required in reversed([*members]):
    here = join(' ?', constant(name), ' ?: ?', value, as_later)
    later = join(' ?,', here)
    if not is_required:
      here = expression_lib.Alternation((here, as_first))
      later = expression_lib.Alternation((later, as_later))
    as_first, as_later = here, later
  return join(r'\{', as_first)


def object_with(value: expression_lib.Tree) -> expression_lib.Tree:
  """An object with any names; all its values are texts of one tree."""
  member = join(' ?', string(), ' ?: ?', value)
  more = expression_lib.Repetition((join(' ?,', member),))
  return join(r'\{', _optional(join(member, more)), r' ?\}')


@functools.cache
def anything(levels: int) -> expression_lib.Tree:
  """Any value with at most `levels` levels of arrays and objects."""
  trees = [*map(parse, SCALARS.values()), string()]
  if levels:
    inner = anything(levels - 1)
    trees += [array((), inner), object_with(inner)]
  return expression_lib.Alternation(tuple(trees))
