"""Stop strings, matched exactly: an Aho-Corasick automaton over bytes.

A state is the longest beginning of a stop string that the text read so far
ends with, so one integer per row is all there is to carry from token to token.
Bytes, not tokens: the same stop string can be cut into tokens in many ways, can
end within a token, and characters can be cut as well.

The device follows whole tokens through `StopTable`; the host follows bytes
through `StopMatcher`, to know what may be shown already. Both read the
transitions of one builder.
"""

import collections
from collections.abc import Sequence
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

# The state of a row whose text holds a stop string.
STOPPED = -1

# States come in multiples of this, so that few shapes are compiled.
_STATE_BLOCK = 16


class StopTable(flax.struct.PyTreeNode):
  """Where each token leads, for a batch whose rows may stop at other strings.

  Attributes:
    next_state: `[Q, V]` int16, or int32 if Q is large: the state after a token;
      `STOPPED` if a stop string ends within the token or with it.
    start: `[B]` int32, the state of each row before its first new token.
  """

  next_state: jax.Array
  start: jax.Array

  def follow(
    self, state: jax.Array, tokens: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Reads some tokens in each row.

    Args:
      state: `[B]` int32, before the first of them.
      tokens: `[B, n]` int32.

    Returns:
      `[B, n]` bool, in which tokens a stop string is complete, all that follow
      included, and `[B, n + 1]` int32, the states before the first token, after
      it, and so on.
    """
    states = [state]
    for index in range(tokens.shape[1]):
      here = states[-1]
      after = self.next_state[jnp.maximum(here, 0), tokens[:, index]]
      after = after.astype(jnp.int32)
      states.append(jnp.where(here == STOPPED, STOPPED, after))
    stacked = jnp.stack(states, axis=1)
    return stacked[:, 1:] == STOPPED, stacked


@dataclasses.dataclass(frozen=True)
class _Automaton:
  """The automaton of one set of stop strings; state 0 has read nothing.

  Attributes:
    delta: `[states, 256]` int32, the state after a byte.
    depth: `[states]` int32, how many of the last bytes may begin a stop string.
    stop_length: `[states]` int32, of the longest stop string that ends here; 0
      if none does.
  """

  delta: np.ndarray
  depth: np.ndarray
  stop_length: np.ndarray


def _build_automaton(stops: Sequence[bytes]) -> _Automaton:
  """Goto and fail transitions in one table (Aho and Corasick, 1975).

  Args:
    stops: none of them empty.
  """
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
  fallback = [0] * len(children)
  # Shorter ones first: a state falls back to a shorter one, complete by then.
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    # A stop string that ends the fallback ends this state too; its own, if it
    # has one, is longer.
    stop_lengths[state] = stop_lengths[state] or stop_lengths[fallback[state]]
    delta[state] = delta[fallback[state]]
    for byte, child in children[state].items():
      fallback[child] = delta[state, byte]
      delta[state, byte] = child
      queue.append(child)
  return _Automaton(
    delta=delta,
    depth=np.array(depths, np.int32),
    stop_length=np.array(stop_lengths, np.int32),
  )


def _without_stopped(automaton: _Automaton, offset: int) -> np.ndarray:
  """`[live states, 256]` int32: states from `offset` on, or `STOPPED`."""
  live = automaton.stop_length == 0
  renamed = np.where(live, offset + np.cumsum(live) - 1, STOPPED)
  return renamed[automaton.delta[live]].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class _TokenTrie:
  """Every distinct beginning of a token, so that each is followed only once.

  Attributes:
    levels: of each length from 1, `[nodes]` parents and `[nodes]` last bytes.
      Nodes are numbered level by level; 0 is the empty beginning.
    node: `[V]`, of each whole token.
    num_nodes: the empty one included.
  """

  levels: list[tuple[np.ndarray, np.ndarray]]
  node: np.ndarray
  num_nodes: int


def _token_trie(token_bytes: Sequence[bytes], vocab_size: int) -> _TokenTrie:
  """The beginnings of all tokens; those that are not given are empty."""
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
  return _TokenTrie(levels=levels, node=node, num_nodes=num_nodes)


def _follow(delta: np.ndarray, trie: _TokenTrie, states: np.ndarray):
  """`[states, V]` int32: the state after each token from each of some states.

  Args:
    delta: `[Q + 1, 256]` int32; the last row is of `STOPPED`, which as an index
      is the last.
    trie: of the tokens.
    states: `[states]` int32.
  """
  after = np.empty((len(states), trie.num_nodes), np.int32)
  after[:, 0] = states
  start = 1
  for parents, byte in trie.levels:
    stop = start + len(parents)
    after[:, start:stop] = delta.take(after[:, parents] * 256 + byte[None])
    start = stop
  return after[:, trie.node]


def build_stop_table(
  stops: Sequence[Sequence[bytes]],
  token_bytes: Sequence[bytes],
  vocab_size: int,
) -> StopTable:
  """Builds the table that a decode follows; it takes 2 Q V bytes.

  Q is the number of bytes of the distinct stop strings, about: each distinct
  set of them has an automaton of its own, and all share one state space.

  Args:
    stops: the stop strings of each row, perhaps none.
    token_bytes: of each token, perhaps empty; ids beyond are as if empty.
    vocab_size: V.

  Returns:
    The table on the default device.

  Raises:
    ValueError: a stop string is empty.
  """
  for row, strings in enumerate(stops):
    if not all(strings):
      raise ValueError(f'row {row} has an empty stop string: {list(strings)}')
  sets = [tuple(sorted(set(strings))) for strings in stops]
  offsets, blocks, num_states = {}, [], 0
  for one in dict.fromkeys(sets):
    offsets[one] = num_states
    blocks.append(_without_stopped(_build_automaton(one), num_states))
    num_states += len(blocks[-1])
  padded = -(-num_states // _STATE_BLOCK) * _STATE_BLOCK
  # One row more than states: that of `STOPPED`, which is never left.
  rest = np.full((padded + 1 - num_states, 256), STOPPED, np.int32)
  delta = np.concatenate([*blocks, rest])
  trie = _token_trie(token_bytes, vocab_size)
  dtype = np.int16 if padded < 2**15 else np.int32
  next_state = np.empty((padded, vocab_size), dtype)
  for first in range(0, padded, _STATE_BLOCK):
    states = np.arange(first, first + _STATE_BLOCK, dtype=np.int32)
    next_state[states] = _follow(delta, trie, states)
  return StopTable(
    next_state=jnp.asarray(next_state),
    start=jnp.array([offsets[one] for one in sets], jnp.int32),
  )


class StopMatcher:
  """Says of a text that comes in pieces what will be kept of it.

  The text ends before the stop string that ends first; of those that end with
  the same byte, before the longest. How the text is cut into pieces makes no
  difference to what is returned in all.

  Attributes:
    stopped: whether a stop string was found; nothing is returned from then on.
  """

  def __init__(self, stops: Sequence[bytes]):
    """Before the first byte.

    Args:
      stops: the stop strings, perhaps none.

    Raises:
      ValueError: a stop string is empty.
    """
    if not all(stops):
      raise ValueError(f'a stop string is empty: {list(stops)}')
    self.stopped = False
    self._automaton = _build_automaton(stops)
    self._state = 0
    self._held = b''

  def feed(self, data: bytes) -> bytes:
    """More of the text; returns what is now certain to be kept."""
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
    """The text ends here: returns what was held back."""
    held, self._held, self._state = self._held, b'', 0
    return held
