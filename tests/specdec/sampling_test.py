"""Filters against slow references."""

import jax
import numpy as np
import pytest
import reference

import specdec
from specdec import arguments as arguments_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib


def _softmax(logits):
  weights = np.exp(logits - logits.max())
  return weights / weights.sum()


# Compiled once per set of filters: dispatching op by op costs far more.
_filter_logits = jax.jit(sampling_lib.filter_logits)
_choose = jax.jit(sampling_lib.choose)
_position_noise = jax.jit(randomness_lib.position_noise)


def _noise(batch_size, length, sampling):
  keys = jax.random.split(jax.random.key(0), batch_size)
  positions = np.tile(np.arange(length), (batch_size, 1))
  return _position_noise(keys, positions, sampling.is_stochastic)


def _probs(logits, sampling):
  params = arguments_lib.to_params(sampling, logits.shape[0], logits.shape[-1])
  kept = _filter_logits(logits, params)
  return np.apply_along_axis(_softmax, -1, np.asarray(kept, np.float64))


@pytest.mark.parametrize(
  ('top_k', 'top_p', 'min_p'),
  [
    (None, None, None),
    (1000, None, None),
    (None, 0.6, None),
    (None, None, 0.2),
    (1, 1.0, 0.0),
    (7, 0.6, None),
    # Each row has its own.
    (7, [0.5, 1.0, 0.8, 0.7, 0.9, 0.2], [0.0, 0.3, 0.05, 0.0, 0.1, 0.0]),
  ],
)
def test_filters_against_numpy(top_k, top_p, min_p):
  """In any other order they would keep other tokens of some rows."""
  logits = np.random.default_rng(0).normal(size=(6, 4, 20)) * 2
  temperature = [0.3, 1.0, 2.5, 0.3, 1.0, 2.5]
  filters = {'top_k': top_k, 'top_p': top_p, 'min_p': min_p}
  filters = {
    name: value for name, value in filters.items() if value is not None
  }
  sampling = specdec.Sampling(temperature=temperature, **filters)
  actual = _probs(logits.astype(np.float32), sampling)
  for row in range(6):
    of_row = lambda value, row=row: np.ravel(value)[row % np.size(value)].item()
    values = {name: of_row(value) for name, value in filters.items()}
    values['temperature'] = temperature[row]
    options = reference.Options(**values)
    expected = np.array(
      [reference.probs(each, options) for each in logits[row]]
    )
    np.testing.assert_array_equal(actual[row] > 0, expected > 0)
    np.testing.assert_allclose(actual[row], expected, atol=1e-6)


def test_top_p_of_1_keeps_all_of_a_large_vocabulary_and_top_k_keeps_ties():
  """Summed in float32, probabilities may reach 1 before the last token."""
  logits = np.random.default_rng(0).normal(size=(4, 50_000)) * 3
  sampling = arguments_lib.to_params(
    specdec.Sampling(temperature=1.0, top_p=1.0), 4, 50_000
  )
  kept = _filter_logits(logits.astype(np.float32), sampling)
  assert np.all(np.asarray(kept) > -100)
  logits = np.array([[2.0, 1.0, 1.0, 0.0]], np.float32)
  probs = _probs(logits, specdec.Sampling(temperature=1.0, top_k=2))
  np.testing.assert_array_equal(probs[0] > 0, [True, True, True, False])


_ALL_FILTERS = [{}, {'top_k': 2}, {'top_p': 0.9}, {'min_p': 0.1}]


@pytest.mark.parametrize('filters', _ALL_FILTERS)
def test_huge_logits_and_tiny_temperatures(filters):
  """The best token wins, or one of two that tie; never a NaN."""
  scale = np.repeat([1e-30, 1.0, 1e30, 3e38], 5).astype(np.float32)
  temperature = np.tile([0.0, 1e-30, 1e-45, 1.0, 1e6], 4)
  sampling = arguments_lib.to_params(
    specdec.Sampling(temperature=temperature, **filters), 20, 5
  )
  logits = np.array([-1.0, 0.2, 1.0, 0.3, -1.0], np.float32)
  logits = np.tile(scale[:, None, None] * logits, (1, 50, 1))
  noise = _noise(20, 50, sampling)
  assert not np.any(np.isnan(_filter_logits(logits, sampling)))
  for row, chosen in enumerate(np.asarray(_choose(logits, noise, sampling))):
    if temperature[row] == 0 or scale[row] / temperature[row] > 1e6:
      np.testing.assert_array_equal(chosen, 2)
    else:
      assert len(set(chosen.tolist())) > 1


def test_no_temperature_and_no_penalty_brings_a_banned_token_back():
  """Everything else is far less likely, and the text has the token."""
  temperature = np.tile([0.0, 1e-45, 1.0, 1e6], 3)
  penalty = np.repeat([1e-3, 1.0, 1e3], 4)
  sampling = arguments_lib.to_params(
    specdec.Sampling(
      logit_bias={2: -np.inf},
      temperature=temperature,
      repetition_penalty=penalty,
      top_p=0.999,
    ),
    12,
    5,
  )
  logits = np.tile(np.float32([-1e4, -2e4, 1e6, -1e4, -3e4]), (12, 200, 1))
  seen = np.broadcast_to(np.arange(5) == 2, logits.shape)
  adjust = lambda logits: sampling_lib.penalize(
    sampling_lib.add_bias(logits, sampling), sampling, seen
  )
  adjusted = adjust(logits)
  noise = _noise(12, 200, sampling)
  assert 2 not in np.asarray(_choose(adjusted, noise, sampling))
  assert np.all(
    _filter_logits(adjusted, sampling)[..., 2] == sampling_lib.EXCLUDED
  )
  # Where nothing but it can be said, nothing can.
  only = np.where(np.arange(5) == 2, logits, -np.inf)
  assert not np.any(sampling_lib.is_usable(adjust(only)))
