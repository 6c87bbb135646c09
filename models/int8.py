"""Weights in eight bits: half the bytes of bfloat16, and exact products.

A row of a matrix is stored as integers times one scale, and so is every row of
activations, anew for each product:

    x[r] = s[r] q[r],  w[o] = t[o] v[o]
    x[r] . w[o] = s[r] t[o] (q[r] . v[o])

The product in brackets is one of integers, exact in 32 bits. So what a token
gets does not depend on the other rows beside it, as it does in floating point.
This is the vector-wise scheme of LLM.int8() (arXiv 2208.07339, section 3.1)
without its special treatment of outliers. Rounding loses a little; the loss of
the quantised model is measured with scripts/measure_loss.py.
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Symmetric: -128 has no counterpart.
_LARGEST = 127.0


class Int8Matrix(flax.struct.PyTreeNode):
  """A matrix in eight bits, for the places where an array stands otherwise.

  Attributes:
    values: `[out, in]` int8, between -127 and 127.
    scale: `[out]` float32, positive.
  """

  values: jax.Array
  scale: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the matrix, `(out, in)`."""
    return self.values.shape


def quantize_rows(rows, xp=jnp):
  """Rounds each row to integers times a scale.

  Args:
    rows: `[n, k]` float32.
    xp: `jax.numpy` or `numpy`.

  Returns:
    `[n, k]` int8 and `[n]` float32. A row that is not finite has a scale that
    is not, so that its products are not finite either.
  """
  peak = xp.max(xp.abs(rows), axis=1)
  scale = xp.where(peak == 0.0, 1.0, peak / _LARGEST)
  return xp.round(rows / scale[:, None]).astype(xp.int8), scale


def quantize(matrix: np.ndarray) -> Int8Matrix:
  """Rounds a matrix `[out, in]`, on the host, row by row.

  Raises:
    ValueError: the matrix has a weight that is not finite.
  """
  matrix = np.asarray(matrix, np.float32)
  if not np.isfinite(matrix).all():
    raise ValueError('a matrix has weights that are not finite')
  values, scale = quantize_rows(matrix, np)
  return Int8Matrix(
    values=jnp.asarray(values), scale=jnp.asarray(scale, jnp.float32)
  )


def _integer_product(x, y):
  return lax.dot_general(
    x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
  )


def _as_two_rows(x, y):
  return _integer_product(jnp.concatenate([x, x]), y)[:1]


def int8_matmul(x: jax.Array, weight: Int8Matrix) -> jax.Array:
  """`x @ weight.T` for `x` `[rows, in]` of any float dtype; float32.

  The rows of the result do not depend on one another, to the last bit.
  """
  values, scale = quantize_rows(x.astype(jnp.float32))
  if x.shape[0] > 1:
    product = _integer_product(values, weight.values)
  else:  # On CPU ten times faster than one row, as in bfloat16.
    product = lax.platform_dependent(
      values, weight.values, cpu=_as_two_rows, default=_integer_product
    )
  scales = scale[:, None] * weight.scale[None]
  return product.astype(jnp.float32) * scales
