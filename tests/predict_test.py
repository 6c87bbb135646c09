"""Predicted speeds, from costs and counts made by hand."""

import types

import pytest

from models.lab.bench import arms as arms_lib
from models.lab.bench import predict as predict_lib
from models.lab.study import costs as costs_lib

_TARGET, _DRAFT = object(), object()
# Seconds of a forward over so many tokens per row.
_COSTS = {_TARGET: {1: 2.0, 5: 3.0}, _DRAFT: {4: 0.25}}


def _arm(models, num_nodes=1):
  unused = {'decode': None, 'sizes': {}, 'weight_bytes': 0}
  return arms_lib.ReadyArm(**unused, models=models, num_nodes=num_nodes)


def _figures(**forwards):
  return {
    'new_tokens': 48,
    'prefill_seconds': 4.0,
    'stage_forwards': {'draft': 24},
    'positions': {'target': 99, 'draft': 24 * 4},
    'reads': {name: {'forwards': count} for name, count in forwards.items()},
  }


def test_a_decode_is_its_prefill_and_its_forwards(monkeypatch):
  def measure(model, texts, *, node_counts, context, **_):
    assert 1 < context <= 32 + 64 - 8
    costs = {width: _COSTS[model][width] for width in node_counts}
    return types.SimpleNamespace(verification=costs)

  monkeypatch.setattr(costs_lib, 'measure_step_costs', measure)
  sizes = {'prompts': [[1] * 9], 'texts': [[1] * 50], 'max_new_tokens': 40}
  arms = {
    'plain': _arm({'target': _TARGET}),
    'tree': _arm({'target': _TARGET, 'draft': _DRAFT}, num_nodes=5),
    'peer': _arm({}),
  }
  figures = {
    'plain': _figures(target=48),
    'tree': _figures(target=12, draft=24),
    'peer': _figures(),
  }
  speeds = predict_lib.predicted_speeds(arms, figures, **sizes)
  plain = 4 + 48 * 2
  tree = 4 + 12 * 3 + 24 * 0.25
  assert speeds == {'plain': 1, 'tree': pytest.approx(plain / tree)}
  # There is no prediction over a peer.
  arms = {name: arms[name] for name in ('peer', 'plain')}
  assert predict_lib.predicted_speeds(arms, figures, **sizes) == {}
