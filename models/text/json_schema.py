"""JSON schemas, as trees of expressions.

Every text of a tree is JSON that conforms to the schema. Keywords are obeyed or
refused, by name and with their place; only annotations are ignored.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import json
from typing import Any
from typing import NoReturn
import urllib.parse

from specdec import arguments as arguments_lib
from specdec.models.text import ecma_pattern
from specdec.models.text import expression as expression_lib
from specdec.models.text import json_texts

_ANNOTATIONS = {
  '$comment',
  '$defs',
  '$schema',
  'default',
  'definitions',
  'deprecated',
  'description',
  'examples',
  'readOnly',
  'title',
  'writeOnly',
}
_OF_TYPE = {
  'string': {'format', 'maxLength', 'minLength', 'pattern'},
  'array': {'items', 'maxItems', 'minItems', 'prefixItems'},
  'object': {'additionalProperties', 'properties', 'required'},
}
# Values that say nothing about a text.
_SAYS_NOTHING = {'uniqueItems': False, 'minProperties': 0}
# The largest number that keywords may have, such as `maxLength`.
_LARGEST = 100_000
# No other keyword may stand beside one of these, except `type` in two cases.
_ALONE = ('$ref', 'allOf', 'anyOf', 'const', 'enum')
_WITH_TYPE = ('const', 'enum')
_OBEYED = {'type', *_ALONE}.union(*_OF_TYPE.values())

_IS_OF: dict[str, Callable[[Any], bool]] = {
  'null': lambda value: value is None,
  'boolean': lambda value: isinstance(value, bool),
  'integer': lambda value: _is_number(value) and value == value // 1,
  'number': lambda value: _is_number(value),
  'string': lambda value: isinstance(value, str),
  'array': lambda value: isinstance(value, list),
  'object': lambda value: isinstance(value, dict),
}

_LEVELS = 2  # For values that the schema does not describe.


def parse(text: str) -> expression_lib.Tree:
  """The tree of a schema.

  Args:
    text: a schema, which is JSON.

  Raises:
    ValueError: it is no JSON, or has what is not supported; says what and
      where.
    RecursionError: it is nested too deeply.
  """
  schema = json.loads(text, parse_constant=_refuse_constant)
  if isinstance(schema, dict):  # Its own name says nothing of its texts.
    schema.pop('$id', None)
  return _Reader(schema).tree(schema, '#')


def _refuse_constant(name: str) -> NoReturn:
  raise ValueError(f'{name} is no JSON')


def _refuse(place: str, message: str) -> NoReturn:
  raise ValueError(f'{place} {message}')


def _refuse_name(place: str, name: Any, known: Iterable[str]) -> NoReturn:
  _refuse(place, f'must be one of {", ".join(known)}, got {name!r:.40}')


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _says_nothing(key: str, value: Any) -> bool:
  """Whether a keyword with a value is only an annotation."""
  if key in _SAYS_NOTHING:
    nothing = _SAYS_NOTHING[key]
    return type(value) is type(nothing) and value == nothing
  return key in _ANNOTATIONS or key.startswith('x-')


def _checked(value: Any, kind: Any, place: str) -> Any:
  """A value that must be of a type of Python."""
  if not isinstance(value, kind):
    what = {dict: 'an object', list: 'a list'}.get(kind, 'a string')
    _refuse(place, f'must be {what}, got {value!r:.40}')
  return value


def _bounds(
  given: dict[str, Any], least: str, most: str, place: str
) -> tuple[int, int | None]:
  for key in (least, most):
    if key in given:
      arguments_lib.check_count(f'{place}/{key}', given[key], least=0)
      if given[key] > _LARGEST:
        _refuse(
          f'{place}/{key}',
          f'must be at most {_LARGEST:,}, got {given[key]}; choose a smaller'
          ' number, or leave it out',
        )
  return given.get(least, 0), given.get(most)


def _types(given: dict[str, Any], place: str) -> list[str]:
  """The types that values may have; without `type`, those of other keywords."""
  if 'type' not in given:
    return [one for one, keys in _OF_TYPE.items() if keys & given.keys()]
  types = given['type']
  types = [types] if isinstance(types, str) else types
  for one in _checked(types, list, f'{place}/type'):
    if not isinstance(one, str) or one not in _IS_OF:
      _refuse_name(f'{place}/type', one, _IS_OF)
  return types


def _string(given: dict[str, Any], place: str) -> expression_lib.Tree:
  keys = [key for key in given if key in _OF_TYPE['string']]
  if len(keys) > 1 and {*keys} != {'minLength', 'maxLength'}:
    _refuse(f'{place}/{keys[1]}', f'is not supported beside {keys[0]}')
  if 'format' in given:
    inner = json_texts.parse(json_texts.FORMATS[given['format']])
    return json_texts.string_of(inner)
  if 'pattern' not in given:
    bounds = _bounds(given, 'minLength', 'maxLength', place)
    return json_texts.string(*bounds, place)
  own = f'{place}/pattern'
  pattern = _checked(given['pattern'], str, own)
  try:
    return json_texts.string_of(ecma_pattern.parse(pattern), own)
  except ValueError as error:
    _refuse(own, f'{pattern!r} cannot be used: {error}')


class _Reader:
  """Reads a schema, and others that it refers to."""

  def __init__(self, root: Any):
    self._root = root
    # By pointer; None while it is read.
    self._referred: dict[str, expression_lib.Tree | None] = {}

  def tree(self, schema: Any, place: str) -> expression_lib.Tree:
    """The tree of a schema; its place is a JSON pointer."""
    if isinstance(schema, bool):
      schema = {} if schema else {'enum': []}
    given = {
      key: value
      for key, value in _checked(schema, dict, place).items()
      if not _says_nothing(key, value)
    }
    for key in given:
      if key not in _OBEYED:
        _refuse(f'{place}/{key}', 'is a keyword that is not supported')
    if 'format' in given and given['format'] not in [*json_texts.FORMATS]:
      _refuse_name(f'{place}/format', given['format'], json_texts.FORMATS)
    for one in _ALONE:
      others = [key for key in given if key != one]
      if one in _WITH_TYPE:
        others = [key for key in others if key != 'type']
      if one in given and others:
        _refuse(f'{place}/{others[0]}', f'is not supported beside {one}')
      if one in given:
        return self._alone(one, given, place)
    if not given:
      return json_texts.anything(_LEVELS)
    types = _types(given, place)
    return expression_lib.Alternation(
      tuple(self._of_type(one, given, place) for one in types)
    )

  def _alone(
    self, key: str, given: dict[str, Any], place: str
  ) -> expression_lib.Tree:
    value, own = given[key], f'{place}/{key}'
    if key == '$ref':
      return self._reference(_checked(value, str, own), own)
    values = [value] if key == 'const' else _checked(value, list, own)
    if key in _WITH_TYPE:
      types = _types(given, place) if 'type' in given else [*_IS_OF]
      found = [
        json_texts.constant(one)
        for one in values
        if any(_IS_OF[kind](one) for kind in types)
      ]
    else:
      if key == 'allOf' and len(values) > 1:
        _refuse(own, 'of more than one schema is not supported')
      found = self._each(values, own)
    return expression_lib.Alternation(tuple(found))

  def _each(
    self, schemas: Sequence[Any], place: str
  ) -> list[expression_lib.Tree]:
    return [
      self.tree(one, f'{place}/{index}') for index, one in enumerate(schemas)
    ]

  def _of_type(
    self, kind: str, given: dict[str, Any], place: str
  ) -> expression_lib.Tree:
    if kind == 'array':
      first = _checked(given.get('prefixItems', []), list, place)
      return json_texts.array(
        self._each(first, f'{place}/prefixItems'),
        self.tree(given.get('items', True), f'{place}/items'),
        *_bounds(given, 'minItems', 'maxItems', place),
        place,
      )
    if kind == 'object':
      return self._object(given, place)
    if kind == 'string':
      return _string(given, place)
    return json_texts.parse(json_texts.SCALARS[kind])

  def _object(self, given: dict[str, Any], place: str) -> expression_lib.Tree:
    required = _checked(given.get('required', []), list, f'{place}/required')
    for name in required:
      _checked(name, str, f'{place}/required')
    own = f'{place}/properties'
    properties = _checked(given.get('properties', {}), dict, own)
    others = self.tree(
      given.get('additionalProperties', True), f'{place}/additionalProperties'
    )
    if not required and 'properties' not in given:
      return json_texts.object_with(others)
    escaped = lambda name: name.replace('~', '~0').replace('/', '~1')
    values = {
      name: self.tree(one, f'{own}/{escaped(name)}')
      for name, one in properties.items()
    }
    values = values | {name: others for name in required if name not in values}
    return json_texts.object_of(
      (name, value, name in required) for name, value in values.items()
    )

  def _reference(self, reference: str, place: str) -> expression_lib.Tree:
    """The tree of another place of the schema."""
    pointer, found = urllib.parse.unquote(reference[1:]), self._root
    if reference[:1] != '#' or pointer[:1] not in ('', '/'):
      _refuse(place, f'must be like #/$defs/name, got {reference!r}')
    for part in pointer.split('/')[1:]:
      if isinstance(found, list):
        found = {str(index): one for index, one in enumerate(found)}
      key = part.replace('~1', '/').replace('~0', '~')
      # Within another `$id`, references would be to places there.
      if not isinstance(found, dict) or key not in found or '$id' in found:
        _refuse(place, f'must be a place of this schema, got {reference!r}')
      found = found[key]
    if pointer not in self._referred:
      self._referred[pointer] = None
      self._referred[pointer] = self.tree(found, f'#{pointer}')
    tree = self._referred[pointer]
    if tree is None:
      _refuse(place, f'{reference!r} contains itself, which is not supported')
    return tree
