"""What a benchmark reports, from measurements made by hand."""

import jax
import numpy as np
import pytest

from models.benchmark import ArmSpec
from models.benchmark import parse_arm
from models.table import table_model
from specdec import Generation
from specdec import Sampling
from specdec.benchmarking import find_flips
from specdec.benchmarking import Flip
from specdec.benchmarking import measure
from specdec.benchmarking import Measurement
from specdec.benchmarking import summarize_arms
from specdec.margins import choice_margin


def _generation(*rows):
  new_tokens = sum(map(len, rows))
  return Generation(
    tokens=[list(row) for row in rows],
    origins=[[0] * len(row) for row in rows],
    labels=('target', 'draft'),
    log_probs=None,
    finish_reasons=['length'] * len(rows),
    errors=[None] * len(rows),
    stats={
      'new_tokens': new_tokens,
      'target_forwards': new_tokens // 2,
      'nodes_per_forward': float(new_tokens),
      'stage_forwards': {'draft': 3},
      'origins': {'target': new_tokens, 'draft': 0},
      'accepted_histogram': [0, new_tokens // 2],
      'reads': {
        'plain': {'forwards': new_tokens, 'slots': 0},
        'target': {'forwards': new_tokens // 2, 'slots': 0},
        'draft': {'forwards': 3, 'slots': new_tokens},
      },
      'costs': {
        'target': {'per_forward': 10, 'per_slot': 1},
        'draft': {'per_forward': 1, 'per_slot': 2},
      },
    },
  )


def test_flips_are_found_where_rows_part():
  reference = [Measurement(1.0, _generation([1, 2, 3], [4, 5]))]
  same = [Measurement(1.0, _generation([1, 2, 3], [4, 5]))]
  other = [Measurement(1.0, _generation([1, 9, 3], [4]))]
  assert find_flips(same, reference) == []
  assert find_flips(other, reference) == [Flip(0, 0, 1), Flip(0, 1, 1)]


def test_speed_is_pooled_and_per_batch():
  slow = [
    Measurement(4.0, _generation([1, 2])),
    Measurement(8.0, _generation([1, 2, 3, 4])),
  ]
  fast = [
    Measurement(1.0, _generation([1, 2])),
    Measurement(3.0, _generation([1, 2, 3, 4])),
  ]
  arms = summarize_arms({'slow': slow, 'fast': fast}, baseline='slow')
  assert arms['slow']['speed'] == 1
  assert arms['fast']['speed'] == pytest.approx(12 / 4)
  assert arms['fast']['speed_per_batch'] == pytest.approx([4, 8 / 3])
  assert arms['fast']['tokens_per_second'] == pytest.approx(6 / 4)
  assert arms['fast']['block_efficiency'] == 2
  assert arms['fast']['accepted_histogram'] == [0, 3]
  assert arms['fast']['stage_forwards'] == {'draft': 6}
  # Of 1 and 2 forwards, with 2 and 4 nodes.
  assert arms['fast']['nodes_per_forward'] == pytest.approx((2 + 8) / 3)
  # 3 forwards of the target, 6 of the draft, 6 of its slots; plain takes 6.
  bandwidth = (3 * 10 + 6 * 1 + 6 * 2) / (6 * 10)
  assert arms['fast']['relative_bandwidth'] == pytest.approx(bandwidth)


def test_arms_take_turns_after_everything_is_warm():
  calls = []

  def arm(name):
    def decode(batch, limit):
      calls.append((name, batch[0][0], limit))
      return _generation([1, 2])

    return decode

  arms = {'a': arm('a'), 'b': arm('b')}
  measure(arms, [[[7]], [[8]]], max_new_tokens=20)
  counted = [call for call in calls if call[2] == 20]
  assert counted == [('a', 7, 20), ('b', 7, 20), ('b', 8, 20), ('a', 8, 20)]
  assert calls.index(counted[0]) == len(calls) - len(counted)
  warm = {(name, batch) for name, batch, limit in calls if limit == 0}
  assert warm == {('a', 7), ('a', 8), ('b', 7), ('b', 8)}


@pytest.mark.parametrize('prefix', [[0], [2, 1, 0]])
def test_margin_is_the_gap_of_the_best_two_logits(prefix):
  table = np.zeros((4, 4), np.float32)
  table[0] = [0.5, 2.0, 1.25, -3.0]
  model = table_model(table, max_positions=16)
  margin = choice_margin(model, jax.random.key(0), prefix, Sampling())
  assert margin == pytest.approx(0.75)


def test_arms_are_parsed_and_unknown_ones_refused():
  assert parse_arm('chain', 'float32') == ArmSpec('chain', 'float32')
  assert parse_arm('plain:bfloat16', 'float32') == ArmSpec('plain', 'bfloat16')
  for text in ('forest', 'plain:float64', ''):
    with pytest.raises(ValueError, match='is not known'):
      parse_arm(text, 'float32')
