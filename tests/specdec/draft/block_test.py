"""Block drafters: one forward per step, and a tree that knows its path.

The drafter of these tests is a table. It knows the target by heart if it has
an edge term, and marginals that are wrong without it.
"""

import dataclasses

import jax.numpy as jnp
import pytest
import tiny

from models.nn import table_model
import specdec
from specdec import cache as cache_lib
from specdec.draft import block as block_lib
from specdec.tree import topology as topology_lib

_V, _DEPTH, _LIMIT = 12, 4, 21
_TABLE = tiny.table(_V)
_PROMPTS = [[2, 3, 4], [5], [6, 7]]
_TEMPERATURES = [0.0, 1.0, 0.7]


def _target_apply(params, tokens, positions, mask, cache):
  logits = params['logits'][tokens]
  return logits, cache_lib.write_hidden(cache, 0, logits)


def _target():
  """A table that keeps its logits as hidden states."""
  table = table_model.table_model(_TABLE, max_positions=96)

  def init_cache(batch_size, num_slots):
    empty = cache_lib.init_empty_cache(batch_size, num_slots)
    return cache_lib.with_hidden(empty, {0: _V}, jnp.float32)

  spec = dataclasses.replace(
    table.spec, apply=_target_apply, init_cache=init_cache, hidden=(0,)
  )
  return table.replace(spec=spec)


def _read(params, states, positions, cache):
  """Keys of text are the states, so that a wrong position shows."""
  del params, positions
  new = states[0][:, None]
  return cache_lib.write(cache, 0, new, new)


def _propose(params, tokens, positions, mask, cache):
  """The same marginals at every depth; `states` are zeros.

  Where the last state of the text does not lead to the root, as it does in
  greedy text, the marginals are turned around.
  """
  del mask
  rows, root = len(tokens), tokens[:, :1]
  last = jnp.maximum(positions[:, 0] - 1, 0)[:, None, None]
  state = jnp.take_along_axis(cache.keys[0][:, 0], last, axis=1)[:, 0]
  leads = jnp.argmax(state, axis=1, keepdims=True) == root
  marginal = jnp.where(leads, params['marginal'], -4 * params['marginal'])
  logits = jnp.broadcast_to(marginal[:, None], (rows, _DEPTH, _V))
  fed = jnp.zeros((rows, 1, tokens.shape[1], _V))
  cache = cache_lib.write(cache, 0, fed, fed)
  return logits, jnp.zeros((rows, _DEPTH, 1)), cache


def _edges(params, states, parents, tokens):
  del states
  rows = params['edges'][parents]
  return jnp.take_along_axis(rows, tokens, axis=-1)


def _drafter(*, edges=True, **changes):
  spec = block_lib.BlockSpec(
    init_cache=lambda rows, slots: cache_lib.init_cache(
      rows, slots, num_layers=1, num_heads=1, head_width=_V, dtype=jnp.float32
    ),
    vocab_size=_V,
    max_positions=96,
    weight_bytes=_TABLE.nbytes,
    cache_bytes_per_slot=4,
    read=_read,
    propose=_propose,
    edges=_edges if edges else None,
    reads=(0,),
    block_size=_DEPTH + 1,
    depth=_DEPTH,
    width=1,
    mask_token=0,
  )
  params = {
    'marginal': jnp.asarray(_TABLE.mean(0, keepdims=True)),
    'edges': jnp.asarray(_TABLE - _TABLE.mean(0)),
  }
  return block_lib.BlockScorer(
    block_lib.BlockDrafter(params=params, spec=spec), **changes
  )


def _shape(kind, scorer):
  config = specdec.StageConfig(
    width=8, branching=3, rounds=_DEPTH, cost_ratio=0
  )
  if kind == 'chain':
    return specdec.fixed_drafter(scorer, topology_lib.chain(_DEPTH))
  if kind == 'k_ary':
    return specdec.fixed_drafter(scorer, topology_lib.k_ary(3, 2))
  shape = topology_lib.TreeShape(num_nodes=10, capacity=48)
  drafter = specdec.Drafter((specdec.Stage(scorer, config),), shape)
  if kind == 'staged':
    inner = specdec.CandidateScorer((specdec.PromptLookup((0.5,)),))
    few = specdec.StageConfig(width=4, branching=1, rounds=3)
    return drafter.replace(stages=(*drafter.stages, specdec.Stage(inner, few)))
  return drafter


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


@pytest.mark.parametrize('verify', ['rejection', 'traversal'])
def test_greedy_rows_with_drawn_children(verify):
  plain = _generate(specdec.PLAIN)
  for edges in (True, False):
    found = _generate(_shape('k_ary', _drafter(edges=edges)), verify=verify)
    assert found.tokens[0] == plain.tokens[0]
    assert found.stats.block_efficiency > 1
