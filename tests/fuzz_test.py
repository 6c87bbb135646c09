"""Random calls end in equality with plain decoding, or in a clear error.

Here a few; `--long` makes some thousands.
"""

import fuzzing
import pytest

_CALLS_PER_TEST = 25


def _blocks(long: bool) -> int:
  return 100 if long else 4


def pytest_generate_tests(metafunc):
  if 'block' in metafunc.fixturenames:
    blocks = _blocks(metafunc.config.getoption('--long'))
    metafunc.parametrize('block', range(blocks))


def _seeds(block):
  return range(block * _CALLS_PER_TEST, (block + 1) * _CALLS_PER_TEST)


def _number_of_shapes(config):
  return 30 if config.getoption('--long') else 4


def test_good_calls(block, request):
  number = _number_of_shapes(request.config)
  kinds = {fuzzing.run_good(seed, number) for seed in _seeds(block)}
  assert len(kinds) > 1


def test_bad_calls(block, request):
  number = _number_of_shapes(request.config)
  messages = {fuzzing.run_bad(seed, number) for seed in _seeds(block)}
  assert len(messages) > 10


@pytest.mark.parametrize(
  'error', [ValueError('from somewhere else'), TypeError('and another')]
)
def test_errors_of_others_are_not_clear(error):
  def fail():
    raise error

  try:
    fail()
  except (ValueError, TypeError) as caught:
    with pytest.raises(AssertionError, match='not a clear error'):
      fuzzing.check_clear(caught)
