"""Stop strings on the device and on the host, against a slow search.

`token_bytes_test` compares growing text with `str.find`.
"""

import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest

from specdec.text import sections as sections_lib
from specdec.text import stop_strings


def _symbols(text, special):
  """A stop string with special tokens as ~id, the longest first."""
  tokens = [token for token in special if text.startswith(token)]
  if not text:
    return []
  if tokens:
    longest = max(tokens, key=len)
    return [~special[longest], *_symbols(text[len(longest) :], special)]
  return [text[0], *_symbols(text[1:], special)]


def _slow(stops, special, token_bytes, tokens, sections, first):
  """Yields for each token what was said by section, its end, and the section.

  The end may be a part of a stop string, or of what ends a section. After a
  stop string the section is None.
  """
  section, text, runs = first, [], []
  shown = lambda symbols: bytes(symbol for symbol in symbols if symbol >= 0)
  for token in tokens:
    for symbol in token_bytes[token] or [~token]:
      current = sections[section]
      if symbol == 10 and not text and current.strips:
        continue
      ends = [(_symbols(end, special), then) for end, then in current.ends]
      marks = [*special, *(end for end, _ in current.ends)]
      for stop in stops:
        if current.kind == 'text' or any(mark in stop for mark in marks):
          ends += [([*stop], None), (_symbols(stop, special), None)]
      begun = lambda text, ends=ends: max(
        (
          size
          for end, _ in ends
          for size in range(1, len(end) + 1)
          if end[:size] == text[-size:]
        ),
        default=0,
      )
      # A special token is not there, unless one of these goes on with it.
      if symbol < 0 and not begun([*text, symbol]):
        continue
      text.append(symbol)
      done = [pair for pair in ends if pair[0] == text[-len(pair[0]) :]]
      if done:
        # If two are equal, the stop string counts.
        end, then = max(done, key=lambda pair: (len(pair[0]), pair[1] is None))
        runs.append((section, shown(text[: -len(end)])))
        section, text = then, []
        if then is None:
          yield runs, b'', None
          return
    held = shown(text[len(text) - begun(text) :]) if text else b''
    yield [*runs, (section, shown(text))], held, section


def _by_section(runs):
  """The text of each section, in one piece."""
  said = {section: b'' for section, _ in runs}
  for section, data in runs:
    said[section] += data
  return {section: data for section, data in said.items() if data}


def _check(table, row, stops, special, token_bytes, tokens, sections, first):
  """The section in which a text ends; None after a stop string."""
  next_state, state = np.asarray(table.next_state), np.asarray(table.start)[row]
  matcher = stop_strings.StopMatcher(stops, special, sections, first)
  given = stops, special, token_bytes, tokens, sections, first
  runs, section = [], first
  for token, step in zip(tokens, _slow(*given), strict=False):
    expected, held, section = step
    state = next_state[state, token]
    plain = token_bytes[token].decode('latin-1')
    runs += matcher.feed(matcher.symbols.get(token, plain))
    is_stopped = state == stop_strings.STOPPED
    assert is_stopped == matcher.stopped == (section is None), (stops, tokens)
    assert _by_section([*runs, (section, held)]) == _by_section(expected)
  if section is not None and tokens:
    assert (matcher.section, matcher.flush()) == (section, held)
  assert matcher.flush() == b''
  return section


def _texts(rng, words, count, shortest, longest):
  return [
    b''.join(rng.choices(words, k=rng.randint(shortest, longest)))
    for _ in range(count)
  ]


def _random_sections(rng, words):
  """Three sections that lead to one another, and one that is never left."""
  kinds = rng.sample(sections_lib.KINDS, 3)
  ends = lambda: dict.fromkeys(_texts(rng, words, rng.randint(1, 2), 1, 2), 0)
  return (
    *(
      sections_lib.Section(
        kind, tuple((end, rng.randint(0, 3)) for end in ends())
      )
      for kind in kinds
    ),
    *sections_lib.PLAIN,
  )


