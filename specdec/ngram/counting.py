"""Counting of n-grams, in memory.

An n-gram is a context and the token after it. Contexts are numbered along the
backward trie of `specdec.ngram.table`: a context is its parent, the context
without its first token, and that token.

Memory: about 60 bytes per counted token, and 8 per distinct n-gram kept.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os

import numpy as np

from specdec.text import whole_files

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
  # `[order, 2]` int64, the numbers of n-grams of each order that occur once and
  # twice, in all contexts.
  seldom: np.ndarray
  vocab_size: int
  num_tokens: int


def _read(
  shards: Sequence[str | os.PathLike[str]], gap: int, vocab_size: int
) -> np.ndarray:
  """All tokens, int32, with `gap` times -1 before each shard."""
  parts = []
  for shard in shards:
    with whole_files.reading(shard, 'it must be a .npy file of tokens'):
      tokens: np.ndarray = np.load(shard)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
      raise ValueError(
        f'{shard} must hold integers of shape [tokens], got {tokens.dtype} of'
        f' shape {tokens.shape}'
      )
    known = tokens[tokens != _NO_TOKEN]
    low, high = known.min(initial=0), known.max(initial=0)
    if low < 0 or high >= vocab_size:
      raise ValueError(
        f'{shard} has token {low if low < 0 else high}, outside the vocabulary'
        f' of {vocab_size}'
      )
    parts += [np.full(gap, _NO_TOKEN, np.int32), tokens.astype(np.int32)]
  return np.concatenate([np.zeros(0, np.int32), *parts])


def _runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The distinct ones of sorted keys (0 or more), and how often each occurs."""
  starts = np.flatnonzero(np.diff(keys, prepend=-1))
  return keys[starts], np.diff(starts, append=len(keys))


def count_ngrams(
  shards: Sequence[str | os.PathLike[str]],
  *,
  order: int,
  vocab_size: int,
  min_count: int = 1,
) -> NGramCounts:
  """Counts all n-grams of up to `order` tokens.

  Args:
    shards: `.npy` files of token ids, `[tokens]` of any integer type. No n-gram
      spans two shards, or a -1, which ends a text and is not counted.
    order: n, at least 1.
    vocab_size: V.
    min_count: contexts with fewer occurrences are left out of the levels.

  Raises:
    ValueError: a file cannot be used, or there are no tokens or 2^31 or more.
  """
  text = _read(shards, order - 1, vocab_size)
  # The last tokens of n-grams, and the context of each, by number.
  places = np.flatnonzero(text != _NO_TOKEN)
  if not 0 < (num_tokens := len(places)) < 1 << 31:
    raise ValueError(
      f'the shards have {num_tokens} tokens; between 1 and {(1 << 31) - 1} can'
      ' be counted'
    )
  contexts, keys = np.zeros(num_tokens, np.int64), np.zeros(1, np.int64)
  levels: list[Level] = []
  seldom = np.zeros((order, 2), np.int64)
  new_number = np.zeros(1, np.int64)  # Each context has one if it is kept.
  for length in range(order):
    if length:
      before = text[places - length]
      # Texts that are too short have no context of this length.
      places, contexts = places[before >= 0], contexts[before >= 0]
      longer = contexts * vocab_size + before[before >= 0]
      keys, contexts = np.unique(longer, return_inverse=True)
    ngrams, counts = _runs(np.sort(contexts * vocab_size + text[places]))
    seldom[length] = np.sum(counts == 1), np.sum(counts == 2)
    # A context that ends in a shorter one occurs at most as often.
    kept = np.bincount(contexts, minlength=len(keys)) >= min_count
    kept |= length == 0
    parents, edge_token = np.divmod(keys[kept], vocab_size)
    parents, new_number = new_number[parents], np.cumsum(kept) - 1
    owners, tokens = np.divmod(ngrams, vocab_size)
    rows = kept[owners]
    levels.append(
      Level(
        parents=parents.astype(np.int32),
        edge_token=edge_token.astype(np.int32),
        sizes=np.bincount(new_number[owners[rows]], minlength=kept.sum()),
        tokens=tokens[rows].astype(np.int32),
        counts=counts[rows].astype(np.int32),
      )
    )
  return NGramCounts(tuple(levels), seldom, vocab_size, num_tokens)
