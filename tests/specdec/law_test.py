"""The distribution of the tokens of the compiled loop, by counting.

`enumeration_test` proves the law. This smoke counts the sequences that 20,000
rows emit in several steps, under rules that draw, and compares them with plain
forwards of the target. A bias leaves four tokens. The drafts that take minutes
to compile cannot propose one of the four.
"""

import functools
import itertools

import enumeration
import equality_test
import jax
import numpy as np
import pytest
import quick
from scipy import stats
import tiny_drafters

import specdec
from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec import sampling as sampling_lib
from specdec.tree import topology as topology_lib

_TOKENS = np.array([1, 2, 3, 4])
_LENGTH = 4
_NUM_ROWS, _BATCH_SIZE = 20_000, 100
_TEMPERATURE = 2.5
_TREE = tiny_drafters.Settings(topology=topology_lib.k_ary(2, 2))

_LONG = ('other tokens', 'head of few ids', 'block of few ids')
_LONG = [pytest.param(name, marks=pytest.mark.long) for name in _LONG]

# For one test, so that all hold with a probability of 99.9% at least.
_SIGNIFICANCE = 1e-3 / 12


def _law(target):
  """The distribution of whole sequences, `[V ** L]`, in float64."""
  texts = np.array([*itertools.product(range(len(_TOKENS)), repeat=_LENGTH)])
  prompt = np.full((len(texts), 1), enumeration.PROMPT)
  read = np.concatenate([prompt, _TOKENS[texts[:, :-1]]], axis=1)
  logits = jax.jit(specdec.LanguageModel.logits)(target, read)
  probs = np.exp(np.float64(logits)[:, :, _TOKENS] / _TEMPERATURE)
  probs /= probs.sum(-1, keepdims=True)
  return np.take_along_axis(probs, texts[:, :, None], axis=2).prod((1, 2))


# Compiling takes most of the time.
@functools.partial(
  jax.jit,
  static_argnames='config',
  compiler_options={'xla_backend_optimization_level': 1} | quick.PLAIN_FUSIONS,
)
def _run(target, drafter, sampling, keys, *, config):
  """The new tokens of many batches, and the forwards of each row."""

  def decode_batch(keys):
    request = enumeration.request(keys, sampling, _LENGTH)
    result = specdec.decode(target, drafter, request, config=config)
    return result.tokens[:, 1:], result.counters.target_forwards

  return jax.lax.map(decode_batch, keys)


def _p_value(counts, law):
  """By the G-test; all rare sequences are one cell."""
  rare = counts.sum() * law < 5
  join = lambda array: np.append(array[~rare], array[rare].sum() + 1e-9)
  expected = counts.sum() * join(law) / join(law).sum()
  observed = join(counts) * counts.sum() / join(counts).sum()
  return stats.power_divergence(observed, expected, lambda_=0).pvalue


@pytest.mark.parametrize('rule', ['rejection', 'traversal'])
@pytest.mark.parametrize('name', ['wrong table', *_LONG])
def test_sequences_have_the_targets_law(name, rule):
  target, scorer = equality_test.pair(name)
  rule = decode_options.RULES[rule](sampling_lib.WITHOUT_REPLACEMENT)
  size = target.spec.vocab_size
  bias = np.full((_BATCH_SIZE, size), -np.inf, np.float32)
  bias[:, _TOKENS] = 0.0
  sampling = specdec.Sampling(
    temperature=_TEMPERATURE, logit_bias=bias, repetition_penalty=1.0
  )
  tokens, steps = _run(
    target,
    _TREE.drafter(scorer),
    arguments_lib.to_params(sampling, _BATCH_SIZE, size),
    jax.random.split(jax.random.key(0), _NUM_ROWS).reshape(-1, _BATCH_SIZE),
    config=specdec.DecodeConfig(max_new_tokens=_LENGTH, rule=rule),
  )
  tokens = np.asarray(tokens).reshape(-1, _LENGTH)
  assert np.isin(tokens, _TOKENS).all()
  places = np.searchsorted(_TOKENS, tokens)
  code = places @ len(_TOKENS) ** np.arange(_LENGTH)[::-1]
  law = _law(target)
  counts = np.bincount(code, minlength=len(law))
  assert _p_value(counts, law) > _SIGNIFICANCE
  # And the test would notice a total variation of 0.05: less of the rare half.
  below = law < np.sort(law)[np.searchsorted(np.cumsum(np.sort(law)), 0.5)]
  more, less = 0.05 / law[below].sum(), 0.05 / law[~below].sum()
  moved = law * np.where(below, 1 + more, 1 - less)
  assert _p_value(counts, moved) < _SIGNIFICANCE
  # Drafted tokens are accepted and rejected, in several steps.
  assert 1.5 < np.mean(steps) < _LENGTH - 0.3
