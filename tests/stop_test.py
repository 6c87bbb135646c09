"""Stop strings on the device and on the host, against `bytes.find`."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.verify.stop_strings import build_stop_table
from specdec.verify.stop_strings import StopMatcher
from specdec.verify.stop_strings import STOPPED
from specdec.verify.stop_strings import StopTable


def _first_stop(stops, text):
  """Where the text is cut, and where the stop string ends; or None."""
  found = [(text.find(stop), stop) for stop in stops]
  ends = [(at + len(stop), at) for at, stop in found if at >= 0]
  return min(ends)[::-1] if ends else None


def _tokens_until_stop(table, row, tokens):
  """How many tokens are read until one stops; None if none does."""
  next_state = np.asarray(table.next_state)
  state = np.asarray(table.start)[row]
  for count, token in enumerate(tokens, 1):
    state = next_state[state, token]
    if state == STOPPED:
      return count
  return None


def _expected_tokens(stops, token_bytes, tokens):
  stop = _first_stop(stops, b''.join(token_bytes[token] for token in tokens))
  if stop is None:
    return None
  lengths = np.cumsum([len(token_bytes[token]) for token in tokens])
  return int(np.searchsorted(lengths, stop[1])) + 1


def _check(table, row, stops, token_bytes, tokens):
  actual = _tokens_until_stop(table, row, tokens)
  texts = [token_bytes[token] for token in tokens]
  assert actual == _expected_tokens(stops, token_bytes, tokens), (stops, texts)


def _beginning(stops, text):
  """The longest end of the text that a stop string could begin with."""
  return max(
    (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])),
    default=0,
  )


def _check_matcher(stops, pieces):
  """After each piece and at the end, what is returned and what is held."""
  matcher, text, returned = StopMatcher(stops), b'', b''
  for piece in pieces:
    text += piece
    returned += matcher.feed(piece)
    stop = _first_stop(stops, text)
    assert matcher.stopped == (stop is not None)
    certain = stop[0] if stop else len(text) - _beginning(stops, text)
    assert returned == text[:certain], (stops, pieces)
  returned += matcher.flush()
  stop = _first_stop(stops, text)
  assert returned == (text if stop is None else text[: stop[0]])
  assert matcher.flush() == b''


def _strings(rng, alphabet, count, shortest, longest):
  return [
    bytes(rng.choices(alphabet, k=rng.randint(shortest, longest)))
    for _ in range(count)
  ]


@pytest.mark.parametrize(
  'alphabet', [b'ab', b'abc', b'\x00\xff', '\n€'.encode()]
)
def test_table_and_matcher_find_what_find_finds(alphabet):
  """Rows with strings of their own, tokens of no, one and several bytes."""
  rng = random.Random(0)
  for _ in range(100):
    stops = [
      _strings(rng, alphabet, rng.randint(0, 4), 1, rng.randint(1, 6))
      for _ in range(3)
    ]
    token_bytes = _strings(rng, alphabet, 12, 0, 5)
    table = build_stop_table(stops, token_bytes, len(token_bytes))
    for row, longest in itertools.product(range(3), range(12)):
      tokens = rng.choices(range(12), k=rng.randint(0, 2 + longest))
      _check(table, row, stops[row], token_bytes, tokens)
      _check_matcher(stops[row], [token_bytes[token] for token in tokens])


@pytest.mark.parametrize(
  'stops',
  [
    [b'aa', b'aab', b'ab'],
    [b'aab', b'ab', b'b'],
    [b'abab', b'ba'],
    [b'aabaaab', b'abaaa'],
    [b'abcabd', b'cabe'],
    [b'aaaa', b'aa'],
  ],
)
def test_overlapping_stops_in_every_short_text(stops):
  letters = [
    bytes([byte]) for byte in sorted(set(b''.join(stops)) | {ord('z')})
  ]
  table = build_stop_table([stops], letters, len(letters))
  longest = 8 if len(letters) < 4 else 4
  for tokens in itertools.product(range(len(letters)), repeat=longest):
    _check(table, 0, stops, letters, tokens)


@pytest.mark.parametrize('stop', [b'STOP', b'aabaab', '«fin»'.encode()])
def test_every_split_of_a_stop_over_tokens(stop):
  size = len(stop)
  parts = [stop[a:b] for a in range(size) for b in range(a + 1, size + 1)]
  token_bytes = [*dict.fromkeys(parts), b'S', b'x', b'']
  table = build_stop_table([[stop]], token_bytes, len(token_bytes))
  before = [[], [token_bytes.index(b'x')], [token_bytes.index(stop[:1])]]
  for cuts in itertools.product([False, True], repeat=size - 1):
    ends = [*(i for i, cut in enumerate(cuts, 1) if cut), size]
    pieces = [stop[a:b] for a, b in itertools.pairwise([0, *ends])]
    for prefix in before:
      tokens = [*prefix, *map(token_bytes.index, pieces)]
      _check(table, 0, [stop], token_bytes, tokens)
      assert _tokens_until_stop(table, 0, tokens) == len(tokens)


def test_stop_within_a_long_token():
  token_bytes = [b'before STOP after', b'ST', b'OP and more', b'O', b'']
  table = build_stop_table([[b'STOP']], token_bytes, 5)
  for tokens, expected in (
    ([0], 1),
    ([1, 2], 2),
    ([1, 4, 2], 3),
    ([1, 1, 2], 3),
    ([1, 3, 2], None),
    ([1, 3, 0], 3),
  ):
    assert _tokens_until_stop(table, 0, tokens) == expected


def test_rows_stop_at_their_own_strings_only():
  token_bytes = [b'a', b'b', b'ab', b'c']
  stops = [[b'ab'], [], [b'c'], [b'ba', b'c'], [b'c', b'ba'], [b'ab', b'ab']]
  table = build_stop_table(stops, token_bytes, 4)
  start = np.asarray(table.start)
  assert start[3] == start[4]
  assert start[0] == start[5]
  assert len(set(start)) == 4
  np.testing.assert_array_equal(table.next_state[start[1]], [start[1]] * 4)
  for tokens in itertools.product(range(4), repeat=4):
    for row, own in enumerate(stops):
      _check(table, row, own, token_bytes, tokens)


def test_tokens_without_bytes_change_nothing():
  """Those at the end of the vocabulary among them."""
  table = build_stop_table([[b'ab']], [b'a', b'', b'b'], 6)
  next_state, start = np.asarray(table.next_state), int(table.start[0])
  begun = int(next_state[start, 0])
  for state in (start, begun):
    assert (next_state[state, [1, 3, 4, 5]] == state).all()
  assert next_state[begun, 2] == STOPPED


def test_tokens_beyond_the_vocabulary_are_passed_over():
  table = build_stop_table([[b'ab']], [b'a', b'ab', b'abcdef'], 2)
  expected = build_stop_table([[b'ab']], [b'a', b'ab'], 2)
  np.testing.assert_array_equal(table.next_state, expected.next_state)


@pytest.mark.parametrize('longest', [1, 15, 16, 17, 40])
def test_states_come_in_blocks_and_lead_to_states(longest):
  stop = bytes(range(longest))
  table = build_stop_table([[stop]], [bytes([i]) for i in range(64)], 64)
  # One state for every proper beginning of the stop string.
  assert table.next_state.shape == (-(-longest // 16) * 16, 64)
  assert table.next_state.dtype == jnp.int16
  assert table.start.dtype == jnp.int32
  reached, new = set(), {int(table.start[0])}
  while new:
    reached |= new
    after = set(np.asarray(table.next_state)[list(new)].ravel().tolist())
    new = after - reached - {STOPPED}
  assert reached == set(range(longest))


def test_many_states_need_wider_integers():
  rng = random.Random(0)
  stops = _strings(rng, range(256), 2500, 16, 16)
  token_bytes = [stops[-1][:9], stops[-1][9:], b'']
  table = build_stop_table([stops, stops[-1:]], token_bytes, 3)
  assert table.next_state.shape[0] >= 2**15
  assert table.next_state.dtype == jnp.int32
  assert int(table.start[1]) >= 2**15
  for row in range(2):
    _check(table, row, stops, token_bytes, [0, 2, 1])
    _check(table, row, stops, token_bytes, [1, 0, 0])


def test_large_vocabularies_are_quick():
  # No clock here: walking 65,536 tokens by 256 states in Python would show.
  tokens = [bytes(pair) for pair in itertools.product(range(256), repeat=2)]
  stops = [[bytes([row, i, i]) for i in range(40)] for row in range(4)]
  table = build_stop_table(stops, tokens, len(tokens))
  next_state, start = map(np.asarray, (table.next_state, table.start))
  assert next_state.shape[1] == 65536
  begun = next_state[start[2], 2 * 256 + 7]
  assert next_state[begun, 7 * 256 + 99] == STOPPED
  assert next_state[begun, 8 * 256 + 7] != STOPPED


def test_follow_under_jit_in_a_batch():
  token_bytes = [b'a', b'b', b'ab', b'c', b'']
  stops = [[b'aab'], [], [b'bc', b'ca'], [b'c']]
  table = build_stop_table(stops, token_bytes, 5)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 5, (4, 12)).astype(np.int32)
  follow = jax.jit(StopTable.follow)
  stopped, states = follow(table, table.start, tokens)
  counts = [
    _expected_tokens(own, token_bytes, row)
    for own, row in zip(stops, tokens, strict=True)
  ]
  assert counts[1] is None
  assert sum(count is not None for count in counts) >= 2
  for row, count in enumerate(counts):
    expected = np.arange(1, 13) >= (99 if count is None else count)
    np.testing.assert_array_equal(stopped[row], expected)
  np.testing.assert_array_equal(states[:, 0], table.start)
  np.testing.assert_array_equal(states[:, 1:] == STOPPED, stopped)
  # In portions, from the state where the last one ended.
  for cut in (1, 6, 11):
    before, seen = follow(table, table.start, tokens[:, :cut])
    after, rest = follow(table, seen[:, -1], tokens[:, cut:])
    np.testing.assert_array_equal(
      np.concatenate([before, after], axis=1), stopped
    )
    np.testing.assert_array_equal(rest, states[:, cut:])


def test_empty_stop_is_refused_by_row():
  with pytest.raises(ValueError, match='row 1 has an empty stop string'):
    build_stop_table([[b'a'], [b'b', b'']], [b'a'], 1)
  with pytest.raises(ValueError, match='a stop string is empty'):
    StopMatcher([b'a', b''])


@pytest.mark.parametrize(
  ('stops', 'pieces'),
  [
    # Of the stop strings that end together the longest, at the first end.
    ([b'b', b'aab', b'ab'], [(b'xaabab', b'x')]),
    ([b'aab', b'b'], [(b'xaabab', b'x')]),
    # The first end counts, not the first start.
    ([b'abcd', b'c'], [(b'xabcd', b'xab')]),
    # What may begin a stop string is held back until the end.
    (
      [b'\n\nQ:', b'END'],
      [
        *((b'one\n', b'one'), (b'\n', b''), (b'\n', b'\n')),
        *((b'QE', b'\n\nQ'), (b'N', b''), (None, b'EN')),
      ],
    ),
    # Nothing comes after a stop string.
    (
      [b'STOP'],
      [
        *((b'text ST', b'text '), (b'OP more', b'')),
        *((b'still more', b''), (None, b'')),
      ],
    ),
    ([], [(b'a\x00\xff', b'a\x00\xff'), (None, b'')]),
  ],
)
def test_a_matcher_by_hand(stops, pieces):
  matcher = StopMatcher(stops)
  for fed, returned in pieces:
    assert (matcher.flush() if fed is None else matcher.feed(fed)) == returned
  assert matcher.stopped == (stops not in ([b'\n\nQ:', b'END'], []))
