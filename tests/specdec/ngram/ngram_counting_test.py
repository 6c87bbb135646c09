"""Counts of n-grams are the counts of a loop."""

import collections
import itertools

import hypothesis
from hypothesis import strategies as st
import ngram_texts
import numpy as np
import pytest

from specdec.ngram import counting


def _expected(texts, order):
  """Counts by n-gram (the last token first), of every context length."""
  levels = [collections.Counter() for _ in range(order)]
  for text in texts:
    for end in range(len(text)):
      for length in range(min(order, end + 1)):
        levels[length][tuple(text[end - length : end + 1][::-1])] += 1
  return levels


def _frequent(level, min_count):
  """The n-grams of contexts that occur so often; the empty one always does."""
  seen = collections.Counter()
  for ngram, count in level.items():
    seen[ngram[1:]] += count
  kept = lambda context: not context or seen[context] >= min_count
  return {ngram: count for ngram, count in level.items() if kept(ngram[1:])}


def _found(counts):
  """The same from `NGramCounts`, following parents."""
  levels, names = [], [()]
  for length, level in enumerate(counts.levels):
    if length:
      edges = zip(level.parents, level.edge_token, strict=True)
      names = [(*names[parent], token) for parent, token in edges]
    assert names == sorted(names)
    found = {}
    spans = itertools.pairwise(level.first)
    for name, (start, stop) in zip(names, spans, strict=True):
      assert start < stop
      tokens = level.tokens[start:stop].tolist()
      assert tokens == sorted(set(tokens))
      for token, count in zip(tokens, level.counts[start:stop], strict=True):
        found[(token, *name)] = count
    levels.append(found)
  return levels


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('shards')


@hypothesis.given(
  texts=ngram_texts.texts(9),
  order=st.integers(1, 5),
  vocab_size=st.sampled_from([9, 1 << 16, 1 << 18]),
  joined=st.booleans(),
  min_count=st.sampled_from([1, 2, 3, 1000]),
)
def test_counts_are_those_of_a_counter(
  texts, order, vocab_size, joined, min_count, folder
):
  # The largest ids of the vocabulary.
  texts = [[vocab_size - 1 - token for token in text] for text in texts]
  # A negative token ends a text, as the end of a shard does.
  one = [token for text in texts for token in (*text, -1)]
  shards = ngram_texts.save(folder, [one] if joined else texts)
  counts = counting.count_ngrams(
    shards, order=order, vocab_size=vocab_size, min_count=min_count
  )
  expected = _expected(texts, order)
  assert _found(counts) == [_frequent(level, min_count) for level in expected]
  assert counts.num_tokens == sum(map(len, texts))
  # Rare contexts are counted, too.
  for level, row in zip(expected, counts.seldom, strict=True):
    found = collections.Counter(level.values())
    assert row.tolist() == [found[1], found[2]]


def test_bad_shards_are_refused(tmp_path):
  path = tmp_path / 'shard.npy'

  def refused(message):
    with pytest.raises(ValueError, match=message) as caught:
      counting.count_ngrams([path], order=3, vocab_size=9)
    assert '\n' not in str(caught.value)

  refused(r'shard\.npy cannot be read')
  path.write_bytes(b'no numpy')
  refused(r'shard\.npy cannot be read')
  for array in (np.zeros((2, 2), int), np.zeros(3)):
    np.save(path, array)
    refused(r'shard\.npy must hold integers of shape \[tokens\]')
  for token in (9, -2):
    np.save(path, np.array([0, token]))
    refused(rf'shard\.npy has token {token}, outside')
  np.save(path, np.zeros(0, int))
  refused('have 0 tokens')
