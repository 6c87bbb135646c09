"""Attention against NumPy, and the products under it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models.nn import attention
from specdec.models.nn import matrices as matrices_lib

_SCALE = 0.3


def _operands(length=3, heads=4):
  rng = np.random.default_rng(0)
  shapes = [(2, heads, size, 8) for size in (length, 7, 7)]
  arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
  mask = rng.random((2, length, 7)) < 0.5
  mask[:, :, 0] = True
  return *map(jnp.asarray, arrays), mask


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


_dtypes = pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])


@_dtypes
@pytest.mark.parametrize(('length', 'heads'), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_attend_equals_one_query_and_head_at_a_time(length, heads, dtype):
  *operands, mask = _operands(length=length, heads=heads)
  operands = [operand.astype(dtype) for operand in operands]
  attend = jax.jit(
    lambda *a: attention.attend(attention.Operands(*a), scale=_SCALE)
  )
  result = attend(*operands, mask)
  assert result.dtype == jnp.float32
  expected = _reference(
    *(operand.astype('float32') for operand in operands), mask
  )
  tolerance = 1e-5 if dtype == 'float32' else 2e-2
  np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
  # A query that sees nothing.
  assert np.isfinite(attend(*operands, np.zeros_like(mask))).all()


# A text of three tokens, then a tree of two branches. Their nodes alternate,
# and one branch is longer than a window of three positions. For each node: what
# it sees, as its path, and what of it is within the window.
_PATHS = {
  (0,): (0,),
  (0, 1, 2): (0, 1, 2),
  (0, 1, 2, 3): (1, 2, 3),
  (0, 1, 2, 4): (1, 2, 4),
  (0, 1, 2, 3, 5): (2, 3, 5),
  (0, 1, 2, 4, 6): (2, 4, 6),
  (0, 1, 2, 3, 5, 7): (3, 5, 7),
  (): (),
}


def test_a_window_is_counted_along_the_path_of_a_query():
  is_in = lambda paths: np.array(
    [[[slot in path for slot in range(9)] for path in paths]]
  )
  mask = jnp.asarray(is_in(_PATHS))
  narrowed = attention.within_window(mask, 3)
  np.testing.assert_array_equal(narrowed, is_in(_PATHS.values()))
  assert attention.within_window(mask, None) is mask
  np.testing.assert_array_equal(attention.within_window(mask, 6), mask)


def test_gradients_of_matmul_are_those_of_the_plain_product():
  rng = np.random.default_rng(1)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  x, weight = draw(2, 3, 16), draw(8, 16)
  ours = jax.grad(lambda *a: jnp.sum(jnp.sin(matrices_lib.matmul(*a))), (0, 1))
  plain = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), (0, 1))
  for got, expected in zip(ours(x, weight), plain(x, weight), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
