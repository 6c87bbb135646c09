"""The distribution of the tokens of the compiled loop, as users run it.

Tokens of tens of thousands of rows of every rule, way to choose children and
kind of tree are counted and compared with the exact distribution of whole
sequences, which take several steps.
"""

import functools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import specdec
from specdec import sampling as sampling_lib
from specdec.models.nn import table_model
from specdec.verify import rules as rules_lib

VOCAB_SIZE = 4
LENGTH = 4
_NUM_ROWS = 60_000  # of each sampling
_BATCH_SIZE = 100

_FILTERS = {'temperature': 0.7, 'top_p': 0.9, 'min_p': 0.02}
_FILTERS |= {'repetition_penalty': 1.4, 'logit_bias': 0.3}
_SAMPLINGS = {
  'temperature 1': {},
  'filters': _FILTERS,
  'greedy': {'temperature': 0.0},
}
_DRAWN = ('temperature 1', 'filters')  # those whose distribution is tested

# Rule, children, drafter.
_CASES = [
  ('rejection', sampling_lib.BEST, 'staged'),
  ('rejection', sampling_lib.BEST, 'earlier'),
  ('rejection', sampling_lib.WITHOUT_REPLACEMENT, 'binary tree'),
  ('traversal', sampling_lib.WITHOUT_REPLACEMENT, 'binary tree'),
]
_MORE_CASES = [
  (rule, children, name)
  for rule, kinds, names in (
    (
      'rejection',
      [sampling_lib.BEST],
      ('none', 'bigram', 'binary tree', 'tree'),
    ),
    ('rejection', [sampling_lib.WITH_REPLACEMENT], ('binary tree',)),
    ('rejection', sampling_lib.CHILDREN, ('chain of 2', 'ragged tree')),
    ('traversal', sampling_lib.CHILDREN, ('chain of 2', 'ragged tree')),
    ('traversal', [sampling_lib.BEST], ('none', 'staged')),
    ('block', sampling_lib.CHILDREN, ('chain of 2',)),
    ('block', [sampling_lib.BEST], ('bigram chain',)),
    ('match', [sampling_lib.BEST], ('none', 'tree', 'binary tree')),
  )
  for children in kinds
  for name in names
]

# For one test, so that all hold with a probability of 99.9% at least.
_SIGNIFICANCE = 1e-3 / len(_DRAWN) / (len(_CASES) + len(_MORE_CASES))


@functools.cache
def _tables():
  """`[V, V]` logits of the target and of a draft that is right now and then."""
  rng = np.random.default_rng(0)
  target = rng.normal(size=(VOCAB_SIZE,) * 2)
  draft = target + 1.2 * rng.normal(size=target.shape)
  return target.astype(np.float32), draft.astype(np.float32)


# The program of users, its machine code less optimized.
@functools.partial(
  jax.jit,
  static_argnames='config',
  compiler_options={'xla_backend_optimization_level': 1},
)
def _run(target, drafter, samplings, keys, kinds, *, config):
  """The new tokens of many batches, and the forwards of each row.

  `samplings` are stacked, `kinds [n, B]` are indices of them; `keys [n, B]`.
  """

  def decode_batch(batch):
    keys, kinds = batch
    sampling = jax.tree.map(lambda array: array[kinds], samplings)
    request = enumeration.request(keys, sampling, LENGTH)
    result = specdec.decode(target, drafter, request, config=config)
    return result.tokens[:, 1:], result.counters.target_forwards

  return jax.lax.map(decode_batch, (keys, kinds))


