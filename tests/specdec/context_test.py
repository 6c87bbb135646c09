"""A draft whose context is shorter than the context of its target."""

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import table_model
from specdec.tree import topology as topology_lib

VOCAB_SIZE = 16
CONTEXT = 20
LIMIT = 24
G = 3

# Below, at and beyond the last position that can still be scored, and a mix.
_PROMPTS = [
  [1, 2, 3],
  [4] * (CONTEXT - 1),
  [5] * CONTEXT,
  [6] * (CONTEXT + 1),
  [7] * (CONTEXT + 12),
]
_BATCHES = [[0, 4, 1], [2, 3, 0], [3, 4, 3], [1, 2, 1]]


_TARGET, _DRAFT = (
  table_model.table_model(tiny.table(VOCAB_SIZE), max_positions=size)
  for size in (200, CONTEXT)
)
# A tree that grows as a chain.
_TREE = tiny_drafters.Settings(
  num_nodes=G + 1, width=1, branching=1, rounds=G, capacity=8, cost_ratio=0
)


_FIXED = tiny_drafters.Settings(topology=topology_lib.chain(G))


def _generate(prompts, drafter=specdec.PLAIN):
  return specdec.generate(
    _TARGET,
    jax.random.key(0),
    prompts,
    max_new_tokens=LIMIT,
    sampling=specdec.Sampling(temperature=[0.0, 1.0, 1.0]),
    drafter=drafter,
  )


def _slow(prompts, is_fixed):
  """Origins, histogram, forwards of the draft and verified nodes."""
  lengths = [len(prompt) for prompt in prompts]
  ends = [length + LIMIT for length in lengths]
  origins = [[] for _ in prompts]
  histogram, forwards, nodes = [0] * (G + 1), 0, 0
  while lengths != ends:
    active = [row for row in range(len(prompts)) if lengths[row] < ends[row]]
    # A draft token for position q needs the node before it, at q - 1, scored.
    depths = {row: np.clip(CONTEXT + 1 - lengths[row], 0, G) for row in active}
    deepest = max(depths.values())
    forwards += len(active) * (G * (deepest > 0) if is_fixed else deepest)
    for row in active:
      nodes += 1 + depths[row]
      block = [1] * int(depths[row]) + [0]
      block = block[: ends[row] - lengths[row]]
      histogram[len(block) - 1] += 1
      origins[row] += block
      lengths[row] += len(block)
  return origins, histogram, forwards, nodes


@pytest.mark.parametrize('batch', _BATCHES)
@pytest.mark.parametrize('config', [_TREE, _FIXED])
def test_drafts_go_up_to_the_last_position_exactly(batch, config):
  """The tokens are the same as by plain decoding; a loop gives the origins."""
  prompts = [_PROMPTS[row] for row in batch]
  generation = _generate(prompts, tiny_drafters.model(_DRAFT, config))
  assert generation.tokens == _generate(prompts).tokens
  origins, histogram, forwards, nodes = _slow(prompts, config is _FIXED)
  assert generation.origins == origins
  stats = generation.stats
  assert stats.accepted_histogram == histogram
  assert stats.stage_forwards == {'draft': forwards}
  assert round(stats.nodes_per_forward * sum(histogram), 3) == nodes
  late = [min(len(prompt) - CONTEXT - 1, 0) + LIMIT for prompt in prompts]
  assert stats.beyond_context == {'draft': sum(late)}


def test_a_stage_inside_goes_on():
  """The draft beyond its context does not hold it up, and costs nothing."""
  bigram = tiny_drafters.exact(tiny.table(VOCAB_SIZE))
  inner = tiny_drafters.candidates(bigram, config=_TREE)
  drafter = specdec.staged(tiny_drafters.model(_DRAFT, _TREE), inner)
  for batch in _BATCHES:
    prompts = [_PROMPTS[row] for row in batch]
    generation = _generate(prompts, drafter)
    blocks = len(prompts) * LIMIT // (G + 1)
    assert generation.stats.accepted_histogram == [0] * G + [blocks]
    assert set(generation.stats.beyond_context) == {'draft'}
    for prompt, origins in zip(prompts, generation.origins, strict=True):
      assert 1 not in origins[max(CONTEXT + 1 - len(prompt), 0) :]
    everyone_beyond = min(map(len, prompts)) > CONTEXT
    forwards = generation.stats.stage_forwards
    assert (forwards['draft'] == 0) == everyone_beyond
