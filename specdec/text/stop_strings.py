"""Exact matching of stop strings: an Aho-Corasick automaton over bytes.

A state of the automaton is the longest prefix of a stop string with which the
text so far ends, so a decode carries one integer per row. The automaton reads
bytes, because a stop string can be split into tokens in many ways and can end
within a token. The device reads whole tokens with `StopTable`; the host reads
bytes with `StopMatcher`, to know which text can be shown already.

A special token, such as <|im_end|>, has no bytes, because it is not shown, but
a stop string may name it. There it is one symbol beyond the bytes.
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

# The state of a row whose text contains a stop string.
STOPPED = -1

# The number of states is a multiple of this, so that few shapes are compiled.
_STATE_BLOCK = 16

# Bytes; the symbols from here on are special tokens.
_NUM_BYTES = 256
_NO_TOKENS: Mapping[bytes, int] = types.MappingProxyType({})


class StopTable(flax.struct.PyTreeNode):
  """The transition of each state by each token; rows have their own strings."""

  # `[Q, V]` int16, or int32 if Q is large: the state after a token; `STOPPED`
  # if a stop string ends within the token or at its end.
  next_state: jax.Array
  start: jax.Array  # `[B]` int32, the state before the first new token.

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
  stops: Iterable[bytes], special: Mapping[bytes, int]
) -> dict[bytes, int]:
  """The special tokens that stop strings name, by their texts; longest first.

  A token's symbol is its index, from `_NUM_BYTES` on.
  """
  texts = [text for text in special if any(text in stop for stop in stops)]
  return {text: special[text] for text in sorted(texts, key=len, reverse=True)}


def _spelled(stops: Iterable[bytes], named: Iterable[bytes]) -> set[str]:
  """The symbols of stop strings: of all bytes, and of special tokens as such.

  A symbol is the character of its number.
  """
  texts = [text.decode('latin-1') for text in named]
  words = re.compile('|'.join(map(re.escape, texts)) or '(?!)')
  symbol = lambda found: chr(_NUM_BYTES + texts.index(found[0]))
  plain = {stop.decode('latin-1') for stop in stops}
  return plain | {words.sub(symbol, stop) for stop in plain}


def _automaton(
  stops: set[str], num_symbols: int
) -> tuple[np.ndarray, np.ndarray]:
  """Goto and fail transitions in one table (Aho and Corasick, 1975).

  Returns:
    `[states, symbols]` int32, the state after a symbol; state 0 is the empty
    prefix. `[states]` bool, whether a stop string ends there.
  """
  prefixes = {stop[:size] for stop in stops for size in range(len(stop))}
  prefixes |= {'', *stops}
  # In an order that all hosts share.
  ordered = sorted(prefixes, key=lambda prefix: (len(prefix), prefix))
  states = {one: state for state, one in enumerate(ordered)}
  children = collections.defaultdict[str, list[str]](list)
  for prefix in [*states][1:]:
    children[prefix[:-1]].append(prefix)
  fail = {'': 0}
  delta = np.zeros((len(states), num_symbols), np.int32)
  is_stop = np.zeros(len(states), bool)
  # The fail state is shorter, so its row is already complete.
  for prefix, state in states.items():
    delta[state] = delta[fail[prefix]]
    is_stop[state] = prefix in stops or is_stop[fail[prefix]]
    for child in children[prefix]:
      fail[child] = delta[state, ord(child[-1])]
      delta[state, ord(child[-1])] = states[child]
  # A special token with which no stop string goes on is as if it was not there,
  # like those that none names: the text that is shown goes on.
  tokens = delta[:, _NUM_BYTES:]
  tokens[...] = np.where(tokens, tokens, np.arange(len(delta))[:, None])
  return delta, is_stop


def build_stop_table(
  stops: Sequence[Sequence[bytes]],
  token_bytes: Sequence[bytes],
  vocab_size: int,
  special: Mapping[bytes, int] = _NO_TOKENS,
) -> StopTable:
  """Builds the table that a decode reads; it takes 2 Q V bytes.

  Q is about the number of bytes of the distinct stop strings: each distinct
  set of stop strings has its own automaton in a common state space.

  Args:
    stops: those of each row.
    token_bytes: of each token; ends before the tokens at the end of the
      vocabulary that have no bytes.
    vocab_size: V.
    special: the ids of tokens without bytes that stop strings may name, by
      their texts.

  Raises:
    ValueError: a stop string is empty.
  """
  for row, strings in enumerate(stops):
    if not all(strings):
      raise ValueError(f'row {row} has an empty stop string: {list(strings)}')
  sets = [tuple(sorted(set(strings))) for strings in stops]
  named = _named([stop for strings in sets for stop in strings], special)
  ids, num_symbols = [*named.values()], _NUM_BYTES + len(named)
  offsets, blocks, num_states = {}, [], 0
  for strings in dict.fromkeys(sets):
    offsets[strings] = num_states
    own, is_stop = _automaton(_spelled(strings, named), num_symbols)
    renamed = np.where(is_stop, STOPPED, num_states + np.cumsum(~is_stop) - 1)
    blocks.append(renamed[own[~is_stop]].astype(np.int32))
    num_states += len(blocks[-1])
  padded = -(-num_states // _STATE_BLOCK) * _STATE_BLOCK
  # The last row (index -1) is that of `STOPPED`, which is never left.
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
  starts = jnp.array([offsets[strings] for strings in sets], jnp.int32)
  return StopTable(next_state=jnp.asarray(next_state), start=starts)


class StopMatcher:
  """Cuts a text that arrives in pieces before its first stop string.

  The first stop string is that which ends first; of those that end at the same
  byte, the longest. Once it was found (`stopped`), nothing more is returned.

  Attributes:
    symbols: of the special tokens that stop strings name, by their ids.
    stopped: whether a stop string was found.
  """

  def __init__(
    self, stops: Sequence[bytes], special: Mapping[bytes, int] = _NO_TOKENS
  ):
    """The arguments are those of `build_stop_table`, for one row.

    Raises:
      ValueError: a stop string is empty.
    """
    if not all(stops):
      raise ValueError(f'a stop string is empty: {list(stops)}')
    named = _named(stops, special)
    self.symbols = {
      token: chr(_NUM_BYTES + index)
      for index, token in enumerate(named.values())
    }
    self.stopped = False
    # The longest first.
    self._stops = sorted(_spelled(stops, named), key=len, reverse=True)
    self._beginnings = {
      stop[:size] for stop in self._stops for size in range(1, len(stop))
    }
    self._held = ''  # The longest end of the text that is such a beginning.

  def feed(self, text: str) -> bytes:
    """Reads symbols; returns the bytes that are in no stop string.

    The symbol of a byte is the character of its number, as in Latin-1.
    """
    shown = ''
    for symbol in '' if self.stopped else text:
      seen = self._held + symbol
      if stop := next(filter(seen.endswith, self._stops), ''):
        self.stopped, self._held = True, ''
        return _bytes(shown + seen[: -len(stop)])
      ends = (seen[start:] for start in range(len(seen)))
      held = next((end for end in ends if end in self._beginnings), '')
      if held or ord(symbol) < _NUM_BYTES:
        shown += seen[: len(seen) - len(held)]
        self._held = held
    return _bytes(shown)

  def flush(self) -> bytes:
    """Returns the text that was held back; call it at the end of the text."""
    held, self._held = self._held, ''
    return _bytes(held)


def _bytes(symbols: str) -> bytes:
  """The bytes; special tokens are not shown."""
  return symbols.encode('latin-1', 'ignore')
