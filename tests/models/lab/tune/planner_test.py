"""From prompts to a plan: planted times, and real decodes of a table model."""

import dataclasses
import functools
import itertools
import types

import numpy as np
import pytest

from specdec.models.lab import task as task_lib
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.lab.tune import planner
from specdec.models.nn import table_model
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib

_CONTEXT = plan_lib.Context(
  models={'target': 't', 'draft': 'd', 'vocabulary': 'v'},
  machine={},
  dtype='float32',
  draft_dtype='float32',
  batch_size=1,
  sampling={},
)
_NAMES = [name for name, _, _ in planner._CANDIDATES]
_SHORT, _LONG = [[1] * 20] * 3, [[1] * 300] * 2


class _Machine:
  """Decodes take planted times on its clock.

  Reading a token takes `reads[name]` seconds, a step `steps[name]`; a step of a
  way emits `tokens[name]` tokens. Without an entry a way is three times slower
  than plain decoding.
  """

  def __init__(self, reads, steps, tokens):
    self.reads = {'plain': 0.001} | reads
    self.steps = {'plain': 0.01} | steps
    self.tokens = {'plain': 1} | tokens
    self.now, self.runs, self.slow_from = 0.0, [], np.inf

  def run(self, drafter, prompts, *, limit, end):
    name = getattr(drafter, 'name', 'plain')
    length = max(map(len, prompts))
    factor = 2 if self.now > self.slow_from else 1
    reading = factor * length * self.reads.get(name, 0.001)
    steps = int(np.ceil(limit / self.tokens.get(name, 1)))
    decoding = factor * steps * self.steps.get(name, 0.03)
    self.now += reading + decoding
    self.runs.append((length, name, limit))
    return planner.Run(reading, decoding, limit, steps, 64)


@pytest.fixture
def make(monkeypatch):
  """Makes a plan on a machine of planted times; returns it and its reports."""

  def make_plan(machine, prompts=(*_SHORT, *_LONG), seconds=300.0, report=None):
    run = lambda _, *args, **kw: machine.run(*args, **kw)
    monkeypatch.setattr(planner.Search, 'run', run)
    names = {
      (method, str(settings_lib.with_options(_BASE, options))): name
      for name, method, options in planner._CANDIDATES
    }
    named = lambda method, _, drafting: types.SimpleNamespace(
      name=names[method, str(drafting)]
    )
    monkeypatch.setattr(planner.drafters, 'make_drafter', named)
    pair = types.SimpleNamespace(
      drafting_model=True, eos_ids=(), ids_of=lambda prompts: prompts
    )
    lines = []
    plan = planner.make_plan(
      pair,
      prompts,
      task_lib.Task(max_new_tokens=64, drafting=_BASE),
      context=_CONTEXT,
      plan_seconds=seconds,
      clock=lambda: machine.now,
      report=report or lines.append,
    )
    return plan, lines

  return make_plan


_BASE = settings_lib.DraftSettings(store='texts')


def _two_lengths():
  """A staged draft is the fastest way, but it reads three times as long.

  Of a short prompt (20 tokens) and 64 tokens that is 0.06 + 0.32 seconds, of a
  long one 0.9 + 0.32; by lookup 0.02 + 0.48 and 0.3 + 0.48.
  """
  return _Machine(
    {'staged N=8': 0.003},
    {'staged N=8': 0.02, 'lookup N=8': 0.015},
    {'staged N=8': 4, 'lookup N=8': 2},
  )


