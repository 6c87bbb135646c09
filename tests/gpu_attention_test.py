"""The attention kernel for GPUs, interpreted, against writing and attending."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cached_attention
from models import gpu_attention
from specdec.cache import KVCache

_SCALE = 0.3


def _normal(seed, shape, dtype):
  return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _operands(length, slots, start, *, dtype=jnp.float32, heads=3, width=16):
  """A cache with something in every slot, also in those not filled yet."""
  start = jnp.array(start, jnp.int32)
  rows = start.shape[0]
  new = (rows, heads, length, width)
  query, key, value = (_normal(seed, new, dtype) for seed in range(3))
  filled = (rows, heads, slots, width)
  keys, values = (_normal(seed, filled, dtype) for seed in (3, 4))
  shape = (rows, length, slots)
  mask = jax.random.bernoulli(jax.random.key(5), 0.5, shape)
  slot = jnp.arange(slots)[None, None]
  mask &= slot < (start + length)[:, None, None]
  # Every query sees itself.
  own = start[:, None] + jnp.arange(length)[None]
  mask |= slot == own[:, :, None]
  return query, key, value, mask, keys, values, start


def _by_kernel(*operands):
  return gpu_attention.attend_and_write(*operands, scale=_SCALE, interpret=True)


def _by_two_steps(query, key, value, mask, keys, values, start):
  cache = KVCache(
    keys=(keys,), values=(values,), length=start, num_slots=keys.shape[2]
  )
  out, cache = cached_attention._write_then_attend(
    query, key, value, mask, cache, layer=0, scale=_SCALE
  )
  return out, cache.keys[0], cache.values[0]


@pytest.mark.parametrize(
  ('length', 'slots', 'start'),
  [
    (1, 7, (3, 0)),  # nothing before
    (1, 130, (129, 64)),  # the last slot; a whole block
    (3, 200, (5, 130)),  # less than a block; three of them
    (17, 90, (63, 73)),  # more rows than the fewest
  ],
)
def test_the_kernel_is_writing_then_attending(length, slots, start):
  operands = _operands(length, slots, start)
  out, keys, values = _by_kernel(*operands)
  expected, expected_keys, expected_values = _by_two_steps(*operands)
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(keys, expected_keys)
  np.testing.assert_array_equal(values, expected_values)


def test_in_bfloat16_the_kernel_rounds_as_little():
  operands = _operands(4, 100, (70, 9), dtype=jnp.bfloat16)
  out, keys, _ = _by_kernel(*operands)
  exact = [one.astype(jnp.float32) for one in operands[:3]]
  exact_cache = [one.astype(jnp.float32) for one in operands[4:6]]
  expected = _by_two_steps(*exact, operands[3], *exact_cache, operands[6])[0]
  assert keys.dtype == jnp.bfloat16
  np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)


def test_what_is_masked_or_not_filled_has_no_say():
  query, key, value, mask, keys, values, start = _operands(2, 80, (40, 66))
  slot = jnp.arange(80)[None, :, None]
  hidden = slot >= start[:, None, None]
  hidden |= ~jnp.any(mask, axis=1)[:, :, None]
  other = lambda array: jnp.where(hidden[:, None], 100.0, array)
  out = _by_kernel(query, key, value, mask, keys, values, start)[0]
  changed = _by_kernel(
    query, key, value, mask, other(keys), other(values), start
  )[0]
  np.testing.assert_array_equal(out, changed)


def test_a_query_that_sees_nothing_is_finite():
  operands = list(_operands(2, 30, (4, 0)))
  operands[3] = jnp.zeros_like(operands[3])
  assert np.isfinite(_by_kernel(*operands)[0]).all()


def test_queries_of_a_group_share_the_keys_of_their_head():
  _, key, value, mask, keys, values, start = _operands(3, 90, (70, 2))
  query = _normal(6, (2, 6, 3, 16), jnp.float32)
  out = _by_kernel(query, key, value, mask, keys, values, start)[0]
  twice = [jnp.repeat(one, 2, axis=1) for one in (key, value, keys, values)]
  expected = _by_two_steps(query, *twice[:2], mask, *twice[2:], start)[0]
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_what_the_kernel_serves():
  shapes = lambda heads, length, width: (
    jax.ShapeDtypeStruct((1, heads, length, width), jnp.float32),
    jax.ShapeDtypeStruct((1, 4, length, width), jnp.float32),
  )
  assert gpu_attention.fits(*shapes(4, 128, 64))
  assert not gpu_attention.fits(*shapes(4, 129, 64))
  assert not gpu_attention.fits(*shapes(8, 128, 64))
  assert not gpu_attention.fits(*shapes(4, 1, 80))
  assert not gpu_attention.fits(*shapes(4, 1, 8))
