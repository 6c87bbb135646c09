"""Plan files: what is written comes back, what is foreign is refused."""

import copy
import dataclasses
import functools
import json
import shutil

import huggingface_hub
import pytest

import models
from models.checkpoints import hub
from models.text import choice as choice_lib
from models.text import drafters
from models.text import pair as pair_lib
from models.text import plan as plan_lib
from models.text import settings as settings_lib
from models.text import sources as sources_lib
import specdec
from specdec.tree import topology as topology_lib

_CONTEXT = plan_lib.Context(
  models={'target': 't', 'draft': 'd', 'vocabulary': 'v'},
  machine={'device': 'cpu', 'processor': 'p', 'cores': 2, 'jax': '1'},
  dtype='float32',
  draft_dtype='float32',
  batch_size=2,
  sampling={'temperature': 1.0, 'top_k': 50},
)
_USUAL = settings_lib.DraftSettings()
_STAGED = settings_lib.with_options(
  dataclasses.replace(
    _USUAL, lookup=specdec.PromptLookup(confidence=(0.0, 0.5))
  ),
  {'num_nodes': 16, 'width': 4, 'cost_ratio': 0.03, 'inner_rounds': 1},
)
_CHAIN = settings_lib.DraftSettings(
  num_draft_tokens=7, inner='lookup', ngram='x.st'
)
_FIXED = settings_lib.DraftSettings(
  topology=topology_lib.from_paths([(0,), (1,), (0, 0), (0, 2)])
)


_PLAN = plan_lib.Plan(
  method='staged',
  drafting=_STAGED,
  min_block_efficiency=1.7,
  context=_CONTEXT,
  candidates=({'name': 'plain', 'tokens_per_second': 3.5},),
)
_plan = functools.partial(dataclasses.replace, _PLAN)


def _load(path, record):
  path /= 'plan.json'
  if isinstance(record, dict):
    record = {key: one for key, one in record.items() if key != 'digest'}
  path.write_text(record if isinstance(record, str) else json.dumps(record))
  return plan_lib.load_plan(path)


def test_a_plan_comes_back_as_it_was(tmp_path):
  path = tmp_path / 'deep' / 'plan.json'
  for drafting in (_USUAL, _STAGED, _CHAIN, _FIXED):
    plan = _plan(drafting=drafting)
    plan.save(path)
    assert plan_lib.load_plan(path) == plan
    assert [one.name for one in path.parent.iterdir()] == ['plan.json']


def test_only_what_differs_is_written(tmp_path):
  record = json.loads(_PLAN.to_json())
  assert record['schema'] == 1
  assert record['drafting'] == {
    'tree': {'num_nodes': 16, 'width': 4, 'cost_ratio': 0.03},
    **{'inner_tree': {'rounds': 1}, 'lookup': {'confidence': [0.0, 0.5]}},
  }
  tree = json.loads(_plan(drafting=_FIXED).to_json())['drafting']['tree']
  assert tree['topology'] == [[0], [1], [0, 0], [0, 2]]
  assert not {'num_nodes', 'rounds', 'capacity'} & tree.keys()
  # In the old form the calibration stood beside a topology.
  drafting = _load(tmp_path, record | _tree(**tree, calibration=1.0)).drafting
  assert drafting == settings_lib.with_options(_FIXED, {'calibration': 1.0})


def _tree(**entries):
  return {'drafting': {'tree': entries}}


_OTHER_MODELS = dataclasses.asdict(_CONTEXT) | {'models': {'target': 't'}}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    *(([], 'must hold a JSON object'), ('{', 'cannot be read')),
    ({'schema': ...}, 'has schema None, expected 1; make it anew'),
    ({'schema': 99}, 'has schema 99, expected 1'),
    ({'method': 'plan'}, "method 'plan' is not known"),
    ({'method': ...}, 'it lacks the entry method; make it anew with scripts/'),
    ({'methods': 'plain'}, 'methods is not known; make it anew'),
    ({'min_block_efficiency': ...}, 'min_block_efficiency'),
    ({'min_block_efficiency': 0}, 'must be positive'),
    ({'context': {'models': {}}}, 'it lacks the entry context.machine'),
    ({'context': _OTHER_MODELS}, 'context.models lacks'),
    (_tree(min_gain=0.1), 'drafting.tree.min_gain is not known; make it anew'),
    (_tree(topology=[[0, 0]]), 'not its parent'),
  ],
)
def test_bad_plans_are_refused(changes, message, tmp_path):
  record = changes
  if isinstance(changes, dict):
    record = json.loads(_PLAN.to_json()) | changes
    record = {key: one for key, one in record.items() if one is not ...}
  with pytest.raises(ValueError, match=message) as error:
    _load(tmp_path, record)
  assert str(tmp_path / 'plan.json') in str(error.value)


_OF_ALL_KINDS = (None, True, 3, 1.5, 'text', [1], {'a': 1})
_MAY_BE_NULL = ('target', 'draft', 'vocabulary', 'draft_vocab', 'cost_ratio')


