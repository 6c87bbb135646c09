"""Expressions accept the texts that `re.fullmatch` accepts, and no others.

All texts over a few characters are tried; `constraint_test` has tokens.
"""

import itertools
import random
import re

import numpy as np
import pytest

from specdec.models.text import byte_automaton
from specdec.models.text import expression
from specdec.text import automaton as automaton_lib

# By the characters of which texts are tried.
_EXPRESSIONS = {
  'ab': [
    'a|ab',
    'ab|a|abb',
    'a?b?',
    'a(b)?',
    '(ab)?',
    'a*',
    '(a|b)*abb',
    'a??b',
    'a{2}',
    'a{1,3}',
    'a{,2}',
    'a{2,}',
    '(ab){1,2}?',
    'a{0}b',
    '(a*)*',
    '(a*)+b',
    '(a|)*',
    '(|a){2}',
    '(a?){3}',
    '(a?b?){2}',
    '(a|ab)(b|bb)',
    '(a|ab)*b',
    '(?P<x>a)b',
    '(?#no)a',
    '',
    '()',
    '|a',
    'a||',
    '^a$',
    '^(a|b)$',
    '^a$|^b$',
    '(^a|^b)b$',
    '(?:^ab$)',
    '^^a$$',
    '$',
    r'\Aa\Z',
    r'\Aa\z',
    '(?x) a b # c',
    '(?x: a )b',
    r'\x61\142',
    r'\u0061',
    '[a]b',
    '[^a]',
    '[a-b]',
    '[ab]{3}',
    '[^ab]',
    r'[\s\S]',
    '(?i)AB',
    'a{b',
  ],
  'a\n': [
    '.',
    '.*',
    'a.',
    '[^a]',
    '(?s).',
    '(?s:.)a',
    'a$',
    '(?m)a$',
    '(?m)^a',
    '(?m)^a$',
    r'\n',
    r'a\s',
    r'\S',
    '(?-s:.)',
    'a\n',
    '(?s)(?-s:.)a',
  ],
  'kKß\u017f\u212asS': [
    '(?i)k',
    '(?i)s',
    '(?i)[k-s]',
    '(?i)[^k]',
    '(?i:k)s',
    '(?i)ß',
  ],
  'éÉЖж': ['(?i)é', '(?i)Ж', '(?i:É)ж', '(?i)[é]', '(?i)[^ж]', 'é', 'É'],
  'aé_1٣🙂': [
    r'\w',
    r'\W',
    r'\d',
    r'\D',
    r'(?a)\w',
    r'(?a)\D',
    r'(?a:\w)\w',
    '[^é]',
    'é',
    '[é-🙂]',
    '🙂|é',
    'é?🙂',
    r'[\d_]',
    r'[^\d]',
    '..',
    r'\U0001f642',
    '[é1]*',
    '(é|🙂){2}',
    '(a|aé|é)*',
    '[^a]é',
    'é|[a-z]',
  ],
  'a.^$\\]-': [
    r'\.',
    r'\^',
    r'\$',
    r'^a\$$',
    r'a\\$',
    r'\\\\',
    r'^\\$',
    r'[]a]',
    '[^]]',
    '[a-]',
    r'[\]a]',
    '[.^$]',
    r'\]',
    '[a^]',
    r'[\^a]',
    r'\\z',
  ],
}


def _random_expression(rng, depth):
  kind = rng.choice(('part', 'many', 'either', 'both', 'both'))
  if not depth or kind == 'part':
    return rng.choice(('a', 'b', '[ab]', '.', 'ab', '(?:)', '[^a]'))
  first, second = (_random_expression(rng, depth - 1) for _ in range(2))
  if kind == 'many':
    return f'(?:{first}){rng.choice(("*", "+", "??", "{2}", "{0,2}", "{1,}"))}'
  return f'(?:{first}|{second})' if kind == 'either' else first + second


def _cases():
  rng = random.Random(0)
  drawn = [_random_expression(rng, 4) for _ in range(40)]
  table = _EXPRESSIONS | {'ab': _EXPRESSIONS['ab'] + drawn}
  return [(letters, pattern) for letters in table for pattern in table[letters]]


def _automaton(pattern):
  return byte_automaton.of_tree(expression.parse(pattern))


