"""Pictures of plans."""

import types

import numpy as np
import pytest

from models.lab.bench import plots


def test_the_bars_of_a_plan_are_milliseconds_per_token():
  pytest.importorskip('matplotlib')
  both = ('staged', 55.0, 34.0, 4.45), ('plain', 42.0, 0.5, 1.0)
  keys = 'verification_milliseconds', 'drafting_milliseconds'
  keys = ('name', *keys, 'block_efficiency')
  plan = types.SimpleNamespace(
    candidates=[dict(zip(keys, row, strict=True)) for row in both]
  )
  (axes,) = plots.draw_plan(plan, 'title').axes
  bars = [(one.get_x(), one.get_width()) for one in axes.patches]
  first, alone = 55 / 4.45, 42.0
  expected = (0, first), (0, alone), (first, 34 / 4.45), (alone, 0.5)
  np.testing.assert_allclose(bars, expected)
  shown = [label.get_text() for label in axes.get_yticklabels()]
  assert shown == ['staged', 'plain']
