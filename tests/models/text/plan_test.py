"""Plan files: what is written comes back, what is foreign is refused."""

import dataclasses
import functools
import json
import shutil

import huggingface_hub
import numpy as np
import plans
import pytest

import specdec
from specdec import arguments as arguments_lib
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
  candidates=({'name': 'plain', 'tokens_per_second': 3.5},),
)


def _drafting(drafting):
  """The plan with other settings."""
  way = dataclasses.replace(_PLAN.ways[0], drafting=drafting)
  return _plan(ways=(plans.way('plain'), way))


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
    plan = _drafting(drafting)
    plan.save(path)
    assert plan_lib.load_plan(path) == plan
    assert [one.name for one in path.parent.iterdir()] == ['plan.json']


def test_only_what_differs_is_written():
  record = json.loads(_PLAN.to_json())
  assert record['schema'] == 4
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
    ({'schema': ...}, 'has schema None, expected 4; make it anew'),
    ({'schema': 3, 'draft_token_seconds': 1}, 'schema 3, expected 4; make it'),
    ({'ways': ...}, 'it lacks the entry ways; make it anew with scripts/'),
    ({'ways': {}}, 'ways is empty'),
    ({'methods': 'plain'}, 'methods is not known; make it anew'),
    ({'ends_per_token': 1.5}, 'ends_per_token must be from 0 to 1, got 1.5'),
    ({'new_tokens': -5}, 'new_tokens must not be negative, got -5'),
    (_way(method='plan'), "ways.a.method 'plan' is not known"),
    (_way(method=...), 'it lacks the entry ways.a.method'),
    (_way(name='b'), 'ways.a.name is not known'),
    (_way(min_block_efficiency=0), 'ways.a.min_block_efficiency must be posit'),
    *(
      (
        _way(new_token_seconds=times),
        'ways.a.new_token_seconds must have posit',
      )
      for times in ({}, {'64': 0}, {'0': 1}, {'long': 1})
    ),
    ({'context': {'models': {}}}, 'it lacks the entry context.machine'),
    ({'context': _OTHER_MODELS}, 'context.models lacks'),
    (_tree(min_gain=0.1), 'ways.a.drafting.min_gain is not known; make'),
    (_tree(topology=[[0, 0]]), 'not its parent'),
    # Wrong types, at each depth.
    ({'new_tokens': 7.5}, 'new_tokens must be an integer'),
    ({'context': 3}, 'context must be'),
    ({'context': _OTHER_BATCH}, 'context.batch_size must be an integer'),
    (_way(reading_seconds=3), 'ways.a.reading_seconds must be'),
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
  plans.way('plain', 1.0),
  plans.way('chain', 0.25),
  plans.way('chain', 0.5, name='of the end', draft_prompt=256),
  plans.way('lookup', {32: 1.0, 1024: 0.5, 2048: 1.5}),
)


def _seconds(name, length, tokens):
  """By hand: a target reads a token in 1/4 s, a draft in 1/8 s."""
  drafted = {
    'plain': tokens,
    'chain': length / 8 + tokens / 4,
    'of the end': min(length, 256) / 8 + tokens / 2,
    # Gains in documents, and nobody knows of longer ones.
    'lookup': tokens * (1.5 if length > 1024 else 1 - (length - 32) / 1984),
  }
  return length / 4 + drafted[name]


def test_a_request_is_decoded_in_the_way_that_takes_the_least_time():
  plan, chosen = _plan(ways=_WAYS), set()
  for length in (*range(1, 70), *(2**n for n in range(7, 15))):
    padded = arguments_lib.padded_length(length)
    for tokens in (*range(0, 40), *(2**n for n in range(6, 13))):
      expected = [_seconds(way.name, padded, tokens) for way in _WAYS]
      for way, seconds in zip(_WAYS, expected, strict=True):
        found = plan_lib.expected_seconds(plan, way, length, tokens)
        assert found == pytest.approx(seconds)
      name = plan_lib.choose(plan, length, tokens).name
      assert name == _WAYS[int(np.argmin(expected))].name, (length, tokens)
      chosen.add(name)
  assert chosen == {one.name for one in _WAYS}


@pytest.mark.parametrize(
  ('ends', 'limit', 'name'),
  [
    (0.0, 8, 'plain'),
    (0.0, 64, 'chain'),
    # Texts of 4 tokens, whatever the limit is: 1 + 3/4 + (3/4)^2 + ...
    (0.25, 64, 'plain'),
    (0.25, 4096, 'plain'),
    (0.01, 64, 'chain'),
  ],
)
def test_texts_are_expected_to_end_as_those_of_the_samples(ends, limit, name):
  plan = _plan(ways=_WAYS[:2], ends_per_token=ends)
  assert plan_lib.choose(plan, 64, limit).name == name


def test_each_request_has_the_drafter_that_was_chosen(monkeypatch):
  """Its tokens are those of plain decoding, whatever is chosen."""
  context = dataclasses.replace(_CONTEXT, models=_digests('demo', 'demo'))
  plan = _plan(ways=_WAYS, context=context)
  lm = specdec.load('demo', 'demo', dtype='float32', plan=plan)
  plain = dataclasses.replace(lm, drafter=specdec.PLAIN)
  prompt, seen = lm.pair.encode('import os\nimport ') * 20, []
  of_request = drafters.Planned.of_request

  def spy(planned, *request):
    drafter, ratio = of_request(planned, *request)
    names = [name for name, one in planned.by_name.items() if one is drafter]
    seen.append((*request, *names, ratio))
    return drafter, ratio

  monkeypatch.setattr(drafters.Planned, 'of_request', spy)
  # In a batch, the longest prompt and the largest limit decide.
  for prompts, limits, name in (
    ([prompt[:60], prompt[:9]], [8, 2], 'lookup'),
    ([prompt[:9], prompt[:33]], [5, 60], 'chain'),
  ):
    given = {'max_new_tokens': limits, 'room_for_new_tokens': 64}
    found = lm.generate(prompts, **given)
    longest = max(map(len, prompts))
    assert seen.pop() == (longest, max(limits), name, 1.5)
    assert found.tokens == plain.generate(prompts, **given).tokens
    assert found.labels[1] == {'chain': 'draft'}.get(name, name)
  # Slots take the way of the samples.
  (many,) = lm.generate_many([prompt[:9]], batch_size=1, max_new_tokens=2)
  assert many.error is None
  assert seen == [(9, 32, 'chain', 1.5)]
  for bad, limit, message in (
    ([[]], 4, 'prompt 0 is empty'),
    ([[1]], -1, 'max_new_tokens must be at least 0'),
  ):
    with pytest.raises(ValueError, match=message):
      lm.generate(bad, max_new_tokens=limit)
