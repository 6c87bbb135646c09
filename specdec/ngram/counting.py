"""Counts n-grams of more tokens than fit in memory.

An n-gram is a context and the token after it. Contexts form the backward trie
of `specdec.ngram.table`, so all contexts that end in the same token share a
subtree, and the tokens can be counted in partitions by the last token of the
context: each partition yields whole subtrees, which only need to be appended.

Memory: about 20 (order + 3) bytes per token of the largest partition, whose
size is `partition_tokens` or, if that is more, the number of occurrences of the
most frequent token; and 8 bytes per distinct n-gram kept, 16 while the
partitions are put together. Counting 120 million tokens by trigrams takes
about 2 GB, estimating them 3 GB.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import os

import numpy as np

# Counts of counts are kept up to here: what discounts are estimated from.
HIGHEST_COUNT = 6

_CHUNK_TOKENS = 1 << 22
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class Level:
  """The contexts of one length, and what followed them.

  Attributes:
    parents: `[C]` int32, ascending, the index of each context without its first
      token, in the level of that length; 0 where there is none.
    edge_token: `[C]` int32, that first token, ascending among siblings.
    first: `[C + 1]` int64; the n-grams of context c are `first[c]` to
      `first[c + 1] - 1`, at least one.
    tokens: `[N]` int32, the last token of each n-gram, ascending in a context.
    counts: `[N]` int32, how often it was seen.
  """

  parents: np.ndarray
  edge_token: np.ndarray
  first: np.ndarray
  tokens: np.ndarray
  counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class NGramCounts:
  """What `count_ngrams` found.

  Attributes:
    levels: of the contexts of 0, 1, ... tokens; n of them for order n.
    counts_of_counts: `[order, HIGHEST_COUNT + 1]` int64; entry r of a row is
      how many n-grams of that order were seen r times, pruned ones included.
    vocab_size: V.
    num_tokens: how many tokens were read.
  """

  levels: tuple[Level, ...]
  counts_of_counts: np.ndarray
  vocab_size: int
  num_tokens: int


def _open(shard) -> np.ndarray:
  try:
    tokens = np.load(shard, mmap_mode='r')
  except (OSError, ValueError) as error:
    raise ValueError(f'{shard} cannot be read as tokens: {error}') from error
  if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(
      f'{shard} must hold integers of shape [tokens], got {tokens.dtype} of'
      f' shape {tokens.shape}'
    )
  return tokens


def _windows(shards, order: int) -> Iterator[np.ndarray]:
  """The shards as `[...]` int32, a part at a time.

  The first n - 1 entries of a window are history: the end of the window before,
  or -1 at the start of a shard.
  """
  history = order - 1
  for shard in shards:
    tokens = _open(shard)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
      known = min(start, history)
      window = tokens[start - known : start + _CHUNK_TOKENS].astype(np.int32)
      yield np.pad(window, (history - known, 0), constant_values=_NO_TOKEN)


def _count_tokens(shards, order, vocab_size) -> np.ndarray:
  """How often each token occurs, `[V]` int64."""
  counts = np.zeros(vocab_size, np.int64)
  for shard in shards:
    for window in _windows([shard], order):
      tokens = window[order - 1 :]
      tokens = tokens[tokens != _NO_TOKEN]
      low, high = tokens.min(initial=0), tokens.max(initial=0)
      if low < 0 or high >= vocab_size:
        raise ValueError(
          f'{shard} has token {low if low < 0 else high}, outside the'
          f' vocabulary of {vocab_size}'
        )
      counts += np.bincount(tokens, minlength=vocab_size)
  return counts


def _partitions(token_counts, partition_tokens) -> Iterator[tuple[int, int]]:
  """Ranges of tokens that occur about equally often."""
  seen = np.cumsum(token_counts)
  parts = -(-int(seen[-1]) // partition_tokens)
  shares = np.arange(1, parts) * (seen[-1] / parts)
  ends = np.unique([0, *np.searchsorted(seen, shares), len(seen)])
  yield from zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)


def _extract(shards, order, low, high) -> list[np.ndarray]:
  """The n-grams whose context ends in a token of `[low, high)`.

  Returns:
    n columns of int32: the last token, the one before it, and so on; -1 before
    the start of a text.
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
  """Where each run of equal keys begins."""
  changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
  return np.concatenate([np.zeros(min(len(keys), 1), np.int64), changes])


