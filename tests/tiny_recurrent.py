"""Models with states: one whose state is a hash of its path, and forwards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specdec
from specdec import cache as cache_lib
from specdec import recurrent as recurrent_lib
from specdec.models.nn import mixer

_ROWS = 997  # Different states; hardly two paths have the same.


def _step(state, inputs):
  return {'hash': (31 * state['hash'] + inputs['token'][0] + 1) % _ROWS}


def _layer(batch_size):
  state = {'hash': jnp.zeros(batch_size, jnp.int32)}
  mark = jax.tree.map(jnp.copy, state)
  inputs = {'token': jnp.zeros((batch_size, 1, 0, 1), jnp.int32)}
  return recurrent_lib.Recurrent(state, inputs, mark, _step)


def _apply(params, tokens, positions, mask, cache):
  del positions
  entries, sees, first = mixer.enter_window(cache, 0, mask, _layer(len(tokens)))
  visit = lambda state, added: (added, _step(state, added)['hash'])
  added, hashes = recurrent_lib.walk(
    entries, sees, first, {'token': tokens[..., None]}, visit
  )
  entries = mixer.write_inputs(cache, entries, added, first)
  cache = cache.replace(recurrent={0: entries})
  return params['logits'][hashes], cache


def _init_cache(batch_size, num_slots):
  cache = cache_lib.init_empty_cache(batch_size, num_slots)
  return cache_lib.with_recurrent(cache, {0: _layer(batch_size)})


@functools.cache
def hashed(
  vocab_size: int, noise: float = 0.0, *, max_positions: int = 1000
) -> specdec.LanguageModel:
  """A model whose logits are random for every path; `noise` makes a draft."""
  rng = np.random.default_rng(0)
  shape = (_ROWS, vocab_size)
  logits = 3 * rng.normal(size=shape) + noise * rng.normal(size=shape)
  return specdec.LanguageModel(
    params={'logits': jnp.asarray(logits, jnp.float32)},
    spec=_spec(vocab_size, max_positions),
  )


@functools.cache
def _spec(vocab_size, max_positions):
  return specdec.ModelSpec(
    apply=_apply,
    init_cache=_init_cache,
    vocab_size=vocab_size,
    max_positions=max_positions,
    weight_bytes=0,
    cache_bytes_per_slot=0,
  )


def hash_of(text) -> int:
  """The state after a text, by a loop."""
  add = lambda state, token: (31 * state + token + 1) % _ROWS
  return functools.reduce(add, map(int, text), 0)


@jax.jit
def chunk(model, tokens, cache):
  """Logits of tokens `[B, L]` after the cache's text, and the cache with them.

  The window is empty afterwards, so that a forward of any size may follow.
  """
  size = tokens.shape[1]
  positions = cache.length[:, None] + jnp.arange(size)[None]
  mask = cache_lib.causal_mask(cache.length, size, cache.num_slots)
  logits, cache = model.apply(tokens, positions, mask, cache)
  cache = cache_lib.advance(cache, jnp.full_like(cache.length, size))
  return logits, cache_lib.with_window(cache, 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty(spec, rows):
  """A cache that has read nothing, for texts of up to 100 tokens."""
  return spec.init_cache(rows, 100)


def in_chunks(model, tokens, size):
  """Logits of texts that are read in chunks, and the cache."""
  rows, length = tokens.shape
  cache = empty(model.spec, rows)
  parts = []
  for start in range(0, length, size):
    logits, cache = chunk(model, tokens[:, start : start + size], cache)
    parts.append(np.asarray(logits))
  return np.concatenate(parts, axis=1), cache


@dataclasses.dataclass
class Tree:
  """Random trees of tokens, one per row."""

  tokens: np.ndarray  # `[B, N]`
  parents: np.ndarray  # `[B, N]`, -1 of the root.

  @classmethod
  def random(cls, rng, rows, nodes, vocab_size):
    parents = np.full((rows, nodes), -1)
    for node in range(1, nodes):
      parents[:, node] = rng.integers(max(0, node - 6), node, size=rows)
    return cls(rng.integers(vocab_size, size=(rows, nodes)), parents)

  def path(self, row, node):
    """The nodes from the root on."""
    nodes = [node]
    while self.parents[row, nodes[0]] >= 0:
      nodes.insert(0, int(self.parents[row, nodes[0]]))
    return nodes

  def logits(self, model, cache, most=None):
    """Logits `[B, N, V]` of every node; a forward scores up to `most` nodes."""
    number = self.tokens.shape[1]
    most = most or number
    sees = np.zeros((*self.tokens.shape, number), bool)
    for row, node in np.ndindex(self.tokens.shape):
      sees[row, node, self.path(row, node)] = True
    if most < number:
      cache = _with_window(cache, number)
    parts = []
    for first in range(0, number, most):
      part = slice(first, first + most)
      some = self.tokens[:, part], sees[:, part]
      logits, cache = _forward(model, *some, cache, first)
      parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


_with_window = jax.jit(cache_lib.with_window, static_argnums=1)


@jax.jit
def _forward(model, tokens, sees, cache, first):
  """Logits of some nodes, and the cache with them; `first` of them is there."""
  depth = jnp.sum(sees, axis=2) - 1
  mask = cache.ops.mask(cache.length, sees, cache.num_slots)
  positions = cache.length[:, None] + depth
  cache = cache.replace(start=cache.length + first)
  logits, cache = model.apply(tokens, positions, mask, cache)
  return logits, cache.replace(start=None)
