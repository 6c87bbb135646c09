"""From prompts to a plan, on a table model, with a clock that the test sets."""

import functools
import itertools
from unittest import mock

import numpy as np
import plans
import pytest
import tiny
import tiny_drafters

import specdec
from specdec.models.lab import machine
from specdec.models.lab import task as task_lib
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.lab.tune import plan_lookup
from specdec.models.lab.tune import planner
from specdec.models.lab.tune import trials
from specdec.models.nn import adapter
from specdec.models.nn import table_model
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib

_TEXT = 'the cat says ok, and the dog says no to the cat\n' * 20
_PROMPTS = ('the cat says', 'ok, and', 'the dog', 'to the cat')
_LONG = (_TEXT[:150], _TEXT[9:160])
_SAMPLING = specdec.Sampling(temperature=0.7)
# Before a test replaces it.
_MEASURE = machine.measure_step_costs
_FEW = {trials.PLAIN, 'chain 2', 'lookup N=8'}
_REFUSED = 'ngram N=8'  # The table was built with another tokenizer.


@functools.cache
def _tokenizer():
  return tokenizer_lib.train_tokenizer([_TEXT], vocab_size=300, context=128)


@functools.cache
def _pair():
  tokenizer = _tokenizer()
  size = len(tokenizer)
  rng = np.random.default_rng(0)
  counts = 1e-3 + 0.05 * rng.random((size, size)) ** 8
  for before, after in itertools.pairwise(tokenizer(_TEXT)['input_ids']):
    counts[before, after] += 1
  logits, noise = np.log(counts), rng.normal(size=counts.shape)
  target = table_model.table_model(logits, max_positions=256)
  draft = table_model.table_model(logits + noise, max_positions=256)
  eos_ids = tuple(tokenizer('the')['input_ids'][-1:])
  return pair_lib.Pair(
    target=target, draft=draft, tokenizer=tokenizer, eos_ids=eos_ids
  )


@functools.cache
def _with_states():
  """A delta net that drafts for itself."""
  tokenizer = _tokenizer()
  module = tiny.llama_module('delta', vocab_size=len(tokenizer))
  model = adapter.as_model(module)
  return pair_lib.Pair(
    target=model, draft=model, tokenizer=tokenizer, eos_ids=()
  )


_CONTEXT = plan_lib.Context(
  models={'target': 't', 'draft': 'd', 'vocabulary': 'v'},
  machine={},
  dtype='float32',
  draft_dtype='float32',
  batch_size=2,
  sampling={'temperature': 0.7},
)


@pytest.fixture
def winning(monkeypatch):
  """Few candidates and sizes, which compile fast.

  V is the same for any N, so that speculation is predicted to win.
  """
  kept = tuple(one for one in trials._CANDIDATES if one[0] in {*_FEW, _REFUSED})
  monkeypatch.setattr(trials, '_CANDIDATES', kept)
  monkeypatch.setattr(planner, 'NODE_COUNTS', (1, 8))
  monkeypatch.setattr(planner, '_LENGTHS', (512,))
  costs = machine.StepCosts(verification={1: 10.0, 8: 10.0})
  measure = mock.Mock(return_value=costs)
  monkeypatch.setattr(machine, 'measure_step_costs', measure)
  return measure


def _interrupting(moment, lines):
  """A report at which the user interrupts."""

  def report(line):
    lines.append(line)
    if moment in line:
      raise KeyboardInterrupt

  return report


def _by_name(plan):
  return {figures['name']: figures for figures in plan.candidates}


def _plan(make_pair=_pair, prompts=_PROMPTS, **options):
  task = task_lib.Task(
    sampling=_SAMPLING,
    batch_size=2,
    max_new_tokens=20,
  )
  return planner.make_plan(
    make_pair(),
    prompts,
    task,
    context=_CONTEXT,
    **{'plan_seconds': 1e6} | options,
  )


def _decoded(length, *decodes):
  return [trials.Decoded(length, *one) for one in decodes]


@pytest.mark.parametrize(
  ('decodes', 'mean', 'careful'),
  [
    # Nobody knows how one sample differs from others: 15 %.
    (_decoded(64, (8, 16)), {64: 0.5}, {64: 0.575, 128: 0.575}),
    # Within noise, 3 %.
    (_decoded(64, (8, 16), (4, 8)), {64: 0.5}, {64: 0.515, 128: 0.515}),
    # 0.5, and sqrt(2 ((6 - 4)^2 + (2 - 4)^2)) / 16 for the error.
    (_decoded(64, (6, 8), (2, 8)), {64: 0.5}, {64: 0.75, 128: 0.75}),
    # The slowest sample is among the short ones.
    (
      _decoded(64, (10, 10), (6, 10), (8, 20)) + _decoded(512, (2, 8)),
      {64: 0.6, 512: 0.25},
      {64: 0.6 + np.sqrt(1.5 * 32) / 40, 512: 0.2875, 1024: 1.0},
    ),
  ],
)
def test_the_error_of_a_time_and_the_slowest_sample_by_hand(
  decodes, mean, careful
):
  found = trials.token_seconds(decodes, careful=False)
  assert found == pytest.approx(mean)
  assert trials.token_seconds(decodes, careful=True) == pytest.approx(careful)


