"""Exact matching of stop strings: an Aho-Corasick automaton over bytes.

A state of the automaton is the longest prefix of a stop string with which the
text so far ends, so a decode carries one integer per row. The automaton reads
bytes, because a stop string can be split into tokens in many ways and can end
within a token. The device reads whole tokens with `StopTable`; the host reads
bytes with `StopMatcher`, to know which text can be shown already.

A special token, such as <|im_end|>, has no bytes, because it is not shown, but
a stop string may name it. The automaton reads it as one symbol after the 256
bytes.

A text may have sections (`specdec.text.sections`), each with an automaton of
its own. The texts that end a section are found like stop strings, and lead to
the first state of another section.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import re
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec.text import automaton as automaton_lib
from specdec.text import sections as sections_lib

# The state of a row whose text contains a stop string.
STOPPED = -1

# A state at which nothing ends.
_GOES_ON = -2

# The number of states is a multiple of this, so that few shapes are compiled.
_STATE_BLOCK = 16

# Bytes; the symbols from here on are special tokens.
_NUM_BYTES = 256
_NEWLINE = ord('\n')
_NO_TOKENS: Mapping[bytes, int] = types.MappingProxyType({})


class StopTable(flax.struct.PyTreeNode):
  """The transition of each state by each token; rows have their own strings."""

  # `[Q, V]` int16, or int32 if Q is large: the state after a token; `STOPPED`
  # if a stop string ends within the token or at its end.
  next_state: jax.Array
  # `[B]` int32, the first state of section 0; the first states of the other
  # sections follow it.
  base: jax.Array
  section: jax.Array  # `[B]` int32, the first section of each row's new text.

  @property
  def start(self) -> jax.Array:
    """`[B]` int32, the state before the first new token."""
    return self.base + self.section

  def in_sections(self, sections: Sequence[int] | np.ndarray) -> 'StopTable':
    """The table for new texts that begin in other sections, one per row."""
    return self.replace(section=jnp.array(sections, jnp.int32))

  def follow(
    self, state: jax.Array, tokens: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Reads `tokens [B, n]` from `state [B]`, both int32.

    Returns:
      `[B, n]` bool, true from the token on that completes a stop string, and
      `[B, n + 1]` int32, the state before the first and after each token.
    """
    states = [state]
    for index in range(tokens.shape[1]):
      before = states[-1]
      after = self.next_state[jnp.maximum(before, 0), tokens[:, index]]
      after = after.astype(jnp.int32)
      states.append(jnp.where(before == STOPPED, STOPPED, after))
    stacked = jnp.stack(states, axis=1)
    return stacked[:, 1:] == STOPPED, stacked


def _named(
  stops: Iterable[bytes],
  sections: sections_lib.Sections,
  special: Mapping[bytes, int],
) -> dict[bytes, int]:
  """The ids of the special tokens in what is searched for; longest first.

  A token's symbol is its index, from `_NUM_BYTES` on.
  """
  ends = [text for section in sections for text, _ in section.ends]
  texts = [*stops, *ends]
  tokens = [token for token in special if any(token in text for text in texts)]
  return {
    token: special[token] for token in sorted(tokens, key=len, reverse=True)
  }


def _symbols(text: bytes, named: Iterable[bytes]) -> str:
  """The symbols of a text, which may name special tokens.

  A symbol is the character of its number.
  """
  texts = [token.decode('latin-1') for token in named]
  words = re.compile('|'.join(map(re.escape, texts)) or '(?!)')
  symbol = lambda match: chr(_NUM_BYTES + texts.index(match[0]))
  return words.sub(symbol, text.decode('latin-1'))


def _ends(
  stops: Iterable[bytes],
  section: sections_lib.Section,
  named: Iterable[bytes],
) -> dict[str, int]:
  """The ends of a section, in symbols, and where they lead; longest first.

  A stop string is spelled in bytes alone, or with symbols for special tokens.
  Outside the text itself it is searched for only if it names a special token or
  an end of this section: such a stop string is meant for these sections.
  """
  ends = {_symbols(text, named): follower for text, follower in section.ends}
  marks = [*named, *(text for text, _ in section.ends)]
  for stop in stops:
    if section.is_text or any(mark in stop for mark in marks):
      ends[stop.decode('latin-1')] = STOPPED
      ends[_symbols(stop, named)] = STOPPED
  return {text: ends[text] for text in sorted(ends, key=len, reverse=True)}


