"""Counting in parts gives what counting at once gives."""

import collections

import numpy as np
import pytest

from specdec.ngram import counting
from specdec.ngram.counting import count_ngrams


def _save(folder, texts):
  shards = []
  for number, tokens in enumerate(texts):
    # Narrow and wide, as the shards of different sources are.
    fits = all(0 <= token < 1 << 16 for token in tokens)
    dtype = np.uint16 if fits and number % 2 else np.int32
    shards.append(folder / f'{number}.npy')
    np.save(shards[-1], np.array(tokens, dtype))
  return shards


def _expected(texts, order):
  """Of every context length: n-gram (the last token first) to count."""
  levels = [collections.Counter() for _ in range(order)]
  for text in texts:
    for end in range(len(text)):
      for length in range(min(order, end + 1)):
        levels[length][tuple(text[end - length : end + 1][::-1])] += 1
  return levels


def _found(counts):
  """The same from `NGramCounts`, following parents."""
  levels, names = [], [()]
  for length, level in enumerate(counts.levels):
    if length:
      names = [
        (*names[parent], token)
        for parent, token in zip(level.parents, level.edge_token, strict=True)
      ]
    assert names == sorted(names)
    found = {}
    for name, start, stop in zip(
      names, level.first[:-1], level.first[1:], strict=True
    ):
      assert start < stop
      tokens = level.tokens[start:stop].tolist()
      assert tokens == sorted(set(tokens))
      for token, count in zip(tokens, level.counts[start:stop], strict=True):
        found[(token, *name)] = count
    levels.append(found)
  return levels


def _texts(vocab_size, seed=0):
  rng = np.random.default_rng(seed)
  lengths = [40, 1, 2, 3, 0, 90, 5]
  # Skewed, as tokens are: few are most of the text.
  return [
    (vocab_size * rng.random(length) ** 3).astype(int).tolist()
    for length in lengths
  ]


@pytest.mark.parametrize('order', [1, 2, 3, 4, 5])
@pytest.mark.parametrize(('partition', 'chunk'), [(1 << 20, 1 << 20), (10, 7)])
def test_counts_are_those_of_a_counter(
  order, partition, chunk, tmp_path, monkeypatch
):
  monkeypatch.setattr(counting, '_CHUNK_TOKENS', chunk)
  texts = _texts(9)
  calls = []
  counts = count_ngrams(
    _save(tmp_path, texts),
    order=order,
    vocab_size=9,
    partition_tokens=partition,
    progress=lambda *call: calls.append(call),
  )
  expected = _expected(texts, order)
  assert _found(counts) == expected
  assert counts.num_tokens == sum(map(len, texts))
  assert len(counts.levels) == order
  for level, row in zip(expected, counts.counts_of_counts, strict=True):
    found = collections.Counter(level.values())
    assert row.tolist() == [found[count] for count in range(7)]
  if order > 1:
    assert (len(calls) > 3) == (partition == 10)
    assert calls[-1] == (counts.num_tokens, counts.num_tokens)


def test_large_token_ids(tmp_path):
  vocab_size = 1 << 18
  rng = np.random.default_rng(0)
  texts = [rng.integers(vocab_size - 3, vocab_size, 60).tolist()]
  shards = _save(tmp_path, texts)
  counts = count_ngrams(shards, order=5, vocab_size=vocab_size)
  assert _found(counts) == _expected(texts, 5)


def test_a_negative_token_ends_a_text(tmp_path):
  texts = _texts(9)
  joined = [token for text in texts for token in (*text, -1)]
  counts = count_ngrams(_save(tmp_path, [joined]), order=4, vocab_size=9)
  assert _found(counts) == _expected(texts, 4)
  assert counts.num_tokens == sum(map(len, texts))


@pytest.mark.parametrize('min_count', [2, 3, 1000])
def test_rare_contexts_are_left_out_but_not_of_the_counts_of_counts(
  min_count, tmp_path
):
  texts = _texts(9)
  shards = _save(tmp_path, texts)
  every, pruned = (
    count_ngrams(
      shards, order=4, vocab_size=9, min_count=count, partition_tokens=20
    )
    for count in (1, min_count)
  )
  expected = _expected(texts, 4)
  for length in range(1, 4):
    seen = collections.Counter()
    for ngram, count in expected[length].items():
      seen[ngram[1:]] += count
    expected[length] = {
      ngram: count
      for ngram, count in expected[length].items()
      if seen[ngram[1:]] >= min_count
    }
  assert _found(pruned) == expected
  assert np.array_equal(every.counts_of_counts, pruned.counts_of_counts)


def _refused(shard, message, **arguments):
  with pytest.raises(ValueError, match=message) as caught:
    count_ngrams([shard], order=3, vocab_size=9, **arguments)
  assert '\n' not in str(caught.value)


def test_bad_shards_are_refused(tmp_path):
  path = tmp_path / 'shard.npy'
  _refused(path, r'shard\.npy cannot be read')
  path.write_bytes(b'no numpy')
  _refused(path, r'shard\.npy cannot be read')
  for array in (np.zeros((2, 2), int), np.zeros(3)):
    np.save(path, array)
    _refused(path, r'shard\.npy must hold integers of shape \[tokens\]')
  for token in (9, -2):
    np.save(path, np.array([0, token]))
    _refused(path, rf'shard\.npy has token {token}, outside')
  np.save(path, np.zeros(0, int))
  _refused(path, 'have 0 tokens')
