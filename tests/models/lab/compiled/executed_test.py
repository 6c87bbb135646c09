"""Counts of a step as it is executed, by hand."""

import pytest

from models.lab.compiled import executed


def _loop(name, kernels, bookkeeping, keeping=0, conditions=0):
  return {
    **{'loop': name, 'kernels': kernels, 'bookkeeping': bookkeeping},
    **{'keeping': keeping, 'conditions': conditions},
  }


def test_loops_count_as_often_as_they_run():
  loops = (
    _loop('decode step', 500, 60, keeping=6, conditions=1),
    _loop('growth round of table, before', 30, 30),
    _loop('growth round of draft, before', 100, 20),
    _loop('growth round of table, within', 32, 32),
  )
  assert executed.per_step(loops, {'draft': 2.0, 'table': 4.5}) == {
    'kernels': 500 + 2 * 100 + 4.5 * 31,
    'bookkeeping': 60 + 2 * 20 + 4.5 * 31,
    'keeping': 6,
    # A step waits once, for a conditional, in the draft's loop and in three of
    # the table's.
    'waits': 1 + 1 + (1 + 2) + (3 + 4.5),
    'rounds': {'draft': 2.0, 'table': 4.5},
  }


@pytest.mark.parametrize('rounds', [{}, {'draft': 4.0}])
def test_a_loop_of_known_length_is_part_of_the_step(rounds):
  step = executed.per_step([_loop('decode step', 700, 90)], rounds)
  assert (step['kernels'], step['waits'], step['rounds']) == (700, 1.0, {})
