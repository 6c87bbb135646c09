"""Bytes, operations and the roofs, beside figures made by hand."""

import pytest

from models.lab.bench import machine
from specdec import statistics as statistics_lib

_COSTS = {
  'target': {'per_forward': 100, 'per_slot': 2},
  'draft': {'per_forward': 10, 'per_slot': 1},
  'ngram': {'per_forward': 3, 'per_slot': 0},
}
_FIGURES = {
  **{'target_forwards': 4, 'stage_forwards': {'draft': 8, 'ngram': 20}},
  'positions': {'target': 12, 'draft': 16, 'ngram': 99},
  'reads': {
    'plain': {'forwards': 50, 'slots': 1000},
    'target': {'forwards': 4, 'slots': 40},
    'draft': {'forwards': 8, 'slots': 160},
    'ngram': {'forwards': 20, 'slots': 0},
  },
  **{'seconds': 7.0, 'prefill_seconds': 2.0},
}
_SIZES = {'target': machine.ModelSize(50, 1), 'draft': machine.ModelSize(5, 2)}

# 12 positions of 50 weights, each seeing 10 slots; 16 of 5, seeing 20 of 2.
_FLOPS = 2 * 12 * (50 + 10) + 2 * 16 * (5 + 20 * 2)
_BYTES = 4 * 100 + 40 * 2 + 8 * 10 + 160 + 20 * 3


def test_every_format_of_weights_has_a_rate(monkeypatch):
  monkeypatch.setattr(machine, '_READ_BYTES', {'default': 1 << 20})
  monkeypatch.setattr(machine, '_MATRIX_WIDTH', {'default': 64})
  formats = ['float32', 'int4', 'stored']
  rates = machine.MachineLimits(formats)
  rates.sample()
  found = rates.summary()['flops_per_second']
  assert list(found) == formats
  assert min(found.values()) > 0


def test_an_arm_is_placed_under_the_roofs():
  """All models are read, and the reads of plain decoding do not count."""
  assert statistics_lib.bytes_read(_FIGURES['reads'], _COSTS) == _BYTES
  assert machine.flops(_FIGURES, _SIZES) == _FLOPS
  placed = machine.roofline_point(
    _FIGURES, _COSTS, _SIZES, {'bytes_per_second': 200.0}
  )
  assert placed == {
    'arithmetic_intensity': pytest.approx(_FLOPS / _BYTES),
    'flops_per_second': pytest.approx(_FLOPS / 5),
    'seconds_per_target_forward': pytest.approx(5 / 4),
    'ideal_seconds_per_target_forward': pytest.approx(_BYTES / 200 / 4),
    'of_memory_limit': pytest.approx(_BYTES / 200 / 5),
  }