def _matches(pattern, text):
  # Before Python 3.14 `\z` has another name.
  pattern = pattern.replace(r'\Aa\z', r'\Aa\Z')
  return re.fullmatch(pattern, text) is not None


def _read(states, state, data):
  for byte in data:
    state = states[state][byte] if state >= 0 else -1
  return state


def check_texts():
  for letters, pattern in _cases():
    delta, accepting = _automaton(pattern)
    states, ends = delta.tolist(), [*accepting.tolist(), False]
    for length in range(6 if len(letters) < 3 else 3):
      for text in map(''.join, itertools.product(letters, repeat=length)):
        accepted = ends[_read(states, 0, text.encode())]
        assert accepted == _matches(pattern, text), (pattern, text)


def test_the_texts_are_those_of_fullmatch():
  assert len(_cases()) > 140
  check_texts()


def _ways(states, accepting, length):
  """How many texts of `length` bytes are accepted."""
  num_ways = accepting.astype(np.int64)
  for _ in range(length):
    num_ways = np.where(states >= 0, num_ways[states], 0).sum(axis=1)
  return num_ways[0]


@pytest.mark.parametrize(
  'pattern',
  [r'\w', r'\ud800|é', '[^a-f\u0800-\uffff]', r'(?i)[^\Wk-s]', '(?s).'],
)
def test_of_all_characters_those_that_match_are_accepted(pattern):
  """And no other bytes, which UTF-8 would not write so."""
  states, accepting = _automaton(pattern)
  compiled = re.compile(pattern)
  scalars = map(chr, (*range(0xD800), *range(0xE000, 0x110000)))
  by_length = [[], [], [], [], []]
  for letter in scalars:
    by_length[len(letter.encode())].append(letter)
  for length, letters in enumerate(by_length[1:], 1):
    data = np.frombuffer(''.join(letters).encode(), np.uint8)
    state = np.zeros(len(letters), np.int64)
    for byte in data.reshape(-1, length).T:
      state = np.where(state < 0, -1, states[state, byte])
    accepted = (state >= 0) & accepting[state]
    matches = [compiled.fullmatch(letter) is not None for letter in letters]
    assert accepted.tolist() == matches
    assert _ways(states, accepting, length) == sum(matches)


_REFUSED = [
  ('a(?=b)', 'look-around is not supported'),
  ('(?<!a)b', 'look-around'),
  (r'(a)\1', 'back references'),
  ('(?P<x>a)(?P=x)', 'back references'),
  ('(a)?(?(1)b|c)', 'conditional groups'),
  ('(?>a|ab)b', 'atomic groups'),
  ('a++a', 'possessive quantifiers'),
  ('(?:a){1,2}+', 'possessive quantifiers'),
  (r'\ba', r'\\b is not supported'),
  (r'a\B', r'\\B is not supported'),
  ('a^b', 'anchors, except at the beginning and the end'),
  ('a$b', 'anchors'),
  ('(?m)a$\n^b', 'anchors'),
  ('(^a)*', 'anchors'),
  (r'a|(b\Z)?a', 'anchors'),
  ('()^a', 'anchors'),
  (r'\pL', 'bad escape'),
  ('[a', 'unterminated character set'),
  ('a{99999999999}', 'repetition number is too large'),
  ('(?L)a', "cannot use 'L' flag"),
]


@pytest.mark.parametrize(('pattern', 'message'), _REFUSED)
def test_what_has_no_automaton_is_refused_by_name(pattern, message):
  with pytest.raises(ValueError, match=message):
    expression.parse(pattern)


@pytest.mark.parametrize('pattern', ['(a|b)*a(a|b){60}', '(a?){0,2000}'])
def test_what_is_too_large_is_given_up(pattern, monkeypatch):
  monkeypatch.setattr(byte_automaton, '_MAX_WORK', 2**16)
  with pytest.raises(automaton_lib.TooLarge, match='16,383 states'):
    _automaton(pattern)


@pytest.mark.parametrize(
  'pattern', ['a[ab]{40}b', '[^"]{0,1000}', '(ab|a)*b{9}', r'(\d{1,9},){20}']
)
def test_states_are_not_many_where_few_are_needed(pattern):
  """A search for what begins anywhere would need very many."""
  states, _ = _automaton(pattern)
  assert len(states) < automaton_lib.MAX_STATES
