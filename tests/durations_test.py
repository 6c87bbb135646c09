"""The report about the tests' own time, and its budgets."""

import durations
import jax
import jax.numpy as jnp


def test_files_are_slow_as_a_whole():
  files = durations.by_file(
    [
      ('tests/a_test.py::test_one', durations.Times(total=6.0)),
      ('tests/c_test.py::test_one', durations.Times(total=12.0)),
      (
        'tests/a_test.py::test_two[x::y]',
        durations.Times(total=5.0, programs=2),
      ),
      ('tests/b_test.py::test_one', durations.Times(total=9.0)),
    ]
  )
  assert list(files) == [f'tests/{name}_test.py' for name in 'cab']
  assert files['tests/a_test.py'] == durations.Times(total=11.0, programs=2)
  last = durations.table(files)[-1].split()
  assert last == ['all', 'files', '32', '0', '0', '0', '0', '2']


def test_programs_are_counted_once_and_above_the_budget_files_are_named():
  before, double = durations.now(), jax.jit(lambda x: 2 * x + jnp.sin(x))
  for _ in range(3):
    double(1.0)
  spent = durations.now() - before
  assert spent.programs == 1
  assert min(spent.traced, spent.lowered, spent.compiled) > 0
  files = {
    'a': durations.Times(programs=5),
    'b': durations.Times(programs=50),
    'c': durations.Times(),
  }
  assert durations.over_budget(files, {'a': 0, 'b': 41}) == []
  [line] = durations.over_budget(files, {'b': 40})
  assert line.startswith('b had 50 programs compiled; its budget is 40.')
