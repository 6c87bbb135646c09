"""Plan files: what is written comes back, what is foreign is refused."""

import dataclasses
import functools
import json
import operator
import shutil

import huggingface_hub
import plans
import pytest
import refusals
import tiny_demo

import specdec
from specdec.models.checkpoints import hub
from specdec.models.text import choice as choice_lib
from specdec.models.text import drafters
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import sources as sources_lib
from specdec.tree import topology as topology_lib

_tiny_pair = tiny_demo.in_this_file
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
  dataclasses.replace(_USUAL, lookup_confidence=(0.0, 0.5)),
  {'num_nodes': 16, 'width': 4, 'cost_ratio': 0.03, 'inner_rounds': 1},
)
_CHAIN = settings_lib.DraftSettings(
  num_draft_tokens=7, inner='lookup', ngram='x.st'
)
_FIXED = settings_lib.DraftSettings(
  topology=topology_lib.Topology([(0,), (1,), (0, 0), (0, 2)])
)


_PLAN = plans.plan(
  _CONTEXT,
  dataclasses.replace(plans.way('staged', 0.2, 1.7), drafting=_STAGED),
)
_plan = functools.partial(dataclasses.replace, _PLAN)


def test_a_plan_comes_back_as_it_was(tmp_path):
  """Settings that are usual are not written."""
  path = tmp_path / 'deep' / 'plan.json'
  for drafting in (_USUAL, _STAGED, _CHAIN, _FIXED):
    way = dataclasses.replace(_PLAN.ways[0], drafting=drafting)
    plan = _plan(ways=(plans.way('plain'), way))
    plan.save(path)
    assert plan_lib.load_plan(path) == plan
    assert [file.name for file in path.parent.iterdir()] == ['plan.json']
  written = json.loads(path.read_text())['ways']['staged']['drafting']
  assert written == {'topology': [[0], [1], [0, 0], [0, 2]]}


def _changed(record, changes):
  """A record with other values at places; None removes a value."""
  for name, value in changes.items():
    *outer, last = name.split('.')
    place = functools.reduce(operator.getitem, outer, record)
    place[last] = value
    if value is None:
      del place[last]
  return json.dumps(record)


def test_bad_plans_are_refused(tmp_path):
  path = tmp_path / 'plan.json'
  for content, message in (
    ('[]', 'must hold a JSON object'),
    ('{', 'cannot be read'),
    *(
      (_changed(json.loads(_PLAN.to_json()), changes), message)
      for changes, message in refusals.of('models/text', 'plan')
    ),
  ):
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
      plan_lib.load_plan(path)
    assert str(path) in str(error.value)


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
  for name in digests:
    other = dataclasses.replace(context, models=digests | {name: 'other'})
    other = dataclasses.replace(plan, context=other)
    with pytest.raises(ValueError, match=f'made for another {name}'):
      specdec.load('demo-draft', 'demo', plan=other)


_WAYS = (
  plans.way('plain', {32: 2.0, 64: 2.0, 256: 3.0}),
  plans.way('chain', {32: 4.0, 256: 5.0}),
  plans.way('chain', {256: 4.0}, name='of the end', draft_prompt=256),
  plans.way('lookup', {64: 3.0, 256: 3.5}),
)


def test_a_request_takes_the_fastest_way_of_its_length():
  """65 tokens take the next longer length's way, 257 one that reads less."""
  names = ['chain'] * 2 + ['lookup'] * 2 + ['chain'] * 2 + ['of the end'] * 2
  for ways in (_WAYS, _WAYS[::-1]):
    plan = _plan(ways=ways)
    lengths = (1, 32, 33, 64, 65, 256, 257, 9999)
    assert [plan_lib.choose(plan, length).name for length in lengths] == names
  assert plan_lib.choose(_plan(ways=_WAYS[:2]), 257).name == 'plain'


def test_each_request_has_the_drafter_that_was_chosen(monkeypatch):
  """The tokens are the same as by plain decoding, whatever is chosen."""
  context = dataclasses.replace(_CONTEXT, models=_digests('demo', 'demo'))
  plan = _plan(ways=_WAYS, context=context)
  lm = specdec.load('demo', 'demo', dtype='float32', plan=plan)
  plain = dataclasses.replace(lm, drafter=specdec.PLAIN)
  prompt, seen = lm.pair.encode('import os\nimport ') * 20, []
  of_length = drafters.Planned.of_length

  def spy(planned, length):
    drafter, ratio = of_length(planned, length)
    names = [
      name
      for name, known_drafter in planned.by_name.items()
      if known_drafter is drafter
    ]
    seen.append((length, *names, ratio))
    return drafter, ratio

  monkeypatch.setattr(drafters.Planned, 'of_length', spy)
  with pytest.raises(ValueError, match='method plan needs'):
    drafters.make_drafter('plan', lm.pair, _USUAL)
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
  with pytest.raises(ValueError, match='prompt 0 is empty'):
    lm.generate([[]], max_new_tokens=4)
