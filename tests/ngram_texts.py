"""Texts to count n-grams in, and the contexts of tables."""

import itertools

from hypothesis import strategies as st
import numpy as np


def text(vocab_size: int, length: int, seed: int = 0, skew: int = 3) -> list:
  """Skewed, and dependent on the last token, as text is."""
  rng = np.random.default_rng(seed)
  tokens = [0]
  for draw in rng.random(length - 1) ** skew:
    tokens.append(int(vocab_size * draw + 7 * tokens[-1]) % vocab_size)
  return tokens


def texts(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
  """At least one token; some repeat themselves, some lack the last token."""
  tokens = st.integers(0, vocab_size - 1)
  periods = st.lists(tokens, min_size=1, max_size=4)
  repeated = st.builds(lambda one, n: one * n, periods, st.integers(1, 20))
  drawn = st.builds(
    text,
    st.sampled_from([max(vocab_size - 1, 1), vocab_size]),
    st.integers(1, 300),
    st.integers(0, 99),
    st.sampled_from([1, 3]),
  )
  several = st.lists(repeated | drawn | st.just([]), max_size=5)
  return several.filter(any)


def save(folder, texts: list[list[int]]) -> list:
  """A shard for each text, narrow or wide, as those of different sources."""
  shards = []
  for number, tokens in enumerate(texts):
    fits = all(0 <= token < 1 << 16 for token in tokens)
    dtype = np.uint16 if fits and number % 2 else np.int32
    shards.append(folder / f'{number}.npy')
    np.save(shards[-1], np.array(tokens, dtype))
  return shards


def contexts(table) -> list[tuple[int, ...]]:
  """Each context's tokens, the most recent first."""
  names = [()] * table.num_contexts
  edge_token = table.edge_token.tolist()
  bounds = itertools.pairwise(table.first_child.tolist())
  for parent, (first, end) in enumerate(bounds):
    for child in range(first, end):
      names[child] = (*names[parent], edge_token[child])
  return names
