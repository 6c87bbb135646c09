"""Plan files: what is written comes back, what is foreign is refused."""

import dataclasses
import functools
import json
import shutil

import huggingface_hub
import plans
import pytest

import specdec
from specdec.models.checkpoints import hub
from specdec.models.text import choice as choice_lib
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import sources as sources_lib
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


_PLAN = plans.plan(
  _CONTEXT,
  dataclasses.replace(plans.way('staged', 0.2, 1.7), drafting=_STAGED),
)


def _drafting(drafting):
  """The plan with other settings."""
  way = dataclasses.replace(_PLAN.ways[0], drafting=drafting)
  return _plan(ways=(plans.way('plain'), way))


_plan = functools.partial(dataclasses.replace, _PLAN)


def _load(path, record):
  path /= 'plan.json'
  path.write_text(record if isinstance(record, str) else json.dumps(record))
  return plan_lib.load_plan(path)


def test_a_plan_comes_back_as_it_was(tmp_path):
  path = tmp_path / 'deep' / 'plan.json'
  for drafting in (_USUAL, _STAGED, _CHAIN, _FIXED):
    plan = _drafting(drafting)
    plan.save(path)
    assert plan_lib.load_plan(path) == plan
    assert [one.name for one in path.parent.iterdir()] == ['plan.json']


def test_only_what_differs_is_written():
  record = json.loads(_PLAN.to_json())
  assert record['schema'] == 5
  assert record['ways']['staged']['drafting'] == {
    'num_nodes': 16,
    'width': 4,
    'cost_ratio': 0.03,
    'inner_rounds': 1,
    'lookup': {'confidence': [0.0, 0.5], 'num_matches': 4},
  }
  record = json.loads(_drafting(_FIXED).to_json())
  tree = record['ways']['staged']['drafting']
  assert tree == {'topology': [[0], [1], [0, 0], [0, 2]]}


def _way(**entries):
  way = json.loads(_PLAN.to_json())['ways']['staged'] | entries
  return {'ways': {'a': {k: one for k, one in way.items() if one is not ...}}}


def _tree(**entries):
  return _way(drafting=entries)


_OTHER_MODELS = dataclasses.asdict(_CONTEXT) | {'models': {'target': 't'}}
_OTHER_BATCH = dataclasses.asdict(_CONTEXT) | {'batch_size': '2'}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ([], 'must hold a JSON object'),
    ('{', 'cannot be read'),
    ({'schema': ...}, 'has schema None, expected 5; make it again'),
    ({'schema': 4, 'draft_token_seconds': 1}, 'schema 4, expected 5; make it'),
    ({'ways': ...}, 'the entry ways is missing; make it again: scripts/'),
    ({'ways': {}}, 'ways is empty'),
    ({'ways': {'a': 3}}, 'ways.a must be an object'),
    ({'methods': 'plain'}, 'methods is not known; make it again'),
    ({'usual_length': 0}, 'usual_length must be positive, got 0'),
    (_way(method='plan'), "ways.a.method 'plan' is not known"),
    (_way(method=...), 'the entry ways.a.method is missing'),
    (_way(name='b'), 'ways.a.name is not known'),
    (_way(break_even=0), 'ways.a.break_even must be positive'),
    (_way(tokens_per_second={}), 'tokens_per_second must have positive speeds'),
    (_way(tokens_per_second={'64': 0}), 'must have positive speeds by length'),
    (_way(tokens_per_second={'0': 1}), 'must have positive speeds by length'),
    (
      _way(tokens_per_second={'long': 1}),
      'must have positive speeds by length',
    ),
    ({'context': {'models': {}}}, 'the entry context.machine is missing'),
    ({'context': _OTHER_MODELS}, 'context.models lacks'),
    (_tree(min_gain=0.1), 'ways.a.drafting.min_gain is not known; make'),
    (_tree(topology=[[0, 0]]), 'not its parent'),
    # Wrong types, at each depth.
    ({'usual_length': 7.5}, 'usual_length must be an integer'),
    ({'context': 3}, 'context must be'),
    ({'context': _OTHER_BATCH}, 'context.batch_size must be an integer'),
    (_way(tokens_per_second=3), 'ways.a.tokens_per_second must be'),
    (_tree(calibration='1'), 'ways.a.drafting.calibration must be a fin'),
    (_tree(topology=[0]), 'ways.a.drafting.topology must be'),
    (_tree(lookup={'x': 1}), 'ways.a.drafting.lookup.x is not known'),
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


def test_plans_for_other_models_are_refused():
  models = _CONTEXT.models
  _PLAN.check_models(models)
  for name in models:
    with pytest.raises(ValueError, match=f'made for another {name}'):
      _PLAN.check_models(models | {name: None})
  # Without a draft model, any may be there.
  plan = _plan(ways=(*map(plans.way, ('plain', 'lookup', 'ngram+lookup')),))
  plan.check_models(models | {'draft': None})
  with pytest.raises(ValueError, match='another target'):
    plan.check_models(models | {'target': 'x'})


