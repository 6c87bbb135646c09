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
import dataclasses
import re
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec.text import token_trie

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


@dataclasses.dataclass(frozen=True)
class _Automaton:
  """The automaton of a set of stop strings; state 0 is the empty prefix."""

  delta: np.ndarray  # [states, symbols] int32, the state after a symbol.
  depth: np.ndarray  # [states] int32, the length of the prefix.
  # [states] int32, the length of the longest stop string that ends here, or 0.
  stop_length: np.ndarray


def _named(
  stops: Iterable[bytes], special: Mapping[bytes, int]
) -> dict[bytes, int]:
  """The special tokens that stop strings name, by their texts; longest first.

  A token's symbol is its index, from `_NUM_BYTES` on.
  """
  texts = [text for text in special if any(text in stop for stop in stops)]
  return {text: special[text] for text in sorted(texts, key=len, reverse=True)}


def _spellings(stop: bytes, named: Sequence[bytes]) -> set[tuple[int, ...]]:
  """The symbols of a stop string: its bytes, and special tokens as such."""
  words = b'|'.join(map(re.escape, named))
  symbols: list[int] = []
  for part in re.split(b'(' + words + b')', stop) if named else [stop]:
    is_token = part in named
    symbols += [_NUM_BYTES + named.index(part)] if is_token else part
  return {tuple(stop), tuple(symbols)}


def _build_automaton(
  stops: Iterable[Sequence[int]], num_symbols: int
) -> _Automaton:
  """Goto and fail transitions in one table (Aho and Corasick, 1975)."""
  children: list[dict[int, int]] = [{}]
  depths, stop_lengths = [0], [0]
  for stop in stops:
    state = 0
    for symbol in stop:
      if symbol not in children[state]:
        children[state][symbol] = len(children)
        children.append({})
        depths.append(depths[state] + 1)
        stop_lengths.append(0)
      state = children[state][symbol]
    stop_lengths[state] = len(stop)
  delta = np.zeros((len(children), num_symbols), np.int32)
  fail = [0] * len(children)
  # Breadth first: the fail state is shorter, so its row is already complete.
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    # A stop string that ends the fail state ends this state, too, but is
    # shorter than a stop string which is this state.
    stop_lengths[state] = stop_lengths[state] or stop_lengths[fail[state]]
    delta[state] = delta[fail[state]]
    for symbol, child in children[state].items():
      fail[child] = delta[state, symbol]
      delta[state, symbol] = child
      queue.append(child)
  # A special token with which no stop string goes on is as if it was not there,
  # like those that none names: the text that is shown goes on.
  tokens = delta[:, _NUM_BYTES:]
  tokens[...] = np.where(tokens, tokens, np.arange(len(delta))[:, None])
  return _Automaton(delta, *np.array([depths, stop_lengths], np.int32))


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
    spelled = [one for text in strings for one in _spellings(text, [*named])]
    automaton = _build_automaton(spelled, num_symbols)
    live = automaton.stop_length == 0  # No stop string ends in these states.
    renamed = np.where(live, num_states + np.cumsum(live) - 1, STOPPED)
    blocks.append(renamed[automaton.delta[live]].astype(np.int32))
    num_states += len(blocks[-1])
  padded = -(-num_states // _STATE_BLOCK) * _STATE_BLOCK
  # The last row (index -1) is that of `STOPPED`, which is never left.
  rest = np.full((padded + 1 - num_states, num_symbols), STOPPED, np.int32)
  delta = np.concatenate([*blocks, rest])
  levels, node = token_trie.token_trie(token_bytes, vocab_size)
  dtype = np.int16 if padded < 2**15 else np.int32
  next_state = np.empty((padded, vocab_size), dtype)
  num_nodes = 1 + sum(len(parents) for parents, _ in levels)
  after = np.empty((_STATE_BLOCK, num_nodes), np.int32)
  for first in range(0, padded, _STATE_BLOCK):
    states = np.arange(first, first + _STATE_BLOCK)
    after[:, 0], start = states, 1
    for parents, byte in levels:
      stop = start + len(parents)
      before = after[:, parents]
      after[:, start:stop] = delta.take(before * num_symbols + byte[None])
      start = stop
    next_state[states] = after[:, node]
    next_state[states[:, None], ids] = delta[states, _NUM_BYTES:]
  starts = jnp.array([offsets[strings] for strings in sets], jnp.int32)
  return StopTable(next_state=jnp.asarray(next_state), start=starts)


class StopMatcher:
  """Cuts a text that arrives in pieces before its first stop string.

  The first stop string is that which ends first; of those that end at the same
  byte, the longest. Once it was found (`stopped`), nothing more is returned.

  Attributes:
    symbols: of the special tokens that stop strings name, by their ids.
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
      token: _NUM_BYTES + index for index, token in enumerate(named.values())
    }
    self.stopped = False
    spelled = [one for stop in stops for one in _spellings(stop, [*named])]
    self._automaton = _build_automaton(spelled, _NUM_BYTES + len(named))
    self._state = 0
    self._held: list[int] = []

  def feed(self, data: Iterable[int]) -> bytes:
    """Reads bytes and symbols; returns the text that is in no stop string."""
    if self.stopped:
      return b''
    automaton, text = self._automaton, self._held
    for symbol in data:
      before, self._state = self._state, automaton.delta[self._state, symbol]
      if symbol >= _NUM_BYTES and self._state == before:
        continue
      text.append(symbol)
      if length := automaton.stop_length[self._state]:
        self.stopped = True
        self._held = []
        return _shown(text[:-length])
    certain = len(text) - automaton.depth[self._state]
    self._held = text[certain:]
    return _shown(text[:certain])

  def flush(self) -> bytes:
    """Returns the text that was held back; call it at the end of the text."""
    held, self._held, self._state = self._held, [], 0
    return _shown(held)


def _shown(symbols: Iterable[int]) -> bytes:
  """The bytes; special tokens are not shown."""
  return bytes(symbol for symbol in symbols if symbol < _NUM_BYTES)