def test_the_fastest_way_of_each_length_counts_the_prompt(make):
  plan, _ = make(_two_lengths())
  assert [way.name for way in plan.ways] == [
    'plain',
    'staged N=8',
    'lookup N=8',
  ]
  plain, staged, lookup = plan.ways
  near = lambda speeds: pytest.approx(speeds, rel=1e-6)
  assert plain.tokens_per_second == near({32: 64 / 0.66, 512: 64 / 0.94})
  assert staged.tokens_per_second == near({32: 64 / 0.38})
  assert lookup.tokens_per_second == near({512: 64 / 0.78})
  # A step takes twice, and one and a half times, as long as a plain one.
  assert (staged.break_even, lookup.break_even) == near((2.0, 1.5))
  assert plan.usual_length == 32
  assert plan_lib.choose(plan, 30).name == 'staged N=8'
  assert plan_lib.choose(plan, 500).name == 'lookup N=8'


def test_the_faster_half_goes_on_until_the_time_is_spent(make):
  machine = _two_lengths()
  make(machine, _SHORT, seconds=30.0)
  counts = lambda limit: [
    sum(run == (20, way, limit) for run in machine.runs)
    for way in ('plain', *_NAMES)
  ]
  # Programs are compiled first. The end of a prompt is not tried here.
  assert counts(0) == [1, *(int('of the' not in name) for name in _NAMES)]
  # A quarter of the tokens, each way with plain decoding.
  assert counts(16) == [7, *counts(0)[1:]]
  plain, *others = counts(64)
  by_name = dict(zip(_NAMES, others, strict=True))
  # Seven ways, then four, two, and one until the end.
  assert sorted(others, reverse=True)[1:5] == [2, 1, 1, 0]
  assert by_name['staged N=8'] in (plain, plain - 1)
  assert plain > 10
  assert 30.0 <= machine.now < 31.0


def test_a_machine_that_slows_down_does_not_change_the_order(make):
  for moment in (0.2, 1.0, 5.0, 20.0):
    machine = _two_lengths()
    machine.slow_from = moment
    plan, _ = make(machine, _SHORT, seconds=60.0)
    assert plan_lib.choose(plan, 20).name == 'staged N=8'
    assert plan.ways[1].break_even == pytest.approx(2.0, rel=0.1)
    ratio = plan.ways[1].tokens_per_second[32]
    ratio /= plan.ways[0].tokens_per_second[32]
    assert ratio == pytest.approx(0.66 / 0.38, rel=0.1)


def test_plain_decoding_alone_is_a_plan(make):
  plan, _ = make(_Machine({}, {}, {}))
  (way,) = plan.ways
  assert (way.name, way.drafting) == ('plain', _BASE)  # With its store.
  assert plan_lib.choose(plan, 5000).name == 'plain'


def test_interrupted_the_plan_is_made_from_what_is_known(make):
  def interrupt(moment):
    def report(line):
      if moment in line:
        raise KeyboardInterrupt

    return report

  plan, _ = make(_two_lengths(), report=interrupt('32 tokens, chain 4:'))
  assert [way.name for way in plan.ways] == ['plain', 'staged N=8']
  machine = _two_lengths()
  machine.run = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
  with pytest.raises(KeyboardInterrupt):
    make(machine)


def test_little_time_leaves_ways_and_lengths_out(make):
  plan, lines = make(_two_lengths(), seconds=1.5)
  assert [*plan.ways[0].tokens_per_second] == [32]
  assert any('out of time; other ways are left out' in line for line in lines)
  with pytest.raises(ValueError, match='plan_seconds must be positive'):
    make(_two_lengths(), seconds=0.0)


def test_samples_are_full_batches_of_the_most_frequent_lengths():
  prompts = [[n] * size for n, size in enumerate((9, 70, 20, 40, 65, 9, 300))]
  assert planner.sample_batches(prompts, 2, 2) == {
    32: [[prompts[0], prompts[5]], [prompts[2], prompts[0]]],
    128: [[prompts[4], prompts[1]]],
  }