def test_contexts(monkeypatch, tmp_path):
  """Each has a file of its own; some differences are warned of."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  changes = {
    'models': _CONTEXT.models | {'draft': None},
    'machine': _CONTEXT.machine | {'cores': 64},
    'dtype': 'bfloat16',
    'batch_size': 8,
    'sampling': {},
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
  plan = _plan(ways=(plans.way('lookup'), plans.way('chain')), context=context)
  specdec.load('some/target', 'some/draft', plan=plan)
  assert asked == ['some/target', 'some/draft']
  # Without a draft model, none is loaded.
  lookup = dataclasses.replace(plan, ways=plan.ways[:1])
  assert specdec.load('demo-draft', '/no/draft', plan=lookup).pair.draft is None
  other = dataclasses.replace(context, models=digests | {'draft': 'other'})
  other = dataclasses.replace(plan, context=other)
  with pytest.raises(ValueError, match='made for another draft'):
    specdec.load('demo-draft', 'demo', plan=other)


def test_the_method_plan_is_what_the_plan_says():
  pair = pair_lib.load_pair(choice_lib.ModelChoice('demo', None))
  way = dataclasses.replace(plans.way('lookup'), drafting=_STAGED)
  made = drafters.make_drafter(
    'plan', pair, settings_lib.DraftSettings(plan=_plan(ways=(way,)))
  )
  expected = drafters.make_drafter('lookup', pair, _STAGED)
  assert made.shape == expected.shape
  assert made.stages[0].config == expected.stages[0].config
  assert made.labels == expected.labels
  with pytest.raises(ValueError, match='method plan needs'):
    drafters.make_drafter('plan', pair, settings_lib.DraftSettings())


_WAYS = (
  plans.way('plain', {32: 2.0, 64: 2.0, 256: 3.0}),
  plans.way('chain', {32: 4.0, 256: 5.0}),
  plans.way('chain', {256: 4.0}, name='of the end', draft_prompt=256),
  plans.way('lookup', {64: 3.0, 256: 3.5}),
)


@pytest.mark.parametrize(
  ('length', 'name'),
  [
    (1, 'chain'),
    (32, 'chain'),
    (33, 'lookup'),
    (64, 'lookup'),
    # 128 takes the next longer one.
    (65, 'chain'),
    (256, 'chain'),
    # No draft is known to read so much in time, but one reads the end.
    (257, 'of the end'),
    (9999, 'of the end'),
  ],
)
def test_a_request_takes_the_fastest_way_of_its_length(length, name):
  plan = _plan(ways=_WAYS)
  assert plan_lib.choose(plan, length).name == name
  # The order of the ways does not matter.
  assert plan_lib.choose(_plan(ways=_WAYS[::-1]), length).name == name
  fewer = _plan(ways=_WAYS[:2])
  if length > 256:
    assert plan_lib.choose(fewer, length).name == 'plain'


def test_each_request_has_the_drafter_that_was_chosen(monkeypatch):
  """Its tokens are those of plain decoding, whatever is chosen."""
  context = dataclasses.replace(_CONTEXT, models=_digests('demo', 'demo'))
  plan = _plan(ways=_WAYS, context=context)
  lm = specdec.load('demo', 'demo', dtype='float32', plan=plan)
  plain = dataclasses.replace(lm, drafter=specdec.PLAIN)
  prompt, seen = lm.pair.encode('import os\nimport ') * 20, []
  of_length = drafters.Planned.of_length

  def spy(planned, length):
    drafter, ratio = of_length(planned, length)
    names = [name for name, one in planned.by_name.items() if one is drafter]
    seen.append((length, *names, ratio))
    return drafter, ratio

  monkeypatch.setattr(drafters.Planned, 'of_length', spy)
  # In a batch, the longest prompt decides.
  for prompts, limits, name in (
    ([prompt[:60], prompt[:9]], [8, 2], 'lookup'),
    ([prompt[:9], prompt[:30]], [5, 60], 'chain'),
  ):
    given = {'max_new_tokens': limits, 'room_for_new_tokens': 64}
    drafted = lm.generate(prompts, **given)
    assert seen.pop() == (max(map(len, prompts)), name, 1.5)
    assert drafted.tokens == plain.generate(prompts, **given).tokens
    assert drafted.labels[1] == {'chain': 'draft'}.get(name, name)
  # Slots take the way of the samples.
  (many,) = lm.generate_many([prompt[:9]], batch_size=1, max_new_tokens=2)
  assert many.error is None
  assert seen == [(32, 'chain', 1.5)]
  for bad, limit, message in (
    ([[]], 4, 'prompt 0 is empty'),
    ([[1]], -1, 'max_new_tokens must be at least 0'),
  ):
    with pytest.raises(ValueError, match=message):
      lm.generate(bad, max_new_tokens=limit)
