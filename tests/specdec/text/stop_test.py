"""Stop strings on the device and on the host, against `bytes.find`."""

import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest

from specdec.text import stop_strings


def _first_stop(stops, text):
  """Index at which the text is cut, and end of the stop string; or None."""
  found = [(text.find(stop), stop) for stop in stops]
  ends = [(at + len(stop), at) for at, stop in found if at >= 0]
  return min(ends)[::-1] if ends else None


def _tokens_until_stop(table, row, tokens):
  """The number of tokens read until one stops; None if none does."""
  next_state, state = np.asarray(table.next_state), np.asarray(table.start)[row]
  for count, token in enumerate(tokens, 1):
    state = next_state[state, token]
    if state == stop_strings.STOPPED:
      return count
  return None


def _check(table, row, stops, token_bytes, tokens):
  texts = [token_bytes[token] for token in tokens]
  stop = _first_stop(stops, b''.join(texts))
  ends = np.cumsum([*map(len, texts)])
  expected = None if stop is None else np.searchsorted(ends, stop[1]) + 1
  assert _tokens_until_stop(table, row, tokens) == expected, (stops, texts)


def _check_matcher(stops, pieces):
  """After each piece and at the end, what is returned and what is held."""
  matcher, text, returned = stop_strings.StopMatcher(stops), b'', b''
  beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
  for piece in pieces:
    text += piece
    returned += matcher.feed(piece)
    stop = _first_stop(stops, text)
    assert matcher.stopped == (stop is not None)
    # The longest end of the text that a stop string could begin with is held.
    held = max(map(len, filter(text.endswith, beginnings)), default=0)
    assert returned == text[: stop[0] if stop else len(text) - held], stops
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
    # The last tokens have no bytes, or some are not of the vocabulary.
    vocab_size = rng.randint(9, 15)
    table = stop_strings.build_stop_table(stops, token_bytes, vocab_size)
    assert table.next_state.shape[1] == vocab_size
    token_bytes += [b''] * 3
    for row, longest in itertools.product(range(3), range(12)):
      tokens = rng.choices(range(vocab_size), k=rng.randint(0, 2 + longest))
      _check(table, row, stops[row], token_bytes, tokens)
      _check_matcher(stops[row], [token_bytes[token] for token in tokens])


_TOKENS = {b'<a>': 3, b'<a><b>': 5, b'<b>': 4}


def _symbols(text):
  """A stop string with special tokens as -id, the longest first."""
  found = [one for one in sorted(_TOKENS, key=len)[::-1] if text[:3] == one[:3]]
  found = [one for one in found if text.startswith(one)]
  if not text:
    return []
  if found:
    return [-_TOKENS[found[0]], *_symbols(text[len(found[0]) :])]
  return [text[0], *_symbols(text[1:])]


def _slow_special(stops, token_bytes, tokens):
  """The number of tokens until a stop string, and the text before it."""
  spelled = [[*stop] for stop in stops] + [*map(_symbols, stops)]
  goes_on = lambda text: any(
    one[:size] == text[-size:]
    for one in spelled
    for size in range(1, len(one) + 1)
  )
  text = []
  shown = lambda symbols: bytes(one for one in symbols if one >= 0)
  for count, token in enumerate(tokens, 1):
    for symbol in token_bytes[token] or [-token]:
      if symbol < 0 and not goes_on([*text, symbol]):
        continue
      text.append(symbol)
      ends = [len(one) for one in spelled if one == text[-len(one) :]]
      if ends:
        return count, shown(text[: -max(ends)])
  return None, shown(text)


def test_stops_that_name_special_tokens():
  """Alone and within other text, also where it is spelled by other tokens."""
  token_bytes = [b'x', b'<', b'a>', b'', b'', b'', b'xx', b'']
  words = [b'x', *_TOKENS, b'<', b'a>']
  rng, ends = random.Random(0), 0
  for _ in range(300):
    stops = [
      [
        b''.join(rng.choices(words, k=rng.randint(1, 3)))
        for _ in range(rng.randint(0, 3))
      ]
      for _ in range(3)
    ]
    table = stop_strings.build_stop_table(stops, token_bytes, 8, _TOKENS)
    for row, own in enumerate(stops):
      tokens = rng.choices(range(8), k=8)
      expected, text = _slow_special(own, token_bytes, tokens)
      assert _tokens_until_stop(table, row, tokens) == expected, (own, tokens)
      matcher, shown = stop_strings.StopMatcher(own, _TOKENS), b''
      for token in tokens:
        symbol = matcher.symbols.get(token)
        shown += matcher.feed(
          token_bytes[token] if symbol is None else [symbol]
        )
      assert shown + matcher.flush() == text, (own, tokens)
      assert matcher.stopped == (expected is not None)
      ends += matcher.stopped
  assert 200 < ends < 800


def test_states_come_in_blocks_and_lead_to_states():
  for longest in (1, 16, 17):
    stop = bytes(range(longest))
    table = stop_strings.build_stop_table(
      [[stop]], [bytes([i]) for i in range(64)], 64
    )
    # One state for every proper beginning of the stop string.
    assert table.next_state.shape == (-(-longest // 16) * 16, 64)
    own = np.asarray(table.next_state)[:longest]
    assert {*own.ravel().tolist()} == {0, *range(longest), stop_strings.STOPPED}


def test_many_states_need_wider_integers():
  rng = random.Random(0)
  for count, dtype in ((20, jnp.int16), (2500, jnp.int32)):
    stops = _strings(rng, range(256), count, 16, 16)
    token_bytes = [stops[-1][:9], stops[-1][9:], b'']
    table = stop_strings.build_stop_table([stops, stops[-1:]], token_bytes, 3)
    assert table.next_state.dtype == dtype
    for row, tokens in itertools.product(range(2), ([0, 2, 1], [1, 0, 0])):
      _check(table, row, stops, token_bytes, tokens)


def test_empty_stop_is_refused_by_row():
  with pytest.raises(ValueError, match='row 1 has an empty stop string'):
    stop_strings.build_stop_table([[b'a'], [b'b', b'']], [b'a'], 1)
  with pytest.raises(ValueError, match='a stop string is empty'):
    stop_strings.StopMatcher([b'a', b''])
