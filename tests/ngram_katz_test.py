"""Katz back-off against a transcription of its formulas into dictionaries."""

import collections
import functools
from unittest import mock

import hypothesis
from hypothesis import strategies as st
import jax
import ngram_texts
from ngram_texts import text
import numpy as np
import pytest

from specdec.ngram import katz
from specdec.ngram.counting import count_ngrams
from specdec.ngram.katz import build_table
from specdec.ngram.katz import discounts_of
from specdec.ngram.katz import estimate
from specdec.ngram.table import find_context
from specdec.ngram.table import MISSING


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
    self.method = functools.cache(self._method)
    self.prob = functools.cache(self._prob)

  def total(self, context):
    return sum(self.counts[*context, w] for w in self.following[context])

  def _method(self, n):
    having = collections.Counter(
      count for ngram, count in self.counts.items() if len(ngram) == n
    )
    if all(having[r] for r in range(1, 6)):
      good_turing = {}
      common = 6 * having[6] / having[1]
      if common != 1:
        for r in range(1, 6):
          r_star = (r + 1) * having[r + 1] / having[r]
          good_turing[r] = (r_star / r - common) / (1 - common)
        if all(0 < ratio <= 1 for ratio in good_turing.values()):
          return 'good-turing', lambda r: r * good_turing.get(r, 1)
    if having[1] and having[2]:
      amount = having[1] / (having[1] + 2 * having[2])
      return 'absolute', lambda r: r - amount
    return 'constant', lambda r: r - 0.5

  def _prob(self, context, w):
    if context and self.total(context) < self.min_count:
      return self.prob(context[1:], w)
    lower = functools.partial(self.prob, context[1:])
    if not context:
      lower = lambda w: 1 / self.vocab_size
    _, discounted = self.method(len(context) + 1)
    seen = self.following[context]
    total = self.total(context)
    mass = {v: discounted(self.counts[*context, v]) for v in seen}
    if sum(mass.values()) >= total:
      total += 1
    if len(seen) == self.vocab_size:
      total = sum(mass.values())
    if w in mass:
      return mass[w] / total
    left = 1 - sum(mass.values()) / total
    return left * lower(w) / (1 - sum(map(lower, seen)))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('shards')


def _estimate(folder, texts, **arguments):
  shards = ngram_texts.save(folder, texts)
  return estimate(count_ngrams(shards, **arguments))


def _distribution(model, history):
  """The distribution after a text, whose most recent token comes first."""
  length, context = 0, 0
  for token in history[: len(model.levels) - 1]:
    level = model.levels[length + 1].counts
    start, stop = np.searchsorted(level.parents, [context, context + 1])
    child = start + np.searchsorted(level.edge_token[start:stop], token)
    if child == stop or level.edge_token[child] != token:
      break
    length, context = length + 1, int(child)
  return model.distributions(length, np.array([context]))[0]


def _table_contexts(table):
  """Each context's tokens, the most recent first."""
  names = [()] * table.num_contexts
  for parent in range(table.num_contexts):
    first, end = table.first_child[parent], table.first_child[parent + 1]
    for child in range(int(first), int(end)):
      names[child] = (*names[parent], int(table.edge_token[child]))
  return names


