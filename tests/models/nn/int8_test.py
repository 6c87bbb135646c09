"""Eight-bit weights: exact products, bounded rounding, and whole models."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import hub
from models.nn import matrices as matrices_lib

_RNG = np.random.default_rng(0)


def _matrix(rows, columns):
  spread = 10.0 ** _RNG.uniform(-3, 1, size=(rows, 1))
  return (spread * _RNG.normal(size=(rows, columns))).astype(np.float32)


def test_weights_are_rounded_to_the_nearest_step_of_their_row():
  matrix = _matrix(6, 40)
  matrix[2] = 0.0
  ours = matrices_lib.quantize(matrix)
  assert ours.shape == matrix.shape
  values = np.asarray(ours.values, np.float32)
  step = np.asarray(ours.scale)[:, None]
  assert np.abs(values).max() == 127
  assert (np.abs(values * step - matrix) <= 0.5001 * step).all()
  # The largest weight of every row that is not zero is exactly representable.
  peaks = np.abs(values).max(axis=1)
  assert peaks.tolist() == [127, 127, 0, 127, 127, 127]
  rows = matrices_lib.take_rows(ours, jnp.array([[4, 1]]))
  np.testing.assert_array_equal(rows, (values * step)[[[4, 1]]])


def test_the_product_is_the_one_of_integers():
  """Bit by bit what NumPy has in 64-bit integers, scaled in the same order."""
  x, weight = _matrix(5, 300), matrices_lib.quantize(_matrix(7, 300))
  scale = (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float32)[:, None]
  rounded = np.round(x / scale).astype(np.int64)
  exact = rounded @ np.asarray(weight.values, np.int64).T
  expected = exact.astype(np.float32) * (scale * np.asarray(weight.scale)[None])
  product = jax.jit(matrices_lib.matmul)
  result = product(jnp.asarray(x), weight)
  np.testing.assert_allclose(result, expected, rtol=1e-6)
  # Nor does a row depend on those beside it.
  alone = product(jnp.asarray(x[3:4]), weight)
  np.testing.assert_array_equal(alone, result[3:4])


def test_rows_of_denormal_numbers_have_a_scale_that_is_not_zero():
  rows = np.array([[1e-44, -1e-44, 0], [1e-38, 0, 0]], np.float32)
  for xp in (np, jnp):
    values, scale = matrices_lib.quantize_rows(rows, xp)
    assert np.all(np.asarray(scale) > 0)
    np.testing.assert_array_less(np.abs(values.astype(int)), 128)


@pytest.mark.parametrize('width', [8, 8960])
def test_what_is_not_finite_stays_so_and_alone(width):
  """In long rows, too, where a maximum of XLA's may drop NaN."""
  matrix = _matrix(4, width)
  weight = matrices_lib.quantize(matrix)
  for value in (np.nan, np.inf):
    x = jnp.asarray(_matrix(3, width)).at[1, 2].set(value)
    result = np.asarray(weight.product(x))
    assert not np.isfinite(result[1]).any()
    assert np.isfinite(result[[0, 2]]).all()
  matrix[1, 1] = np.inf
  with pytest.raises(ValueError, match='not finite'):
    matrices_lib.quantize(matrix)


def test_default_dtype_of_the_draft():
  small = hub.locate('demo')
  large = types.SimpleNamespace(size=1 << 27, stored_dtypes=['float16'])
  in_blocks = types.SimpleNamespace(size=1 << 27, stored_dtypes=['stored'])
  for draft, dtype, target_dtype, packed, expected in (
    (small, None, 'bfloat16', True, 'int8'),
    (small, None, 'bfloat16', False, 'bfloat16'),
    (small, None, 'float32', True, 'float32'),
    (small, 'bfloat16', 'bfloat16', True, 'bfloat16'),
    (small, None, 'int8', True, 'int8'),
    (small, None, 'stored', True, 'int4'),
    (large, None, 'bfloat16', True, 'int4'),
    (large, None, 'int8', False, 'int8'),
    (large, None, 'float32', True, 'float32'),
    (in_blocks, None, 'int8', True, 'stored'),
    (in_blocks, None, 'stored', True, 'stored'),
  ):
    found = checkpoint_lib.resolve_draft_dtype(
      dtype, draft, target_dtype=target_dtype, packed=packed
    )
    assert found == expected
