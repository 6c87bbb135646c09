"""N-grams: counts against a loop, Katz back-off against its formulas, tables.

Katz back-off is transcribed from its formulas into dictionaries. Then contexts
are looked up, and files of tables are written and read.
"""

import collections
import functools
import itertools
from unittest import mock

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny_drafters

from specdec.ngram import katz
from specdec.ngram import table as table_lib


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('shards')


def _text(vocab_size: int, length: int, seed: int = 0, skew: int = 3) -> list:
  """Skewed, and dependent on the last token, as text is."""
  rng = np.random.default_rng(seed)
  tokens = [0]
  for draw in rng.random(length - 1) ** skew:
    tokens.append(int(vocab_size * draw + 7 * tokens[-1]) % vocab_size)
  return tokens


def _texts(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
  """At least one token; some texts repeat, some never have the last token."""
  tokens = st.integers(0, vocab_size - 1)
  periods = st.lists(tokens, min_size=1, max_size=4)
  repeated = st.builds(
    lambda period, n: period * n, periods, st.integers(1, 20)
  )
  drawn = st.builds(
    _text,
    st.sampled_from([max(vocab_size - 1, 1), vocab_size]),
    st.integers(1, 300),
    st.integers(0, 99),
    st.sampled_from([1, 3]),
  )
  several = st.lists(repeated | drawn | st.just([]), max_size=5)
  return several.filter(any)


def _save(folder, texts: list[list[int]]) -> list:
  """A shard for each text, narrow or wide, as different sources write them."""
  shards = []
  for number, tokens in enumerate(texts):
    fits = all(0 <= token < 1 << 16 for token in tokens)
    dtype = np.uint16 if fits and number % 2 else np.int32
    shards.append(folder / f'{number}.npy')
    np.save(shards[-1], np.array(tokens, dtype))
  return shards


def _contexts(table) -> list[tuple[int, ...]]:
  """Each context's tokens, the most recent first."""
  names = [()] * table.num_contexts
  edge_token = table.edge_token.tolist()
  bounds = itertools.pairwise(table.first_child.tolist())
  for parent, (first, end) in enumerate(bounds):
    for child in range(first, end):
      names[child] = (*names[parent], edge_token[child])
  return names


# Counts.


def _counted(texts, order):
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


def _ngrams_of(counts):
  """The same from `NGramCounts`, following parents."""
  levels, names = [], [()]
  for length, level in enumerate(counts.levels):
    if length:
      edges = zip(level.parents, level.edge_token, strict=True)
      names = [(*names[parent], token) for parent, token in edges]
    assert names == sorted(names)
    ngrams = {}
    spans = itertools.pairwise(level.first)
    for name, (start, stop) in zip(names, spans, strict=True):
      assert start < stop
      tokens = level.tokens[start:stop].tolist()
      assert tokens == sorted(set(tokens))
      for token, count in zip(tokens, level.counts[start:stop], strict=True):
        ngrams[(token, *name)] = count
    levels.append(ngrams)
  return levels


@hypothesis.given(
  texts=_texts(9),
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
  joined_text = [token for text in texts for token in (*text, -1)]
  shards = _save(folder, [joined_text] if joined else texts)
  counts = katz.count_ngrams(
    shards, order=order, vocab_size=vocab_size, min_count=min_count
  )
  expected = _counted(texts, order)
  assert _ngrams_of(counts) == [
    _frequent(level, min_count) for level in expected
  ]
  assert counts.num_tokens == sum(map(len, texts))
  # Rare contexts are counted, too.
  for level, row in zip(expected, counts.seldom, strict=True):
    seldom = collections.Counter(level.values())
    assert row.tolist() == [seldom[1], seldom[2]]


def test_bad_shards_are_refused(tmp_path):
  path = tmp_path / 'shard.npy'

  def refused(message):
    with pytest.raises(ValueError, match=message) as caught:
      katz.count_ngrams([path], order=3, vocab_size=9)
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


# Katz back-off.


class _Reference:
  """Contexts are tuples in reading order; slow, and nothing is shared."""

  def __init__(self, texts, *, order, vocab_size, min_count=1):
    self.vocab_size = vocab_size
    self.min_count = min_count
    self.order = order
    self.counts = collections.Counter(
      tuple(text[start : start + n])
      for text in texts
      for n in range(1, order + 1)
      for start in range(len(text) - n + 1)
    )
    self.following = collections.defaultdict(list)
    for ngram in self.counts:
      self.following[ngram[:-1]].append(ngram[-1])
    self.discount = functools.cache(self._discount)
    self.prob = functools.cache(self._prob)

  def total(self, context):
    return sum(self.counts[*context, w] for w in self.following[context])

  def _discount(self, n):
    """D of n-grams; tested by hand below."""
    ngrams = [ngram for ngram in self.counts if len(ngram) == n]
    having = collections.Counter(self.counts[ngram] for ngram in ngrams)
    return katz.discount_of(having[1], having[2])

  def _prob(self, context, w):
    if context and self.total(context) < self.min_count:
      return self.prob(context[1:], w)
    lower = functools.partial(self.prob, context[1:])
    if not context:
      lower = lambda w: 1 / self.vocab_size
    discount = self.discount(len(context) + 1)
    seen = self.following[context]
    total = self.total(context)
    mass = {v: self.counts[*context, v] - discount for v in seen}
    if len(seen) == self.vocab_size:
      total = sum(mass.values())
    if w in mass:
      return mass[w] / total
    left = 1 - sum(mass.values()) / total
    return left * lower(w) / (1 - sum(map(lower, seen)))


def _build(folder, texts, k, **arguments):
  shards = _save(folder, texts)
  # JAX would compile a program for every shape of an array.
  with mock.patch.object(table_lib, 'jnp', np):
    return katz.build_table(
      katz.estimate(katz.count_ngrams(shards, **arguments)), k
    )


def _check(table, reference, k):
  names = _contexts(table)
  # Distinct, and in the order in which they are looked up.
  assert names == sorted(set(names), key=lambda name: (len(name), name))
  assert {name[::-1] for name in names} == {
    context
    for context in reference.following
    if not context or reference.total(context) >= reference.min_count
  }
  assert table.num_continuations == k
  for index in range(0, len(names), max(1, len(names) // 300)):
    context = names[index][::-1]
    all_tokens = range(reference.vocab_size)
    expected = np.array([reference.prob(context, w) for w in all_tokens])
    assert expected.sum() == pytest.approx(1)
    best = np.sort(expected[expected > 0])[::-1][:k]
    number = len(best)
    tokens = table.next_tokens[index]
    log_probs = table.next_log_probs[index]
    assert len(set(tokens[:number].tolist())) == number
    for probs in (best, expected[tokens[:number]]):
      np.testing.assert_allclose(np.exp(log_probs[:number]), probs, rtol=1e-5)
    assert np.all(tokens[number:] == 0)
    assert np.all(log_probs[number:] == -np.inf)


def _case(vocab_size):
  return st.fixed_dictionaries(
    {
      'texts': _texts(vocab_size),
      'order': st.integers(1, 5),
      'vocab_size': st.just(vocab_size),
      'min_count': st.integers(1, 3),
    }
  )


def _long(vocab_size, length, **arguments):
  """The last token never occurs."""
  texts = [_text(vocab_size - 1, length), _text(vocab_size - 1, 9, seed=1)]
  return {'texts': texts, 'order': 5, 'vocab_size': vocab_size} | arguments


def _beyond_the_candidates():
  """Seen once, and so discounted below many that were not seen."""
  texts = [_text(200, 3000, skew=1)]
  return {'texts': texts, 'order': 2, 'vocab_size': 200}


@hypothesis.given(
  case=st.sampled_from([2, 3, 7, 12, 40]).flatmap(_case),
  k=st.sampled_from([1, 2, 3, 8, 40]),
  block=st.sampled_from([62, 1 << 20]),
)
@hypothesis.example(case=_long(7, 600, min_count=1), k=3, block=62)
@hypothesis.example(case=_long(7, 600, min_count=3), k=8, block=1 << 20)
@hypothesis.example(case=_long(40, 700, min_count=1), k=40, block=1 << 20)
@hypothesis.example(case=_beyond_the_candidates(), k=2, block=1 << 20)
def test_tables_are_those_of_the_formulas(case, k, block, folder):
  reference = _Reference(**case)
  # Whether the work is done in parts does not show.
  with mock.patch.object(katz, '_BLOCK_PROBS', block):
    _check(_build(folder, k=k, **case), reference, k)


@pytest.mark.parametrize(
  ('once', 'twice', 'discount'),
  [(6, 2, 0.6), (6, 6, 1 / 3), (0, 4, 0.5), (4, 0, 0.5), (0, 0, 0.5)],
)
def test_discounts_by_hand(once, twice, discount):
  assert katz.discount_of(once, twice) == pytest.approx(discount)


# Tables.

_find = jax.jit(table_lib.find_context)


def _table(texts, vocab_size, order, k=2):
  # JAX would compile a program for every shape of an array.
  with mock.patch.object(tiny_drafters, 'jnp', np):
    return tiny_drafters.ngram_table(
      texts, vocab_size, order=order, num_continuations=k
    )


def _expected(index, histories):
  nodes = []
  for history in histories.tolist():
    length = 0
    while length < len(history) and tuple(history[: length + 1]) in index:
      length += 1
    nodes.append(index[tuple(history[:length])])
  return nodes


def _random(order, vocab_size, low):
  """A table, and histories that it knows, half knows or does not know."""
  rng = np.random.default_rng(order)
  draw = lambda *shape: rng.integers(low, vocab_size, size=shape)
  texts = draw(150, order).tolist()
  table = _table(texts, vocab_size, order)
  histories, names = draw(300, order - 1), _contexts(table)
  for row in range(150):  # Known ones, some followed by others.
    name = names[rng.integers(len(names))]
    histories[row, : len(name)] = name
  for row in range(0, 300, 3):  # Starts of texts.
    histories[row, rng.integers(order) :] = -1
  histories[:2] = [[vocab_size - 1], [0]]
  index = {name: number for number, name in enumerate(names)}
  return table, index, histories.astype(np.int32)


@pytest.mark.parametrize(
  ('order', 'vocab_size', 'low'),
  [(1, 6, 0), (2, 300, 0), (3, 262144, 262100), (4, 6, 0), (5, 262144, 0)],
)
def test_the_longest_known_context_is_found(order, vocab_size, low):
  table, index, histories = _random(order, vocab_size, low)
  expected = _expected(index, histories)
  nodes = _find(table, histories)
  assert nodes.dtype == jnp.int32
  assert nodes.tolist() == expected
  names = [*index]
  assert {len(names[context]) for context in expected} == set(range(order))


def test_bytes_of_a_lookup_and_a_table_without_contexts():
  texts = [[1, token, 0] for token in range(5)]
  table = _table(texts, 9, 3, k=4)
  # The child of the root; then ends and edge of its children (each context has
  # one child); then 4 tokens with log-probabilities.
  assert table.lookup_bytes == 4 * (1 + (2 + 0 + 1) + 2 * 4)
  assert _table([[0]], 9, 1, k=4).lookup_bytes == 4 * 2 * 4
  table = _table([[0]], 9, 3)
  assert table.num_contexts == 1
  histories = np.array([[0, 0], [-1, -1], [8, 3]], np.int32)
  assert _find(table, histories).tolist() == [0, 0, 0]


@pytest.mark.parametrize('vocab_size', [1 << 16, (1 << 16) + 1])
def test_a_file_holds_the_table(vocab_size, tmp_path):
  table, _, _ = _random(4, vocab_size, vocab_size - 200)
  path = tmp_path / 'new' / 'table.safetensors'
  provenance = {'draft': 'a', 'tokens': 3, 'discounts': [0.5]}
  table_lib.save_table(path, table, provenance)
  loaded, stored = table_lib.load_table(path)
  assert stored == provenance
  assert (loaded.order, loaded.vocab_size) == (4, vocab_size)
  for field in ('edge_token', 'first_child', 'next_tokens'):
    assert np.array_equal(getattr(loaded, field), getattr(table, field))
    assert getattr(loaded, field).dtype == jnp.int32
  assert loaded.next_log_probs.dtype == jnp.float32
  np.testing.assert_allclose(
    loaded.next_log_probs, table.next_log_probs, rtol=1e-3
  )
  assert -np.inf in np.asarray(loaded.next_log_probs)
  # Small vocabularies give small files: per context an edge and two tokens.
  bytes_per_id = 2 if vocab_size <= 1 << 16 else 4
  floats = 2 * 2 * table.num_contexts + 4 * (table.num_contexts + 1)
  content = path.stat().st_size - 3 * bytes_per_id * table.num_contexts - floats
  assert 0 < content < 1000  # Its description.
  # Rounding twice changes nothing.
  whole = path.read_bytes()
  table_lib.save_table(path, loaded, provenance)
  assert path.read_bytes() == whole
  # A failed write leaves the old file.
  with pytest.raises(TypeError):
    table_lib.save_table(path, table, {'version': object()})
  assert path.read_bytes() == whole
  assert [file.name for file in path.parent.iterdir()] == [path.name]


def _refused(path, message):
  with pytest.raises(ValueError, match=message) as caught:
    table_lib.load_table(path)
  assert str(path) in str(caught.value)
  assert 'scripts/build_ngram.py' in str(caught.value)


def test_bad_files_are_refused(tmp_path):
  path, unreadable = tmp_path / 'table', 'table cannot be read: '
  _refused(path, 'there is no n-gram table')
  _refused(tmp_path, 'there is no n-gram table')
  table, _, _ = _random(3, 300, 0)
  table_lib.save_table(path, table, {})
  whole = path.read_bytes()
  text = b'def f():\n  pass\n' * 9
  for content in (b'', text, whole[:-1]):
    path.write_bytes(content)
    _refused(path, unreadable)
  for old, new, reason in (
    (b'"I32"', b'"F32"', 'first_child is float32'),
    (rb'order\": 3', rb'order\": x', 'Expecting value'),
    (rb'order\": 3', rb'order\":{}', 'order is {}'),
  ):
    path.write_bytes(whole.replace(old, new))
    _refused(path, f'cannot be read: .*{reason}')
  for metadata in (None, {'format': 'pt'}, {'ngram_table': '{}'}):
    safetensors_numpy.save_file({'a': np.zeros(3)}, path, metadata=metadata)
    _refused(path, 'it is no table of this version')
  safetensors_numpy.save_file({}, path, metadata={'ngram_table': '{'})
  _refused(path, unreadable)
