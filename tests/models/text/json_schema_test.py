"""Texts of schemas conform to them, by `jsonschema`; other schemas are refused.

Schemas come from the JSON Schema test suite and from use. For small ones, all
values are tried.
"""

import collections
import datetime
import functools
import itertools
import json
import pathlib
import random
import re

import jsonschema
import numpy as np
import pytest
import refusals

from specdec.models.text import byte_automaton
from specdec.models.text import constraints
from specdec.models.text import json_schema
from specdec.models.text import json_texts
from specdec.text import automaton as automaton_lib

_ROOT = pathlib.Path(__file__).parents[3]
_FORMATS = jsonschema.FormatChecker()
_FORMATS.checks('date-time', ValueError)(datetime.datetime.fromisoformat)
_FORMATS.checks('time', ValueError)(datetime.time.fromisoformat)


def _rows(file):
  return [*map(json.loads, (_ROOT / file).read_text().splitlines())]


def _suite():
  """Schemas, and values with whether they conform."""
  return _rows('tests/golden/schemas.jsonl')


@functools.cache
def _automaton_of(text):
  """With the states as lists, too; None if the schema is refused."""
  try:
    delta, accepting = byte_automaton.of_tree(json_schema.parse(text))
  except ValueError as error:
    if '#' not in str(error):  # The place.
      raise
    return None
  return delta, accepting, delta.tolist()


def _automaton(schema):
  return _automaton_of(json.dumps(schema))


def _accepts(automaton, value):
  _, accepting, states = automaton
  state = 0
  for byte in json.dumps(value, ensure_ascii=False).encode():
    state = states[state][byte] if state >= 0 else -1
  return state >= 0 and bool(accepting[state])


def _validator(schema):
  return jsonschema.Draft202012Validator(schema, format_checker=_FORMATS)


def _conforms(schema, text):
  try:
    return _validator(schema).is_valid(json.loads(text))
  except json.JSONDecodeError:
    return False


def _samples(automaton, num_texts, rng):
  """Texts, all ways through the automaton of one length equally likely.

  Bytes that lead to the same states are one way. Most letters are beyond ASCII;
  without this rule texts would have no others.
  """
  delta, accepting, _ = automaton
  kinds = collections.defaultdict(list)
  for byte, column in enumerate(delta.T):
    kinds[column.tobytes()].append(byte)
  columns = np.stack([delta[:, bytes_[0]] for bytes_ in kinds.values()], axis=1)
  num_ways = [accepting.astype(float)]  # By the number of bytes that are left.
  lengths = []
  while len(num_ways) < 150 and len(lengths) < 30:
    if num_ways[-1][0]:
      lengths.append(len(num_ways) - 1)
    ways = np.where(columns >= 0, num_ways[-1][columns], 0)
    num_ways.append(ways.sum(axis=1) / max(ways.max(), 1))
  for _ in range(num_texts if lengths else 0):
    state, text = 0, b''
    for left in range(rng.choice(lengths) - 1, -1, -1):
      after = columns[state]
      weights = np.where(after >= 0, num_ways[left][after], 0)
      (kind,) = rng.choices(range(len(after)), weights)
      text += bytes([rng.choice([*kinds.values()][kind])])
      state = after[kind]
    yield text.decode()


def test_a_schema_is_obeyed_or_refused():
  """Texts of a schema that is obeyed conform."""
  rng, num_obeyed = random.Random(0), 0
  suite = [schema for schema, _ in _suite()]
  of_use = _rows('tests/models/text/schemas.jsonl')
  for schema in suite + of_use:
    automaton = _automaton(schema)
    num_obeyed += automaton is not None
    for text in _samples(automaton, 6, rng) if automaton else ():
      assert _conforms(schema, text), (schema, text)
  assert num_obeyed > 120


def test_values_of_the_suite():
  """Values that are accepted conform."""
  verdicts = []
  for schema, values in _suite():
    automaton = _automaton(schema)
    for value, conforms in values if automaton else ():
      verdicts.append((_accepts(automaton, value), conforms))
      assert verdicts[-1] != (True, False), (schema, value)
  assert verdicts.count((True, True)) > 180
  assert verdicts.count((False, False)) > 260


# Small schemas: all values, in the layout that `docs/api.md` promises.


def _arrays():
  bounds = [{}, *({'minItems': n} for n in (1, 3))]
  limits = [{}, *({'maxItems': n} for n in (0, 2))]
  others = [{}, *({'items': items} for items in (False, {'const': 3}))]
  first = [{}, {'prefixItems': [{'const': 1}, {'enum': [1, 2]}]}]
  first += [{'prefixItems': [{'const': 2}]}]
  values = [
    list(entries)
    for length in range(4)
    for entries in itertools.product((1, 2, 3), repeat=length)
  ]
  for parts in itertools.product(bounds, limits, others, first):
    schema = {'type': 'array'}
    for part in parts:
      schema |= part
    yield schema, values


def _subsets(names):
  sizes = range(len(names) + 1)
  return [
    subset for size in sizes for subset in itertools.combinations(names, size)
  ]