def _automaton(
  ends: Mapping[str, int], num_symbols: int
) -> tuple[np.ndarray, np.ndarray]:
  """Goto and fail transitions in one table (Aho and Corasick, 1975).

  Returns:
    `[states, symbols]` int32, the state after a symbol; state 0 is the empty
    prefix. `[states]` int32, the section that follows the end that is complete
    in a state, or `STOPPED`, or `_GOES_ON` if no end is.
  """
  prefixes = {text[:size] for text in ends for size in range(len(text))}
  prefixes |= {'', *ends}
  # In an order that all hosts share.
  ordered = sorted(prefixes, key=lambda prefix: (len(prefix), prefix))
  states = {prefix: state for state, prefix in enumerate(ordered)}
  children = collections.defaultdict[str, list[str]](list)
  for prefix in [*states][1:]:
    children[prefix[:-1]].append(prefix)
  fail = {'': 0}
  delta = np.zeros((len(states), num_symbols), np.int32)
  leads = np.full(len(states), _GOES_ON, np.int32)
  # The fail state is shorter, so its row is already complete.
  for prefix, state in states.items():
    delta[state] = delta[fail[prefix]]
    leads[state] = ends.get(prefix, leads[fail[prefix]])
    for child in children[prefix]:
      fail[child] = delta[state, ord(child[-1])]
      delta[state, ord(child[-1])] = states[child]
  # A special token that continues no stop string does not change the state, nor
  # does one that no stop string names.
  tokens = delta[:, _NUM_BYTES:]
  tokens[...] = np.where(tokens, tokens, np.arange(len(delta))[:, None])
  return delta, leads


def _joined(
  automata: Sequence[tuple[np.ndarray, np.ndarray]],
  sections: sections_lib.Sections,
  base: int,
) -> np.ndarray:
  """`[states, symbols]` int32, the states of all sections.

  They are numbered from `base`, and the first states of sections come first.
  """
  numbers, size = list[np.ndarray](), len(sections)
  for index, section in enumerate(sections):
    leads = automata[index][1]
    others = leads == _GOES_ON
    others[0] = section.strips
    number = np.where(leads == STOPPED, STOPPED, base + leads)
    number[0] = base + index
    number[others] = base + size + np.arange(others.sum())
    size += others.sum()
    numbers.append(number)
  joined = np.empty((size, automata[0][0].shape[1]), np.int32)
  for index, (delta, leads) in enumerate(automata):
    number, kept = numbers[index], leads == _GOES_ON
    joined[number[kept] - base] = number[delta[kept]]
    if sections[index].strips:
      # The first state differs: newlines and tokens do not change it.
      row = number[delta[0]]
      row[_NUM_BYTES:][delta[0, _NUM_BYTES:] == 0] = base + index
      row[_NEWLINE] = base + index
      joined[index] = row
  return joined


