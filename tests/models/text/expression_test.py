"""Expressions accept the texts that `re.fullmatch` accepts, and no others.

Patterns of JSON schemas accept what the engine of Node accepts;
`golden/make_ecma_patterns.js` wrote that down. All texts over a few characters
are tried; `constraint_test` has tokens.
"""

import itertools
import json
import pathlib
import random
import re

import numpy as np
import pytest
import refusals

from specdec.models.text import byte_automaton
from specdec.models.text import ecma_pattern
from specdec.models.text import expression
from specdec.text import automaton as automaton_lib

# Texts of these characters are tried; the expressions are between spaces.
_EXPRESSIONS = {
  'ab': r"""
    a|ab ab|a|abb a?b? a(b)? (ab)? a* (a|b)*abb a??b a{2} a{1,3} a{,2} a{2,}
    (ab){1,2}? a{0}b (a*)* (a*)+b (a|)* (|a){2} (a?){3} (a?b?){2} (a|ab)(b|bb)
    (a|ab)*b (?P<x>a)b (?#no)a () |a a|| ^a$ ^(a|b)$ ^a$|^b$ (^a|^b)b$ (?:^ab$)
    ^^a$$ $ \Aa\Z \Aa\z \x61\142 \u0061 [a]b [^a] [a-b] [ab]{3} [^ab] [\s\S]
    (?i)AB a{b
  """,
  'a\n': r"""
    . .* a. [^a] (?s). (?s:.)a a$ (?m)a$ (?m)^a (?m)^a$ \n a\s \S (?-s:.)
    (?s)(?-s:.)a
  """,
  'kKß\u017f\u212asS': '(?i)k (?i)s (?i)[k-s] (?i)[^k] (?i:k)s (?i)ß',
  'éÉЖж': '(?i)é (?i)Ж (?i:É)ж (?i)[é] (?i)[^ж] é É',
  'aé_1٣🙂': r"""
    \w \W \d \D (?a)\w (?a)\D (?a:\w)\w [^é] é [é-🙂] 🙂|é é?🙂 [\d_] [^\d] ..
    \U0001f642 [é1]* (é|🙂){2} (a|aé|é)* [^a]é é|[a-z]
  """,
  'a.^$\\]-': r"""
    \. \^ \$ ^a\$$ a\\$ \\\\ ^\\$ []a] [^]] [a-] [\]a] [.^$] \] [a^] [\^a] \\z
  """,
}
_WITH_SPACES = [
  ('ab', pattern) for pattern in ('', '(?x) a b # c', '(?x: a )b')
]
_WITH_SPACES += [('a\n', 'a\n')]


def _random_expression(rng, depth):
  kind = rng.choice(('part', 'many', 'either', 'both', 'both'))
  if not depth or kind == 'part':
    return rng.choice(('a', 'b', '[ab]', '.', 'ab', '(?:)', '[^a]'))
  first, second = (_random_expression(rng, depth - 1) for _ in range(2))
  if kind == 'many':
    return f'(?:{first}){rng.choice(("*", "+", "??", "{2}", "{0,2}", "{1,}"))}'
  return f'(?:{first}|{second})' if kind == 'either' else first + second


def _cases():
  """Letters and an expression."""
  for letters, patterns in _EXPRESSIONS.items():
    for pattern in patterns.split():
      yield letters, pattern
  yield from _WITH_SPACES
  rng = random.Random(0)
  for _ in range(40):
    yield 'ab', _random_expression(rng, 4)


def _automaton(pattern):
  return byte_automaton.of_tree(expression.parse(pattern))


def _matches(pattern, text):
  # Before Python 3.14 `\z` has another name.
  pattern = pattern.replace(r'\Aa\z', r'\Aa\Z')
  return re.fullmatch(pattern, text) is not None


def _texts(letters, longest):
  for length in range(longest + 1):
    yield from map(''.join, itertools.product(letters, repeat=length))


def _accepted(automaton, texts):
  """For each text whether it is accepted."""
  delta, accepting = automaton
  states, ends = delta.tolist(), [*accepting.tolist(), False]
  for text in texts:
    state = 0
    for byte in text.encode():
      state = states[state][byte] if state >= 0 else -1
    yield ends[state]


def test_the_texts_are_those_of_fullmatch():
  for letters, pattern in _cases():
    texts = [*_texts(letters, 5 if len(letters) < 3 else 2)]
    accepted = [*_accepted(_automaton(pattern), texts)]
    assert accepted == [_matches(pattern, text) for text in texts], pattern


def test_patterns_match_what_node_says():
  """Patterns that are too large, or have no such tree, are refused."""
  path = pathlib.Path(__file__).parents[2] / 'golden/ecma_patterns.jsonl'
  read = refused = 0
  # Line ends of Unicode are among the characters.
  for line in path.read_text('utf-8').removesuffix('\n').split('\n'):
    case = json.loads(line)
    pattern, letters = case['pattern'], case['letters']
    try:
      tree = ecma_pattern.parse(pattern)
    except ValueError:
      refused += 1
      continue
    assert case['flag'] != 'invalid', pattern
    read += 1
    texts = _texts(letters, 2 if len(letters) > 5 else 3)
    accepted = _accepted(byte_automaton.of_tree(tree), texts)
    matches = [match == '1' for match in case['matches']]
    assert [*accepted] == matches, pattern
  assert (read, refused) == (332, 77)


def _ways(states, accepting, length):
  """How many texts of `length` bytes are accepted."""
  num_ways = accepting.astype(np.int64)
  for _ in range(length):
    num_ways = np.where(states >= 0, num_ways[states], 0).sum(axis=1)
  return num_ways[0]


@pytest.mark.parametrize(
  'pattern', [r'\ud800|é', '[^a-f\u0800-\uffff]', r'(?i)[^\Wk-s]']
)
def test_of_all_characters_those_that_match_are_accepted(pattern):
  """And no bytes that UTF-8 would not write."""
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


def test_what_has_no_automaton_is_refused_by_name():
  for name, parse in (
    ('expression', expression.parse),
    ('ECMA-262', ecma_pattern.parse),
  ):
    for pattern, message in refusals.of('models/text', name):
      with pytest.raises(ValueError, match=message):
        parse(pattern)


def test_what_is_too_large_is_given_up(monkeypatch):
  monkeypatch.setattr(byte_automaton, '_MAX_WORK', 2**16)
  for pattern in ('(a|b)*a(a|b){60}', '(a?){0,2000}'):
    with pytest.raises(automaton_lib.TooLarge, match='16,383 states'):
      _automaton(pattern)


def test_states_are_not_many_where_few_are_needed():
  """A search for what begins anywhere would need very many."""
  for pattern in ('a[ab]{40}b', '[^"]{0,1000}', '(ab|a)*b{9}'):
    states, _ = _automaton(pattern)
    assert len(states) < automaton_lib.MAX_STATES
