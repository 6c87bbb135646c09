"""The draft's cache, which lags the sequence by one token or by two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from specdec.drafting import commit_chain
from specdec.drafting import draft_chain
from specdec.masks import causal_mask
from specdec.sampling import choose
from specdec.sampling import position_noise

NUM_SLOTS = 48
BATCH_SIZE = 4
G = 3


@jax.jit
def _draft_chain(draft, cache, tokens, length, keys, sampling):
  positions = length[:, None] + jnp.arange(G)[None]
  noise = position_noise(keys, positions, tiny_models.VOCAB_SIZE, sampling)
  return draft_chain(draft, cache, tokens, length, noise, sampling)


@jax.jit
def _prefill(draft, tokens):
  """Logits and cache of whole sequences, as if nothing had been drafted."""
  cache = draft.definition.init_cache(BATCH_SIZE, NUM_SLOTS)
  positions = jnp.broadcast_to(jnp.arange(NUM_SLOTS)[None], tokens.shape)
  mask = causal_mask(cache.length, NUM_SLOTS, NUM_SLOTS)
  return draft.apply(tokens, positions, mask, cache)


def _assert_kept_slots_equal(cache, fresh):
  for array, expected in zip(
    (*cache.keys, *cache.values), (*fresh.keys, *fresh.values), strict=True
  ):
    for row, length in enumerate(cache.length.tolist()):
      np.testing.assert_allclose(
        array[row, :length], expected[row, :length], rtol=1e-4, atol=1e-5
      )


@jax.jit
def _expected_chain(draft, tokens, length, keys, sampling):
  """What the draft says of each position behind the root, without a cache."""
  positions = length[:, None] + jnp.arange(G)[None]
  noise = position_noise(keys, positions, tiny_models.VOCAB_SIZE, sampling)
  logits, _ = _prefill(draft, tokens)
  rows = jnp.arange(BATCH_SIZE)[:, None]
  return choose(logits[rows, positions - 1], noise, sampling)


# How many tokens each step emits in each row. The second row accepts all again
# and again, the third never does; the last alternates, and rests for a while.
_EMITTED = np.array(
  [
    [1, 4, 1, 4],
    [4, 4, 2, 0],
    [2, 4, 3, 0],
    [3, 4, 1, 1],
    [4, 4, 2, 4],
    [1, 4, 3, 2],
    [4, 4, 1, 3],
    [4, 4, 1, 4],
  ]
)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_the_draft_cache_equals_a_fresh_prefill_after_every_step(temperature):
  rng = np.random.default_rng(0)
  draft = tiny_models.gpt2()
  keys = jax.random.split(jax.random.key(0), BATCH_SIZE)
  sampling = tiny_models.sampling(*[temperature] * BATCH_SIZE).validated()
  # What is beyond a row's length is garbage, as in a decode.
  tokens = rng.integers(
    tiny_models.VOCAB_SIZE, size=(BATCH_SIZE, NUM_SLOTS)
  ).astype(np.int32)
  length = np.array([3, 1, 9, 6], np.int32)
  cache = _prefill(draft, tokens)[1].replace(length=jnp.asarray(length - 1))
  rows = np.arange(BATCH_SIZE)

  for emitted in _EMITTED:
    chain = _draft_chain(draft, cache, tokens, length, keys, sampling)
    np.testing.assert_array_equal(chain.cache.length, cache.length)

    drafted = np.asarray(chain.tokens)
    assert drafted.shape == (BATCH_SIZE, G)
    with_drafted = tokens.copy()
    with_drafted[rows[:, None], length[:, None] + np.arange(G)] = drafted
    np.testing.assert_array_equal(
      drafted, _expected_chain(draft, with_drafted, length, keys, sampling)
    )

    before = cache.length
    cache = commit_chain(
      chain.cache, jnp.asarray(length), jnp.asarray(emitted), G
    )
    # Some of the drafted tokens, then a bonus token of the target's own.
    bonus = rng.integers(tiny_models.VOCAB_SIZE, size=BATCH_SIZE)
    for row, count in enumerate(emitted):
      if count:
        tokens[row, length[row] : length[row] + count - 1] = drafted[
          row, : count - 1
        ]
        tokens[row, length[row] + count - 1] = bonus[row]
    length = length + emitted.astype(np.int32)
    missing = np.where(emitted == G + 1, 2, 1)
    expected = np.where(emitted > 0, length - missing, before)
    np.testing.assert_array_equal(cache.length, expected)
    _assert_kept_slots_equal(cache, _prefill(draft, tokens)[1])
  assert length.max() + G + 1 <= NUM_SLOTS


def test_commit_by_hand():
  """A sequence of 7 tokens and 3 drafted; emitted 0 to 4 of them."""
  cache = tiny_models.gpt2().definition.init_cache(5, 20)
  cache = cache.replace(length=jnp.array([5, 6, 6, 5, 6]))
  after = commit_chain(
    cache, jnp.full(5, 7), jnp.array([0, 1, 2, 3, 4]), num_drafted=3
  )
  # All but the root; after full acceptance the last drafted one is missing too.
  assert after.length.tolist() == [5, 7, 8, 9, 9]