def test_candidates():
  whole = [name for name in _NAMES if 'of the' not in name]
  without_table = [name for name in whole if 'ngram' not in name]
  reads_less = {'draft_prompt': 64, 'inner': 'lookup'}
  for options, has_draft, length, names in (
    ({}, True, 512, _NAMES),
    ({}, True, 256, whole),
    ({}, False, 512, ['lookup N=8', 'ngram+lookup N=8']),
    (reads_less, True, 512, without_table),
    ({'inner': 'none'}, True, 32, ['chain 4', 'tree N=8', 'chain 2']),
    ({'inner': 'none'}, False, 32, []),
  ):
    base = settings_lib.with_options(_BASE, options)
    listed = planner.list_candidates(base, has_draft=has_draft, length=length)
    assert [name for name, _, _ in listed] == names


_TEXT = 'the cat says ok, and the dog says no to the cat\n' * 20


@functools.cache
def _pair():
  tokenizer = tokenizer_lib.train_tokenizer(
    [_TEXT], vocab_size=300, context=128
  )
  counts = 1e-3 + np.zeros((len(tokenizer), len(tokenizer)))
  for before, after in itertools.pairwise(tokenizer(_TEXT)['input_ids']):
    counts[before, after] += 1
  model = table_model.table_model(np.log(counts), max_positions=256)
  return pair_lib.Pair(
    target=model,
    draft=model,
    tokenizer=tokenizer,
    eos_ids=tuple(tokenizer('dog')['input_ids'][-1:]),
  )


def _plan(monkeypatch, prompts, **options):
  """A plan by real decodes, on a clock that ticks whenever it is read."""
  few = [
    candidate
    for candidate in planner._CANDIDATES
    if candidate[0] in ('chain 2', _NGRAM)
  ]
  monkeypatch.setattr(planner, '_CANDIDATES', few)
  ticks, lines = itertools.count(), []
  plan = planner.make_plan(
    _pair(),
    prompts,
    task_lib.Task(max_new_tokens=20, batch_size=2),
    context=_CONTEXT,
    clock=lambda: float(next(ticks)),
    report=lines.append,
    **{'plan_seconds': 59.0} | options,
  )
  return plan, lines


_NGRAM = 'ngram+lookup N=8'  # The table was built with another tokenizer.


def test_a_plan_by_real_decodes(monkeypatch):
  runs, run = [], planner.Search.run

  def spy(search, drafter, prompts, **kw):
    runs.append((kw['limit'], run(search, drafter, prompts, **kw)))
    return runs[-1][1]

  monkeypatch.setattr(planner.Search, 'run', spy)
  plan, lines = _plan(monkeypatch, ('the cat says', 'ok, and', 'the dog'))
  assert any(f'{_NGRAM} is left out: the n-gram' in line for line in lines)
  assert plan.ways[0].name == 'plain'
  assert {way.name for way in plan.ways} <= {'plain', 'chain 2'}
  whole = [measured for limit, measured in runs if limit == 20]
  assert whole
  for measured in whole:
    assert 0 < measured.tokens <= measured.expected <= 40
    assert 0 < measured.steps <= 20
    assert measured.reading > 0
    assert measured.decoding > 0
  # A chain of a perfect draft takes a third of the steps.
  assert min(measured.steps for measured in whole) <= 7


def test_what_cannot_be_planned_is_refused(monkeypatch):
  refuse = functools.partial(pytest.raises, ValueError)
  nothing = planner.Run(1.0, 0.0, 0, 1, 0)
  monkeypatch.setattr(planner.Search, 'run', lambda *_, **__: nothing)
  with refuse(match='all sample prompts at once'):
    _plan(monkeypatch, ('the ',))
  task = task_lib.Task(max_new_tokens=8)
  with refuse(match='must be at least 16 to plan, got 8'):
    planner.make_plan(_pair(), ('the',), task, context=_CONTEXT)
  none = settings_lib.with_options(_BASE, {'inner': 'none'})
  task = task_lib.Task(drafting=none)
  alone = dataclasses.replace(_pair(), draft=None)
  with refuse(match='nothing was measured: .* nothing drafts'):
    planner.make_plan(alone, _SHORT, task, context=_CONTEXT)