def _entries(record, place=()):
  """The places of all entries of an object, and of those in it."""
  for key, value in record.items():
    yield (*place, key), value
    if isinstance(value, dict) and key not in ('machine', 'sampling'):
      yield from _entries(value, (*place, key))


def test_a_wrong_type_is_an_error_that_names_the_key(tmp_path):
  record = json.loads(_PLAN.to_json())
  del record['digest']
  record['context'] |= {'draft_vocab': 7}
  record['drafting'] |= {'ngram': 'x.st', 'num_draft_tokens': 3}
  record['drafting']['tree'] |= {'topology': [[0]], 'calibration': 1.5}
  entries = [*_entries(record)]
  assert len(entries) > 25
  for place, right in entries:
    for value in _OF_ALL_KINDS:
      number = type(right) is float and type(value) is int
      null = value is None and place[-1] in _MAY_BE_NULL
      if type(value) is type(right) or number or null:
        continue
      changed = copy.deepcopy(record)
      functools.reduce(dict.get, place[:-1], changed)[place[-1]] = value
      with pytest.raises(ValueError, match=place[-1]) as error:
        _load(tmp_path, changed)
      assert str(tmp_path / 'plan.json') in str(error.value), place
      assert 'Error' not in str(error.value)


def test_plans_for_other_models_are_refused():
  models = _CONTEXT.models
  _PLAN.check_models(models)
  for name in models:
    with pytest.raises(ValueError, match=f'made for another {name}'):
      _PLAN.check_models(models | {name: None})
  # Without a draft model, any may be there.
  for method in ('plain', 'lookup', 'ngram+lookup'):
    _plan(method=method).check_models(models | {'draft': None})
    with pytest.raises(ValueError, match='another target'):
      _plan(method=method).check_models(models | {'target': 'x'})


def test_contexts(monkeypatch, tmp_path):
  """Each has a file of its own; some differences are warned of."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  changes = {
    'models': _CONTEXT.models | {'draft': None},
    **{'machine': _CONTEXT.machine | {'cores': 64}, 'dtype': 'bfloat16'},
    **{'batch_size': 8, 'sampling': {}},
  }
  change = functools.partial(dataclasses.replace, _CONTEXT)
  others = [change(**{name: value}) for name, value in changes.items()]
  newer = change(machine=_CONTEXT.machine | {'jax': '2'})
  paths = {*map(plan_lib.cache_path, [_CONTEXT, newer, *others])}
  assert len(paths) == len(changes) + 2
  assert {path.parent for path in paths} == {tmp_path / 'specdec' / 'plans'}
  assert _CONTEXT.warnings(_CONTEXT) == newer.warnings(_CONTEXT) == []
  names = [line.split()[0] for line in change(**changes).warnings(_CONTEXT)]
  assert names == ['cores', 'dtype', 'batch_size', 'sampling']


def _digests(*names):
  choice = choice_lib.ModelChoice(*names)
  return plan_lib.model_digests(sources_lib.open_sources(choice))


def test_models_are_told_apart_by_what_is_in_their_files(tmp_path):
  original, copy = hub.locate('demo-draft'), tmp_path / 'copy'
  shutil.copytree(original.path, copy)
  digests = _digests('demo', 'demo')
  digest = lambda: plan_lib.model_digest(hub.locate(copy))
  assert digest() == plan_lib.model_digest(original) == digests['draft']
  assert digests['draft'] != digests['target']
  weights = copy / 'model.safetensors'
  content = bytearray(weights.read_bytes())
  content[-1] ^= 1
  weights.write_bytes(content)
  assert digest() != digests['draft']


def test_a_model_of_the_hub_is_looked_up_once(monkeypatch):
  folder, asked = str(hub.locate('demo-draft').path), []
  digests = _digests('demo-draft', 'demo')
  context = dataclasses.replace(_CONTEXT, models=digests)
  download = lambda name, **_: asked.append(name) or folder
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  plan = _plan(
    method='chain', drafting=settings_lib.DraftSettings(), context=context
  )
  generator = models.load('some/target', 'some/draft', plan=plan)
  assert asked == ['some/target', 'some/draft']
  assert generator.break_even == plan.min_block_efficiency
  # Without a draft model, none is loaded.
  lookup = dataclasses.replace(plan, method='lookup')
  assert models.load('demo-draft', '/no/draft', plan=lookup).pair.draft is None
  other = dataclasses.replace(context, models=digests | {'draft': 'other'})
  other = dataclasses.replace(plan, context=other)
  with pytest.raises(ValueError, match='made for another draft'):
    models.load('demo-draft', 'demo', plan=other)


def test_the_method_plan_is_what_the_plan_says():
  pair = pair_lib.load_pair(choice_lib.ModelChoice('demo', None))
  made = drafters.make_drafter(
    'plan', pair, settings_lib.DraftSettings(plan=_plan(method='lookup'))
  )
  expected = drafters.make_drafter('lookup', pair, _STAGED)
  assert made.shape == expected.shape
  assert made.stages[0].config == expected.stages[0].config
  assert made.labels == expected.labels
  with pytest.raises(ValueError, match='method plan needs'):
    drafters.make_drafter('plan', pair, settings_lib.DraftSettings())
