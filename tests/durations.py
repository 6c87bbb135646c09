"""Which test files were slow the last time, for `bash test.sh --fast`."""

import collections
from collections.abc import Mapping

KEY = 'specdec/seconds'
"""Of pytest's cache: seconds by test, setup and all."""

LIMIT = 10.0


def slow_files(
  seconds: Mapping[str, float], limit: float = LIMIT
) -> frozenset[str]:
  """Files whose known tests took longer than the limit together.

  By file and not by test, because the first test of a file often pays for
  programs that the others then have compiled.

  Args:
    seconds: by test, as pytest names it: `tests/a_test.py::test_b[c]`.
    limit: in seconds.
  """
  totals = collections.Counter[str]()
  for test, duration in seconds.items():
    totals[test.split('::')[0]] += duration
  return frozenset(file for file, total in totals.items() if total > limit)
