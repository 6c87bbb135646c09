"""Automata over tokens, against reading the bytes of every token.

That drafted text is plain text under a constraint is shown by `equality_test`.
"""

import itertools

import equality_test
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.text import automaton as automaton_lib
from specdec.text import constraint as constraint_lib

_follow = jax.jit(constraint_lib.Tables.after)
_allowed = jax.jit(lambda tables, state: tables.allowed(state, _SIZE))
_SIZE = 40


def _example(seed):
  """An automaton over bytes, and tokens that spell some of its texts."""
  rng = np.random.default_rng(seed)
  delta = np.full((6, 256), -1)
  delta[:, 97:100] = rng.integers(-1, 6, (6, 3))
  accepting = rng.random(6) < 0.4
  accepting[5] = True
  texts = ['', 'a', 'b', 'c', 'ab', 'bc', 'ca', 'abc', 'd', 'cccc']
  chosen = [texts[index] for index in rng.integers(len(texts), size=40)]
  return delta, accepting, [text.encode() for text in chosen]


def _read(delta, state, token):
  for byte in token:
    state = delta[state, byte] if state >= 0 else -1
  return state


def _slowly(delta, accepting, tokens, eos):
  """For each state of bytes, the state after each token, or None."""
  after = [
    [
      _read(delta, state, token) if token and index not in eos else -1
      for index, token in enumerate(tokens)
    ]
    for state in range(len(delta))
  ]
  leads = accepting.tolist()
  for _ in delta:
    leads = [
      lead or any(state >= 0 and leads[state] for state in row)
      for lead, row in zip(leads, after, strict=True)
    ]
  keep = lambda state: state if state >= 0 and leads[state] else None
  return [[keep(state) for state in row] for row in after], leads


def test_tables_against_reading_bytes():
  """Stacked tables say what reading bytes says, in every state."""
  eos, size, stacked = (3, 7), _SIZE, []
  # In the last one only a token that ends a text spells what is needed.
  for seed in (*range(11), 297):
    delta, accepting, tokens = _example(seed)
    slow, leads = _slowly(delta, accepting, tokens, eos)
    try:
      made = automaton_lib.of_bytes(delta, accepting, tokens, size, eos)
    except automaton_lib.Unspeakable:
      assert not leads[0]
      continue
    assert leads[0]
    stacked.append((made, slow, accepting))
  assert len(stacked) > 3
  automata = [None, *(made for made, *_ in stacked)]
  tables = automaton_lib.stack(automata, size)
  start = tables.first_state(len(automata)).tolist()
  every = np.tile(np.arange(size, dtype=np.int32), (len(automata), 1))
  same = lambda state: np.full_like(every, state)
  for state in (start[0], 0):
    free = np.asarray(_follow(tables, same(state), every))
    assert not np.any(free[0])
    assert np.all(_allowed(tables, same(state)[:, 0])[0])
  forbidden = same(constraint_lib.FORBIDDEN)
  assert np.array_equal(_follow(tables, forbidden, every), forbidden)
  for index, (_, slow, accepting) in enumerate(stacked, 1):
    waiting, seen = [(start[index], 0)], set()
    while waiting:
      fast, state = waiting.pop()
      if fast in seen:
        continue
      seen.add(fast)
      after = _follow(tables, same(fast), every)[index].tolist()
      may_follow = _allowed(tables, same(fast)[:, 0])[index].tolist()
      for token, (new, allowed) in enumerate(
        zip(after, may_follow, strict=True)
      ):
        expected = slow[state][token]
        if token in eos:
          assert (new >= 0) == allowed == bool(accepting[state])
        else:
          assert (new >= 0) == allowed == (expected is not None), (state, token)
          waiting += [(new, expected)] if allowed else []


def test_tokens_that_do_not_do_the_same_are_of_several_kinds():
  """Hundreds of tokens; hardly any two do the same everywhere."""
  rng = np.random.default_rng(0)
  delta = np.full((12, 256), -1)
  letters = range(97, 123)
  delta[:, letters] = rng.integers(-1, 12, (12, len(letters)))
  tokens = [b'', *(bytes([letter]) for letter in letters)]
  tokens += [bytes(pair) for pair in itertools.product(letters, repeat=2)]
  accepting = np.ones(12, bool)
  made = automaton_lib.of_bytes(delta, accepting, tokens, len(tokens), (0,))
  assert made.after.shape[1] > 500
  slow_state = {1: 0}  # By the states of the automaton over tokens.
  waiting = [1]
  for state in waiting:
    for token, fast in enumerate(made.after[state, made.kinds].tolist()[1:], 1):
      slow = _read(delta, slow_state[state], tokens[token])
      assert (fast < 0) == (slow < 0)
      if fast >= 0:
        waiting += [fast] if fast not in slow_state else []
        assert slow_state.setdefault(fast, slow) == slow
  assert len(slow_state) == 12


def test_rows_that_come_and_go_keep_their_automata():
  made = []
  for seed in range(20):
    delta, accepting, tokens = _example(seed)
    if _slowly(delta, accepting, tokens, (3,))[1][0]:
      made.append(
        automaton_lib.of_bytes(delta, accepting, tokens, len(tokens), (3,))
      )
  larger = np.full((300, 256), -1)
  larger[:-1, 97] = np.arange(1, 300)
  ends = np.arange(300) == 299
  larger = automaton_lib.of_bytes(larger, ends, tokens, len(tokens), (3,))
  rng = np.random.default_rng(0)
  # Texts are in states of their own when the tables of another row grow.
  tables, rows = automaton_lib.stack([None] * 3, _SIZE), [None] * 3
  states = np.ones(3, np.int32)
  for step in range(25):
    row = int(rng.integers(3))
    rows[row] = [*made, None][rng.integers(len(made) + 1)]
    rows[row] = larger if step == 12 else rows[row]
    states[row] = 1
    tables = automaton_lib.with_row(tables, row, rows, _SIZE)
    for busy, automaton in enumerate(rows):
      alone = automaton_lib.stack([automaton] * 3, _SIZE)
      for function, args in ((_allowed, ()), (_follow, (states + 2,))):
        np.testing.assert_array_equal(
          function(tables, states, *args)[busy],
          function(alone, states, *args)[busy],
        )
    after = np.asarray(_follow(tables, states, states + 2))
    states = np.where(after < 0, states, after)
  assert tables.following.shape[1] == 1024


def test_an_automaton_may_not_be_larger_than_is_said():
  delta = np.full((automaton_lib.MAX_STATES, 256), -1)
  with pytest.raises(automaton_lib.TooLarge, match='16,384 states'):
    automaton_lib.of_bytes(delta, np.ones(len(delta), bool), [b'a'], 4, [0])


def test_candidates_are_conditioned_on_what_may_follow():
  log_probs = jnp.log(jnp.array([[0.5, 0.2, 0.1]]))
  tokens = jnp.array([[3, 4, 5]])
  conditioned = equality_test.Turns().adjust_few(
    log_probs, tokens, jnp.array([1])
  )
  np.testing.assert_allclose(jnp.exp(conditioned), [[0.0, 0.5, 0.0]], rtol=1e-5)
