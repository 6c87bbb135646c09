"""Decoding with Llamas and mixtures: drafts change the speed, not the tokens.

Everything is float32 on CPU and compared token for token.
"""

import functools

import pytest
import tiny_drafters
import tiny_llamas
import tiny_models

import specdec
from specdec.topology import chain

_LIMIT = 48
_TREE = specdec.TreeConfig(
  num_nodes=8, width=3, branching=2, rounds=3, capacity=32, cost_ratio=0
)
_INNER = specdec.TreeConfig(width=3, branching=2, rounds=2, cost_ratio=0)


def _generate(name, rows, temperature, drafter=None):
  return specdec.generate(
    tiny_llamas.target(name),
    tiny_models.row_keys(3)[rows],
    tiny_models.prompts(3)[rows],
    max_new_tokens=_LIMIT,
    sampling=specdec.Sampling(temperature=temperature, top_k=20),
    drafter=drafter,
  )


@functools.cache
def _plain(name, temperature):
  return _generate(name, slice(3), temperature).tokens


def _drafter(name, shape):
  draft = tiny_llamas.draft(name)
  if shape == 'chain':
    config = specdec.TreeConfig(topology=chain(4))
    return tiny_drafters.model(draft, config)
  outer = tiny_drafters.model(draft, _TREE)
  inner = tiny_drafters.model(tiny_llamas.draft(name, 0.1), _INNER, 'small')
  return specdec.staged(outer, inner)


@pytest.mark.parametrize('name', tiny_llamas.CONFIGS)
def test_plain_text_is_varied_and_rows_are_their_own(name):
  for temperature in (0.0, 1.0):
    rows = _plain(name, temperature)
    assert all(len(set(row)) > 10 for row in rows), 'not a trivial text'
    for row, tokens in enumerate(rows[:2]):
      alone = _generate(name, slice(row, row + 1), temperature).tokens
      assert alone == [tokens]


@pytest.mark.parametrize('shape', ['chain', 'staged'])
@pytest.mark.parametrize('batch_size', [1, 3])
@pytest.mark.parametrize('name', tiny_llamas.CONFIGS)
def test_drafted_equals_plain(name, batch_size, shape):
  drafter = _drafter(name, shape)
  for temperature in (0.0, 1.0):
    generation = _generate(name, slice(batch_size), temperature, drafter)
    assert generation.tokens == _plain(name, temperature)[:batch_size]
    # Neither never right nor always.
    assert 1.2 < generation.stats['block_efficiency'] < 4.5
