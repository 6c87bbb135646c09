"""Filters against slow references, and the law and the keying of the noise."""

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


def _temperature(logits, sampling):
  return logits / sampling.temperature


def _top_k(logits, sampling):
  kept = np.argsort(-logits)[: sampling.top_k]
  return np.where(np.isin(np.arange(len(logits)), kept), logits, -np.inf)


def _top_p(logits, sampling):
  probs = _softmax(logits)
  total = 0.0
  kept = []
  for token in np.argsort(-probs):
    if total >= sampling.top_p:
      break
    kept.append(token)
    total += probs[token]
  return np.where(np.isin(np.arange(len(logits)), kept), logits, -np.inf)


def _min_p(logits, sampling):
  probs = _softmax(logits)
  return np.where(probs >= sampling.min_p * probs.max(), logits, -np.inf)


_FILTERS = {
  'temperature': _temperature,
  'top_k': _top_k,
  'top_p': _top_p,
  'min_p': _min_p,
}


def _reference(logits, sampling, order=tuple(_FILTERS)):
  """Probabilities after the filters, in float64, one sequence at a time."""
  logits = np.asarray(logits, np.float64)
  for name in order:
    if getattr(sampling, name) is not None:
      logits = _FILTERS[name](logits, sampling)
  return _softmax(logits)


# Compiled once per set of filters: dispatching op by op costs far more.
_filter_logits = jax.jit(filter_logits)
_choose = jax.jit(choose)
_position_noise = jax.jit(position_noise, static_argnums=2)


def _probs(logits, sampling):
  params = check_sampling(sampling, logits.shape[0], logits.shape[-1])
  kept = _filter_logits(logits, params)
  return np.apply_along_axis(_softmax, -1, np.asarray(kept, np.float64))


@pytest.mark.parametrize('top_k', [None, 1, 7, 1000])
@pytest.mark.parametrize(
  ('top_p', 'min_p'),
  [(None, None), (0.6, None), (None, 0.2), (0.8, 0.1), (1.0, 0.0)],
)
def test_filters_against_numpy(top_k, top_p, min_p):
  logits = np.random.default_rng(0).normal(size=(6, 4, 20)) * 2
  for temperature in (0.3, 1.0, 2.5):
    sampling = Sampling(
      temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    expected = np.apply_along_axis(_reference, -1, logits, sampling)
    actual = _probs(logits.astype(np.float32), sampling)
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_top_p_of_1_keeps_all_of_a_large_vocabulary():
  """Summed in float32, probabilities may reach 1 before the last token."""
  logits = np.random.default_rng(0).normal(size=(4, 50_000)) * 3
  sampling = check_sampling(Sampling(temperature=1.0, top_p=1.0), 4, 50_000)
  kept = _filter_logits(logits.astype(np.float32), sampling)
  assert np.all(np.asarray(kept) > -100)


@pytest.mark.parametrize(
  ('values', 'order'),
  [
    ({'top_p': 0.72}, ('top_p', 'temperature')),
    ({'min_p': 0.4}, ('min_p', 'temperature')),
    ({'top_k': 3, 'top_p': 0.7}, ('temperature', 'top_p', 'top_k')),
    ({'top_p': 0.3, 'min_p': 0.6}, ('temperature', 'min_p', 'top_p')),
  ],
)
def test_the_order_of_the_filters(values, order):
  """Examples on which another order would keep other tokens.

  Top-k and min-p commute: min-p compares with the best token, which stays.
  """
  logits = np.log([0.34, 0.25, 0.18, 0.13, 0.10])
  sampling = Sampling(temperature=2.0, **values)
  expected = _reference(logits, sampling)
  other = _reference(logits, sampling, order)
  assert np.any((expected > 0) != (other > 0)), 'a poor example'
  actual = _probs(logits[None].astype(np.float32), sampling)[0]
  np.testing.assert_allclose(actual, expected, atol=1e-6)


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
@pytest.mark.parametrize('temperature', [0.0, 1e-30, 1e-45, 1.0, 1e30])
@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e30, 3e38])
def test_huge_logits_and_tiny_temperatures(scale, temperature, filters):
  """The best token wins, or one of two that tie; never a NaN."""
  sampling = check_sampling(Sampling(temperature=temperature, **filters), 1, 5)
  logits = scale * np.array([-1.0, 0.2, 1.0, 0.3, -1.0], np.float32)
  logits = np.tile(logits, (1, 50, 1))
  keys = jax.random.split(jax.random.key(0), 1)
  noise = _position_noise(keys, np.arange(50)[None], 5, sampling)
  assert not np.any(np.isnan(_filter_logits(logits, sampling)))
  chosen = np.asarray(_choose(logits, noise, sampling))
  if temperature == 0 or scale / temperature > 1e6:
    np.testing.assert_array_equal(chosen, 2)
  else:
    assert len(set(chosen[0].tolist())) > 1


def test_temperature_0_is_argmax_whatever_the_filters():
  logits = np.random.default_rng(2).normal(size=(3, 5, 30)).astype(np.float32)
  for filters in _ALL_FILTERS:
    sampling = check_sampling(Sampling(**filters), 3, 30)
    keys = jax.random.split(jax.random.key(0), 3)
    positions = np.tile(np.arange(5), (3, 1))
    noise = _position_noise(keys, positions, 30, sampling)
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
  [
    {},
    {'temperature': 0.6},
    {'temperature': 1.7},
    {'top_k': 4},
    {'top_p': 0.8},
    {'min_p': 0.15},
    {'temperature': 1.4, 'top_k': 6, 'top_p': 0.9, 'min_p': 0.2},
  ],
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
  ('name', 'value', 'range_text'),
  [
    ('temperature', -0.1, 'at least 0'),
    ('temperature', float('nan'), 'at least 0'),
    ('temperature', float('inf'), 'at least 0'),
    ('temperature', np.array([1.0, -1.0]), 'at least 0'),
    ('top_k', 0, 'positive integer'),
    ('top_k', -3, 'positive integer'),
    ('top_k', 2.0, 'positive integer'),
    ('top_p', 0.0, 'above 0 and at most 1'),
    ('top_p', -0.5, 'above 0 and at most 1'),
    ('top_p', 1.01, 'above 0 and at most 1'),
    ('top_p', float('nan'), 'above 0 and at most 1'),
    ('top_p', np.array([0.5, 0.0]), 'above 0 and at most 1'),
    ('min_p', -0.01, 'between 0 and 1'),
    ('min_p', 1.5, 'between 0 and 1'),
    ('min_p', float('nan'), 'between 0 and 1'),
  ],
)
def test_bad_values_are_refused(name, value, range_text):
  with pytest.raises(ValueError, match=f'{name} must be .*{range_text}'):
    check_sampling(Sampling(**{name: value}), 2, 9)


def test_the_ends_of_the_ranges_are_allowed():
  sampling = check_sampling(
    Sampling(temperature=0, top_k=1, top_p=1, min_p=1), 1, 9
  )
  for name in ('temperature', 'top_p', 'min_p'):
    assert getattr(sampling, name).dtype == jnp.float32
  assert check_sampling(Sampling(), 1, 9).top_p is None
