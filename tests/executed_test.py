"""Counts of a step as it is executed, by hand."""

import pytest

from models.lab.compiled import executed
from models.lab.compiled import report as report_lib


def _loop(name, kernels, bookkeeping, keeping=0, conditions=0):
  return {
    **{'loop': name, 'kernels': kernels, 'bookkeeping': bookkeeping},
    **{'keeping': keeping, 'conditions': conditions},
  }


def test_loops_count_as_often_as_they_run():
  report = report_lib.ProgramReport(
    *('staged', 0, 0, 0.0),
    (
      _loop('decode step', 500, 60, keeping=6, conditions=1),
      _loop('growth round of table, before', 30, 30),
      _loop('growth round of draft, before', 100, 20),
      _loop('growth round of table, within', 32, 32),
    ),
  )
  step = executed.per_step(report, {'draft': 2.0, 'table': 4.5})
  assert step.kernels == 500 + 2 * 100 + 4.5 * 31
  assert step.bookkeeping == 60 + 2 * 20 + 4.5 * 31
  assert step.keeping == 6
  # The step, a conditional, the draft's loop and three loops of the table.
  assert step.waits == 1 + 1 + (1 + 2) + (3 + 4.5)
  assert '| staged | 840 | 240 | 6 | 12.5 |' in executed.to_markdown([step])


@pytest.mark.parametrize('rounds', [{}, {'draft': 4.0}])
def test_a_loop_of_known_length_is_part_of_the_step(rounds):
  report = report_lib.ProgramReport(
    *('chain', 0, 0, 0.0), (_loop('decode step', 700, 90),)
  )
  step = executed.per_step(report, rounds)
  assert (step.kernels, step.waits, step.rounds) == (700, 1.0, {})
