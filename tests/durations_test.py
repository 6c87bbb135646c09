"""What `--fast` leaves out."""

import durations


def test_files_are_slow_as_a_whole():
  seconds = {
    'tests/a_test.py::test_one': 6.0,
    'tests/a_test.py::test_two[x::y]': 5.0,
    'tests/b_test.py::test_one': 9.0,
    'tests/c_test.py::test_one': 11.0,
  }
  assert durations.slow_files(seconds, limit=10) == {
    'tests/a_test.py',
    'tests/c_test.py',
  }
  assert durations.slow_files(seconds, limit=11) == frozenset()
  assert durations.slow_files({}) == frozenset()
