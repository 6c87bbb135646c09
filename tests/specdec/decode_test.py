"""The promise of the library: a drafter changes the speed, never the tokens.

Everything here is float32 on CPU and compared token for token with a slow loop.
Greedy and sampled rows are in one batch, and all that differs in values alone
shares a program: one per shape of a drafter. `fuzz_test` has random requests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_drafters

import specdec
from specdec import hosts

LIMIT = tiny.MAX_NEW_TOKENS
TEMPERATURES = (0.0, 1.0, 1.0, 0.0, 0.7)
_PROMPTS = tiny.prompts(5)
_KEYS = tiny.row_keys(5)
_ALL = tuple(range(5))


@jax.jit
def _logits(model, tokens):
  """`[T, V]`, without a cache."""
  length = tokens.shape[0]
  mask = jnp.tril(jnp.ones((length, length), bool))[None]
  positions = jnp.arange(length)[None]
  return model.apply(tokens[None], positions, mask, None)[0][0]


def _logits_of(text):
  padded = np.zeros(tiny.MAX_POSITIONS, np.int32)
  padded[: len(text)] = text
  return np.asarray(_logits(tiny_drafters.target(), padded))[len(text) - 1]


@functools.cache
def _expected(row):
  """The new tokens of one of the five rows, slowly."""
  options = reference.Options(  # as of `tiny.sampling`
    temperature=TEMPERATURES[row], top_k=20, top_p=0.95, min_p=0.01
  )
  tokens, _ = reference.decode(
    _logits_of, _PROMPTS[row], LIMIT, _KEYS[row], options
  )
  return tokens


def _make(shape, kind='similar', inner='perfect'):
  """A drafter whose tables, if perfect, know these very texts by heart."""
  texts = [prompt + _expected(row) for row, prompt in enumerate(_PROMPTS)]
  return tiny_drafters.make(shape, kind, inner, texts)


def _decode(drafter, rows=_ALL, fill=0):
  """Some of the rows, in any order; the function under `generate`."""
  padded, lengths = tiny.pad([_PROMPTS[row] for row in rows], fill)
  request = specdec.Request(
    prompt=padded,
    prompt_length=lengths,
    limit=np.full(len(rows), LIMIT, np.int32),
    row_keys=_KEYS[np.array(rows)],
    sampling=tiny.sampling_params(*(TEMPERATURES[row] for row in rows)),
  )
  config = specdec.DecodeConfig(max_new_tokens=LIMIT)
  result = specdec.decode(
    tiny_drafters.target(), drafter, request, config=config
  )
  return hosts.read(result), tiny.new_tokens(result, lengths)


def _histogram(result):
  """How many steps emitted 1, 2, ... tokens, if all counters agree with it."""
  counters = result.counters
  histogram = counters.emitted_histogram
  np.testing.assert_array_equal(histogram.sum(axis=1), counters.target_forwards)
  sizes = np.arange(1, histogram.shape[1] + 1)
  np.testing.assert_array_equal(histogram @ sizes, LIMIT)
  assert counters.steps == max(counters.target_forwards)
  return histogram.sum(axis=0)


def test_plain_decoding_equals_a_loop_without_cache():
  expected = [_expected(row) for row in _ALL]
  assert all(len(set(row)) > 10 for row in expected), 'not a trivial text'
  assert _decode(specdec.PLAIN)[1] == expected
  # The trees of a row that fills the context reach beyond its end.
  assert max(map(len, _PROMPTS)) + LIMIT == tiny.MAX_POSITIONS


_MODELS = [(kind, 'perfect') for kind in tiny.DRAFTS]
_TABLES = [('perfect', inner) for inner in tiny_drafters.TABLES]
_BOTH = [
  ('perfect', 'perfect'),
  ('hopeless', 'perfect'),
  ('hopeless', 'empty'),
  ('similar', 'random'),
  ('random', 'empty'),
  ('similar', 'wrong'),
]
# Which drafters are tried of a shape, and how many tokens a step must have
# emitted now and then: otherwise the equality would be tested at the extremes.
_SHAPES = {
  'ragged tree': (_MODELS, range(1, 4)),
  'tree': (_MODELS, range(1, 5)),
  'tables': (_TABLES, range(1, 3)),
  'staged': (_BOTH, range(1, 7)),
}


# One test for all kinds of a shape, so that no two processes compile the same.
@pytest.mark.parametrize('shape', _SHAPES)
def test_drafted_equals_plain(shape):
  kinds, lengths = _SHAPES[shape]
  # The tree is for one row at a time: each is as among others.
  batches = [(row,) for row in _ALL] if shape == 'tree' else [_ALL]
  histograms = {}
  for kind, inner in kinds:
    total = 0
    for rows in batches:
      result, tokens = _decode(_make(shape, kind, inner), rows)
      assert tokens == [_expected(row) for row in rows], (
        f'{kind} model, {inner} inner, rows {rows}'
      )
      total = total + _histogram(result)
    histograms[kind, inner] = total
  emitted = np.flatnonzero(sum(histograms.values())) + 1
  assert set(lengths) <= set(emitted.tolist())
  if shape == 'staged':  # a better stage inside is worth it
    steps = lambda inner: histograms['hopeless', inner].sum()
    assert 1.3 * steps('perfect') < steps('empty')
  if shape == 'tree':  # the draft sees what the target sees, in three rounds
    perfect = histograms['perfect', 'perfect']
    assert perfect[3] > 0.9 * perfect.sum()


def test_neither_order_nor_padding_matters():
  """All that is counted is the same: a row's guesses are its own as well."""
  order = (3, 0, 4, 2, 1)
  drafter = _make('staged', 'similar', 'random')
  result, tokens = _decode(drafter)
  other, other_tokens = _decode(drafter, order, fill=17)
  assert other_tokens == [tokens[row] for row in order]
  # And with the rows where they were, also what is counted for all of them.
  padded, _ = _decode(drafter, fill=17)
  every = lambda result: (result.counters, result.stage_counters)
  moved = lambda count: count[np.array(order)] if count.ndim else count
  equal = np.testing.assert_array_equal
  jax.tree.map(equal, every(result), every(padded))
  jax.tree.map(equal, jax.tree.map(moved, every(result)), every(other))