def build_stop_table(
  stops: Sequence[Sequence[bytes]],
  token_bytes: Sequence[bytes],
  vocab_size: int,
  special: Mapping[bytes, int] = _NO_TOKENS,
  sections: sections_lib.Sections = sections_lib.PLAIN,
) -> StopTable:
  """Builds the table that a decode reads; it takes 2 Q V bytes.

  Q is about the number of bytes of the distinct stop strings: each distinct
  set of stop strings has its own automaton in a common state space.

  Args:
    stops: the stop strings of each row.
    token_bytes: of each token; ends before the tokens at the end of the
      vocabulary that have no bytes.
    vocab_size: V.
    special: the ids of tokens without bytes that stop strings may name, by
      their texts.
    sections: the sections of all texts; they begin in section 0, see
      `StopTable.in_sections`.

  Raises:
    ValueError: a stop string is empty.
  """
  for row, strings in enumerate(stops):
    if not all(strings):
      raise ValueError(f'row {row} has an empty stop string: {list(strings)}')
  sets = [tuple(sorted(set(strings))) for strings in stops]
  stated = [stop for strings in sets for stop in strings]
  named = _named(stated, sections, special)
  ids, num_symbols = [*named.values()], _NUM_BYTES + len(named)
  bases, blocks, num_states = {}, [], 0
  for strings in dict.fromkeys(sets):
    bases[strings] = num_states
    automata = [
      _automaton(_ends(strings, section, named), num_symbols)
      for section in sections
    ]
    blocks.append(_joined(automata, sections, num_states))
    num_states += len(blocks[-1])
  padded = -(-num_states // _STATE_BLOCK) * _STATE_BLOCK
  # The last row (index -1) belongs to `STOPPED`, which is never left.
  rest = np.full((padded + 1 - num_states, num_symbols), STOPPED, np.int32)
  delta = np.concatenate([*blocks, rest])
  pieces = [*token_bytes[:vocab_size]]
  pieces += [b''] * (vocab_size - len(pieces))
  dtype = np.int16 if padded < 2**15 else np.int32
  next_state = np.empty((padded, vocab_size), dtype)
  for first in range(0, padded, _STATE_BLOCK):
    states = np.arange(first, first + _STATE_BLOCK, dtype=np.int32)
    next_state[states] = automaton_lib.read_tokens(delta, states, pieces)
    next_state[states[:, None], ids] = delta[states, _NUM_BYTES:]
  return StopTable(
    next_state=jnp.asarray(next_state),
    base=jnp.array([bases[strings] for strings in sets], jnp.int32),
    section=jnp.zeros(len(sets), jnp.int32),
  )


class StopMatcher:
  """Cuts a text that arrives in pieces before its first stop string.

  The first stop string is the one that ends first; of several that end at the
  same byte it is the longest. Once it was found (`stopped`), nothing more is
  returned. Ends of sections are found in the same way.

  Attributes:
    symbols: the symbols of special tokens that are searched for, by their ids.
    stopped: whether a stop string was found.
    section: the index of the current section.
  """

  def __init__(
    self,
    stops: Sequence[bytes],
    special: Mapping[bytes, int] = _NO_TOKENS,
    sections: sections_lib.Sections = sections_lib.PLAIN,
    first: int = 0,
  ):
    """Takes the arguments of `build_stop_table`, for one row.

    Raises:
      ValueError: a stop string is empty.
    """
    if not all(stops):
      raise ValueError(f'a stop string is empty: {list(stops)}')
    named = _named(stops, sections, special)
    self.symbols = {
      token: chr(_NUM_BYTES + index)
      for index, token in enumerate(named.values())
    }
    self.stopped, self.section = False, first
    self._strips = [section.strips for section in sections]
    self._begins = True  # Nothing is in the section yet.
    self._ends = [_ends(stops, section, named) for section in sections]
    self._beginnings = [
      {text[:size] for text in ends for size in range(1, len(text))}
      for ends in self._ends
    ]
    self._held = ''  # The longest end of the text that is such a beginning.

  def feed(self, text: str) -> list[tuple[int, bytes]]:
    """Reads symbols; returns the bytes that are in no stop string and no end.

    The symbol of a byte is the character of its number, as in Latin-1.

    Returns:
      Sections and what was said in them, in order; the last goes on, unless the
      text is stopped.
    """
    runs, shown = list[tuple[int, bytes]](), ''
    for symbol in '' if self.stopped else text:
      if symbol == '\n' and self._begins and self._strips[self.section]:
        continue
      seen, ends = self._held + symbol, self._ends[self.section]
      if end := next(filter(seen.endswith, ends), ''):
        runs.append((self.section, _bytes(shown + seen[: -len(end)])))
        shown = self._held = ''
        if ends[end] == STOPPED:
          self.stopped = True
          return runs
        self.section, self._begins = ends[end], True
        continue
      beginnings = self._beginnings[self.section]
      rests = (seen[start:] for start in range(len(seen)))
      held = next((rest for rest in rests if rest in beginnings), '')
      if held or ord(symbol) < _NUM_BYTES:
        shown += seen[: len(seen) - len(held)]
        self._held, self._begins = held, False
    return [*runs, (self.section, _bytes(shown))]

  def flush(self) -> bytes:
    """Returns the text that was held back; call it at the end of the text."""
    held, self._held = self._held, ''
    return _bytes(held)


def _bytes(symbols: str) -> bytes:
  """The bytes; special tokens are not shown."""
  return symbols.encode('latin-1', 'ignore')
