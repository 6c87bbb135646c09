"""Options of each row: temperature, filters, bias, penalty, key and limit."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_drafters

from models.nn import table_model
import specdec
from specdec.tree import topology as topology_lib

VOCAB_SIZE = 24
BLOCK = 4

_PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 5, 6], [8, 1], [3, 3, 9, 0]]
_LIMITS = (44, 17, 40, 1, 33)
_OPTIONS = {
  'logit_bias': (
    *(None, {3: 2.5, 7: -np.inf, 2: -1.0}, {}, {5: 4.0}),
    {1: 3.0, 9: 2.0, **dict.fromkeys(range(10, 24), -np.inf)},
  ),
  'repetition_penalty': (1.3, 1.5, 2.0, 1.0, 0.8),
  **{'temperature': (0.0, 1.0, 0.7, 1.6, 3.0), 'top_k': (3, None, 4, 3, None)},
  **{'top_p': (1.0, 0.9, 0.8, 1.0, 0.97), 'min_p': (0.0, 0.02, 0.0, 0.3, 0.2)},
}
_ROWS = range(5)
_TARGET = tiny.table(VOCAB_SIZE)
_MODEL = table_model.table_model(_TARGET, max_positions=64)
_KEYS = tiny.row_keys(5, seed=7)


def _generate(rows, **changed):
  """Some rows of the batch, in any order."""
  pick = lambda values: [values[row] for row in rows]
  chosen = {name: pick(values) for name, values in _OPTIONS.items()}
  return specdec.generate(
    *(_MODEL, _KEYS[jnp.array(rows)], pick(_PROMPTS)),
    room_for_new_tokens=44,
    sampling=specdec.Sampling(**chosen),
    log_probs=True,
    **{'max_new_tokens': pick(_LIMITS)} | changed,
  )


@functools.cache
def _slow_row(row, neutral=None):
  """New tokens of one row, without one option, and their log-probabilities."""
  one = {name: values[row] for name, values in _OPTIONS.items()}
  one.pop(neutral, None)
  return reference.decode(
    lambda text: _TARGET[text[-1]],
    *(_PROMPTS[row], _LIMITS[row], _KEYS[row], reference.Options(**one)),
  )


@pytest.mark.parametrize('name', _OPTIONS)
def test_every_option_changes_the_text(name):
  """Otherwise the tests below would prove nothing."""
  assert any(_slow_row(row) != _slow_row(row, name) for row in _ROWS)
  assert 7 not in _slow_row(1)[0]
  assert max(_slow_row(4)[0]) < 10


@pytest.mark.parametrize('rows', [[3, 0, 4, 2, 1], *([row] for row in _ROWS)])
def test_rows_are_those_of_a_slow_loop(rows):
  """The log-probabilities are of the target itself, whatever is asked for."""
  generation = _generate(rows)
  assert generation.tokens == [_slow_row(row)[0] for row in rows]
  for row, log_probs in zip(rows, generation.log_probs, strict=True):
    assert all(type(log_prob) is float for log_prob in log_probs)
    np.testing.assert_allclose(log_probs, _slow_row(row)[1], atol=1e-4)


def test_the_same_guess_is_judged_alike_by_draft_and_target():
  """Bias, penalty, filters and noise are the draft's too: all is accepted.

  The penalty counts tokens that were guessed in the same block.
  """
  drafter = tiny_drafters.model(
    _MODEL, tiny_drafters.Settings(topology=topology_lib.chain(BLOCK - 1))
  )
  limits = [40, 16, 4, 0, 44]
  stats = _generate(_ROWS, drafter=drafter, max_new_tokens=limits).stats
  assert stats.accepted_histogram == [0, 0, 0, sum(limits) // BLOCK]
