"""Attention against NumPy, and the products under it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.nn import attention
from models.nn import matmul

_SCALE = 0.3


def _operands(batch_size=2, length=3, slots=7, heads=4, width=8):
  keys = jax.random.split(jax.random.key(0), 4)
  query = jax.random.normal(keys[0], (batch_size, heads, length, width))
  key = jax.random.normal(keys[1], (batch_size, heads, slots, width))
  value = jax.random.normal(keys[2], (batch_size, heads, slots, width))
  mask = jax.random.bernoulli(keys[3], 0.5, (batch_size, length, slots))
  return query, key, value, mask.at[:, :, 0].set(True)


def _reference(query, key, value, mask):
  """One query and one head at a time."""
  query, key, value, mask = map(np.asarray, (query, key, value, mask))
  out = np.zeros_like(query)
  for b, h, i in np.ndindex(query.shape[:3]):
    seen = np.flatnonzero(mask[b, i])
    scores = _SCALE * key[b, h, seen] @ query[b, h, i]
    weights = np.exp(scores - scores.max())
    out[b, h, i] = weights @ value[b, h, seen] / weights.sum()
  return out


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('heads', [1, 4])
@pytest.mark.parametrize('length', [1, 3])
def test_attend_equals_one_query_and_head_at_a_time(length, heads, dtype):
  *operands, mask = _operands(length=length, heads=heads)
  operands = [operand.astype(dtype) for operand in operands]
  result = jax.jit(lambda *a: attention.attend(*a, scale=_SCALE))(
    *operands, mask
  )
  assert result.dtype == jnp.float32
  expected = _reference(*(one.astype('float32') for one in operands), mask)
  tolerance = 1e-5 if dtype == 'float32' else 2e-2
  np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('length', [1, 3])
def test_a_query_that_sees_nothing_is_finite(length):
  query, key, value, mask = _operands(length=length)
  result = attention.attend(
    query, key, value, jnp.zeros_like(mask), scale=_SCALE
  )
  assert np.isfinite(result).all()


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('rows', [1, 2, 5])
def test_matmul_contracts_the_last_axes_in_the_dtype_of_the_weights(
  dtype, rows
):
  x = jax.random.normal(jax.random.key(1), (rows, 16))
  weight = jax.random.normal(jax.random.key(2), (8, 16), dtype)
  result = jax.jit(matmul.matmul)(x, weight)
  rounded = np.asarray(x.astype(dtype), np.float64)
  expected = rounded @ np.asarray(weight, np.float64).T
  assert result.dtype == jnp.float32
  np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_padding_does_not_change_a_single_query_or_row():
  operands = _operands(length=1)
  result = attention._attend_padded(8, *operands, scale=_SCALE)
  assert result.shape == operands[0].shape
  np.testing.assert_allclose(
    result, _reference(*operands), rtol=1e-5, atol=1e-6
  )
  row = jax.random.normal(jax.random.key(1), (1, 16))
  weight = jax.random.normal(jax.random.key(2), (8, 16))
  np.testing.assert_allclose(
    matmul._contract_padded(8, row, weight),
    row @ weight.T,
    rtol=1e-4,
    atol=1e-5,
  )


def test_gradients_of_matmul_are_those_of_the_plain_product():
  x = jax.random.normal(jax.random.key(3), (2, 3, 16))
  weight = jax.random.normal(jax.random.key(4), (8, 16))
  ours = jax.grad(lambda *a: jnp.sum(jnp.sin(matmul.matmul(*a))), (0, 1))
  plain = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), (0, 1))
  for got, expected in zip(ours(x, weight), plain(x, weight), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
