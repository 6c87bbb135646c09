"""From counts and costs to a choice: hand tables, and what must follow."""

import pytest

from specdec.study.planning import choose
from specdec.study.planning import climb
from specdec.study.planning import PLAIN
from specdec.study.planning import StepCosts
from specdec.study.planning import Trial

_COSTS = StepCosts(
  prompt=0.5, verification={1: 0.1, 4: 0.13, 8: 0.21}, plain_step=0.11
)


def _trial(**changes):
  counts = {
    'num_nodes': 4,
    'tokens': 100,
    'forwards': 40,
    'steps': 40,
    'prompts': 2,
    'seconds': 2.0,
  }
  return Trial(**(counts | changes))


def test_v_is_a_straight_line_in_between():
  assert _COSTS.of_nodes(1) == 0.1
  assert _COSTS.of_nodes(4) == 0.13
  assert _COSTS.of_nodes(6) == pytest.approx(0.17)
  for outside in (0, 9):
    with pytest.raises(ValueError, match='measured for 1 to 8 nodes'):
      _COSTS.of_nodes(outside)
  with pytest.raises(ValueError, match='1 node'):
    StepCosts(prompt=0.0, verification={4: 1.0}, plain_step=1.0)


def test_a_prediction_by_hand():
  trial = _trial()
  # 2 s of replay, 2 prompts of 0.5 s, 40 steps of 0.13 s.
  assert trial.predicted_seconds(_COSTS) == pytest.approx(2 + 1 + 5.2)
  assert trial.tokens_per_second(_COSTS) == pytest.approx(100 / 8.2)
  assert trial.block_efficiency == 2.5
  # A step: 0.05 s of drafting and 0.13 s of the target, against 0.11 s.
  assert trial.min_block_efficiency(_COSTS) == pytest.approx(0.18 / 0.11)


def test_rows_share_their_steps():
  """Of 4 rows one is slow; the others wait for it."""
  trial = _trial(tokens=400, forwards=100, steps=40)
  assert trial.block_efficiency == 4.0
  assert trial.tokens_per_second(_COSTS) == pytest.approx(400 / 8.2)


def test_plain_unless_another_is_faster_by_more_than_noise():
  rates = {PLAIN: 100.0, 'chain': 102.9, 'tree': 90.0}
  assert choose(rates, margin=0.03) == PLAIN
  assert choose(rates | {'chain': 103.1}, margin=0.03) == 'chain'
  assert choose({PLAIN: 100.0}, margin=0.03) == PLAIN
  assert choose({'a': 2.0, PLAIN: 1.0, 'b': 2.0}, margin=0.0) == 'a'


def test_speculation_must_win_in_every_account():
  measured = {PLAIN: 100.0, 'tree': 130.0, 'chain': 110.0}
  predicted = {PLAIN: 100.0, 'tree': 102.0, 'chain': 120.0, 'more': 200.0}
  assert choose(measured, margin=0.03) == 'tree'
  assert choose(measured, predicted, margin=0.03) == 'chain'
  assert choose(measured, predicted, margin=0.25) == PLAIN


def test_with_the_batch_the_tree_shrinks_until_there_is_none():
  """A machine that reads 10 ms of weights and computes 0.1 ms a position.

  Verification is free as long as it hides behind reading; with more rows it
  hides less.
  """
  tokens_per_step = {1: 1.0, 2: 1.6, 4: 2.1, 8: 2.6, 16: 3.0, 32: 3.3, 64: 3.5}
  chosen = []
  for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
    verification = {
      n: max(0.010, 0.0001 * batch * n) + 0.0001 for n in tokens_per_step
    }
    costs = StepCosts(
      prompt=0.0, verification=verification, plain_step=verification[1]
    )
    rates = {}
    for n, rate in tokens_per_step.items():
      trial = Trial(
        num_nodes=n,
        tokens=round(1000 * rate) * batch,
        forwards=1000 * batch,
        steps=1000,
        prompts=1,
        # Drafts have the same limits, being ten times smaller.
        seconds=0.0 if n == 1 else 100 * verification[n],
      )
      rates[PLAIN if n == 1 else f'N={n}'] = trial.tokens_per_second(costs)
      # The rule that is handed to the online guard says the same.
      pays = rate > trial.min_block_efficiency(costs)
      assert n == 1 or pays == (rates[f'N={n}'] > rates[PLAIN])
    best = choose(rates, margin=0.03)
    chosen.append(1 if best == PLAIN else int(best[2:]))
  assert chosen == [64, 32, 16, 8, 4, 4, 2, 1, 1]


@pytest.mark.parametrize('start', [(2, 0), (0, 3), (4, 4)])
def test_climbing_a_hill_finds_its_top(start):
  axes = {'x': (1, 2, 4, 8, 16), 'y': (1, 2, 3, 4, 6)}
  asked = []

  def score(point):
    asked.append(tuple(point.values()))
    x, y = axes['x'].index(point['x']), axes['y'].index(point['y'])
    return 100 - (x - 3) ** 2 - (y - 1) ** 2

  begin = {'x': axes['x'][start[0]], 'y': axes['y'][start[1]]}
  assert climb(begin, axes, score) == {'x': 8, 'y': 2}
  assert len(asked) == len(set(asked)), 'a point was tried twice'
  assert len(asked) < 5 * 5


def test_climbing_goes_back_to_an_axis_that_another_one_changed():
  # Only together do both pay.
  worth = {(0, 0): 1, (1, 0): 2, (1, 1): 3, (2, 1): 4, (2, 0): 1, (0, 1): 0}
  best = climb(
    {'x': 0, 'y': 0},
    {'x': (0, 1, 2), 'y': (0, 1)},
    lambda point: worth[point['x'], point['y']],
  )
  assert best == {'x': 2, 'y': 1}


def test_noise_does_not_move_a_climber():
  asked = []

  def score(point):
    asked.append(point['x'])
    return 1.0 + 0.01 * point['x']

  assert climb({'x': 1}, {'x': (0, 1, 2)}, score, margin=0.02) == {'x': 1}
  assert sorted(asked) == [0, 1, 2]


def test_a_start_off_the_grid_is_refused():
  with pytest.raises(ValueError, match='x=5 is none of'):
    climb({'x': 5}, {'x': (0, 1)}, lambda point: 0.0)