def _objects():
  for names, required, others in itertools.product(
    _subsets('ab'), ((), 'a', 'c', 'abc'), ({}, False, {'const': 2})
  ):
    schema = {'type': 'object', 'required': [*required]}
    if names:
      schema['properties'] = {name: {'const': 1} for name in names}
    if others != {}:
      schema['additionalProperties'] = others
    # The properties in their order, then the other required names.
    names_of_values = dict.fromkeys((*names, *required)) or 'abc'
    yield (
      schema,
      [
        dict(zip(chosen, values, strict=True))
        for chosen in _subsets([*names_of_values])
        for values in itertools.product((1, 2), repeat=len(chosen))
      ],
    )


_PATTERNS = r"""
  a ^a a$ ^a$ ^a|b$ (^|b)a a($|b) ^ ^$ . ^[^a]$ [^/] ^a\sb$ \\ ^" \n ^\x01*$
  a{2} ^(a|b"){1,2}$ ^[Aa] é|🙂$ ^[\s\S]{2}$
"""


def _strings():
  letters = ('a', 'b', '"', '\\', '\n', '\x01', '/', 'é', '🙂')
  texts = [
    ''.join(text)
    for length in range(4)
    for text in itertools.product(letters, repeat=length)
  ]
  for pattern in ('', '^say "x"$', *_PATTERNS.split()):
    # At a line end, `$` of `re` is not what the standard says.
    compared = [
      text for text in texts if '$' not in pattern or text[-1:] != '\n'
    ]
    yield {'type': 'string', 'pattern': pattern}, compared
  for least, most in ((0, 1), (1, 2), (2, 2), (3, 1)):
    yield {'type': 'string', 'minLength': least, 'maxLength': most}, texts
  # Half a character cannot be spelled.
  yield {'enum': ['\ud800', 'é\x00', '"']}, ['é\x00', '"', 'é', *texts]
  escaped = {'$defs': {'a/b~c': {'enum': ['a']}}}
  yield {'$ref': '#/%24defs/a~1b~0c'} | escaped, texts
  # `~01` is a tilde and 1, and no escape of a slash.
  tilde = {'$defs': {'a~1b': {'enum': ['a']}, 'a/b': {'enum': ['b']}}}
  yield {'$ref': '#/$defs/a~01b'} | tilde, texts
  years = (1, 4, 100, 1900, 2000, 2023, 9996)
  dates = [
    f'{year:04}-{month:02}-{day:02}'
    for year, month, day in itertools.product(years, range(14), range(33))
  ]
  yield {'type': 'string', 'format': 'date'}, dates


def _scalars():
  values = [None, True, False, 0, -1, 12, 1.5, -2.5e-07, 'a']
  for kind in ('null', 'boolean', 'integer', 'number', 'string'):
    yield {'type': kind}, values
    yield {'type': kind, 'enum': [*values, 1.0]}, [*values, 1.0, 2]


_SMALL = {'arrays': _arrays, 'objects': _objects, 'strings': _strings}
_SMALL['scalars'] = _scalars


@pytest.mark.parametrize('kind', _SMALL)
def test_all_values_of_small_schemas(kind):
  count = [0, 0]
  for schema, values in _SMALL[kind]():
    automaton = _automaton(schema)
    validator = _validator(schema)
    for text in _samples(automaton, 2, random.Random(0)):
      assert _conforms(schema, text), (schema, text)
    for value in values:
      conforms = validator.is_valid(value)
      assert _accepts(automaton, value) == conforms, (schema, value)
      count[conforms] += 1
  assert min(count) > (20 if kind == 'scalars' else 100)


def test_what_is_not_obeyed_is_refused_with_its_place():
  for schema, message in refusals.of('models/text', 'schema'):
    with pytest.raises(ValueError, match=message):
      json_schema.parse(json.dumps(schema))


def test_what_says_nothing_is_ignored():
  nothing = {
    'x-order': 3,
    'x-': {'maximum': 1},
    'uniqueItems': False,
    'minProperties': 0,
    'title': 'A title',
  }
  for schema in ({'enum': ['a', 'b']}, {'type': 'integer'}, {'maxItems': 2}):
    annotated, alone = _automaton(schema | nothing), _automaton(schema)
    assert np.array_equal(annotated[0], alone[0]), schema


def test_what_is_too_large_is_refused_by_name(monkeypatch):
  monkeypatch.setattr(byte_automaton, '_MAX_WORK', 2**14)
  many = {'items': {'pattern': 'b{2,20000}'}, 'maxItems': 90}
  for schema, name in (
    ({'pattern': '^(a?){3000}$'}, '{3000,3000} of #/pattern'),
    (many, '{2,20000} of #/items/pattern'),
  ):
    tree = json_schema.parse(json.dumps(schema))
    with pytest.raises(automaton_lib.TooLarge, match=re.escape(name)):
      byte_automaton.counting(tree)


def test_the_reference_names_what_is_obeyed():
  """Among all keywords that a validator knows, and formats."""
  obeyed = {*json_texts.FORMATS}
  for keyword in jsonschema.Draft202012Validator.VALIDATORS:
    try:
      json_schema.parse(json.dumps({keyword: None}))
    except ValueError as error:
      if 'is a keyword that is not supported' in str(error):
        continue
    obeyed.add(keyword)
  (names,) = re.findall(
    r'The keywords are (.*?)\. Annotations', constraints.__doc__, re.S
  )
  assert {*re.findall('`([^`]+)`', names)} == obeyed