def _decode(rule, children, name, num_rows, seed):
  """Tokens `[n, L]` and steps `[n]` of each sampling."""
  target, draft = _tables()
  full = functools.partial(enumeration.full_sampling, vocab_size=VOCAB_SIZE)
  samplings = map(full, _SAMPLINGS.values())
  # Greedy rows need not be as many; they are the last.
  sizes = [num_rows] * len(_DRAWN) + [num_rows // 30]
  kinds = np.repeat(np.arange(len(sizes)), sizes)
  keys = jax.random.split(jax.random.key(seed), len(kinds))
  found = _run(
    table_model.table_model(target, max_positions=1000),
    enumeration.drafter(name, draft),
    jax.tree.map(lambda *rows: jnp.concatenate(rows), *samplings),
    keys.reshape(-1, _BATCH_SIZE),
    kinds.reshape(-1, _BATCH_SIZE),
    config=specdec.DecodeConfig(
      max_new_tokens=LENGTH, rule=rules_lib.RULES[rule](children)
    ),
  )
  ends = np.cumsum(sizes)[:-1]
  return [np.split(np.concatenate(np.asarray(array)), ends) for array in found]


def _law(name):
  """The distribution of whole sequences, `[V ** L]`, in float64."""
  probs, texts = np.ones(1), np.full((1, 1), enumeration.PROMPT)
  tokens = np.arange(VOCAB_SIZE)
  for _ in range(LENGTH):
    seen = (texts[:, :, None] == tokens).any(1)
    logits = _tables()[0][texts[:, -1]]
    after = enumeration.exact_probs(logits, seen, _SAMPLINGS[name])
    probs = (probs[:, None] * after).ravel()
    texts = np.repeat(texts, VOCAB_SIZE, axis=0)
    texts = np.c_[texts, np.resize(tokens, len(texts))]
  return probs


def counts_of(tokens):
  """The number of rows with each sequence, `[V ** L]`."""
  code = tokens @ VOCAB_SIZE ** np.arange(LENGTH)[::-1]
  return np.bincount(code, minlength=VOCAB_SIZE**LENGTH)


def p_value(counts, law):
  """By the G-test; all rare sequences are one cell."""
  if np.any(counts[law <= 0]):
    return 0.0
  rare = counts.sum() * law < 5
  join = lambda array: np.append(array[~rare], array[rare].sum())
  counts, law = join(counts), join(law)
  kept = law > 0
  expected = counts.sum() * law[kept]
  return stats.power_divergence(counts[kept], expected, lambda_=0).pvalue


def moved_law(law, amount):
  """The distribution at this total variation that is hardest to detect.

  It is the one whose chi-square is least: sum (q - p)^2 / p is at least (sum
  |q - p|)^2.
  """
  order = np.argsort(law)
  below = np.isin(np.arange(len(law)), order[np.cumsum(law[order]) < 0.5])
  more, less = amount / law[below].sum(), amount / law[~below].sum()
  moved = law * np.where(below, 1 + more, 1 - less)
  np.testing.assert_allclose(0.5 * np.abs(moved - law).sum(), amount)
  return moved


def _check(rule, children, name, num_rows=_NUM_ROWS, seed=0):
  tokens, steps = _decode(rule, children, name, num_rows, seed)
  # The last of the samplings is greedy: all rows have the same tokens.
  greedy = _law('greedy').argmax()
  assert counts_of(tokens[-1])[greedy] == len(tokens[-1])
  for kind, sampling in enumerate(_DRAWN):
    law = _law(sampling)
    counts = counts_of(tokens[kind])
    assert p_value(counts, law) > _SIGNIFICANCE, sampling
    # And the test is powerful.
    moved = moved_law(law, 0.03)
    assert p_value(counts, moved) < _SIGNIFICANCE, sampling
    # More than one step in most rows, or it would not test several.
    assert np.mean(steps[kind]) > 1.5


@pytest.mark.parametrize(('rule', 'children', 'name'), _CASES)
def test_sequences_have_the_targets_law(rule, children, name):
  _check(rule, children, name)


@pytest.mark.long
@pytest.mark.parametrize(('rule', 'children', 'name'), [*_CASES, *_MORE_CASES])
def test_ten_times_as_many(rule, children, name):
  _check(rule, children, name, num_rows=10 * _NUM_ROWS, seed=1)
