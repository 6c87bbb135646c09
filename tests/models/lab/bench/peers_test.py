"""Transformers' decoding of our weights, beside our own."""

import sys

import jax
import jax.numpy as jnp
import pytest
import tiny

from models.checkpoints import hub
from models.lab.bench import arms as arms_lib
from models.lab.bench import peer as peer_lib
from models.lab.bench import transformers_peer
from models.nn import adapter
from models.text import choice as choice_lib
from models.text import settings as settings_lib
import specdec

_CONTEXT = 96
_LIMIT = 20
_PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]


def test_rows_that_are_done_have_no_more_forwards():
  rows = [[4, 5, 6, 9], [7, 8]]
  found = peer_lib.as_generation(rows, [6], {'target': 3, 'draft': 5})
  assert found.tokens == [[4, 5, 6], [7, 8]]
  assert found.finish_reasons == ['eos', 'length']
  assert found.stats.target_forwards == 3 + 2
  assert found.stats.block_efficiency == 1
  assert found.stats.stage_forwards == {'draft': 5}


def test_without_torch_the_remedy_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(ValueError, match='pip install torch'):
    transformers_peer.describe(peer_lib.BenchmarkTask())


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  pytest.importorskip('torch')
  folder = tmp_path_factory.mktemp('pair')
  for name, seed in (('target', 0), ('draft', 1)):
    module = tiny.module(num_positions=_CONTEXT, seed=seed)
    hub.save_pretrained(module, folder / name)
  return folder


def _arms(folders, text, *, eos_ids=(), **changes):
  target, draft = (str(folders / name) for name in ('target', 'draft'))
  choice = choice_lib.ModelChoice(target, changes.pop('draft', draft))
  settings = {'models': choice, 'seed': 3}
  settings |= {'drafting': settings_lib.DraftSettings()}
  settings |= {'sampling': specdec.Sampling()}
  specs = arms_lib.parse_arms(text, 'float32')
  task = peer_lib.BenchmarkTask(**settings | changes)
  arms = arms_lib.make_peer_arms(specs, task, eos_ids)
  return [arms[spec] for spec in specs]


def test_greedy_tokens_are_ours_however_they_are_decoded(folders):
  module = hub.load_module(folders / 'target', dtype=jnp.float32)
  target, key = adapter.as_model(module), jax.random.key(0)
  ours = specdec.generate(target, key, [_PROMPT], max_new_tokens=_LIMIT)
  eos = ours.tokens[0][5]
  assert ours.tokens[0].index(eos) == 5
  names = 'transformers,transformers-assisted,transformers-lookup'
  for eos_ids, size, reason in (((), _LIMIT, 'length'), ((eos,), 6, 'eos')):
    found = [
      arm.decode([_PROMPT], _LIMIT)
      for arm in _arms(folders, names, eos_ids=eos_ids)
    ]
    for generation in found:
      assert generation.tokens == [ours.tokens[0][:size]]
      assert generation.finish_reasons == [reason]
      assert generation.stats.new_tokens == size
    plain, assisted, _ = (generation.stats for generation in found)
    assert plain.target_forwards == size
    assert assisted.stage_forwards['draft'] > 0


@pytest.mark.parametrize(
  ('kind', 'changes', 'limit', 'message'),
  [
    ('-lookup', {'batch_size': 2}, 1, 'one prompt at a time, not 2'),
    ('-assisted', {'draft': None}, 1, 'needs a draft'),
    ('-assisted(num_assistant_tokens=0)', {}, 1, 'must be an integer from 1'),
    ('', {}, _CONTEXT, 'exceed the context of the target'),
    ('', {'sampling': specdec.Sampling(logit_bias={1: 2})}, 1, 'no --logit_b'),
  ],
)
def test_what_it_cannot_do_is_refused(folders, kind, changes, limit, message):
  with pytest.raises(ValueError, match=message):
    _arms(folders, f'transformers{kind}', **changes)[0].decode([_PROMPT], limit)
