"""Decoding with Llamas and mixtures: drafts change the speed, not the tokens.

Everything is float32 on CPU and compared token for token.
"""

import functools

import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings

import specdec
from specdec import PLAIN
from specdec.tree.topology import chain

_LIMIT = 48
_TREE = Settings(
  num_nodes=8, width=3, branching=2, rounds=3, capacity=32, cost_ratio=0
)
_INNER = Settings(width=3, branching=2, rounds=2, cost_ratio=0)


def _generate(name, rows, temperature, drafter=PLAIN):
  return specdec.generate(
    tiny.llama(name),
    tiny.row_keys(3)[rows],
    tiny.prompts(3)[rows],
    max_new_tokens=_LIMIT,
    sampling=specdec.Sampling(temperature=temperature, top_k=20),
    drafter=drafter,
  )


@functools.cache
def _plain(name, temperature):
  return _generate(name, slice(3), temperature).tokens


def _drafter(name, shape):
  draft = tiny.llama_draft(name)
  if shape == 'chain':
    config = Settings(topology=chain(4))
    return tiny_drafters.model(draft, config)
  lookup = specdec.PromptLookup((0.0, 0.3, 0.6), num_matches=2)
  return specdec.staged(
    tiny_drafters.model(draft, _TREE),
    tiny_drafters.candidates(lookup, config=_INNER),
  )


# Both shapes and both batch sizes for each: a program takes long to compile.
@pytest.mark.parametrize(
  ('name', 'batch_size', 'shape'),
  [
    ('llama', 1, 'staged'),
    ('llama', 3, 'chain'),
    ('mixtral', 1, 'chain'),
    ('mixtral', 3, 'staged'),
  ],
)
def test_drafted_equals_plain(name, batch_size, shape):
  drafter = _drafter(name, shape)
  for temperature in (0.0, 1.0):
    # Of three rows, so that one row alone is compared with itself among others.
    plain = _plain(name, temperature)
    assert all(len(set(row)) > 10 for row in plain), 'not a trivial text'
    generation = _generate(name, slice(batch_size), temperature, drafter)
    assert generation.tokens == plain[:batch_size]
    # Neither never right nor always.
    assert 1.2 < generation.stats['block_efficiency'] < 4.5