def test_samples_are_of_the_two_most_frequent_padded_lengths():
  short, long, other = [[1] * 9] * 3, [[2] * 40, [2] * 60], [[3] * 200]
  assert planner.sample_batches(other + long + short, 2) == [
    [[1] * 9] * 2,
    long,
    [[1] * 9] * 2,
  ]
  assert planner.sample_batches(short, 4) == [[[1] * 9] * 4]


def test_only_what_is_there_and_wanted_is_tried():
  settings = settings_lib.DraftSettings
  listed = lambda base, has_draft=True, longest=64: trials.list_candidates(
    base, has_draft=has_draft, longest=longest
  )
  for inner, has_draft, methods in (
    (None, True, 'chain tree staged ngram lookup ngram+lookup'),
    (None, False, 'ngram lookup ngram+lookup'),
    ('none', True, 'chain tree'),
    ('lookup', True, 'chain tree staged lookup'),
  ):
    found = {one.method for one in listed(settings(inner=inner), has_draft)}
    assert found == {trials.PLAIN, *methods.split()}
  # The user's choices are not varied.
  chosen = {'calibration': 0.7, 'max_depth': 5, 'capacity': 400}
  for candidate in listed(settings_lib.with_options(settings(), chosen)):
    assert candidate.drafting.stage.calibration == 0.7
    assert candidate.drafting.tree.max_depth == 5
    if candidate.method == 'staged':
      assert candidate.drafting.tree.capacity == 400
  for wanted, longest, read in (
    (None, 512, {None, 256}),
    (None, 256, {None}),
    (100, 512, {100}),
  ):
    candidates = listed(settings(draft_prompt=wanted), longest=longest)
    assert {one.drafting.draft_prompt for one in candidates} == read


@pytest.mark.parametrize(
  ('make_pair', 'long', 'lengths'),
  [(_pair, _LONG, {32, 64}), (_with_states, (), {32})],
)
def test_a_plan_is_made_of_what_was_counted(make_pair, long, lengths, winning):
  """The fastest that reads a prompt, and that reads none, are decoded."""
  pair, lines = make_pair(), []
  # The costs are measured, but others are used.
  winning.side_effect = lambda *arguments, **options: (
    _MEASURE(*arguments, **options) and winning.return_value
  )
  prompts = (*long, *_PROMPTS)
  plan = _plan(make_pair=make_pair, prompts=prompts, report=lines.append)
  figures = _by_name(plan)
  (fixed,) = figures.keys() - _FEW
  assert fixed.startswith('fixed tree N=8')
  assert figures[trials.PLAIN]['block_efficiency'] == 1
  assert figures[trials.PLAIN]['min_block_efficiency'] == 1
  assert figures['chain 2']['block_efficiency'] > 1
  assert any(f'{_REFUSED} is left out: the n-gram' in line for line in lines)
  assert bool(plan.ends_per_token) == bool(pair.eos_ids)
  chosen = ['lookup N=8', next(n for n in figures if n in ('chain 2', fixed))]
  decoded = {name for name in figures if figures[name]['measured']}
  assert decoded == {trials.PLAIN, *chosen}
  plain, *ways = plan.ways
  assert plain.name == trials.PLAIN
  assert {way.name for way in ways} <= {*chosen}
  measured = figures[trials.PLAIN]['measured']
  assert plain.new_token_seconds[32] == pytest.approx(2 / measured)
  assert plain.new_token_seconds.keys() == lengths
  for way in ways:
    # The error is added, and the slowest sample is that of longer prompts.
    assert way.new_token_seconds.keys() == lengths | {2 * max(lengths)}
    assert way.new_token_seconds[32] > 2.05 / figures[way.name]['measured']
    for length, seconds in way.reading_seconds.items():
      assert seconds >= plain.reading_seconds[length] > 0
  # Prompts of 512 tokens do not fit.
  assert plain.reading_seconds.keys() == {32}
  assert plan.prompt_length == max(len(pair.encode(one)) for one in _PROMPTS)
  assert (plan.new_tokens, plan.context) == (20, _CONTEXT)
  assert len(plan_lookup.table(plan).splitlines()) == 2 + len(figures)
  assert any('chain 2: ' in line for line in lines)


def _tried(tokens=1, *decodes, drafter=specdec.PLAIN, counts=(1, 1, 0.0), **kw):
  """A candidate; `counts` are forwards, steps and seconds."""
  return trials.Tried(
    plans.candidate(**kw), drafter, tokens, *counts, [*decodes]
  )