def _runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Each of the sorted keys once, and how often it occurs."""
  starts = _starts(keys)
  return keys[starts], np.diff(starts, append=len(keys))


def _count_partition(columns, vocab_size: int) -> Iterator[Level]:
  """The levels of context length 1, 2, ... of one partition."""
  tokens, *history = columns
  context = np.zeros(len(tokens), np.int64)
  for depth in range(len(history)):
    # Texts that are too short for a context of this length.
    long_enough = np.flatnonzero(history[depth] >= 0)
    keys = context[long_enough] * vocab_size + history[depth][long_enough]
    order = np.argsort(keys)
    keys, order = keys[order], long_enough[order]
    tokens = tokens[order]
    history = [column[order] for column in history]
    starts = _starts(keys)
    parents, edge_token = np.divmod(keys[starts], vocab_size)
    context = np.repeat(
      np.arange(len(starts)), np.diff(starts, append=len(keys))
    )
    ngrams, counts = _runs(np.sort(context * vocab_size + tokens))
    owners, last_tokens = np.divmod(ngrams, vocab_size)
    yield Level(
      parents=parents.astype(np.int32),
      edge_token=edge_token.astype(np.int32),
      first=np.searchsorted(owners, np.arange(len(starts) + 1)),
      tokens=last_tokens.astype(np.int32),
      counts=counts.astype(np.int32),
    )


def _prune(
  level: Level, min_count: int, parent_ids: np.ndarray
) -> tuple[Level, np.ndarray]:
  """Drops rare contexts.

  Args:
    level: what to prune.
    min_count: contexts seen less often are dropped; so are then all longer
      ones, which cannot have been seen more often.
    parent_ids: where each context of the level above is now.

  Returns:
    What is kept, and where each context is now.
  """
  seen = np.diff(np.concatenate([[0], np.cumsum(level.counts)])[level.first])
  kept = seen >= min_count
  sizes = np.diff(level.first)
  ngrams = np.repeat(kept, sizes)
  pruned = Level(
    parents=parent_ids[level.parents[kept]],
    edge_token=level.edge_token[kept],
    first=np.concatenate([[0], np.cumsum(sizes[kept])]),
    tokens=level.tokens[ngrams],
    counts=level.counts[ngrams],
  )
  return pruned, (np.cumsum(kept) - 1).astype(np.int32)


def _concatenate(parts: list[Level]) -> Level:
  """The partitions of one level, one after the other; parents are final."""
  sizes = np.concatenate([np.diff(part.first) for part in parts])
  columns = {
    name: np.concatenate([getattr(part, name) for part in parts])
    for name in ('parents', 'edge_token', 'tokens', 'counts')
  }
  return Level(first=np.concatenate([[0], np.cumsum(sizes)]), **columns)


def _root(token_counts: np.ndarray) -> Level:
  tokens = np.flatnonzero(token_counts)
  return Level(
    parents=np.zeros(1, np.int32),
    edge_token=np.zeros(1, np.int32),
    first=np.array([0, len(tokens)]),
    tokens=tokens.astype(np.int32),
    counts=token_counts[tokens].astype(np.int32),
  )


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
  progress: Callable[[int, int], None] | None = None,
) -> NGramCounts:
  """Counts all n-grams of up to `order` tokens.

  Args:
    shards: `.npy` files of token ids, `[tokens]` of any integer type; mapped,
      not loaded. No n-gram spans two shards or a -1, which ends a text without
      being counted; an end-of-text token is a token like any other.
    order: n, at least 1.
    vocab_size: V.
    min_count: contexts seen less often are left out (see `_prune`); the counts
      of counts include them.
    partition_tokens: n-grams counted at once, see above.
    progress: called with the number of tokens counted and that of all, after
      each partition.

  Returns:
    The counts.

  Raises:
    ValueError: a file cannot be used, or there are no tokens at all or too many
      to count; says which.
  """
  token_counts = _count_tokens(shards, order, vocab_size)
  num_tokens = int(token_counts.sum())
  if not 0 < num_tokens < 1 << 31:
    raise ValueError(
      f'the shards have {num_tokens} tokens; between 1 and {(1 << 31) - 1} can'
      ' be counted'
    )
  levels = [_root(token_counts)]
  counts_of_counts = np.zeros((order, HIGHEST_COUNT + 1), np.int64)
  counts_of_counts[0] = _count_counts(levels[0].counts)
  if order > 1:
    parts: list[list[Level]] = [[] for _ in range(order - 1)]
    num_contexts = [1] + [0] * (order - 1)
    for low, high in _partitions(token_counts, partition_tokens):
      columns = _extract(shards, order, low, high)
      parent_ids = np.zeros(1, np.int32)
      for length, level in enumerate(_count_partition(columns, vocab_size), 1):
        counts_of_counts[length] += _count_counts(level.counts)
        kept, ids = _prune(level, min_count, parent_ids)
        parts[length - 1].append(kept)
        parent_ids = ids + np.int32(num_contexts[length])
        num_contexts[length] += len(kept.parents)
      if progress is not None:
        progress(int(token_counts[:high].sum()), num_tokens)
    while parts:
      levels.append(_concatenate(parts.pop(0)))
  return NGramCounts(
    levels=tuple(levels),
    counts_of_counts=counts_of_counts,
    vocab_size=vocab_size,
    num_tokens=num_tokens,
  )
