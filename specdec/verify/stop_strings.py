"""Exact matching of stop strings: an Aho-Corasick automaton over bytes.

A state of the automaton is the longest prefix of a stop string with which the
text so far ends, so a decode carries one integer per row. The automaton reads
bytes, because a stop string can be split into tokens in many ways and can end
within a token. The device reads whole tokens with `StopTable`; the host reads
bytes with `StopMatcher`, to know which text can be shown already.
"""

import collections
from collections.abc import Sequence
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# The state of a row whose text contains a stop string.
STOPPED = -1

# The number of states is a multiple of this, so that few shapes are compiled.
_STATE_BLOCK = 16


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

  delta: np.ndarray  # [states, 256] int32, the state after a byte.
  depth: np.ndarray  # [states] int32, the length of the prefix.
  # [states] int32, the length of the longest stop string that ends here, or 0.
  stop_length: np.ndarray


def _build_automaton(stops: Sequence[bytes]) -> _Automaton:
  """Goto and fail transitions in one table (Aho and Corasick, 1975)."""
  children: list[dict[int, int]] = [{}]
  depths, stop_lengths = [0], [0]
  for stop in stops:
    state = 0
    for byte in stop:
      if byte not in children[state]:
        children[state][byte] = len(children)
        children.append({})
        depths.append(depths[state] + 1)
        stop_lengths.append(0)
      state = children[state][byte]
    stop_lengths[state] = len(stop)
  delta = np.zeros((len(children), 256), np.int32)
  fail = [0] * len(children)
  # Breadth first: the fail state is shorter, so its row is already complete.
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    # A stop string that ends the fail state ends this state, too, but is
    # shorter than a stop string which is this state.
    stop_lengths[state] = stop_lengths[state] or stop_lengths[fail[state]]
    delta[state] = delta[fail[state]]
    for byte, child in children[state].items():
      fail[child] = delta[state, byte]
      delta[state, byte] = child
      queue.append(child)
  return _Automaton(delta, *np.array([depths, stop_lengths], np.int32))


def _token_trie(token_bytes: Sequence[bytes], vocab_size: int):
  """The trie of all tokens, so that each distinct prefix is read only once.

  A list with, for each prefix length from 1, `[nodes]` parents and `[nodes]`
  last bytes; and `[V]`, the node of each token. Nodes are numbered in the order
  of the list, after node 0, the empty prefix.
  """
  tokens = token_bytes[:vocab_size]
  lengths = np.zeros(vocab_size, np.int64)
  lengths[: len(tokens)] = [len(token) for token in tokens]
  first = np.cumsum(lengths) - lengths
  text = np.frombuffer(b''.join(tokens), np.uint8)
  levels: list[tuple[np.ndarray, np.ndarray]] = []
  node, num_nodes = np.zeros(vocab_size, np.int64), 1
  for position in range(lengths.max(initial=0)):
    longer = np.flatnonzero(lengths > position)
    keys = node[longer] * 256 + text[first[longer] + position]
    distinct, inverse = np.unique(keys, return_inverse=True)
    node[longer] = num_nodes + inverse
    num_nodes += len(distinct)
    levels.append((distinct // 256, distinct % 256))
  return levels, node


def build_stop_table(
  stops: Sequence[Sequence[bytes]],
  token_bytes: Sequence[bytes],
  vocab_size: int,
) -> StopTable:
  """Builds the table that a decode reads; it takes 2 Q V bytes.

  Q is about the number of bytes of the distinct stop strings: each distinct
  set of stop strings has its own automaton in a common state space.

  `stops` are those of each row; `token_bytes` ends before the tokens at the end
  of the vocabulary that have no bytes.

  Raises:
    ValueError: a stop string is empty.
  """
  for row, strings in enumerate(stops):
    if not all(strings):
      raise ValueError(f'row {row} has an empty stop string: {list(strings)}')
  sets = [tuple(sorted(set(strings))) for strings in stops]
  offsets, blocks, num_states = {}, [], 0
  for strings in dict.fromkeys(sets):
    offsets[strings] = num_states
    automaton = _build_automaton(strings)
    live = automaton.stop_length == 0  # No stop string ends in these states.
    renamed = np.where(live, num_states + np.cumsum(live) - 1, STOPPED)
    blocks.append(renamed[automaton.delta[live]].astype(np.int32))
    num_states += len(blocks[-1])
  padded = -(-num_states // _STATE_BLOCK) * _STATE_BLOCK
  # The last row (index -1) is that of `STOPPED`, which is never left.
  rest = np.full((padded + 1 - num_states, 256), STOPPED, np.int32)
  delta = np.concatenate([*blocks, rest])
  levels, node = _token_trie(token_bytes, vocab_size)
  dtype = np.int16 if padded < 2**15 else np.int32
  next_state = np.empty((padded, vocab_size), dtype)
  num_nodes = 1 + sum(len(parents) for parents, _ in levels)
  after = np.empty((_STATE_BLOCK, num_nodes), np.int32)
  for first in range(0, padded, _STATE_BLOCK):
    states = np.arange(first, first + _STATE_BLOCK)
    after[:, 0], start = states, 1
    for parents, byte in levels:
      stop = start + len(parents)
      after[:, start:stop] = delta.take(after[:, parents] * 256 + byte[None])
      start = stop
    next_state[states] = after[:, node]
  starts = jnp.array([offsets[strings] for strings in sets], jnp.int32)
  return StopTable(next_state=jnp.asarray(next_state), start=starts)


class StopMatcher:
  """Cuts a text that arrives in pieces before its first stop string.

  The first stop string is that which ends first; of those that end at the same
  byte, the longest. Once it was found (`stopped`), nothing more is returned.
  """

  def __init__(self, stops: Sequence[bytes]):
    """Raises ValueError if a stop string is empty."""
    if not all(stops):
      raise ValueError(f'a stop string is empty: {list(stops)}')
    self.stopped = False
    self._automaton = _build_automaton(stops)
    self._state = 0
    self._held = b''

  def feed(self, data: bytes) -> bytes:
    """Reads a piece; returns the text that is not part of a stop string."""
    if self.stopped:
      return b''
    automaton, text = self._automaton, self._held + data
    for end, byte in enumerate(data, len(self._held) + 1):
      self._state = automaton.delta[self._state, byte]
      if length := automaton.stop_length[self._state]:
        self.stopped = True
        self._held = b''
        return text[: end - length]
    certain = len(text) - automaton.depth[self._state]
    self._held = text[certain:]
    return text[:certain]

  def flush(self) -> bytes:
    """Returns the text that was held back; call it at the end of the text."""
    held, self._held, self._state = self._held, b'', 0
    return held
