"""Training of block drafters, and the drafters that it writes."""

import functools

import by_heart
from flax import nnx
import pytest
import tiny_heads

from models.checkpoints.heads import block_drafters
from models.lab.training import block_trainer
from models.nn import block_drafter
import specdec
from specdec.draft import block as block_lib
from specdec.tree import topology as topology_lib

_ROWS = 4


@functools.cache
def _learned(markov_rank):
  """A module that knows the texts by heart."""
  training = block_trainer.BlockTraining(
    **{'block_size': _ROWS, 'markov_rank': markov_rank, 'inner_width': 128},
    **{'length': 47, 'answer_tokens': by_heart.NEW, 'num_heads': 2},
  )
  config = training.config(tiny_heads.TARGET)
  graph, variables = nnx.split(
    block_drafter.BlockDrafter(config, rngs=nnx.Rngs(0))
  )
  make_loss = functools.partial(
    block_trainer.make_loss,
    *(graph, config),
    first=by_heart.PROMPT - 1,
    num_anchors=12,
  )
  params = by_heart.fitted(
    *(make_loss, nnx.to_pure_dict(variables), config.reads), steps=1300
  )
  return nnx.merge(graph, params)


def _drafter(scorer, kind):
  if kind == 'chain':
    depth = scorer.drafter.spec.depth
    return specdec.fixed_drafter(scorer, topology_lib.chain(depth))
  config = specdec.StageConfig(width=8, branching=3, rounds=4, cost_ratio=0)
  shape = topology_lib.TreeShape(num_nodes=12, capacity=48)
  return specdec.Drafter((specdec.Stage(scorer, config),), shape)


@pytest.mark.parametrize(
  ('markov_rank', 'dtype', 'kind'),
  [
    *((8, 'float32', 'chain'), (8, 'float32', 'tree'), (8, 'int4', 'chain')),
    *((8, 'int4', 'tree'), (0, 'float32', 'chain')),
  ],
)
def test_a_drafter_drafts_what_it_knows_by_heart(
  markov_rank, dtype, kind, tmp_path
):
  module = _learned(markov_rank)
  block_drafters.save(module, tmp_path, num_target_layers=2)
  drafter = tiny_heads.load(tmp_path, dtype=dtype)
  assert drafter.spec.depth == _ROWS - (markov_rank == 0)
  texts = by_heart.texts()
  found = by_heart.generate(
    _drafter(block_lib.BlockScorer(drafter), kind),
    texts[:, : by_heart.PROMPT].tolist(),
  )
  assert found.tokens == texts[:, by_heart.PROMPT :].tolist()
  print(found.stats.accepted_histogram)
  accepted = by_heart.by_position(found.stats.accepted_histogram)
  assert (accepted[: drafter.spec.depth] >= 0.95).all()
  forwards = found.stats.stage_forwards['block']
  assert forwards == found.stats.target_forwards
