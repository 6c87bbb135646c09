"""Patterns match what the engine of Node says, or are refused by name.

`tests/golden/make_ecma_patterns.js` makes what it says.
"""

import itertools
import json
import pathlib

import pytest

from specdec.models.text import byte_automaton
from specdec.models.text import ecma_pattern

_GOLDEN = pathlib.Path(__file__).parents[2] / 'golden/ecma_patterns.jsonl'


def _patterns():
  # Line ends of Unicode are among the characters.
  lines = _GOLDEN.read_text('utf-8').removesuffix('\n').split('\n')
  return [*map(json.loads, lines)]


def _texts(letters):
  longest = 2 if len(letters) > 5 else 3
  return [
    ''.join(text)
    for length in range(longest + 1)
    for text in itertools.product(letters, repeat=length)
  ]


def _accepts(states, accepting, text):
  state = 0
  for byte in text.encode():
    state = states[state][byte] if state >= 0 else -1
  return state >= 0 and bool(accepting[state])


def check_patterns():
  """All that are not refused; those are too large, or have no such tree."""
  read = refused = 0
  for case in _patterns():
    pattern = case['pattern']
    try:
      tree = ecma_pattern.parse(pattern)
    except ValueError:
      refused += 1
      continue
    assert case['flag'] != 'invalid', pattern
    read += 1
    delta, accepting = byte_automaton.of_tree(tree)
    states, texts = delta.tolist(), _texts(case['letters'])
    for text, match in zip(texts, case['matches'], strict=True):
      accepted = _accepts(states, accepting, text)
      assert accepted == (match == '1'), (pattern, text)
  assert (read, refused) == (332, 77)


def test_texts_are_those_that_match():
  check_patterns()


@pytest.mark.parametrize(
  ('pattern', 'message'),
  [
    ('[]a]', r'\[\] is an empty class in ECMA-262; write \\\]'),
    (r'\Aa', r'\\A is not an escape of ECMA-262 \(before position 2\)'),
    (r'a\Z', r'\\Z is not an escape'),
    ('(?i)a', r'\(\?i\) is not a group of ECMA-262, or has flags'),
    ('(?i:a)', r'\(\?i: is not a group'),
    ('(?P<x>a)', 'is not a group'),
    ('a{,2}', r'\{,2\} is not a number of repetitions .* write \{0,2\} or'),
    ('a++', r'\+ has nothing to repeat'),
    ('a{2,1}', 'numbers out of order'),
    ('a(?=b)', 'look-around is not supported'),
    (r'(a)\1', 'back references are not supported'),
    (r'\p{L}', r'classes of Unicode, \\p, are not supported'),
    (r'\ba', r'\\b is not supported'),
    ('a^b', 'anchors, except at the beginning and the end'),
    ('(a', r'missing \), unterminated group'),
    ('a)', r'unbalanced parenthesis \)'),
    ('[a', r'unterminated class \]'),
    ('a\\', 'bad escape'),
    ('[b-a]', 'a range of a class is out of order'),
    (r'\u{110000}', 'is not a character'),
  ],
)
def test_what_is_not_read_is_refused_by_name(pattern, message):
  with pytest.raises(ValueError, match=message):
    ecma_pattern.parse(pattern)
