"""Katz back-off against a transcription of its formulas into dictionaries."""

import collections
import functools
from unittest import mock

import hypothesis
from hypothesis import strategies as st
import ngram_texts
import numpy as np
import pytest

from specdec.ngram import counting
from specdec.ngram import katz
from specdec.ngram import table as table_lib


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


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('shards')


def _build(folder, texts, k, **arguments):
  shards = ngram_texts.save(folder, texts)
  # JAX would compile a program for every shape of an array.
  with mock.patch.object(table_lib, 'jnp', np):
    return katz.build_table(
      katz.estimate(counting.count_ngrams(shards, **arguments)), k
    )


def _check(table, reference, k):
  names = ngram_texts.contexts(table)
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
    known = len(best)
    tokens = table.next_tokens[index]
    log_probs = table.next_log_probs[index]
    assert len(set(tokens[:known].tolist())) == known
    for probs in (best, expected[tokens[:known]]):
      np.testing.assert_allclose(np.exp(log_probs[:known]), probs, rtol=1e-5)
    assert np.all(tokens[known:] == 0)
    assert np.all(log_probs[known:] == -np.inf)


def _case(vocab_size):
  return st.fixed_dictionaries(
    {
      'texts': ngram_texts.texts(vocab_size),
      'order': st.integers(1, 5),
      'vocab_size': st.just(vocab_size),
      'min_count': st.integers(1, 3),
    }
  )


def _long(vocab_size, length, **arguments):
  """The last token never occurs."""
  texts = [
    ngram_texts.text(vocab_size - 1, length),
    ngram_texts.text(vocab_size - 1, 9, seed=1),
  ]
  return {'texts': texts, 'order': 5, 'vocab_size': vocab_size} | arguments


def _beyond_the_candidates():
  """Seen once, and so discounted below many that were not seen."""
  texts = [ngram_texts.text(200, 3000, skew=1)]
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
