"""Block drafters: one forward per step, and a tree that knows its path.

The drafter of these tests is a table. It knows the target by heart if it has
an edge term, and marginals that are wrong without it.
"""

import constraint_test
import numpy as np
import pytest
import table_blocks
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import table_model
from specdec.tree import topology as topology_lib

_V, _DEPTH, _LIMIT = 12, 4, 21
_TABLE = tiny.table(_V)
_PROMPTS = [[2, 3, 4], [5], [6, 7]]
_TEMPERATURES = [0.0, 1.0, 0.7]


def _target():
  table = table_model.table_model(_TABLE, max_positions=96)
  return table_blocks.keeping_states(table)


def _drafter(*, edges=True):
  if edges:
    return table_blocks.of_table(_TABLE, _DEPTH)
  return table_blocks.scorer(np.tile(_TABLE.mean(0), (_DEPTH, 1)))


def _shape(kind, scorer):
  if kind == 'chain':
    return specdec.fixed_drafter(scorer, topology_lib.chain(_DEPTH))
  tree = tiny_drafters.TREE.drafter(scorer)
  inner = tiny_drafters.candidates(
    specdec.PromptLookup((0.5,)), config=tiny_drafters.INNER
  )
  return tree if kind == 'tree' else specdec.staged(tree, inner)


def _generate(drafter, **options):
  arguments = {
    'max_new_tokens': _LIMIT,
    'sampling': specdec.Sampling(temperature=_TEMPERATURES),
  }
  return specdec.generate(
    _target(),
    tiny.row_keys(3),
    _PROMPTS,
    drafter=drafter,
    **arguments | options,
  )


@pytest.mark.parametrize('kind', ['chain', 'tree', 'staged'])
@pytest.mark.parametrize('edges', [True, False])
def test_tokens_are_those_of_plain_decoding(kind, edges):
  plain = _generate(specdec.PLAIN)
  found = _generate(_shape(kind, _drafter(edges=edges)))
  assert found.tokens == plain.tokens
  if kind != 'staged':
    # One forward in each step, of each row.
    assert found.stats.stage_forwards['block'] == found.stats.target_forwards
  if edges and kind == 'chain':
    # In the greedy row all is accepted after the first step.
    alone = _generate(
      _shape(kind, _drafter()), sampling=specdec.Sampling(temperature=0.0)
    )
    assert alone.stats.block_efficiency > 4


def test_with_the_targets_noise_all_that_is_known_is_right():
  """The drafter has the target's distribution after every parent."""
  scorer = table_blocks.scorer(np.zeros((_DEPTH, _V)), _TABLE, noise_weight=1.0)
  sampling = specdec.Sampling(temperature=[0.5, 1.0, 2.0])
  found = _generate(_shape('chain', scorer), sampling=sampling)
  assert found.tokens == _generate(specdec.PLAIN, sampling=sampling).tokens
  assert found.stats.block_efficiency > 4


def test_rows_come_and_go_and_constraints_hold():
  drafter = _shape('tree', _drafter())
  options = {'constraint': constraint_test.Turns(), 'eos_ids': [1]}
  plain = _generate(specdec.PLAIN, **options)
  assert _generate(drafter, **options).tokens == plain.tokens
  plain = _generate(specdec.PLAIN)
  slots = specdec.Slots(_target(), num_slots=2, context=40, drafter=drafter)
  rows = zip(_PROMPTS, tiny.row_keys(3), _TEMPERATURES, strict=True)
  jobs = [
    {
      'prompt': prompt,
      'rng_key': key,
      'max_new_tokens': _LIMIT,
      'sampling': specdec.Sampling(temperature=temperature),
    }
    for prompt, key, temperature in rows
  ]
  found, _ = tiny.in_slots(slots, jobs)
  assert [one.tokens[0] for one in found] == plain.tokens
