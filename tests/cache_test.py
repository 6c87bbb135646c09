"""Caches that were written, kept and rolled back, against fresh ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from specdec import cache as kv
from specdec import init_cache
from specdec.masks import causal_mask

NUM_SLOTS = 40


def test_causal_mask_by_hand():
  mask = causal_mask(jnp.array([0, 2, 3]), 3, 6)
  np.testing.assert_array_equal(
    mask,
    np.array(
      [
        [
          [1, 0, 0, 0, 0, 0],
          [1, 1, 0, 0, 0, 0],
          [1, 1, 1, 0, 0, 0],
        ],
        [
          [1, 1, 1, 0, 0, 0],
          [1, 1, 1, 1, 0, 0],
          [1, 1, 1, 1, 1, 0],
        ],
        [
          [1, 1, 1, 1, 0, 0],
          [1, 1, 1, 1, 1, 0],
          [1, 1, 1, 1, 1, 1],
        ],
      ],
      bool,
    ),
  )
  np.testing.assert_array_equal(
    causal_mask(jnp.array([1]), 1, 4), np.array([[[1, 1, 0, 0]]], bool)
  )


@pytest.mark.parametrize('layer', [0, 1, 2])
def test_write_puts_every_row_at_its_own_length(layer):
  num_layers, batch_size, num_slots, heads, width = 3, 4, 7, 2, 3
  rng = np.random.default_rng(0)
  shape = (batch_size, num_slots, heads, width)
  old = init_cache(
    batch_size,
    num_slots,
    num_layers=num_layers,
    num_heads=heads,
    head_width=width,
    dtype=jnp.float32,
  )
  assert [array.shape for array in old.keys] == [shape] * num_layers
  fill = lambda: tuple(
    jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(num_layers)
  )
  length = np.array([0, 5, 2, 3], np.int32)
  old = old.replace(keys=fill(), values=fill(), length=jnp.asarray(length))
  new_shape = (batch_size, 2, heads, width)
  key = rng.normal(size=new_shape).astype(np.float32)
  value = rng.normal(size=new_shape).astype(np.float32)
  new = jax.jit(kv.write, static_argnums=1)(old, layer, key, value)

  for other in range(num_layers):
    for arrays_old, arrays_new, written in (
      (old.keys, new.keys, key),
      (old.values, new.values, value),
    ):
      expected = np.array(arrays_old[other])
      if other == layer:
        for row in range(batch_size):
          expected[row, length[row] : length[row] + 2] = written[row]
      np.testing.assert_array_equal(arrays_new[other], expected)
  np.testing.assert_array_equal(new.length, length)
  assert new.num_slots == num_slots


@functools.cache
def _forward(num_tokens):
  """A forward of `num_tokens` tokens behind what each row keeps."""
  model = tiny_models.gpt2()

  @jax.jit
  def forward(tokens, cache):
    start = cache.length
    positions = start[:, None] + jnp.arange(num_tokens)[None]
    mask = causal_mask(start, num_tokens, NUM_SLOTS)
    return model.apply(tokens, positions, mask, cache)

  return forward


def test_random_accepts_and_rollbacks_equal_a_fresh_prefill():
  rng = np.random.default_rng(0)
  batch_size = 3
  model = tiny_models.gpt2()
  cache = model.definition.init_cache(batch_size, NUM_SLOTS)
  kept = [[] for _ in range(batch_size)]
  block = lambda length: rng.integers(
    tiny_models.VOCAB_SIZE, size=(batch_size, length)
  ).astype(np.int32)
  longest = 24
  for _ in range(25):
    size = int(rng.choice([1, 3, 6]))
    tokens = block(size)
    _, cache = _forward(size)(tokens, cache)
    accepted = rng.integers(size + 1, size=batch_size)
    # Now and then a row gives up tokens that it had kept before.
    lengths = np.array([len(row) for row in kept])
    dropped = np.where(rng.random(batch_size) < 0.2, lengths // 2, 0)
    accepted = np.where(dropped, 0, accepted)
    accepted = np.minimum(accepted, longest - lengths)
    for row in range(batch_size):
      kept[row] += tokens[row, : accepted[row]].tolist()
      del kept[row][lengths[row] - dropped[row] : lengths[row]]
    cache = cache.replace(
      length=cache.length + jnp.asarray(accepted - dropped, jnp.int32)
    )
  lengths = np.array([len(row) for row in kept])
  assert cache.length.tolist() == lengths.tolist()
  assert len(set(lengths.tolist())) == batch_size
  assert min(lengths) > 3

  padded = np.zeros((batch_size, longest), np.int32)
  for row in range(batch_size):
    padded[row, : lengths[row]] = kept[row]
  fresh = model.definition.init_cache(batch_size, NUM_SLOTS)
  _, fresh = _forward(longest)(padded, fresh)
  fresh = fresh.replace(length=cache.length)
  for array, expected in zip(
    (*cache.keys, *cache.values), (*fresh.keys, *fresh.values), strict=True
  ):
    for row in range(batch_size):
      np.testing.assert_allclose(
        array[row, : lengths[row]],
        expected[row, : lengths[row]],
        rtol=1e-4,
        atol=1e-5,
      )
  tokens = block(6)
  actual, _ = _forward(6)(tokens, cache)
  expected, _ = _forward(6)(tokens, fresh)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
  # Stale slots were there to be ignored.
  assert any(
    np.abs(np.asarray(cache.keys[0][row, lengths[row] :])).max() > 0
    for row in range(batch_size)
  )