def _check_model(model, reference, contexts):
  vocab_size = reference.vocab_size
  for n, discounts in enumerate(model.discounts, 1):
    assert discounts.method == reference.method(n)[0]
  for context in contexts:
    found = _distribution(model, context[::-1])
    expected = [reference.prob(context, w) for w in range(vocab_size)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert abs(found.sum() - 1) < 1e-9
    assert np.all(found > 0)


def _check_table(model, k):
  # JAX would compile a program for every shape of an array.
  with mock.patch.object(katz, 'jnp', np):
    table = build_table(model, k)
  names = _table_contexts(table)
  # Distinct, and in the order in which they are looked up.
  assert names == sorted(set(names), key=lambda name: (len(name), name))
  assert table.num_continuations == k
  assert table.num_contexts == sum(len(x.backoff) for x in model.levels)
  for context in range(0, len(names), max(1, len(names) // 300)):
    expected = _distribution(model, names[context])
    tokens = table.next_tokens[context]
    log_probs = table.next_log_probs[context]
    best = np.sort(expected[expected > 0])[::-1][:k]
    known = len(best)
    assert len(set(tokens[:known].tolist())) == known
    for probs in (best, expected[tokens[:known]]):
      np.testing.assert_allclose(np.exp(log_probs[:known]), probs, rtol=1e-5)
    assert np.all(tokens[known:] == 0)
    assert np.all(log_probs[known:] == np.float32(MISSING))
  return table, names


def _case(vocab_size):
  return st.builds(
    dict,
    texts=ngram_texts.texts(vocab_size),
    order=st.integers(1, 5),
    vocab_size=st.just(vocab_size),
    min_count=st.integers(1, 3),
  )


def _long(vocab_size, length, **arguments):
  """The last token never occurs."""
  texts = [text(vocab_size - 1, length), text(vocab_size - 1, 9, seed=1)]
  return {'texts': texts, 'order': 5, 'vocab_size': vocab_size} | arguments


@hypothesis.given(
  case=st.sampled_from([2, 3, 7, 12, 40]).flatmap(_case),
  k=st.sampled_from([1, 2, 3, 8]),
)
@hypothesis.example(case=_long(7, 600, min_count=1), k=3)
@hypothesis.example(case=_long(7, 600, min_count=3), k=8)
@hypothesis.example(case=_long(40, 700, min_count=1), k=2)
def test_probabilities_and_tables_are_those_of_the_formulas(case, k, folder):
  model, reference = _estimate(folder, **case), _Reference(**case)
  # Known contexts, and others of all lengths.
  contexts = [c for c in reference.following if len(c) < case['order']][:60]
  rng = np.random.default_rng(0)
  for length in range(case['order']):
    others = rng.integers(case['vocab_size'], size=(6, length))
    contexts += [tuple(context) for context in others.tolist()]
  _check_model(model, reference, contexts)
  _check_table(model, k)


def test_every_kind_of_discount_is_tried_and_contexts_are_found(folder):
  models = [
    _estimate(folder, **_long(*sizes)) for sizes in ((7, 600), (40, 700))
  ]
  methods = {one.method for model in models for one in model.discounts}
  assert methods == {'good-turing', 'absolute', 'constant'}
  table, names = _check_table(models[0], 3)
  histories = np.full((len(names), 4), -1, np.int32)
  for row, name in enumerate(names):
    histories[row, : len(name)] = name
  found = find_context(table, histories)
  assert np.array_equal(found, np.arange(len(names)))


def test_good_turing_by_hand():
  # Seen once: 120, twice: 40, ...; 6 n6 / n1 = 3/10, so that
  # d(1) = (2 40 / 120 - 3/10) / (7/10) = 11/21, and so on.
  counts = np.array([0, 120, 40, 20, 12, 8, 6])
  ratios = np.array([11 / 21, 9 / 14, 5 / 7, 16 / 21, 6 / 7])
  discounts = discounts_of(counts)
  assert discounts.method == 'good-turing'
  r = np.arange(1, 6)
  np.testing.assert_allclose(discounts.apply(r), r * ratios, rtol=1e-12)
  assert discounts.apply(np.array([6, 7, 1000])).tolist() == [6, 7, 1000]
  # What is taken off is what n1 / N of the mass is.
  taken = np.sum(counts[1:6] * (r - discounts.apply(r)))
  assert taken == pytest.approx(120, rel=1e-12)


@pytest.mark.parametrize(
  ('counts', 'method', 'amount'),
  [
    ([0, 6, 2, 0, 0, 0, 0], 'absolute', 0.6),  # Some never occur.
    ([0, 6, 6, 6, 6, 6, 1], 'absolute', 1 / 3),  # 6 n6 / n1 = 1
    ([0, 6, 9, 1, 1, 1, 0], 'absolute', 1 / 4),  # d(1) = 3
    ([0, 0, 4, 3, 2, 1, 1], 'constant', 0.5),  # Would take off nothing,
    ([0, 4, 0, 3, 2, 1, 1], 'constant', 0.5),  # or everything.
  ],
)
def test_fallback_discounts(counts, method, amount):
  discounts = discounts_of(np.array(counts))
  assert discounts.method == method
  seen = np.array([1, 2, 5, 100])
  np.testing.assert_allclose(discounts.apply(seen), seen - amount)


def test_frequent_n_grams_alone_leave_something_for_the_others(folder):
  # Good-Turing discounts of the bigrams, none of which apply after token 0.
  rng = np.random.default_rng(0)
  others = (4 + 36 * rng.random(700) ** 3).astype(int).tolist()
  model = _estimate(
    folder, [[0, 1] * 50, others], order=2, vocab_size=41, min_count=1
  )
  assert model.discounts[1].method == 'good-turing'
  after = _distribution(model, [0])
  assert after[1] == pytest.approx(50 / 51)
  assert np.all(after > 0)
  assert after.sum() == pytest.approx(1)


def test_tokens_beyond_the_candidates_are_found(folder):
  # Seen once, and so discounted below many that were not seen.
  texts = [text(200, 3000, skew=1)]
  model = _estimate(folder, texts, order=2, vocab_size=200)
  original = katz._from_distributions
  with mock.patch.object(
    katz, '_from_distributions', side_effect=original
  ) as spy:
    _check_table(model, 2)
  calls = [call.args for call in spy.call_args_list]
  checked = sum(
    len(contexts) for _, length, contexts, _ in calls if length == 1
  )
  assert 0 < checked < len(model.levels[1].backoff)


def test_parts_of_the_work_do_not_show(folder, monkeypatch):
  sizes = {'order': 4, 'vocab_size': 31}
  build = lambda: build_table(_estimate(folder, [text(30, 500)], **sizes), 3)
  whole = build()
  monkeypatch.setattr(katz, '_BLOCK_NGRAMS', 13)
  monkeypatch.setattr(katz, '_BLOCK_PROBS', 62)
  jax.tree.map(np.testing.assert_array_equal, whole, build())
