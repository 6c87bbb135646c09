"""Random calls equal plain decoding; bad ones are refused in clear words."""

import fuzzing
import numpy as np
import pytest


# One test per shape: it has programs of its own.
@pytest.mark.parametrize('index', range(len(fuzzing.SHAPES)))
def test_good_calls(index, request):
  number = 500 if request.config.getoption('--long') else 25
  seeds = index + len(fuzzing.SHAPES) * np.arange(number)
  histogram = sum(fuzzing.run_good(int(seed)) for seed in seeds)
  assert all(histogram[:2]), 'drafts that are always or never right'


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    pytest.param(name, value, message, id=f'{name}={value!r:.30}')
    for name, values, message in fuzzing.BAD
    for value in values
  ],
)
def test_bad_calls(name, value, message):
  with pytest.raises((ValueError, TypeError), match=message):
    raise fuzzing.run_bad(name, value, seed=len(message))
