"""The trie of the bytes of all tokens: each distinct prefix is read once."""

from collections.abc import Sequence

import numpy as np


def token_trie(
  token_bytes: Sequence[bytes], vocab_size: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
  """The trie of all tokens.

  Args:
    token_bytes: of each token; ends before the tokens at the end of the
      vocabulary that have no bytes.
    vocab_size: V.

  Returns:
    A list with, for each prefix length from 1, `[nodes]` parents and `[nodes]`
    last bytes; and `[V]`, the node of each token. Nodes are numbered in the
    order of the list, after node 0, the empty prefix.
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
