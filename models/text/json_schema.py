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
_KEYWORDS_BY_TYPE = {
  'string': {'format', 'maxLength', 'minLength', 'pattern'},
  'array': {'items', 'maxItems', 'minItems', 'prefixItems'},
  'object': {'additionalProperties', 'properties', 'required'},
}
# Values that say nothing about a text.
_SAYS_NOTHING = {'uniqueItems': False, 'minProperties': 0}
# The largest number that keywords may have, such as `maxLength`.
_LARGEST = 100_000
# No other keyword may be next to one of these, except `type` in two cases.
_EXCLUSIVE = ('$ref', 'allOf', 'anyOf', 'const', 'enum')
_WITH_TYPE = ('const', 'enum')
_OBEYED = {'type', *_EXCLUSIVE}.union(*_KEYWORDS_BY_TYPE.values())

_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {
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
  """The tree of a schema, which is given as JSON.

  Raises:
    ValueError: it is not valid JSON, or something in it is not supported; names
      the place.
    RecursionError: it is nested too deeply.
  """
  schema = json.loads(text, parse_constant=_refuse_constant)
  if isinstance(schema, dict):  # The name of a schema does not limit its texts.
    schema.pop('$id', None)
  return _Reader(schema).tree(schema, '#')


def _refuse_constant(name: str) -> NoReturn:
  raise ValueError(f'{name} is not valid JSON')


def _refuse(place: str, message: str) -> NoReturn:
  raise ValueError(f'{place} {message}')


def _refuse_name(place: str, name: Any, names: Iterable[str]) -> NoReturn:
  _refuse(place, f'must be one of {", ".join(names)}, got {name!r:.40}')


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _says_nothing(key: str, value: Any) -> bool:
  """Whether a keyword with a value is only an annotation."""
  if key in _SAYS_NOTHING:
    nothing = _SAYS_NOTHING[key]
    return type(value) is type(nothing) and value == nothing
  return key in _ANNOTATIONS or key.startswith('x-')


def _checked(value: Any, type_: Any, place: str) -> Any:
  if not isinstance(value, type_):
    expected = {dict: 'an object', list: 'a list'}.get(type_, 'a string')
    _refuse(place, f'must be {expected}, got {value!r:.40}')
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
  """The types that values may have; without `type`, by the other keywords."""
  if 'type' not in given:
    keywords = _KEYWORDS_BY_TYPE.items()
    return [name for name, keys in keywords if keys & given.keys()]
  types = given['type']
  types = [types] if isinstance(types, str) else types
  for name in _checked(types, list, f'{place}/type'):
    if not isinstance(name, str) or name not in _TYPE_CHECKS:
      _refuse_name(f'{place}/type', name, _TYPE_CHECKS)
  return types


def _string(given: dict[str, Any], place: str) -> expression_lib.Tree:
  keys = [key for key in given if key in _KEYWORDS_BY_TYPE['string']]
  if len(keys) > 1 and {*keys} != {'minLength', 'maxLength'}:
    _refuse(f'{place}/{keys[1]}', f'is not supported next to {keys[0]}')
  if 'format' in given:
    inner = json_texts.parse(json_texts.FORMATS[given['format']])
    return json_texts.string_of(inner)
  if 'pattern' not in given:
    bounds = _bounds(given, 'minLength', 'maxLength', place)
    return json_texts.string(*bounds, place)
  pattern_place = f'{place}/pattern'
  pattern = _checked(given['pattern'], str, pattern_place)
  try:
    return json_texts.string_of(ecma_pattern.parse(pattern), pattern_place)
  except ValueError as error:
    _refuse(pattern_place, f'{pattern!r} cannot be used: {error}')


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
    for name in _EXCLUSIVE:
      others = [key for key in given if key != name]
      if name in _WITH_TYPE:
        others = [key for key in others if key != 'type']
      if name in given and others:
        _refuse(f'{place}/{others[0]}', f'is not supported next to {name}')
      if name in given:
        return self._exclusive(name, given, place)
    if not given:
      return json_texts.anything(_LEVELS)
    types = _types(given, place)
    return expression_lib.Alternation(
      tuple(self._of_type(name, given, place) for name in types)
    )

  def _exclusive(
    self, key: str, given: dict[str, Any], place: str
  ) -> expression_lib.Tree:
    value, key_place = given[key], f'{place}/{key}'
    if key == '$ref':
      return self._reference(_checked(value, str, key_place), key_place)
    values = [value] if key == 'const' else _checked(value, list, key_place)
    if key in _WITH_TYPE:
      types = _types(given, place) if 'type' in given else [*_TYPE_CHECKS]
      trees = [
        json_texts.constant(entry)
        for entry in values
        if any(_TYPE_CHECKS[name](entry) for name in types)
      ]
    else:
      if key == 'allOf' and len(values) > 1:
        _refuse(key_place, 'of more than one schema is not supported')
      trees = self._each(values, key_place)
    return expression_lib.Alternation(tuple(trees))

  def _each(
    self, schemas: Sequence[Any], place: str
  ) -> list[expression_lib.Tree]:
    return [
      self.tree(schema, f'{place}/{index}')
      for index, schema in enumerate(schemas)
    ]

  def _of_type(
    self, name: str, given: dict[str, Any], place: str
  ) -> expression_lib.Tree:
    if name == 'array':
      first = _checked(given.get('prefixItems', []), list, place)
      return json_texts.array(
        self._each(first, f'{place}/prefixItems'),
        self.tree(given.get('items', True), f'{place}/items'),
        *_bounds(given, 'minItems', 'maxItems', place),
        place,
      )
    if name == 'object':
      return self._object(given, place)
    if name == 'string':
      return _string(given, place)
    return json_texts.parse(json_texts.SCALARS[name])

  def _object(self, given: dict[str, Any], place: str) -> expression_lib.Tree:
    required = _checked(given.get('required', []), list, f'{place}/required')
    for name in required:
      _checked(name, str, f'{place}/required')
    names_place = f'{place}/properties'
    properties = _checked(given.get('properties', {}), dict, names_place)
    others = self.tree(
      given.get('additionalProperties', True), f'{place}/additionalProperties'
    )
    if not required and 'properties' not in given:
      return json_texts.object_with(others)
    escaped = lambda name: name.replace('~', '~0').replace('/', '~1')
    values = {
      name: self.tree(schema, f'{names_place}/{escaped(name)}')
      for name, schema in properties.items()
    }
    values = values | {name: others for name in required if name not in values}
    return json_texts.object_of(
      (name, value, name in required) for name, value in values.items()
    )

  def _reference(self, reference: str, place: str) -> expression_lib.Tree:
    """The tree of another place of the schema."""
    pointer, node = urllib.parse.unquote(reference[1:]), self._root
    if reference[:1] != '#' or pointer[:1] not in ('', '/'):
      _refuse(place, f'must be like #/$defs/name, got {reference!r}')
    for part in pointer.split('/')[1:]:
      if isinstance(node, list):
        node = {str(index): entry for index, entry in enumerate(node)}
      key = part.replace('~1', '/').replace('~0', '~')
      # Within another `$id`, references would be to places there.
      if not isinstance(node, dict) or key not in node or '$id' in node:
        _refuse(place, f'must be a place of this schema, got {reference!r}')
      node = node[key]
    if pointer not in self._referred:
      self._referred[pointer] = None
      self._referred[pointer] = self.tree(node, f'#{pointer}')
    tree = self._referred[pointer]
    if tree is None:
      _refuse(place, f'{reference!r} contains itself, which is not supported')
    return tree
