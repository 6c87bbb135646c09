"""From prompts to a plan, on a table model, with a clock that the test sets."""

import functools
import itertools
from unittest import mock

import jax
import numpy as np
import plans
import pytest
import tiny

from models.lab import machine
from models.lab import task as task_lib
from models.lab.bench import replay
from models.lab.training import tokenizer as tokenizer_lib
from models.lab.tune import candidate_methods
from models.lab.tune import plan_lookup
from models.lab.tune import planner
from models.lab.tune import trials
from models.nn import adapter
from models.nn import table_model
from models.text import drafters
from models.text import pair as pair_lib
from models.text import plan as plan_lib
from models.text import settings as settings_lib
import specdec

_TEXT = 'the cat says ok, and the dog says no to the cat\n' * 20
_PROMPTS = ('the cat says', 'ok, and', 'the dog', 'to the cat')
_SAMPLING = specdec.Sampling(temperature=0.7)
# Before a test replaces it.
_MEASURE = machine.measure_step_costs
_FEW = {candidate_methods.PLAIN, 'chain 2', 'lookup N=8'}


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
  kept = tuple(one for one in candidate_methods._CANDIDATES if one[0] in _FEW)
  monkeypatch.setattr(candidate_methods, '_CANDIDATES', kept)
  monkeypatch.setattr(planner, 'NODE_COUNTS', (1, 8))
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


def _plan(max_new_tokens=20, make_pair=_pair, **options):
  task = task_lib.Task(
    sampling=_SAMPLING,
    drafting=settings_lib.DraftSettings(inner='lookup'),
    batch_size=2,
    max_new_tokens=max_new_tokens,
  )
  return planner.make_plan(
    *(make_pair(), _PROMPTS, task),
    context=_CONTEXT,
    **{'plan_seconds': 1e6} | options,
  )


def test_plain_unless_another_is_faster_by_more_than_noise_in_every_account():
  rates = {candidate_methods.PLAIN: 100.0, 'chain': 102.9, 'tree': 90.0}
  assert trials.clearly_faster(rates, margin=0.03) == []
  assert trials.clearly_faster(rates, margin=0.02) == ['chain']
  measured = {candidate_methods.PLAIN: 100.0, 'chain': 110.0, 'tree': 130.0}
  predicted = {
    **{candidate_methods.PLAIN: 100.0, 'tree': 102.0, 'chain': 120.0},
    'b': 200.0,
  }
  assert trials.clearly_faster(measured, margin=0.03) == ['tree', 'chain']
  both = measured, predicted
  assert trials.clearly_faster(*both, margin=0.03) == ['chain']
  assert trials.clearly_faster(*both, margin=0.25) == []


def test_only_what_is_there_and_wanted_is_tried():
  for inner, has_draft, methods in (
    (None, True, 'chain tree staged ngram lookup ngram+lookup'),
    (None, False, 'ngram lookup ngram+lookup'),
    ('none', True, 'chain tree'),
    ('lookup', True, 'chain tree staged lookup'),
  ):
    settings = settings_lib.DraftSettings(inner=inner)
    listed = candidate_methods.list_candidates(
      settings, has_draft=has_draft, prompt_tokens=256
    )
    found = {candidate.method for candidate in listed}
    assert found == {candidate_methods.PLAIN, *methods.split()}
  # The user's choices are not varied.
  chosen = {'calibration': 0.7, 'max_depth': 5, 'capacity': 400}
  base = settings_lib.with_options(settings_lib.DraftSettings(), chosen)
  for candidate in candidate_methods.list_candidates(
    base, has_draft=True, prompt_tokens=1
  ):
    assert candidate.drafting.stage.calibration == 0.7
    assert candidate.drafting.tree.max_depth == 5
    if candidate.method == 'staged':
      assert candidate.drafting.tree.capacity == 400


@pytest.mark.parametrize(
  ('wanted', 'prompt_tokens', 'read'),
  [(None, 256, {None}), (None, 257, {None, 256}), (100, 257, {100})],
)
def test_a_draft_reads_the_end_of_long_prompts_unless_told_what_to_read(
  wanted, prompt_tokens, read
):
  base = settings_lib.DraftSettings(draft_prompt=wanted)
  listed = candidate_methods.list_candidates(
    base, has_draft=True, prompt_tokens=prompt_tokens
  )
  assert {candidate.drafting.draft_prompt for candidate in listed} == read


