"""Filters against slow references, and the law and the keying of the noise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specdec import Sampling
from specdec.checks import check_sampling
from specdec.sampling import choose
from specdec.sampling import filter_logits
from specdec.sampling import position_noise


def _softmax(logits):
  weights = np.exp(logits - logits.max())
  return weights / weights.sum()


def _keep(logits, kept):
  return np.where(kept, logits, -np.inf)


def _top_p(logits, sampling):
  order = np.argsort(-logits)
  before = 0.0
  kept = np.zeros(len(logits), bool)
  for token in order:
    kept[token] = before < sampling.top_p
    before += _softmax(logits)[token]
  return _keep(logits, kept)


_FILTERS = {
  'temperature': lambda logits, sampling: logits / sampling.temperature,
  'top_k': lambda logits, sampling: _keep(
    logits, np.argsort(np.argsort(-logits)) < sampling.top_k
  ),
  'top_p': _top_p,
  'min_p': lambda logits, sampling: _keep(
    logits, _softmax(logits) >= sampling.min_p * _softmax(logits).max()
  ),
}


def _reference(logits, sampling):
  """Probabilities after the filters, in float64, one sequence at a time."""
  logits = np.asarray(logits, np.float64)
  for name, apply in _FILTERS.items():
    if getattr(sampling, name) is not None:
      logits = apply(logits, sampling)
  return _softmax(logits)


# Compiled once per set of filters: dispatching op by op costs far more.
_filter_logits = jax.jit(filter_logits)
_choose = jax.jit(choose)
_position_noise = jax.jit(position_noise, static_argnums=2)


def _probs(logits, sampling):
  params = check_sampling(sampling, logits.shape[0], logits.shape[-1])
  kept = _filter_logits(logits, params)
  return np.apply_along_axis(_softmax, -1, np.asarray(kept, np.float64))


@pytest.mark.parametrize(
  ('top_k', 'top_p', 'min_p'),
  [
    (None, None, None),
    (7, None, None),
    (1000, None, None),
    (None, 0.6, None),
    (None, None, 0.2),
    (None, 0.8, 0.1),
    (1, 1.0, 0.0),
    (7, 0.6, None),
    (7, 0.8, 0.1),
  ],
)
def test_filters_against_numpy(top_k, top_p, min_p):
  """In any other order they would keep other tokens of some rows."""
  logits = np.random.default_rng(0).normal(size=(6, 4, 20)) * 2
  kw = {'top_k': top_k, 'top_p': top_p, 'min_p': min_p}
  temperatures = np.array([0.3, 1.0, 2.5, 0.3, 1.0, 2.5])
  actual = _probs(
    logits.astype(np.float32), Sampling(temperature=temperatures, **kw)
  )
  for row, temperature in enumerate(temperatures):
    sampling = Sampling(temperature=temperature, **kw)
    expected = np.apply_along_axis(_reference, -1, logits[row], sampling)
    np.testing.assert_array_equal(actual[row] > 0, expected > 0)
    np.testing.assert_allclose(actual[row], expected, atol=1e-6)


def test_top_p_of_1_keeps_all_of_a_large_vocabulary():
  """Summed in float32, probabilities may reach 1 before the last token."""
  logits = np.random.default_rng(0).normal(size=(4, 50_000)) * 3
  sampling = check_sampling(Sampling(temperature=1.0, top_p=1.0), 4, 50_000)
  kept = _filter_logits(logits.astype(np.float32), sampling)
  assert np.all(np.asarray(kept) > -100)


def test_ties_with_the_last_of_top_k_are_kept():
  logits = np.array([[2.0, 1.0, 1.0, 0.0]], np.float32)
  probs = _probs(logits, Sampling(temperature=1.0, top_k=2))
  np.testing.assert_array_equal(probs[0] > 0, [True, True, True, False])


def test_values_of_each_row():
  logits = np.random.default_rng(1).normal(size=(3, 2, 12)) * 2
  values = {
    'temperature': (0.5, 1.0, 2.0),
    'top_p': (0.5, 1.0, 0.8),
    'min_p': (0.0, 0.3, 0.05),
  }
  batch = _probs(
    logits.astype(np.float32),
    Sampling(top_k=9, **{k: np.array(v) for k, v in values.items()}),
  )
  for row in range(3):
    alone = Sampling(top_k=9, **{k: v[row] for k, v in values.items()})
    expected = np.apply_along_axis(_reference, -1, logits[row], alone)
    np.testing.assert_allclose(batch[row], expected, atol=1e-6)


_ALL_FILTERS = [{}, {'top_k': 2}, {'top_p': 0.9}, {'min_p': 0.1}]


@pytest.mark.parametrize('filters', _ALL_FILTERS)
def test_huge_logits_and_tiny_temperatures(filters):
  """The best token wins, or one of two that tie; never a NaN."""
  scale = np.repeat([1e-30, 1.0, 1e30, 3e38], 5).astype(np.float32)
  temperature = np.tile([0.0, 1e-30, 1e-45, 1.0, 1e30], 4)
  sampling = check_sampling(Sampling(temperature=temperature, **filters), 20, 5)
  logits = np.array([-1.0, 0.2, 1.0, 0.3, -1.0], np.float32)
  logits = np.tile(scale[:, None, None] * logits, (1, 50, 1))
  keys = jax.random.split(jax.random.key(0), 20)
  noise = _position_noise(keys, np.tile(np.arange(50), (20, 1)), 5, sampling)
  assert not np.any(np.isnan(_filter_logits(logits, sampling)))
  for row, chosen in enumerate(np.asarray(_choose(logits, noise, sampling))):
    if temperature[row] == 0 or scale[row] / temperature[row] > 1e6:
      np.testing.assert_array_equal(chosen, 2)
    else:
      assert len(set(chosen.tolist())) > 1


def test_temperature_0_is_argmax_whatever_the_filters():
  logits = np.random.default_rng(2).normal(size=(3, 5, 30)).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), 3)
  for filters in _ALL_FILTERS:
    sampling = check_sampling(Sampling(**filters), 3, 30)
    noise = _position_noise(keys, np.tile(np.arange(5), (3, 1)), 30, sampling)
    np.testing.assert_array_equal(noise, 0.0)
    np.testing.assert_array_equal(
      _choose(logits, noise, sampling), logits.argmax(-1)
    )


# The law. 40,000 draws; the noise is that of a real decode: one row key, and
# position after position.

_NUM_DRAWS = 40_000
_LAW = np.array([0.31, 0.22, 0.15, 0.12, 0.1, 0.06, 0.03, 0.01])
_SIGNIFICANCE = 1e-4


def _draw(sampling):
  sampling = check_sampling(sampling, 1, len(_LAW))
  keys = jax.random.split(jax.random.key(0), 1)
  positions = np.arange(_NUM_DRAWS)[None]
  noise = _position_noise(keys, positions, len(_LAW), sampling)
  logits = np.tile(np.log(_LAW).astype(np.float32), (1, _NUM_DRAWS, 1))
  return np.asarray(_choose(logits, noise, sampling))[0]


def _p_value(counts, probs):
  kept = probs > 0
  if np.any(counts[~kept]):
    return 0.0
  return stats.chisquare(counts[kept], counts.sum() * probs[kept]).pvalue


@pytest.mark.parametrize(
  'values',
  [{}, {'temperature': 1.4, 'top_k': 6, 'top_p': 0.9, 'min_p': 0.2}],
)
def test_the_law_of_choose(values):
  sampling = Sampling(**({'temperature': 1.0} | values))
  counts = np.bincount(_draw(sampling), minlength=len(_LAW))
  assert _p_value(counts, _reference(np.log(_LAW), sampling)) > _SIGNIFICANCE


def test_the_power_of_the_chi_square():
  """Moving 0.015 of the mass between two tokens is seen 99 times in 100."""
  moved = _LAW.copy()
  moved[0] += 0.015
  moved[1] -= 0.015
  distance = _NUM_DRAWS * np.sum((moved - _LAW) ** 2 / _LAW)
  freedom = len(_LAW) - 1
  threshold = stats.chi2.isf(_SIGNIFICANCE, freedom)
  assert stats.ncx2.sf(threshold, freedom, distance) > 0.99
  counts = np.bincount(_draw(Sampling(temperature=1.0)), minlength=len(_LAW))
  assert _p_value(counts, moved) < _SIGNIFICANCE


def test_neighbouring_positions_are_independent():
  """Reused or correlated noise would keep the law of single tokens."""
  tokens = _draw(Sampling(temperature=1.0, top_k=4))
  law = _reference(np.log(_LAW), Sampling(temperature=1.0, top_k=4))[:4]
  pairs = np.zeros((4, 4))
  np.add.at(pairs, (tokens[0::2], tokens[1::2]), 1)
  joint = np.outer(law, law)
  assert _p_value(pairs.ravel(), joint.ravel()) > _SIGNIFICANCE
  repeated = np.diag(law)
  mixed = 0.97 * joint + 0.03 * repeated  # what 3% of reused noise would give
  assert _p_value(pairs.ravel(), mixed.ravel()) < _SIGNIFICANCE


def test_rows_are_independent():
  sampling = check_sampling(Sampling(temperature=1.0), 2, 3)
  keys = jax.random.split(jax.random.key(5), 2)
  positions = np.tile(np.arange(20_000), (2, 1))
  noise = np.asarray(_position_noise(keys, positions, 3, sampling))
  first, second = noise.argmax(axis=-1)
  pairs = np.zeros((3, 3))
  np.add.at(pairs, (first, second), 1)
  assert stats.chi2_contingency(pairs).pvalue > _SIGNIFICANCE


def test_noise_depends_on_row_key_and_position_only():
  sampling = check_sampling(Sampling(temperature=1.0), 5, 11)
  keys = jax.random.split(jax.random.key(0), 5)
  everywhere = np.tile(np.arange(40), (5, 1))
  noise = np.asarray(_position_noise(keys, everywhere, 11, sampling))
  assert len(np.unique(noise.reshape(200, 11), axis=0)) == 200
  start = np.array([3, 0, 17, 30, 8])
  for rows, length in (([0, 1, 2, 3, 4], 5), ([4, 2], 1), ([3], 9)):
    rows = np.array(rows)
    positions = start[rows][:, None] + np.arange(length)[None]
    params = check_sampling(Sampling(temperature=1.0), len(rows), 11)
    block = _position_noise(keys[rows], positions, 11, params)
    np.testing.assert_array_equal(block, noise[rows[:, None], positions])


def test_noise_of_cold_rows_is_zero_and_of_hot_rows_as_ever():
  keys = jax.random.split(jax.random.key(0), 3)
  positions = np.tile(np.arange(4), (3, 1))
  draw = lambda *temperatures: _position_noise(
    keys, positions, 6, check_sampling(Sampling(temperature=temperatures), 3, 6)
  )
  hot, noise = draw(1.0, 1.0, 1.0), draw(0.0, 2.0, 0.1)
  np.testing.assert_array_equal(noise[0], 0.0)
  np.testing.assert_array_equal(noise[1:], hot[1:])


@pytest.mark.parametrize(
  ('name', 'values', 'range_text'),
  [
    ('temperature', (-0.1, math.nan, math.inf, [1.0, -1.0]), 'at least 0'),
    ('top_k', (0, -3, 2.0), 'positive integer'),
    (
      'top_p',
      (0.0, -0.5, 1.01, math.nan, [0.5, 0.0]),
      'above 0 and at most 1',
    ),
    ('min_p', (-0.01, 1.5, math.nan), 'between 0 and 1'),
  ],
)
def test_bad_values_are_refused(name, values, range_text):
  for value in values:
    value = np.array(value) if isinstance(value, list) else value
    with pytest.raises(ValueError, match=f'{name} must be .*{range_text}'):
      check_sampling(Sampling(**{name: value}), 2, 9)


def test_the_ends_of_the_ranges_are_allowed():
  sampling = check_sampling(
    Sampling(temperature=0, top_k=1, top_p=1, min_p=1), 1, 9
  )
  for name in ('temperature', 'top_p', 'min_p'):
    assert getattr(sampling, name).dtype == jnp.float32
  assert check_sampling(Sampling(), 1, 9).top_p is None
