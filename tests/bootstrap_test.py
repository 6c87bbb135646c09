"""Intervals beside cases that can be enumerated by hand."""

import numpy as np
import pytest

from specdec.study.timing import pooled_interval


def test_two_prompts_are_drawn_in_three_ways():
  # Of (1, 3): both alike with a probability of 1/4 each, else a mean of 2.
  mean = lambda values, counts: values / counts
  columns = ([1.0, 3.0], [1, 1])
  assert pooled_interval(columns, mean) == (1, 3)


def test_figures_are_pooled_before_they_are_divided():
  # Drawing (a, a), (a, b) or (b, b): 8 / 2, 5 / 3 or 2 / 4, not means of rates.
  tokens, seconds = [4, 1], [1, 2]
  seen = []

  def rate(tokens, seconds):
    seen.extend(
      {(float(a), float(b)) for a, b in zip(tokens, seconds, strict=True)}
    )
    return tokens / seconds

  assert pooled_interval((tokens, seconds), rate) == (0.5, 4)
  assert sorted(seen) == [(2, 4), (5, 3), (8, 2)]


def test_the_width_is_that_of_the_mean():
  values = np.random.default_rng(1).normal(size=400)
  low, high = pooled_interval(
    (values, np.ones(400)), lambda total, count: total / count
  )
  error = values.std() / 20
  assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)
  assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.1 * error)


def test_what_depends_on_no_prompt_has_no_width():
  columns = ([2, 4, 6], [1, 2, 3])
  assert pooled_interval(columns, np.divide) == (2, 2)


def test_one_prompt_says_nothing():
  assert pooled_interval(([1.0], [2.0]), np.divide) is None


def test_bad_input_is_refused():
  with pytest.raises(ValueError, match='columns must be of one length'):
    pooled_interval(([1, 2], [1]), np.divide)
