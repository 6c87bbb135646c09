"""Block drafters that are tables, and targets whose states they read.

Such a drafter has marginals of each depth and an edge term. It knows a target
by heart if the term is the target's table without its mean. A fault in what it
is fed shows in what it drafts.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

import specdec
from specdec import cache as cache_lib
from specdec.draft import block as block_lib


def _target_apply(params, tokens, positions, mask, cache):
  logits = params['logits'][tokens]
  return logits, cache_lib.write_hidden(cache, 0, logits)


def keeping_states(target: specdec.LanguageModel) -> specdec.LanguageModel:
  """A `table_model` that keeps its logits as hidden states."""
  size = target.spec.vocab_size

  def init_cache(batch_size, num_slots):
    empty = cache_lib.init_empty_cache(batch_size, num_slots)
    return cache_lib.with_hidden(empty, {0: size}, jnp.float32)

  spec = dataclasses.replace(
    target.spec, apply=_target_apply, init_cache=init_cache, hidden=(0,)
  )
  return target.replace(spec=spec)


@functools.cache  # Equal drafters share their compiled programs.
def _init_cache(size):
  return lambda rows, slots: cache_lib.init_cache(
    rows, slots, num_heads=1, head_widths=(size,), dtype=jnp.float32
  )


def _read(params, states, positions, cache):
  """Keys of text are the states, so that a wrong position shows."""
  del params, positions
  new = states[0][:, None]
  return cache_lib.write(cache, 0, new, new)


def _propose(params, tokens, positions, mask, cache):
  """The marginals; `states` are zeros.

  Where the last state of the text does not lead to the root, as it does in
  greedy text, the marginals are turned around.
  """
  del mask
  rows, root = len(tokens), tokens[:, :1]
  depth, size = params['marginals'].shape
  last = jnp.maximum(positions[:, 0] - 1, 0)[:, None, None]
  state = jnp.take_along_axis(cache.keys[0][:, 0], last, axis=1)[:, 0]
  leads = (jnp.argmax(state, axis=1, keepdims=True) == root)[:, :, None]
  marginals = params['marginals'][None]
  logits = jnp.where(leads, marginals, -4 * marginals)
  fed = jnp.zeros((rows, 1, tokens.shape[1], size))
  cache = cache_lib.write(cache, 0, fed, fed)
  return logits, jnp.zeros((rows, depth, 1)), cache


def _edges(params, states, parents, tokens):
  del states
  rows = params['edges'][parents]
  return jnp.take_along_axis(rows, tokens, axis=-1)


def scorer(
  marginals: np.ndarray, edges: np.ndarray | None = None, **changes
) -> block_lib.BlockScorer:
  """A drafter of marginals `[D, V]` and what a parent adds, `[V, V]`."""
  depth, size = marginals.shape
  params = {'marginals': jnp.float32(marginals)}
  if edges is not None:
    params['edges'] = jnp.float32(edges)
  spec = block_lib.BlockSpec(
    init_cache=_init_cache(size),
    vocab_size=size,
    max_positions=1000,
    weight_bytes=4 * size**2,
    cache_bytes_per_slot=4,
    read=_read,
    propose=_propose,
    edges=None if edges is None else _edges,
    reads=(0,),
    block_size=depth + 1,
    depth=depth,
    width=1,
    mask_token=0,
    num_outputs=size,
  )
  drafter = block_lib.BlockDrafter(params=params, spec=spec)
  return block_lib.BlockScorer(drafter, **changes)


def of_table(table: np.ndarray, depth: int, **changes) -> block_lib.BlockScorer:
  """One that has a table `[V, V]` by heart."""
  mean = table.mean(0)
  return scorer(np.tile(mean, (depth, 1)), table - mean, **changes)
