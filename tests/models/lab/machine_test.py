"""Measurements of a machine, and predictions from them by hand."""

import pytest
import tiny

from models.lab import machine
from models.lab.bench import replay

_COSTS = machine.StepCosts(verification={1: 0.1, 4: 0.13, 8: 0.21})


def test_v_is_linear_between_the_measured_sizes():
  assert _COSTS.of_nodes(1) == 0.1
  assert _COSTS.of_nodes(4) == 0.13
  assert _COSTS.of_nodes(6) == pytest.approx(0.17)
  for outside in (0, 9):
    with pytest.raises(ValueError, match='num_nodes must be 1 to 8'):
      _COSTS.of_nodes(outside)
  with pytest.raises(ValueError, match='1 node'):
    machine.StepCosts(verification={4: 1.0})


def test_a_prediction_by_hand():
  counts = {'num_nodes': 4, 'steps': 40, 'seconds': 2.0}
  trial = replay.Trial(tokens=100, forwards=40, **counts)
  # 2 s of replay and 40 steps of 0.13 s.
  assert trial.tokens_per_second(_COSTS) == pytest.approx(100 / (2 + 5.2))
  assert trial.block_efficiency == 2.5
  # A step: 0.05 s of drafting and 0.13 s of the target.
  assert trial.drafting_seconds == pytest.approx(0.05)
  assert trial.step_seconds(_COSTS) == pytest.approx(0.18)
  # Rows share their steps: one of 4 is slow, and the others wait for it.
  trial = replay.Trial(tokens=400, forwards=100, **counts)
  assert trial.block_efficiency == 4.0
  assert trial.tokens_per_second(_COSTS) == pytest.approx(400 / 7.2)


def _measure(target=None, texts=((1, 2, 3), (4,)), context=40, **effort):
  return machine.measure_step_costs(
    *(tiny.gpt2(num_layers=1) if target is None else target, texts),
    prompt_slots=32,
    max_new_tokens=64,
    context=context,
    node_counts=(2, 4, 8),
    effort=machine.Effort(**{'num_steps': 1, 'repeats': 1} | effort),
  )


def test_costs_are_measured_for_every_size_that_can_pay_until_it_is_late():
  costs = _measure()
  assert costs.verification.keys() == {1, 2, 4, 8}
  assert min(costs.verification.values()) > 0
  # No forward is as fast as a limit of 0; two sizes are always measured.
  assert _measure(most_tokens=0).verification.keys() == {1, 2}
  assert _measure(is_late=lambda: True).verification.keys() == {1, 2}
  answers = iter([False, True, True])
  costs = _measure(is_late=lambda: next(answers), most_tokens=1e9)
  assert costs.verification.keys() == {1, 2, 4}
  with pytest.raises(ValueError, match='context must be 2 to 96 tokens'):
    _measure(context=97)
  with pytest.raises(ValueError, match='at least one token in every row'):
    _measure(texts=[[1], []])


def test_bandwidth_is_the_median_of_samples(monkeypatch):
  monkeypatch.setattr(machine, '_READ_BYTES', {'default': 1 << 20})
  bandwidth = machine.Bandwidth()
  for _ in range(3):
    bandwidth.sample()
  found = bandwidth.summary()
  samples = found['bytes_per_second_samples']
  assert len(samples) == 3
  assert found['bytes_per_second'] == sorted(samples)[1] > 0