def test_a_prediction_by_hand():
  costs = machine.StepCosts(verification={1: 0.1, 4: 0.13})
  chain = tiny_drafters.simple('chain', _pair().draft)
  found = _tried(100, drafter=chain, counts=(40, 40, 2.0))
  # 2 s of replay and 40 steps of 0.13 s.
  assert found.tokens_per_second(costs) == pytest.approx(100 / (2 + 5.2))
  assert found.block_efficiency == 2.5
  # A step: 0.05 s of drafting and 0.13 s of the target.
  assert found.drafting_seconds == pytest.approx(0.05)
  assert found.step_seconds(costs) == pytest.approx(0.18)
  # Rows share their steps: one of 4 is slow, and the others wait for it.
  found = _tried(400, drafter=chain, counts=(100, 40, 2.0))
  assert found.block_efficiency == 4.0
  assert found.tokens_per_second(costs) == pytest.approx(400 / 7.2)


def test_what_reading_a_prompt_takes_and_which_ways_are_kept():
  tail = {'method': 'tree', 'draft_prompt': 256}
  tried = {
    trials.PLAIN: _tried(method='plain'),
    'b': _tried(3),
    'a': _tried(2, method='chain'),
    'c': _tried(1, **tail),
    'd': _tried(4, method='chain'),
    'e': _tried(2, method='ngram'),
  }
  reading = {64: (1.0, 0.5), 512: (8.0, 4.0)}
  for name, expected in {
    trials.PLAIN: {64: 1.0, 512: 8.0},
    'b': {64: 1.0, 512: 8.0},
    'a': {64: 1.5, 512: 12.0},
    'c': {64: 1.5, 512: 10.0},
  }.items():
    assert trials.reading_seconds(tried[name], reading) == expected
  costs = machine.StepCosts(verification={1: 1.0})
  kept = trials.fastest_by_reading(tried, costs)
  assert kept == [tried[name] for name in ('plain', 'd', 'b', 'c')]


def test_ways_that_are_never_faster_than_plain_decoding_are_left_out():
  short, long = trials.Sample([[1] * 9], [[2] * 8]), 512
  decoded = lambda seconds: _decoded(64, (8, 8)) + _decoded(long, (seconds, 8))
  tried = {
    trials.PLAIN: _tried(1, *decoded(8), method='plain', name='plain'),
    # Faster after long prompts alone, even with its error.
    'd': _tried(4, *decoded(4), method='chain', name='d'),
    'b': _tried(3, *decoded(7), name='b'),
  }
  plan = trials.plan_of(
    tried,
    trials.Samples([short], limit=8, ends_per_token=0.25),
    machine.StepCosts(verification={1: 1.0}),
    {64: (1.0, 0.5)},
    _CONTEXT,
  )
  assert [way.name for way in plan.ways] == ['plain', 'd']
  assert plan.ways[0].new_token_seconds == {64: 2.0, long: 2.0}
  assert plan.ways[1].reading_seconds == {64: 1.5}
  assert (plan.prompt_length, plan.ends_per_token) == (9, 0.25)


@pytest.mark.usefixtures('winning')
def test_when_the_budget_is_spent_a_plan_is_made_of_what_is_known():
  """Each look at the clock takes a second of a budget of one."""
  clock, lines = itertools.count(0.0), []
  plan = _plan(plan_seconds=1, clock=lambda: next(clock), report=lines.append)
  # One sample, and plain decoding and one drafter were tried and decoded.
  figures = _by_name(plan)
  assert figures.keys() == {'lookup N=8', trials.PLAIN}
  assert all(one['measured'] > 0 for one in figures.values())
  assert sum('sample batch' in line for line in lines) == 1
  assert any('out of time for replays' in line for line in lines)


@pytest.mark.usefixtures('winning')
@pytest.mark.parametrize('moment', ['lookup N=8: ', 'compiling', 'decoding'])
def test_when_the_user_interrupts_a_plan_is_made_of_what_is_known(moment):
  lines = []
  plan = _plan(report=_interrupting(moment, lines))
  assert {trials.PLAIN, 'lookup N=8'} <= _by_name(plan).keys()
  assert 'interrupted' in lines[-1]
  # Nothing was measured with the target, and the predictions are clear.
  assert all(figures['measured'] is None for figures in plan.candidates)
  assert plan.usual.name != trials.PLAIN
  assert plan.usual.min_block_efficiency == pytest.approx(1.0, rel=0.1)


@pytest.mark.usefixtures('winning')
def test_what_cannot_be_planned_is_refused():
  with pytest.raises(ValueError, match='plan_seconds must be positive'):
    _plan(plan_seconds=0)
  # An interrupt before any drafter was tried leaves no plan.
  with pytest.raises(KeyboardInterrupt):
    _plan(report=_interrupting(f'{trials.PLAIN}: ', []))