@pytest.mark.parametrize('make_pair', [_pair, _with_states])
def test_a_plan_is_made_of_what_was_counted(make_pair, winning, monkeypatch):
  """Finalists are decoded, and the fastest by both accounts is chosen."""
  pair, lines = make_pair(), []
  monkeypatch.setattr(planner, '_FINALISTS', 1)
  # The costs are measured, but others are used.
  winning.side_effect = lambda *arguments, **options: (
    _MEASURE(*arguments, **options) and winning.return_value
  )
  plan = _plan(make_pair=make_pair, report=lines.append)
  figures = _by_name(plan)
  (fixed,) = figures.keys() - _FEW
  assert fixed.startswith('fixed tree N=8')
  assert figures[candidate_methods.PLAIN]['block_efficiency'] == 1
  assert figures[candidate_methods.PLAIN]['min_block_efficiency'] == 1
  # The replay counted what decoding with the target counts.
  drafting = settings_lib.DraftSettings(inner='lookup', num_draft_tokens=2)
  drafter = drafters.make_drafter('chain', pair, drafting)
  options = {'drafter': drafter, 'sampling': _SAMPLING, 'max_new_tokens': 20}
  forwards = tokens = ends = 0
  for batch in (_PROMPTS[:2], _PROMPTS[2:]):
    prompts = [*map(pair.encode, batch)]
    arguments = pair.target, jax.random.key(0), prompts
    found = specdec.generate(*arguments, eos_ids=pair.eos_ids, **options)
    forwards += found.stats.target_forwards
    tokens += found.stats.new_tokens
    ends += found.finish_reasons.count('eos')
  assert figures['chain 2']['block_efficiency'] == tokens / forwards > 1
  assert plan.ends_per_token == ends / tokens
  assert bool(ends) == bool(pair.eos_ids)
  # The fastest was decoded, and the fastest that reads no prompt.
  wins = lambda name, *accounts: all(
    figures[name][key] > 1.03 * figures[candidate_methods.PLAIN][key]
    for key in accounts
  )
  faster = [name for name in figures if wins(name, 'tokens_per_second')]
  of_draft = [name for name in faster if name != 'lookup N=8'][:1]
  decoded = {name for name in figures if figures[name]['measured']}
  chosen = {*of_draft, *{'lookup N=8'}.intersection(faster)}
  assert decoded == {candidate_methods.PLAIN, *chosen}
  first, *ways = plan.ways
  assert first.name == candidate_methods.PLAIN
  expected = {n for n in chosen if wins(n, 'tokens_per_second', 'measured')}
  assert {way.name for way in ways} == expected
  for way in plan.ways:
    assert way.new_token_seconds == 2 / figures[way.name]['measured']
  assert plan.prompt_token_seconds > 0
  assert plan.prompt_length == max(len(pair.encode(one)) for one in _PROMPTS)
  assert (plan.new_tokens, plan.context) == (20, _CONTEXT)
  assert len(plan_lookup.table(plan).splitlines()) == 2 + len(figures)
  assert any('chain 2: ' in line for line in lines)


def _tried(name, reading, **options):
  way = plans.way(name=name, **options)
  trial = replay.Trial(
    num_nodes=1, tokens=1, forwards=1, steps=1, seconds=0.0, reading=reading
  )
  return trials.Tried(way, specdec.PLAIN, trial, [])


def test_what_a_draft_takes_to_read_a_prompt_and_which_ways_are_kept():
  """The rest of a decode takes 1 s; a token of 1,024 takes 1/64 s."""
  tail, chain = {'method': 'tree', 'draft_prompt': 256}, {'method': 'chain'}
  tried = {
    candidate_methods.PLAIN: _tried('plain', 1.0, method='plain'),
    **{'a': _tried('a', 1.0 + 16, **chain), 'b': _tried('b', 1.0)},
    **{'c': _tried('c', 1.0 + 4, **tail), 'd': _tried('d', 1.0 + 16, **chain)},
  }
  assert trials.draft_token_seconds(tried, 1024) == 1 / 64
  assert trials.draft_token_seconds({'plain': tried['plain']}, 1024) == 0
  assert trials.by_reading('dabc', tried) == ['d', 'b', 'c']


@pytest.mark.usefixtures('winning')
def test_when_the_budget_is_spent_a_plan_is_made_of_what_is_known():
  """Each look at the clock takes a second of a budget of one."""
  clock, lines = itertools.count(0.0), []
  plan = _plan(plan_seconds=1, clock=lambda: next(clock), report=lines.append)
  # One sample, and plain decoding and one drafter were tried and decoded.
  figures = _by_name(plan)
  assert figures.keys() == {'lookup N=8', candidate_methods.PLAIN}
  assert all(one['measured'] > 0 for one in figures.values())
  assert sum('sample batch' in line for line in lines) == 1
  assert any('out of time for replays' in line for line in lines)


@pytest.mark.usefixtures('winning')
@pytest.mark.parametrize('moment', ['lookup N=8: ', 'compiling', 'decoding'])
def test_when_the_user_interrupts_a_plan_is_made_of_what_is_known(moment):
  lines = []
  plan = _plan(report=_interrupting(moment, lines))
  assert {candidate_methods.PLAIN, 'lookup N=8'} <= _by_name(plan).keys()
  assert 'interrupted' in lines[-1]
  # Nothing was measured with the target, and the predictions are clear.
  assert all(figures['measured'] is None for figures in plan.candidates)
  assert plan.usual.name != candidate_methods.PLAIN
  assert plan.usual.min_block_efficiency == pytest.approx(1.0, rel=0.1)


def test_an_ngram_of_another_tokenizer_is_left_out(winning, monkeypatch):
  make = drafters.make_drafter

  def refuse(method, *rest):
    if method == 'lookup':
      raise ValueError('another tokenizer')
    return make(method, *rest)

  monkeypatch.setattr(drafters, 'make_drafter', refuse)
  lines = []
  # Interrupted, because the rest is that of other plans.
  plan = _plan(report=_interrupting('compiling', lines))
  assert 'lookup N=8' not in _by_name(plan)
  assert any('left out: another tokenizer' in line for line in lines)


@pytest.mark.usefixtures('winning')
def test_what_cannot_be_planned_is_refused():
  with pytest.raises(ValueError, match='max_new_tokens must be at least 16'):
    _plan(max_new_tokens=8)
  with pytest.raises(ValueError, match='plan_seconds must be positive'):
    _plan(plan_seconds=0)
  # An interrupt before any drafter was tried leaves no plan.
  with pytest.raises(KeyboardInterrupt):
    _plan(report=_interrupting(f'{candidate_methods.PLAIN}: ', []))
