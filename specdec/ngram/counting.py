"""Counting of n-grams in texts that are larger than memory.

An n-gram is a context and the token after it. N-grams are counted in partitions
by the last token of the context: all contexts that end in a token are a subtree
of the backward trie of `specdec.ngram.table`, so partitions are concatenated.

Memory: about 20 (order + 3) bytes per token of the largest partition, which has
at least the occurrences of the most frequent token, and 8 bytes per distinct
n-gram kept, 16 during concatenation. Counting the trigrams of 120 million
tokens takes about 2 GB, estimating them 3 GB.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import os

import numpy as np

from specdec.text import whole_files

# The largest count whose frequency is recorded for the estimation of discounts.
HIGHEST_COUNT = 6

_CHUNK_TOKENS = 1 << 22
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Level:
  """The C contexts of one length, and the N n-grams that extend them."""

  # `[C]` int32, ascending, the index of each context without its first token,
  # in the level of that length; 0 at the root, which has no parent.
  parents: np.ndarray
  edge_token: np.ndarray  # `[C]` int32, that token, ascending among siblings.
  sizes: np.ndarray  # `[C]` int64, the number of n-grams, at least 1.
  tokens: np.ndarray  # `[N]` int32, last tokens, ascending in a context.
  counts: np.ndarray  # `[N]` int32, the number of occurrences of each n-gram.

  @functools.cached_property
  def first(self) -> np.ndarray:
    """`[C + 1]` int64; context c has the n-grams `first[c] : first[c + 1]`."""
    return np.concatenate([[0], np.cumsum(self.sizes)])


@dataclasses.dataclass(frozen=True)
class NGramCounts:
  """The result of `count_ngrams`."""

  levels: tuple[Level, ...]  # By context length: 0, 1, ... order - 1.
  # `[order, HIGHEST_COUNT + 1]` int64; entry r of a row is the number of
  # n-grams of that order that occur r times, in all contexts.
  counts_of_counts: np.ndarray
  vocab_size: int
  num_tokens: int


def _open(shard: str | os.PathLike[str]) -> np.ndarray:
  with whole_files.reading(shard, 'it must be a .npy file of tokens'):
    tokens: np.ndarray = np.load(shard, mmap_mode='r')
  if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(
      f'{shard} must hold integers of shape [tokens], got {tokens.dtype} of'
      f' shape {tokens.shape}'
    )
  return tokens


def _windows(
  shards: Sequence[str | os.PathLike[str]], order: int
) -> Iterator[np.ndarray]:
  """The shards in chunks, each behind the order - 1 tokens before it, or -1."""
  history = order - 1
  for shard in shards:
    tokens = _open(shard)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
      known = min(start, history)
      window = tokens[start - known : start + _CHUNK_TOKENS].astype(np.int32)
      yield np.pad(window, (history - known, 0), constant_values=_NO_TOKEN)


def _count_tokens(
  shards: Sequence[str | os.PathLike[str]], vocab_size: int
) -> np.ndarray:
  """The number of occurrences of each token, `[V]` int64."""
  counts = np.zeros(vocab_size, np.int64)
  for shard in shards:
    for window in _windows([shard], 1):
      tokens = window[window != _NO_TOKEN]
      low, high = tokens.min(initial=0), tokens.max(initial=0)
      if low < 0 or high >= vocab_size:
        raise ValueError(
          f'{shard} has token {low if low < 0 else high}, outside the'
          f' vocabulary of {vocab_size}'
        )
      counts += np.bincount(tokens, minlength=vocab_size)
  return counts


def _partitions(
  token_counts: np.ndarray, partition_tokens: int
) -> Iterator[tuple[int, int]]:
  """Ranges of token ids whose numbers of occurrences are about equal."""
  seen = np.cumsum(token_counts)
  parts = -(-int(seen[-1]) // partition_tokens)
  shares = np.arange(1, parts) * (seen[-1] / parts)
  ends = np.unique([0, *np.searchsorted(seen, shares), len(seen)])
  yield from zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)


def _extract(
  shards: Sequence[str | os.PathLike[str]], order: int, low: int, high: int
) -> list[np.ndarray]:
  """The n-grams whose context ends in a token of `[low, high)`.

  The columns are their last tokens, the tokens before them, and so on; -1 says
  that there is none.
  """
  columns: list[list[np.ndarray]] = [[] for _ in range(order)]
  for window in _windows(shards, order):
    last = window[order - 2 : -1]
    hits = (last >= low) & (last < high) & (window[order - 1 :] >= 0)
    positions = np.flatnonzero(hits) + (order - 1)
    for back, column in enumerate(columns):
      column.append(window[positions - back])
  return [np.concatenate(column) for column in columns]


def _starts(keys: np.ndarray) -> np.ndarray:
  """The index at which each run of equal keys (0 or more) begins."""
  return np.flatnonzero(np.diff(keys, prepend=-1))


def _count_partition(
  columns: Sequence[np.ndarray], vocab_size: int
) -> Iterator[Level]:
  """The levels of context length 1, 2, ... of one partition."""
  tokens, *history = columns
  context = np.zeros(len(tokens), np.int64)
  for depth in range(len(history)):
    # Excludes texts that are too short for a context of this length.
    long_enough = np.flatnonzero(history[depth] >= 0)
    keys = context[long_enough] * vocab_size + history[depth][long_enough]
    order = np.argsort(keys)
    keys, order = keys[order], long_enough[order]
    tokens = tokens[order]
    history = [column[order] for column in history]
    starts = _starts(keys)
    parents, edge_token = np.divmod(keys[starts], vocab_size)
    occurrences = np.diff(starts, append=len(keys))
    context = np.repeat(np.arange(len(starts)), occurrences)
    ngrams = np.sort(context * vocab_size + tokens)
    runs = _starts(ngrams)
    owners, last_tokens = np.divmod(ngrams[runs], vocab_size)
    yield Level(
      parents=parents.astype(np.int32),
      edge_token=edge_token.astype(np.int32),
      sizes=np.bincount(owners, minlength=len(starts)),
      tokens=last_tokens.astype(np.int32),
      counts=np.diff(runs, append=len(ngrams)).astype(np.int32),
    )


def _prune(
  level: Level, min_count: int, parent_ids: np.ndarray
) -> tuple[Level, np.ndarray]:
  """Removes contexts that occur fewer than `min_count` times.

  Longer contexts that end in them cannot occur more often. `parent_ids` holds
  the new index of each context of the shorter level; the second result holds
  those of this level.
  """
  kept = np.add.reduceat(level.counts, level.first[:-1], dtype=int) >= min_count
  ngrams = np.repeat(kept, level.sizes)
  pruned = Level(
    parents=parent_ids[level.parents[kept]],
    edge_token=level.edge_token[kept],
    sizes=level.sizes[kept],
    tokens=level.tokens[ngrams],
    counts=level.counts[ngrams],
  )
  return pruned, (np.cumsum(kept) - 1).astype(np.int32)


def _count_counts(counts: np.ndarray) -> np.ndarray:
  low = counts[counts <= HIGHEST_COUNT]
  return np.bincount(low, minlength=HIGHEST_COUNT + 1)


def count_ngrams(
  shards: Sequence[str | os.PathLike[str]],
  *,
  order: int,
  vocab_size: int,
  min_count: int = 1,
  partition_tokens: int = 1 << 23,
  progress: Callable[[int, int], None] = lambda counted, total: None,
) -> NGramCounts:
  """Counts all n-grams of up to `order` tokens.

  Args:
    shards: `.npy` files of token ids, `[tokens]` of any integer type. No n-gram
      spans two shards, or a -1, which ends a text and is not counted.
    order: n, at least 1.
    vocab_size: V.
    min_count: contexts with fewer occurrences are left out of the levels.
    partition_tokens: the number of n-grams that are counted at once.
    progress: called after each partition with the numbers of counted and all
      tokens.

  Raises:
    ValueError: a file cannot be used, or there are no tokens or 2^31 or more.
  """
  token_counts = _count_tokens(shards, vocab_size)
  num_tokens = int(token_counts.sum())
  if not 0 < num_tokens < 1 << 31:
    raise ValueError(
      f'the shards have {num_tokens} tokens; between 1 and {(1 << 31) - 1} can'
      ' be counted'
    )
  tokens = np.flatnonzero(token_counts).astype(np.int32)
  none, sizes = np.zeros(1, np.int32), np.array([len(tokens)])
  counts = token_counts[tokens].astype(np.int32)
  levels = [Level(none, none, sizes, tokens, counts)]
  counts_of_counts = np.zeros((order, HIGHEST_COUNT + 1), np.int64)
  counts_of_counts[0] = _count_counts(levels[0].counts)
  parts: list[list[Level]] = [[] for _ in range(order - 1)]
  num_contexts = [1] + [0] * (order - 1)
  partitions = _partitions(token_counts, partition_tokens) if order > 1 else ()
  for low, high in partitions:
    columns = _extract(shards, order, low, high)
    parent_ids = np.zeros(1, np.int32)
    for length, level in enumerate(_count_partition(columns, vocab_size), 1):
      counts_of_counts[length] += _count_counts(level.counts)
      kept, ids = _prune(level, min_count, parent_ids)
      parts[length - 1].append(kept)
      parent_ids = ids + np.int32(num_contexts[length])
      num_contexts[length] += len(kept.parents)
    progress(int(token_counts[:high].sum()), num_tokens)
  names = [field.name for field in dataclasses.fields(Level)]
  while parts:  # Frees the partitions of a level before the next level.
    level_parts = parts.pop(0)
    arrays = [[getattr(part, x) for part in level_parts] for x in names]
    levels.append(Level(*map(np.concatenate, arrays)))
  return NGramCounts(tuple(levels), counts_of_counts, vocab_size, num_tokens)
