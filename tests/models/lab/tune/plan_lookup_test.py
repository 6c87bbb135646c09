"""The plan that `--plan` finds, and its warnings."""

import dataclasses
import functools

import plans
import pytest

import specdec
from specdec.models.lab import task as task_lib
from specdec.models.lab.tune import plan_lookup
from specdec.models.lab.tune import planner
from specdec.models.text import choice as choice_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib

_TASK = task_lib.Task(
  models=choice_lib.ModelChoice(dtype='float32'),
  sampling=specdec.Sampling(temperature=0.5, logit_bias={7: -1.0}),
  max_new_tokens=32,
)


_USUAL = settings_lib.DraftSettings()


def _find(name, prompts=lambda: ['import '], **changes):
  lines, task = [], dataclasses.replace(_TASK, **changes)
  report = lines.append
  return plan_lookup.find_plan(str(name), prompts, task, report=report), lines


def _plan(context, method='lookup', **options):
  return plans.plan(context, plans.way(method, **options))


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def test_auto_makes_a_plan_once(monkeypatch):
  made = []

  def make_plan(pair, prompts, task, *, context, **options):
    made.append((prompts, task.batch_size, task.max_new_tokens))
    return _plan(context)

  monkeypatch.setattr(planner, 'make_plan', make_plan)
  first, lines = _find('auto')
  assert any('making it' in line for line in lines)
  path = plan_lib.cache_path(first.context, _USUAL)
  assert path.exists()
  again, lines = _find('auto', prompts=None)  # nobody asks for them
  assert (again, lines) == (first, [f'lookup, from {path}'])
  # Another batch size is another plan.
  other, _ = _find('auto', batch_size=2)
  assert other.context.batch_size == 2
  assert made == [(['import '], size, 32) for size in (1, 2)]
  # A damaged one is made again.
  path.write_text('{')
  again, lines = _find('auto')
  assert lines[0].startswith(f'warning: plan {path} cannot be read: ')
  assert (again, lines[-1]) == (first, f'lookup, saved as {path}')
  assert _find('auto', prompts=None) == (first, [f'lookup, from {path}'])
  # So are other settings that all candidates share.
  fewer = settings_lib.with_options(_USUAL, {'inner': 'lookup'})
  assert plan_lib.cache_path(first.context, fewer) != path


def test_a_plan_that_cannot_be_saved_is_used(monkeypatch, tmp_path):
  make = lambda pair, prompts, task, *, context, **options: _plan(context)
  monkeypatch.setattr(planner, 'make_plan', make)
  (tmp_path / 'cache').write_text('no folder')
  plan, lines = _find('auto')
  assert plan.usual.method == 'lookup'
  assert 'warning: the plan is not saved' in lines[-1]


def test_a_plan_from_elsewhere_is_warned_of_or_refused(tmp_path):
  path = tmp_path / 'plan.json'
  context = plan_lookup.context_of(_TASK)
  elsewhere = context.machine | {'cores': 999}
  _plan(dataclasses.replace(context, machine=elsewhere)).save(path)
  plan, lines = _find(path, batch_size=4)
  assert plan.usual.method == 'lookup'
  warnings = [line for line in lines if line.startswith('warning: ')]
  assert [line.split()[1] for line in warnings] == ['cores', 'batch_size']
  _plan(context).save(path)
  assert _find(path)[1] == [f'lookup, from {path}']
  for changes, message in (
    (
      {'models': choice_lib.ModelChoice('demo-draft', dtype='float32')},
      'made for another target',
    ),
    ({'name': '/no/such/plan'}, 'cannot be read'),
    ({'batch_size': 0}, '--batch_size must be at least 1'),
  ):
    with pytest.raises(ValueError, match=message):
      _find(**{'name': path} | changes)


def test_two_plans_are_joined_where_their_trees_differ_in_size_alone():
  plan = functools.partial(_plan, plan_lookup.context_of(_TASK))
  large, small = (plan('staged', num_nodes=n) for n in (32, 8))
  plain, chain = plan('plain'), plan('chain', num_draft_tokens=4)
  shorter, wide = plan('chain', num_draft_tokens=2), plan('staged', width=4)
  fixed = plan('tree', topology='chain:3')
  for alone, full, size, expected in (
    (large, small, 8, (large, {2: 32, 8: 8})),
    (small, large, 3, (large, {1: 8, 3: 32})),
    (large, plain, 8, (large, {2: 32, 8: 1})),
    # The tables of other methods and settings are not compatible.
    (large, plan('tree'), 8, (plan('tree'), {})),
    (large, wide, 8, (wide, {})),
    (plain, small, 8, (small, {})),
    # A chain has as many nodes as drafted tokens, and the root.
    (chain, plain, 8, (chain, {2: 5, 8: 1})),
    (chain, chain, 8, (chain, {2: 5, 8: 5})),
    (chain, shorter, 8, (shorter, {})),
    (fixed, small, 8, (small, {})),
  ):
    assert plan_lookup.join_plans(alone, full, size) == expected


def test_the_speeds_of_a_plan_are_shown():
  ways = plans.way('plain', {32: 2.0, 128: 1.0}), plans.way('chain', 4.25)
  plan = plans.plan(plan_lookup.context_of(_TASK), *ways)
  cells = lambda line: [cell.strip() for cell in line.strip('|').split('|')]
  head, _, plain, chain = map(cells, plan_lookup.table(plan).splitlines())
  assert head == ['way', 'break even', '32 tokens', '128 tokens']
  assert plain == ['plain', '1.50', '2.0', '1.0']
  assert chain == ['chain', '1.50', '4.2', '']
