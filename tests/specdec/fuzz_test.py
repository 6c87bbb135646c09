"""Random calls end in equality with plain decoding, bad ones in clear errors.

Here some hundreds of calls; `--long` makes 3,000.
"""

import fuzzing
import numpy as np
import pytest


def pytest_generate_tests(metafunc):
  if 'calls' in metafunc.fixturenames:
    calls = 182 if metafunc.config.getoption('--long') else 28
    metafunc.parametrize('calls', [calls])


# One test per shape: it has programs of its own.
@pytest.mark.parametrize('index', range(len(fuzzing.SHAPES)))
def test_good_calls(index, calls):
  seeds = index + len(fuzzing.SHAPES) * np.arange(calls)
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
