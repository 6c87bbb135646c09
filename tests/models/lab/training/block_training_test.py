"""Training of block drafters, and the drafters that it writes."""

import dataclasses
import functools

import by_heart
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import tiny
import tiny_heads

import specdec
from specdec import cache as cache_lib
from specdec.draft import block as block_lib
from specdec.models.checkpoints.heads import block_drafters
from specdec.models.checkpoints.heads import heads
from specdec.models.lab.training import block_trainer
from specdec.models.nn import block_drafter
from specdec.models.nn import matrices as matrices_lib
from specdec.tree import topology as topology_lib

_ROWS = 4


def _training(**changes):
  """A training of small drafters; of windows of the texts, if not changed."""
  usual = {'block_size': _ROWS, 'markov_rank': 8, 'inner_width': 128}
  usual |= {'length': 47, 'answer_tokens': by_heart.NEW, 'num_heads': 2}
  return block_trainer.BlockTraining(**usual | changes)


def _module(config, num_outputs=None):
  """The graph and the parameters of a new drafter."""
  module = block_drafter.BlockDrafter(config, num_outputs, rngs=nnx.Rngs(0))
  graph, variables = nnx.split(module)
  return graph, nnx.to_pure_dict(variables)


@functools.cache
def _learned():
  """A module that knows the texts by heart."""
  config = _training().config(tiny_heads.TARGET)
  graph, params = _module(config)
  function = block_trainer.loss_function(
    graph, config, by_heart.PROMPT - 1, 12, 'float32'
  )
  params = by_heart.fitted(function, params, config.reads, steps=1200)
  return nnx.merge(graph, params)


def test_a_drafter_drafts_what_it_knows_by_heart(tmp_path):
  """In trees that grow; `block_drafter_test` has chains."""
  block_drafters.save(_learned(), tmp_path, num_target_layers=2)
  drafter = tiny_heads.load(tmp_path)
  assert drafter.spec.depth == _ROWS
  config = specdec.StageConfig(
    width=8, branching=3, rounds=4, cost_ratio=0, calibration=4.0
  )
  shape = topology_lib.TreeShape(num_nodes=12, capacity=48)
  stage = specdec.Stage(block_lib.BlockScorer(drafter), config)
  texts = by_heart.texts()
  result = by_heart.generate(
    specdec.Drafter((stage,), shape), texts[:, : by_heart.PROMPT].tolist()
  )
  assert result.tokens == texts[:, by_heart.PROMPT :].tolist()
  accepted = by_heart.by_position(result.stats.accepted_histogram)
  assert (accepted[:_ROWS] >= 0.95).all()
  forwards = result.stats.stage_forwards['block']
  assert forwards == result.stats.target_forwards


def test_what_is_written_is_read_again(tmp_path):
  """Without an edge term; `_learned` has one."""
  config = _training(markov_rank=0).config(tiny_heads.TARGET)
  assert config.depth == _ROWS - 1
  module = nnx.merge(*_module(config))
  block_drafters.save(module, tmp_path, num_target_layers=2)
  loaded = heads.locate(tmp_path, tiny_heads.TARGET).config
  without = {'conv_group': 1}  # There are no convolutions.
  assert loaded == dataclasses.replace(config, **without)
  drafter = tiny_heads.load(tmp_path)
  jax.tree.map(
    np.testing.assert_array_equal,
    drafter.params['drafter'],
    nnx.to_pure_dict(nnx.split(module)[1]),
  )


_LENGTH, _DEPTH = 12, 3


@jax.jit
def _block(drafter, states, tokens, anchor):
  """The scores of a drafter at an anchor of a window, as when it decodes.

  Log-probabilities `[D, O]` after the true tokens, and how it rates these.
  """
  spec, params = drafter.spec, drafter.params
  positions = jnp.arange(_LENGTH)[None]
  cache = spec.init_cache(1, _LENGTH + spec.block_size)
  cache = spec.read(params, (states[None],), positions, cache)
  cache = cache_lib.advance(cache, anchor[None])
  rows = jnp.arange(spec.block_size)[None]
  fed = jnp.where(rows == 0, tokens[anchor], spec.mask_token)
  slots = jnp.arange(cache.num_slots)[None, None]
  mask = slots < anchor + spec.block_size
  mask = jnp.broadcast_to(mask, (1, spec.block_size, cache.num_slots))
  logits, of_rows, _ = spec.propose(params, fed, anchor + rows, mask, cache)
  parents = tokens[anchor + jnp.arange(_DEPTH)][None]
  every = jnp.broadcast_to(tiny_heads.IDS, logits.shape)
  logits = logits + spec.edges(params, of_rows, parents, every)
  rated = spec.confidence(params, of_rows, parents)
  return jax.nn.log_softmax(logits)[0], rated[0]


def test_the_loss_is_that_of_blocks_as_they_are_decoded():
  """One forward gives all blocks of a window, the same as decoding."""
  training = _training(
    block_size=_DEPTH,
    markov_rank=4,
    inner_width=24,
    length=_LENGTH - 1,
    answer_tokens=8,
  )
  config = training.config(tiny_heads.TARGET)
  ids = tiny_heads.IDS
  graph, params = _module(config, len(ids))
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  params = jax.tree.map(lambda leaf: leaf + 0.3 * draw(*leaf.shape), params)
  embedding, lm_head = (draw(tiny.VOCAB_SIZE, config.width) for _ in range(2))
  drawn = lambda: rng.integers(tiny.VOCAB_SIZE, size=(2, _LENGTH))
  batch = {'tokens': drawn(), 'choice': drawn(), 'draw': np.uint32(0)}
  for name in ('states', 'normed'):
    batch[name] = draw(2, _LENGTH, config.width)
  lm_head, index = lm_head[ids], matrices_lib.index_of(ids, tiny.VOCAB_SIZE)
  drafter = block_drafter.as_drafter(
    nnx.merge(graph, params),
    embedding=embedding,
    lm_head=matrices_lib.FewOutputs(
      outputs=jnp.asarray(lm_head), index=jnp.asarray(index)
    ),
  )
  first, losses, hits = 3, [], []
  for row, tokens in enumerate(batch['tokens']):
    for anchor in range(first, _LENGTH - _DEPTH):
      log_probs, rated = _block(
        drafter, batch['states'][row], tokens, jnp.array(anchor)
      )
      before = slice(anchor, anchor + _DEPTH)
      wanted = jax.nn.softmax(batch['normed'][row, before] @ lm_head.T)
      variation = 0.5 * np.abs(np.exp(log_probs) - wanted).sum(1)
      entropy = -(wanted * log_probs).sum(1)
      accepted = 1 - variation
      rating = accepted * np.log(rated) + variation * np.log(1 - rated)
      losses.append(0.1 * entropy + 1.8 * variation - rating)
      hits.append(ids[log_probs.argmax(1)] == batch['choice'][row, before])
  weights = np.exp(-np.arange(_DEPTH) / 4)
  expected = np.mean(losses, 0) @ weights / weights.sum()
  loss = block_trainer.loss_function(graph, config, first, 100, 'float32')
  frozen = jnp.asarray(embedding), jnp.asarray(lm_head), ids
  computed, accepted = jax.jit(lambda: loss(frozen, params, batch))()
  np.testing.assert_allclose(computed, expected, rtol=3e-6)
  np.testing.assert_allclose(accepted, np.mean(hits, 0), atol=1e-6)