@pytest.mark.parametrize(
  ('letters', 'special'),
  [
    ([b'a', b'b'], {}),
    ([b'\n', b'\xe2', b'\xff'], {}),
    ([b'\n', b'x'], {b'<b>': 4}),
    ([b'x', b'<', b'a>'], {b'<a>': 3, b'<a><b>': 5, b'<b>': 4}),
  ],
)
def test_table_and_matcher_find_what_a_slow_search_finds(letters, special):
  """Rows with strings of their own, tokens of no, one and several bytes."""
  rng, ends, words = random.Random(0), [], [*letters, *special]
  for number in range(60):
    stops = [
      _texts(rng, words, rng.randint(0, 4), 1, rng.randint(1, 6))
      for _ in range(3)
    ]
    token_bytes = _texts(rng, letters, 12, 0, 5)
    for token in special.values():
      token_bytes[token] = b''
    # The last tokens have no bytes, or some are not of the vocabulary.
    vocab_size = rng.randint(9, 15)
    sections, firsts = sections_lib.PLAIN, [0, 0, 0]
    if number % 2:
      sections = _random_sections(rng, words)
      firsts = rng.choices(range(4), k=3)
    table = stop_strings.build_stop_table(
      stops, token_bytes, vocab_size, special, sections
    ).in_sections(firsts)
    assert table.next_state.shape[1] == vocab_size
    token_bytes += [b''] * 3
    for row, longest in itertools.product(range(3), range(6)):
      tokens = rng.choices(range(vocab_size), k=rng.randint(0, 2 + longest))
      given = stops[row], special, token_bytes, tokens, sections, firsts[row]
      ends.append(_check(table, row, *given))
  assert {*ends} == {None, 0, 1, 2, 3}
  assert 120 < ends.count(None) < 960


def test_states_come_in_blocks_and_lead_to_states():
  for longest in (1, 16, 17):
    stop = bytes(range(longest))
    table = stop_strings.build_stop_table(
      [[stop]], [bytes([i]) for i in range(64)], 64
    )
    # One state for every proper beginning of the stop string.
    assert table.next_state.shape == (-(-longest // 16) * 16, 64)
    following = np.asarray(table.next_state)[:longest]
    states = {0, *range(longest), stop_strings.STOPPED}
    assert {*following.ravel().tolist()} == states


def test_all_hosts_number_states_alike():
  """By length and bytes, not as a set of strings happens to be ordered."""
  letters = 'abcdefgh'
  ends = {2 * letter: stop_strings.STOPPED for letter in letters}
  delta, _ = stop_strings._automaton(ends, 256)
  after = [int(delta[0, ord(letter)]) for letter in letters]
  assert after == [*range(1, 9)]


def test_many_states_need_wider_integers():
  rng = random.Random(0)
  for count, dtype in ((20, jnp.int16), (2500, jnp.int32)):
    stops = [rng.randbytes(16) for _ in range(count)]
    token_bytes = [stops[-1][:9], stops[-1][9:], b'']
    table = stop_strings.build_stop_table([stops, stops[-1:]], token_bytes, 3)
    assert table.next_state.dtype == dtype
    for row, tokens in itertools.product(range(2), ([0, 2, 1], [1, 0, 0])):
      given = (stops, stops[-1:])[row], {}, token_bytes, tokens
      _check(table, row, *given, sections_lib.PLAIN, 0)


def test_empty_stop_is_refused_by_row():
  with pytest.raises(ValueError, match='row 1 has an empty stop string'):
    stop_strings.build_stop_table([[b'a'], [b'b', b'']], [b'a'], 1)
  with pytest.raises(ValueError, match='a stop string is empty'):
    stop_strings.StopMatcher([b'a', b''])


def test_a_token_before_newlines_is_not_the_beginning_of_a_section():
  sections = (sections_lib.Section('text', ((b'q', 0),)), *sections_lib.PLAIN)
  stops, special, token_bytes = [b'\n', b'x<b>'], {b'<b>': 2}, [b'\n', b'x']
  table = stop_strings.build_stop_table(
    [stops], token_bytes, 3, special, sections
  )
  start = int(table.start[0])
  assert np.asarray(table.next_state)[start, [0, 2]].tolist() == [start] * 2
  matcher = stop_strings.StopMatcher(stops, special, sections)
  assert not _by_section(matcher.feed(f'{matcher.symbols[2]}\n'))
  assert not matcher.stopped
