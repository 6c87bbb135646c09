"""Transformers' decoding of our weights, beside our own."""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from models.checkpoints import hub
from models.lab.bench import arms as arms_lib
from models.lab.bench import machine
from models.lab.bench import peers
from models.nn import adapter
from models.text import choice as choice_lib
from models.text import settings as settings_lib
import specdec

_CONTEXT = 96
_LIMIT = 20
_PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]


def _inputs(*shape, cached):
  """Arguments of a forward of transformers."""
  cache = mock.Mock(**{'get_seq_length.return_value': cached})
  return {'input_ids': np.zeros(shape), 'past_key_values': cache}


def test_what_is_counted():
  """A prompt of 5 is its last token; then a token, then 3 with two guesses."""
  found = lambda counted: (counted.forwards, counted.positions, counted.slots)
  counted = peers.Forwards(5)
  counted(None, (np.zeros((2, 5)),), {})
  assert found(counted) == (1, 2, 10)
  counted(None, (), _inputs(2, 1, cached=5))
  counted(None, (), _inputs(2, 3, cached=6))
  assert found(counted) == (3, 2 * (1 + 1 + 3), 2 * (5 + 6 + 9))
  # Guesses that come with the prompt count.
  counted = peers.Forwards(5)
  counted(None, (), _inputs(1, 8, cached=0))
  assert found(counted) == (1, 4, 8)
  # Rows that are done have no more forwards.
  target = peers.Forwards(2, forwards=3, positions=6, slots=18)
  costs = {'target': {'per_forward': 10, 'per_slot': 1}}
  stats = peers.statistics(
    [[1, 2], [3]], [[4, 5, 6], [7]], {'target': target}, costs
  )
  assert stats.new_tokens == 4
  assert stats.target_forwards == 3 + 1
  # Plain decoding reads 2, 3 and 4 slots of the first row, 1 of the other.
  assert stats.reads['plain'] == {'forwards': 3, 'slots': 10, 'rows': 4}
  assert stats.relative_bandwidth == (30 + 18) / (30 + 10)


def test_without_torch_the_remedy_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(ValueError, match='pip install torch'):
    peers.describe_torch()


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
  task = arms_lib.BenchmarkTask(**settings | changes)
  arms = peers.make_arms(specs, task, eos_ids=eos_ids)
  return [arms[spec] for spec in specs]


def _ours(folders, prompts):
  module = hub.load_module(folders / 'target', dtype=jnp.float32)
  target, key = adapter.as_model(module), jax.random.key(0)
  return target, specdec.generate(target, key, prompts, max_new_tokens=_LIMIT)


def test_greedy_tokens_are_ours_however_they_are_decoded(folders):
  _, ours = _ours(folders, [_PROMPT])
  eos = ours.tokens[0][5]
  assert ours.tokens[0].index(eos) == 5
  names = 'transformers,transformers-assisted,transformers-lookup'
  for eos_ids, size, reason in (((), _LIMIT, 'length'), ((eos,), 6, 'eos')):
    for arm in _arms(folders, names, eos_ids=eos_ids):
      generation = arm.decode([_PROMPT], _LIMIT)
      assert generation.tokens == [ours.tokens[0][:size]]
      assert generation.finish_reasons == [reason]
      assert generation.stats.new_tokens == size


def test_plain_decoding_is_counted_as_ours_is(folders):
  target, ours = _ours(folders, [_PROMPT])
  (arm,) = _arms(folders, 'transformers')
  theirs = arm.decode([_PROMPT], _LIMIT).stats
  names = ('new_tokens', 'target_forwards', 'stage_forwards', 'positions')
  for name in (*names, 'relative_bandwidth', 'reads', 'costs'):
    assert getattr(theirs, name) == getattr(ours.stats, name), name
  assert arm.sizes == {'target': machine.model_size(target)}


@pytest.mark.parametrize(
  ('kind', 'changes', 'limit', 'message'),
  [
    ('-lookup', {'batch_size': 2}, 1, 'has a batch size of 1'),
    ('-assisted', {'draft': None}, 1, 'needs a draft'),
    ('-assisted(num_assistant_tokens=0)', {}, 1, 'must be an integer from 1'),
    ('', {}, _CONTEXT, 'exceed the context of the target'),
    ('', {'sampling': specdec.Sampling(logit_bias={1: 2})}, 1, 'no --logit_b'),
  ],
)
def test_what_it_cannot_do_is_refused(folders, kind, changes, limit, message):
  with pytest.raises(ValueError, match=message):
    _arms(folders, f'transformers{kind}', **changes)[0].decode([_PROMPT], limit)
