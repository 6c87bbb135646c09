"""Constraints: drafted text is plain text under the same constraint.

A slow loop makes the plain text; it knows the rule of the constraint and no
automaton. Tables are compared with reading the bytes of every token.
"""

import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import table_model
from specdec.text import automaton as automaton_lib
from specdec.text import constraint as constraint_lib
from specdec.tree import topology as topology_lib

_VOCAB_SIZE, _END = 24, 1
_LIMIT, _DEPTH = 26, 3
_TABLE = tiny.table(_VOCAB_SIZE)
_MODEL = table_model.table_model(_TABLE, max_positions=64)
_PROMPTS = [[2, 3, 4], [5], [6, 7]]
_KEYS = tiny.row_keys(3)
_TEMPERATURES = [0.0, 1.0, 0.7]


class Turns(flax.struct.PyTreeNode, specdec.Constraint):
  """Remainders by 3 take turns; the text may end after three tokens."""

  def next_state(self, state, tokens):
    after = jnp.where(tokens % 3 == state, (state + 1) % 3, -1)
    return jnp.where(tokens == _END, jnp.where(state == 0, 0, -1), after)


def _may_follow(num_new, token):
  if token == _END:
    return num_new % 3 == 0
  return token % 3 == num_new % 3


@functools.cache
def _expected(row):
  """The new tokens of a row, slowly."""
  prompt = _PROMPTS[row]

  def logits_of(text):
    allowed = [
      _may_follow(len(text) - len(prompt), token)
      for token in range(_VOCAB_SIZE)
    ]
    return np.where(allowed, _TABLE[text[-1]], -np.inf)

  options = reference.Options(temperature=_TEMPERATURES[row])
  new, _ = reference.decode(logits_of, prompt, _LIMIT, _KEYS[row], options)
  return new[: new.index(_END) + 1] if _END in new else new


def _drafter(kind):
  chain = tiny_drafters.Settings(topology=topology_lib.chain(_DEPTH))
  if kind == 'guesses':
    return tiny_drafters.candidates(tiny_drafters.exact(_TABLE), config=chain)
  other = table_model.table_model(tiny.table(_VOCAB_SIZE, 1), max_positions=64)
  draft = other if kind == 'staged' else _MODEL
  return tiny_drafters.simple(kind, draft, length=_DEPTH)


def _generate(kind, **options):
  arguments = {
    'max_new_tokens': _LIMIT,
    'drafter': _drafter(kind),
    'sampling': specdec.Sampling(temperature=_TEMPERATURES),
    'eos_ids': [_END],
    'constraint': Turns(),
  }
  return specdec.generate(_MODEL, _KEYS, _PROMPTS, **arguments | options)


def check_tokens(kind, verify):
  """All rows equal the loop's; without `match`, only the greedy row does.

  Drafts that know the target and the constraint are accepted altogether.
  """
  result = _generate(kind, verify=verify)
  for row, new in enumerate(result.tokens):
    if verify == 'match' or not _TEMPERATURES[row]:
      assert new == _expected(row)
    assert all(_may_follow(index, token) for index, token in enumerate(new))
  if kind in ('chain', 'guesses'):
    forwards = sum(-(-len(new) // (_DEPTH + 1)) for new in result.tokens)
    assert result.stats.target_forwards == forwards
  assert {*result.finish_reasons} <= {'eos', 'length'}
  return result


@pytest.mark.parametrize(
  ('kind', 'verify'),
  [
    ('plain', 'match'),
    ('chain', 'match'),
    ('guesses', 'match'),
    ('staged', 'match'),
    ('chain', 'rejection'),
  ],
)
def test_tokens_are_those_of_a_loop(kind, verify):
  check_tokens(kind, verify)


def test_the_example_has_texts_that_end_and_the_constraint_matters():
  reasons = [_END in _expected(row) for row in range(3)]
  assert {*reasons} == {True, False}
  free = _generate('plain', constraint=None)
  assert all(free.tokens[row] != _expected(row) for row in range(3))


def test_where_nothing_may_follow_the_row_ends_with_an_error():
  bias = {token: -np.inf for token in range(_VOCAB_SIZE) if token % 3 == 2}
  sampling = specdec.Sampling(temperature=0.0, logit_bias=[None, bias, None])
  result = _generate('chain', sampling=sampling)
  assert result.finish_reasons[1] == 'error'
  assert len(result.tokens[1]) == 2
  assert 'or constraint and bias exclude all tokens' in result.errors[1]
  assert result.tokens[0] == _expected(0)


def test_the_next_turn_begins_with_the_first_state():
  decoding = specdec.Decoding(
    _MODEL,
    _KEYS[:1],
    [[4, 2]],
    max_new_tokens=8,
    room_for_new_tokens=30,
    eos_ids=[_END],
    constraint=Turns(),
  )
  decoding.run()
  assert len(decoding.result().tokens[0]) % 3
  decoding.extend([_PROMPTS[0]], max_new_tokens=_LIMIT)
  decoding.run()
  assert decoding.result().tokens == [_expected(0)]


class _Wrong(specdec.Constraint):
  def next_state(self, state, tokens):
    return jnp.where(tokens > state, 1.0, -1.0)


def test_what_is_no_constraint_is_refused():
  with pytest.raises(ValueError, match=r'constraint\.next_state must return'):
    _generate('plain', constraint=_Wrong())
  tables = automaton_lib.stack([None], _VOCAB_SIZE + 40)
  with pytest.raises(ValueError, match=r'constraint\.allowed must return'):
    _generate('plain', constraint=tables)
  with pytest.raises(ValueError, match=r'must be a specdec\.Constraint'):
    _generate('plain', constraint=Turns)


# Automata, by reading the bytes of every token.

_follow = jax.jit(constraint_lib.follow)
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


def check_tables(seeds):
  """Stacked tables say what reading bytes says, in every state."""
  eos, size, stacked = (3, 7), _SIZE, []
  for seed in seeds:
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


def test_tables_against_reading_bytes():
  # In the last one only a token that ends a text spells what is needed.
  check_tables([*range(11), 297])


def check_kinds():
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


def test_tokens_that_do_not_do_the_same_are_of_several_kinds():
  check_kinds()


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
    tables = automaton_lib.with_row(tables, row, rows[row])
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
  conditioned = constraint_lib.condition(
    Turns(), log_probs, jnp.array([1]), tokens
  )
  np.testing.assert_allclose(jnp.exp(conditioned), [[0.0, 0.5, 0.0]], rtol=1e-5)
