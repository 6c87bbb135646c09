"""Intervals beside cases that can be enumerated by hand."""

import numpy as np
import pytest

from specdec.study.timing import pooled_interval


def test_figures_are_pooled_before_they_are_divided():
  # Drawing (a, a), (a, b) or (b, b): 8 / 2, 5 / 3 or 2 / 4, not means of rates.
  seen = set()

  def rate(tokens, seconds):
    seen.update(zip(tokens.tolist(), seconds.tolist(), strict=True))
    return tokens / seconds

  assert pooled_interval(([4, 1], [1, 2]), rate) == (0.5, 4)
  assert seen == {(2, 4), (5, 3), (8, 2)}


def test_the_width_is_that_of_the_mean():
  values = np.random.default_rng(1).normal(size=400)
  low, high = pooled_interval(
    (values, np.ones(400)), lambda total, count: total / count
  )
  error = values.std() / 20
  assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)
  assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.1 * error)


def test_ends_of_the_range():
  """A rate that depends on no prompt, a single prompt, bad input."""
  assert pooled_interval(([2, 4, 6], [1, 2, 3]), np.divide) == (2, 2)
  assert pooled_interval(([1.0], [2.0]), np.divide) is None
  with pytest.raises(ValueError, match='columns must be of one length'):
    pooled_interval(([1, 2], [1]), np.divide)
