"""Expressions and JSON schemas: of real use, and random ones.

All texts are of bounded length, so that a random one ends.
"""

import random
from typing import Any

EXPRESSIONS = (
  r'\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])',
  r'[a-z]{2,8}(\.[a-z]{2,8})?@[a-z]{2,10}\.(com|org|net|io)',
  r'((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|1?[0-9]?[0-9])',
  r'-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?',
  r'\$[1-9][0-9]{0,2}(,[0-9]{3}){0,2}\.[0-9]{2}',
  r'def [a-z_]{1,12}\((self|[a-z]{1,5})?\):\n    (pass|return [a-z0-9]{1,6})',
  r'"[^"\\\n]{0,12}"',
  r'\{"answer": (true|false), "confidence": 0\.[0-9]{1,2}\}',
  r'(é|ü|ß|日本|🙂){1,4}',
)

_STRING = {'type': 'string', 'maxLength': 12}
_SMALL = {'type': 'string', 'pattern': '^[a-z]{1,8}$'}
_COUNT = {'type': 'string', 'pattern': '^[1-9][0-9]{0,3}$'}


def _record(**properties: Any) -> dict[str, Any]:
  required = [name for name in properties if not name.startswith('opt')]
  return {'type': 'object', 'properties': properties, 'required': required}


_LEVEL = {'enum': ['low', 'medium', 'high']}
_FLAG = {'type': 'boolean'}
_DATE = {'type': 'string', 'format': 'date'}
_ORDER = _record(sku=_SMALL, n=_COUNT)
_ORDERS = {'type': 'array', 'items': _ORDER, 'maxItems': 2}

SCHEMAS: tuple[dict[str, Any], ...] = (
  _record(location=_STRING, unit={'enum': ['celsius', 'fahrenheit']}),
  _record(date=_DATE, event=_STRING),
  _record(tags={'type': 'array', 'items': _SMALL, 'maxItems': 4}),
  _record(id={'type': 'string', 'format': 'uuid'}),
  _record(user=_record(name=_SMALL, admin=_FLAG), level=_LEVEL),
  _record(items=_ORDERS) | {'title': 'an order'},
  _record(value={'anyOf': [_FLAG, _SMALL, {'type': 'null'}]}),
  _record(choice={'enum': ['a', 2, True, None, 'b']}),
  _record(path=_SMALL, opt_mode={'enum': ['r', 'w', 'a']}),
  {'type': 'array', 'items': _FLAG, 'minItems': 2, 'maxItems': 5},
  {'enum': ['red', 'green', 'blue', 7]},
  {'type': 'string', 'minLength': 2, 'maxLength': 6},
  {'anyOf': [_record(ok=_FLAG), _record(error=_SMALL)]},
  {
    '$defs': {'point': _record(x=_COUNT, y=_COUNT)},
    **_record(begin={'$ref': '#/$defs/point'}, end={'$ref': '#/$defs/point'}),
  },
)

_WORDS = ('if', 'None', 'self', 'x', '0', 'return ', ' = ', 'é')
_CLASSES = ('[a-z]', '[0-9]', '[A-Za-z_]', '[ab]', '[^a-z\\n]', r'\d')


def _expression(rng: random.Random, depth: int) -> str:
  kind = rng.choice(('word', 'class', 'many', 'or', 'then', 'then'))
  if depth == 0 or kind == 'word':
    return rng.choice(_WORDS)
  if kind == 'class':
    low = rng.randrange(3)
    return f'{rng.choice(_CLASSES)}{{{low},{low + rng.randrange(1, 6)}}}'
  inner = [_expression(rng, depth - 1) for _ in range(rng.randrange(2, 4))]
  if kind == 'many':
    return f'({inner[0]}){{{rng.randrange(2)},{rng.randrange(1, 4)}}}'
  return f'({"|".join(inner)})' if kind == 'or' else ''.join(inner)


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
  leaves = (_STRING, _SMALL, _COUNT, _LEVEL, _FLAG, _DATE, {'const': 'x y'})
  kind = rng.choice(('object', 'array', 'any', 'leaf'))
  if depth == 0 or kind == 'leaf':
    return rng.choice(leaves)
  inner = [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
  if kind == 'array':
    return {'type': 'array', 'items': inner[0], 'maxItems': rng.randrange(1, 3)}
  if kind == 'any':
    return {'anyOf': inner}
  names = rng.sample(('id', 'name', 'opt_kind', 'opt_n', 'x'), len(inner))
  return _record(**dict(zip(names, inner, strict=True)))


def expressions(number: int) -> list[str]:
  """Useful ones, then random ones."""
  rng = random.Random(0)
  drawn = [_expression(rng, 3) for _ in range(number)]
  return [*EXPRESSIONS, *drawn][:number]


def schemas(number: int) -> list[dict[str, Any]]:
  """Useful ones, then random ones."""
  rng = random.Random(0)
  drawn = [_schema(rng, 2) for _ in range(number)]
  return [*SCHEMAS, *drawn][:number]
