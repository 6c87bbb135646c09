"""Automata that count allow what automata with a state per number allow."""

import collections
import random

import jax
import numpy as np

from specdec.models.text import byte_automaton
from specdec.models.text import expression
from specdec.models.text import json_texts
from specdec.text import automaton as automaton_lib
from specdec.text import constraint as constraint_lib

# By the counts of each level; none where the next byte does not say whether a
# repetition goes on.
_EXPRESSIONS = {
  'a{2,5}': (6,),
  'a{3,}b': (4,),
  '(ab?){2,4}c': (5,),
  '(a{1,3}b){2,4}': (4, 5),
  '(a{1,3}b|c{2}){2,4}d{3}': (4, 5),
  '((a{2}b){1,2}c){2}': (3, 3, 3),
  'a{2}b(a{4}b)?': (5,),
  '(aé){0,3}(b|)': (4,),
  '[ab]{0,4}c?': (5,),
  'a{2,3}|ba{2,4}': (5,),
  '(a{2,3}b|a{2,3}c)': (4,),
  'a{2,3}[ab]': (),
  '(a|ab){2,3}': (4,),
  '(a{2,3}b|ac)(d{2}|)a': (4,),
  '(a{,2}|)b': (3,),
  '(a{1,3}|a{2,3})c': (),
  '(a?){3}': (),
  '(aa|a){2,4}b': (),
  '.*a{3}': (),
}
_LETTERS = (b'a', b'b', b'c', b'd', b'\xc3', b'\xa9')
_follow = jax.jit(constraint_lib.Tables.after)
_allowed = jax.jit(constraint_lib.Tables.allowed, static_argnums=2)


def _tokens(rng):
  """All bytes that are needed, and tokens of several, an end in front."""
  longer = [
    b''.join(rng.choices(_LETTERS[: rng.choice((1, 2, 3, 6))], k=length))
    for length in range(2, 8)
    for _ in range(6)
  ]
  return [b'', *_LETTERS, *longer]


def _random(rng, letters, depth):
  """Mostly, the next letter says whether a repetition goes on."""
  if not depth or len(letters) < 2:
    return f'[{letters}]' if rng.random() < 0.5 else rng.choice(letters)
  cut = rng.randrange(1, len(letters))
  first = _random(rng, letters[:cut], depth - 1)
  second = _random(rng, letters[cut:], depth - 1)
  least = rng.randrange(3)
  most = rng.choice(('', least + rng.randrange(1, 4)))
  if rng.random() < 0.3:
    return f'(?:{first}|{second})'
  return f'(?:{first}){{{least},{most}}}{second}'


def _cases():
  rng = random.Random(3)
  drawn = [_random(rng, 'abcdé', 3) for _ in range(25)]
  return [*_EXPRESSIONS, *drawn]


def _tables(automaton, tokens):
  return automaton_lib.stack([automaton], len(tokens) + 1)


def _same_ways(counted, plain, size):
  """Follows all tokens in both tables; the number of states."""
  every = np.arange(size, dtype=np.int32)
  seen, waiting = {(1, 1)}, [(1, 1)]
  while waiting:
    # Few shapes are compiled.
    states = np.ones((2, 1, 64), np.int32)
    states[:, 0, : len(waiting[:64])] = np.array(waiting[:64]).T
    del waiting[:64]
    after_both = []
    for tables, own_states in zip((counted, plain), states, strict=True):
      tokens = np.broadcast_to(every, (1, 64, size))
      wide = np.broadcast_to(own_states[..., None], tokens.shape)
      after = np.asarray(_follow(tables, wide, tokens))
      assert np.array_equal(_allowed(tables, own_states, size), after >= 0)
      after_both.append(after.ravel())
    assert np.array_equal(after_both[0] > 0, after_both[1] > 0)
    assert np.array_equal(after_both[0] == 0, after_both[1] == 0)
    both = {*zip(*map(np.ndarray.tolist, after_both), strict=True)}
    new = [pair for pair in sorted(both) if pair[0] > 0 and pair not in seen]
    waiting += new
    seen.update(new)
  return len(seen)


def test_what_is_counted_is_what_is_unrolled(monkeypatch):
  """Every repetition is counted where it can be."""
  monkeypatch.setattr(byte_automaton, '_UNROLLED', 0)
  rng, counted = random.Random(0), collections.Counter()
  for pattern in _cases():
    tokens, tree = _tokens(rng), expression.parse(pattern)
    delta, accepting, counts = byte_automaton.counting(tree)
    expected = _EXPRESSIONS.get(pattern)
    sizes = counts.sizes if counts else ()
    assert expected is None or sizes == expected, pattern
    counted[len(sizes)] += 1
    if counts is None:
      continue
    assert automaton_lib.can_spell(delta, tokens, (0,))
    arguments = tokens, len(tokens) + 1, (0,)
    counting_tables = _tables(
      automaton_lib.of_bytes(delta, accepting, *arguments, counts), tokens
    )
    plain = byte_automaton.of_tree(tree)
    plain = _tables(automaton_lib.of_bytes(*plain, *arguments), tokens)
    _same_ways(counting_tables, plain, len(tokens) + 1)
  assert counted[1] > 10
  assert counted[2] > 5


def test_long_texts_are_counted():
  """Few states, and limits to the letter, also of one inside another."""
  words = json_texts.string(3, 100_000)
  delta, accepting, counts = byte_automaton.counting(words)
  assert len(delta) < 20
  assert counts.sizes == (100_001,)
  pieces = [b'', b'a' * 500, *(bytes([byte]) for byte in range(256))]
  size = len(pieces)
  made = automaton_lib.of_bytes(delta, accepting, pieces, size, (0,), counts)
  tables = automaton_lib.stack([made], size)

  def after(text):
    state = np.ones(1, np.int32)
    for token in text:
      state = _follow(tables, state, np.array([token], np.int32))
    return np.asarray(state)

  quote, letter = 2 + ord('"'), 2 + ord('a')
  assert after([quote, letter, letter, quote]) < 0
  assert after([quote, *[letter] * 3, quote, 0]) == 0
  full = after([quote, *[1] * 200])
  assert _follow(tables, full, np.array([letter], np.int32)) < 0
  assert after([quote, *[1] * 199, letter, 1]) < 0
  assert np.flatnonzero(_allowed(tables, full, size)[0]).tolist() == [quote]
  rows = json_texts.array((), words, 2, 300)
  # Without the first element.
  assert byte_automaton.counting(rows)[2].sizes == (100_001, 300)
