"""What a benchmark reports, from measurements made by hand."""

import jax
import numpy as np
import pytest

from models.nn.table_model import table_model
from specdec import Generation
from specdec import Sampling
from specdec.study.exactness import choice_margin
from specdec.study.timing import find_flips
from specdec.study.timing import Flip
from specdec.study.timing import measure
from specdec.study.timing import Measurement
from specdec.study.timing import summarize_arms
from specdec.study.timing import warm_up


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
      'stage_forwards': {'draft': 3},
      'origins': {'target': new_tokens, 'draft': 0},
      'accepted_histogram': [0, new_tokens // 2],
      'positions': {'target': new_tokens**2 // 2, 'draft': 3},
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
  assert arms['fast']['positions'] == {'target': 10, 'draft': 6}
  # 3 forwards of the target, 6 of the draft, 6 of its slots; plain takes 6.
  bandwidth = (3 * 10 + 6 * 1 + 6 * 2) / (6 * 10)
  assert arms['fast']['relative_bandwidth'] == pytest.approx(bandwidth)


def test_intervals_are_those_of_resampled_batches():
  # Either batch alone, or both: tokens over seconds, and over the baseline's.
  slow = [
    Measurement(4.0, _generation([1, 2])),
    Measurement(8.0, _generation([1, 2, 3, 4])),
  ]
  fast = [
    Measurement(1.0, _generation([1, 2])),
    Measurement(4.0, _generation([1, 2, 3, 4])),
  ]
  arms = summarize_arms({'slow': slow, 'fast': fast}, baseline='slow')
  assert arms['fast']['tokens_per_second_interval'] == (1, 2)
  assert arms['fast']['speed_interval'] == (2, 4)
  assert arms['slow']['speed_interval'] == (1, 1)
  alone = summarize_arms({'slow': slow[:1]}, baseline='slow')['slow']
  assert alone['speed_interval'] is None


class _Recorder:
  """Arms that say when they were called, and take no time."""

  def __init__(self):
    self.calls = []

  def arm(self, name):
    def decode(batch, limit):
      self.calls.append((name, batch[0][0], limit))
      return _generation([1, 2])

    return decode


def test_arms_take_turns_in_an_order_that_is_reversed():
  recorder = _Recorder()
  arms = {name: recorder.arm(name) for name in 'ab'}
  results = measure(
    arms,
    [[[7]], [[8]]],
    max_new_tokens=20,
    before_batch=lambda: recorder.calls.append('before'),
  )
  turns = lambda *order: [
    (name, batch, limit) for name, batch in order for limit in (0, 20)
  ]
  assert recorder.calls == [
    'before',
    *turns(('a', 7), ('b', 7)),
    'before',
    *turns(('b', 8), ('a', 8)),
  ]
  assert {name: len(found) for name, found in results.items()} == {
    'a': 2,
    'b': 2,
  }


def test_every_arm_is_warmed_up_once_for_every_shape():
  recorder = _Recorder()
  arms = {name: recorder.arm(name) for name in 'ab'}
  # The first two are padded to the same shape.
  batches = [[[7]], [[8]], [[9] * 40]]
  seconds = warm_up(arms, batches, max_new_tokens=20)
  twice = lambda name: [(name, batch, 0) for batch in (9, 9, 7, 7)]
  assert recorder.calls == [
    *twice('a'),
    ('a', 7, 8),
    *twice('b'),
    ('b', 7, 8),
  ]
  assert seconds.keys() == arms.keys()


def test_compiling_is_what_a_first_call_takes_longer(monkeypatch):
  # A clock that the arm moves: 5 seconds at first, then 2.
  now = 0.0
  takes = iter([5.0, 2.0, 4.0, 2.0, 0.0])

  def decode(batch, limit):
    nonlocal now
    now += next(takes)
    return _generation([1, 2])

  monkeypatch.setattr('time.perf_counter', lambda: now)
  batches = [[[7]], [[8] * 40]]
  assert warm_up({'a': decode}, batches, max_new_tokens=9) == {'a': 5}


def test_no_batch_is_begun_when_time_is_up(monkeypatch):
  now = 0.0

  def decode(batch, limit):
    nonlocal now
    now += limit
    return _generation([1, 2])

  monkeypatch.setattr('time.perf_counter', lambda: now)
  run = lambda seconds: measure(
    {'a': decode}, [[[1]]] * 5, max_new_tokens=10, max_seconds=seconds
  )
  assert len(run(0)['a']) == len(run(-1)['a']) == 1
  assert len(run(25)['a']) == 3
  assert len(run(None)['a']) == 5
  assert [one.seconds for one in run(0)['a']] == [10]
  assert [one.prefill_seconds for one in run(0)['a']] == [0]


@pytest.mark.parametrize('prefix', [[0], [2, 1, 0]])
def test_margin_is_the_gap_of_the_best_two_logits(prefix):
  table = np.zeros((4, 4), np.float32)
  table[0] = [0.5, 2.0, 1.25, -3.0]
  model = table_model(table, max_positions=16)
  margin = choice_margin(model, jax.random.key(0), prefix, Sampling())
  assert margin == pytest.approx(0.75)
