"""Reports of a benchmark, pictures and draft times, from figures by hand."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest

import specdec
from specdec import arguments as arguments_lib
from specdec import randomness as randomness_lib
from specdec import statistics as statistics_lib
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import arms as arms_lib
from specdec.models.lab.bench import benchmark
from specdec.models.lab.bench import exactness
from specdec.models.lab.bench import questions as questions_lib
from specdec.models.lab.bench import timing
from specdec.models.nn import table_model
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib


def _generation(*rows):
  new_tokens = sum(map(len, rows))
  forwards = new_tokens // 2
  reads = lambda forwards, slots: {'forwards': forwards, 'slots': slots}
  costs = lambda forward, slot: {'per_forward': forward, 'per_slot': slot}
  return specdec.Generation(
    tokens=[list(row) for row in rows],
    origins=[[0] * len(row) for row in rows],
    labels=('target', 'draft'),
    log_probs=None,
    finish_reasons=['length'] * len(rows),
    errors=[None] * len(rows),
    stats=statistics_lib.Statistics(
      new_tokens=new_tokens,
      target_forwards=forwards,
      stage_forwards={'draft': 3},
      origins={'target': new_tokens, 'draft': 0},
      accepted_histogram=[0, forwards],
      positions={'target': new_tokens**2 // 2, 'draft': 3},
      reads={
        'plain': reads(new_tokens, 0),
        'target': reads(forwards, 0),
        'draft': reads(3, new_tokens),
      },
      costs={'target': costs(10, 1), 'draft': costs(1, 2)},
    ),
  )


def _measured(*seconds, prefill=0.0):
  """Batches of 2 and of 4 tokens that took so long, each with its prefill."""
  texts = ([1, 2], [1, 2, 3, 4])
  pairs = zip(seconds, texts, strict=False)
  return [
    timing.Measurement(took, _generation(text), prefill) for took, text in pairs
  ]


def test_speed_is_pooled():
  measured = {
    'slow': _measured(4.0, 8.0, prefill=1.0),
    'fast': _measured(1.0, 3.0, prefill=0.5),
  }
  arms = timing.summarize_arms(measured, baseline='slow')
  fast = arms['fast']
  assert arms['slow']['speed'] == 1
  assert fast['speed'] == pytest.approx(12 / 4)
  assert fast['tokens_per_second'] == pytest.approx(6 / 4)
  # Without the prompt.
  assert fast['decoding_speed'] == pytest.approx(10 / 3)
  assert fast['decoding_tokens_per_second'] == pytest.approx(6 / 3)
  assert fast['block_efficiency'] == 2
  assert fast['accepted_histogram'] == [0, 3]
  assert fast['stage_forwards'] == {'draft': 6}
  # These have 1 and 2 forwards, with 2 and 4 nodes.
  assert fast['nodes_per_forward'] == pytest.approx((2 + 8) / 3)
  assert fast['positions'] == {'target': 10, 'draft': 6}
  # 3 forwards of the target, 6 of the draft, 6 of its slots; plain takes 6.
  bandwidth = (3 * 10 + 6 * 1 + 6 * 2) / (6 * 10)
  assert fast['relative_bandwidth'] == pytest.approx(bandwidth)


def test_an_arm_that_plans_decodes_each_batch_in_its_own_way():
  """A chain for a short prompt, plain decoding for a long one."""
  logits = np.log(np.random.default_rng(0).dirichlet(np.full(9, 0.1), size=9))
  model = table_model.table_model(logits.astype(np.float32), max_positions=256)
  pair = pair_lib.Pair(target=model, draft=model, tokenizer=None, eos_ids=())
  context = types.SimpleNamespace(models={})
  ways = (
    plans.way('plain', {32: 1.0, 64: 1.0}),
    plans.way('chain', {32: 2.0, 64: 0.5}, num_draft_tokens=2, inner='lookup'),
  )
  task = task_lib.Task(
    drafting=settings_lib.DraftSettings(plan=plans.plan(context, *ways)),
    max_new_tokens=8,
  )
  batches = [[list(range(9)) * 5], [[1, 2, 3]]]
  results, texts, labels = {}, {}, [('target',), ('target', 'draft')]
  for method in ('plain', 'plan'):
    spec = arms_lib.ArmSpec(method, 'float32')
    arm, _ = benchmark._own_arm(spec, pair, task)
    decoded = [arm(batch, 8) for batch in batches]
    results[method] = [timing.Measurement(1.0, each) for each in decoded]
    texts[method] = [each.tokens for each in decoded]
  assert texts['plan'] == texts['plain']
  # Where prompts are read only, they are read in the same way.
  assert [arm(batch, 0).labels for batch in batches] == labels
  assert [each.labels for each in decoded] == labels
  pooled = timing.summarize_arms(results, baseline='plain')['plan']
  # Three steps of two drafted tokens, one more after two; eight plain steps.
  assert pooled['accepted_histogram'] == [8, 1, 2]
  assert pooled['stage_forwards'] == {'draft': 6}
  assert pooled['origins'] == {'target': 10, 'draft': 6}
  assert pooled['reads']['draft']['forwards'] == 6
  assert timing.costs_of(results['plan']).keys() == {'target', 'draft'}


def test_intervals_are_those_of_resampled_batches():
  # Either batch alone, or both: tokens over seconds, and over the baseline's.
  measured = {'slow': _measured(4.0, 8.0), 'fast': _measured(1.0, 4.0)}
  arms = timing.summarize_arms(measured, baseline='slow')
  assert arms['fast']['tokens_per_second_interval'] == (1, 2)
  assert arms['fast']['speed_interval'] == (2, 4)
  assert arms['slow']['speed_interval'] == (1, 1)
  alone = timing.summarize_arms({'slow': _measured(4.0)}, baseline='slow')
  assert alone['slow']['speed_interval'] is None


def test_acceptance_by_position_adds_up_to_block_efficiency():
  # 10 forwards emitted 4 + 2 * 3 + 3 * 3 tokens.
  shares = timing.acceptance_by_position([4, 3, 3])
  assert shares == pytest.approx([0.6, 0.3])
  assert 1 + sum(shares) == pytest.approx((4 + 6 + 9) / 10)
  assert timing.acceptance_by_position(None) == []
  assert timing.acceptance_by_position([0, 0]) == [0]


def test_each_category_has_so_many_questions():
  names = 'aababca'
  asked = [
    questions_lib.Question((f'{number}',), name)
    for number, name in enumerate(names)
  ]
  chosen = lambda *of: [
    int(question.turns[0]) for question in questions_lib.choose(asked, *of)
  ]
  assert chosen(2, ()) == [0, 1, 2, 4, 5]
  assert chosen(2, ['c', 'a']) == [0, 1, 5]
  assert sorted(chosen(None, ())) == [*range(7)]


def test_batches_have_one_category_and_categories_take_turns():
  turns = [(name, [size] * size) for size, name in enumerate('aabab', 1)]
  make = lambda batch_size, bucket=None: [
    (name, [*map(len, rows)])
    for name, rows in benchmark.make_batches(
      turns, batch_size=batch_size, bucket=bucket
    )
  ]
  alone = [('a', [1]), ('b', [3]), ('a', [2]), ('b', [5]), ('a', [4])]
  assert make(1) == alone
  assert make(2) == [('a', [1, 2]), ('b', [3, 5])]
  assert make(1, 4) == [('b', [3]), ('a', [4])]
  with pytest.raises(ValueError, match="prompts of the category 'b', 2; got"):
    make(3)


def _recorded(calls):
  """Two arms that say when they were called, and take no time."""
  record = lambda name, batch, limit: (
    calls.append((name, batch[0][0], limit)) or _generation([1, 2])
  )
  return {name: functools.partial(record, name) for name in 'ab'}


def test_arms_take_turns_in_an_order_that_is_reversed():
  calls = []
  results = timing.time_arms(
    _recorded(calls),
    [[[7]], [[8]]],
    before_batch=lambda: calls.append('before'),
    max_new_tokens=20,
  )
  turns = lambda order, batch: [
    (name, batch, limit) for name in order for limit in (0, 20)
  ]
  assert calls == ['before', *turns('ab', 7), 'before', *turns('ba', 8)]
  assert {name: len(runs) for name, runs in results.items()} == dict(a=2, b=2)


def test_every_arm_is_warmed_up_once_for_every_shape():
  # The first two are padded to the same shape.
  calls, batches = [], [[[7]], [[8]], [[9] * 40]]
  arms = _recorded(calls)
  timing.warm_up(arms, batches, max_new_tokens=20)
  limits = [(9, 0), (9, 0), (7, 0), (7, 0), (7, 8)]
  assert calls == [(name, *limit) for name in 'ab' for limit in limits]


def test_no_batch_is_begun_when_time_is_up(monkeypatch):
  """Each decode takes as many seconds as its limit."""
  now = 0.0

  def decode(batch, limit):
    nonlocal now
    now += limit
    return _generation([1, 2])

  monkeypatch.setattr('time.perf_counter', lambda: now)
  run = lambda seconds: timing.time_arms(
    {'a': decode}, [[[1]]] * 5, max_new_tokens=10, max_seconds=seconds
  )['a']
  assert [len(run(seconds)) for seconds in (0, 25, None)] == [1, 3, 5]
  [only] = run(0)
  assert (only.seconds, only.prefill_seconds) == (10, 0)


def test_flips_are_where_rows_part_and_have_the_gap_of_the_best_two_logits():
  table = np.zeros((4, 4), np.float32)
  table[0] = [0.5, 2.0, 1.25, -3.0]
  model = table_model.table_model(table, max_positions=16)
  pair = pair_lib.Pair(target=model, draft=None, tokenizer=None, eos_ids=())
  texts = {'plain': ([3, 3, 3], [0, 1]), 'chain': ([3, 3, 3], [0, 2])}
  results = {
    f'{method}:float32': [timing.Measurement(1.0, _generation(*rows))]
    for method, rows in texts.items()
  }
  (flip,) = benchmark._find_flips(
    arms_lib.ArmSpec('chain', 'float32'),
    results,
    [[[1], [2, 1]]],
    {'float32': pair},
    task_lib.Task(batch_size=2),
  )
  margin = pytest.approx(0.75)
  assert flip == {'batch': 0, 'row': 1, 'offset': 1, 'margin': margin}


def test_margin_is_the_distance_to_the_edge_of_a_filter():
  """A token that a filter just keeps, or just excludes, is a near tie."""
  table = np.array([[0.5, 2.0, 1.25, -3.0]] * 4, np.float32)
  model = table_model.table_model(table, max_positions=16)
  two = specdec.Sampling(temperature=1.0, top_k=2)
  params = arguments_lib.to_params(two, 1, 4)
  keys = arguments_lib.row_keys(jax.random.key(0), 40)

  @jax.jit
  def noise_of(key):
    at = jnp.array([[1]])
    noise = randomness_lib.position_noise(key[None], at, params.is_stochastic)
    return noise.of_all(4)[0, 0]

  seen = set()
  for key in keys:
    noise = np.asarray(noise_of(key))
    scores = table[0] + noise
    by_choice = abs(scores[1] - scores[2])
    best = max(scores[1], scores[2])
    falls = table[0, 1 if scores[1] > scores[2] else 2] - 0.5
    rises = [1.25 - table[0, token] for token in (0, 3) if scores[token] > best]
    every = [by_choice, falls, *rises]
    seen.add(int(np.argmin(every)))
    margin = exactness.choice_margin(model, key, [0], two)
    assert margin == pytest.approx(min(every), abs=1e-5)
  assert seen == {0, 1, 2}
