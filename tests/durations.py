"""The time of a test run, file by file.

JAX reports how long it traces, lowers and compiles; the operating system how
much processor time child processes took. The rest of a test's time is
running, with whatever else Python does.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import operator
import resource

import jax

LIMIT = 10.0
"""Files that took more seconds are slow.

By file and not by test, because the first test of a file often pays for
programs that the others then have compiled.
"""

_EVENTS = {
  '/jax/core/compile/jaxpr_trace_duration': 'traced',
  '/jax/core/compile/jaxpr_to_mlir_module_duration': 'lowered',
  '/jax/core/compile/backend_compile_duration': 'compiled',
}


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds that tests took, and how many programs they had compiled.

  What a persistent cache compiles in no time counts as a program, too.
  """

  total: float = 0.0
  traced: float = 0.0
  lowered: float = 0.0
  compiled: float = 0.0
  children: float = 0.0  # Processor time, of several cores together.
  programs: int = 0

  def __add__(self, other: 'Times') -> 'Times':
    return Times(*map(operator.add, *map(dataclasses.astuple, (self, other))))

  def __sub__(self, other: 'Times') -> 'Times':
    return Times(*map(operator.sub, *map(dataclasses.astuple, (self, other))))


_counted = Times()


def _count(event: str, seconds: float, **kw) -> None:
  del kw
  global _counted
  if kind := _EVENTS.get(event):
    _counted += Times(**{kind: seconds, 'programs': int(kind == 'compiled')})


def listen() -> None:
  """From here on, what JAX compiles in this process is counted."""
  jax.monitoring.register_event_duration_secs_listener(_count)


def now() -> Times:
  """Counts so far; those of a test are the differences of two calls."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return _counted + Times(children=used.ru_utime + used.ru_stime)


def by_file(tests: Iterable[tuple[str, Times]]) -> dict[str, Times]:
  """Sums over the tests of a file, longest first.

  Each test has a name as pytest gives it (`tests/a_test.py::test_b[c]`).
  """
  totals: dict[str, Times] = collections.defaultdict(Times)
  for test, times in tests:
    totals[test.split('::')[0]] += times
  return dict(sorted(totals.items(), key=lambda item: -item[1].total))


def table(files: Mapping[str, Times], least: float = 2.0) -> list[str]:
  """Lines of a report: files of at least `least` seconds, and the sum."""
  columns = [field.name for field in dataclasses.fields(Times)]
  lines = [f'{"seconds of":<28}' + ''.join(f'{name:>10}' for name in columns)]
  rows = {file: times for file, times in files.items() if times.total >= least}
  rows['all files'] = sum(files.values(), Times())
  for file, times in rows.items():
    cells = ''.join(f'{value:>10.0f}' for value in dataclasses.astuple(times))
    lines.append(f'{file.removeprefix("tests/"):<28}{cells}')
  return lines


def over_budget(
  files: Mapping[str, Times], budgets: Mapping[str, int]
) -> list[str]:
  """One line per file that had more programs compiled than its budget.

  A tenth more, and five, pass: single operations that JAX forgot meanwhile
  are compiled again, which depends on the files that the worker ran before.
  """
  return [
    f'{file} had {times.programs} programs compiled; its budget is'
    f' {budgets.get(file, 0)}. Share programs that other tests have, or raise'
    ' the budget with --update_limits.'
    for file, times in files.items()
    if times.programs > 1.1 * budgets.get(file, 0) + 5
  ]
