"""The one matrix product of every model here, shaped for the machine it is on.

Weights are stored `[out, in]` and contracted over their last axis, with
float32 results whatever the weight dtype: on CPU by far the fastest way to
multiply a few bfloat16 rows (docs/cpu.md has the table). A single bfloat16 row
misses the fast path: on CPU it is padded to two, on TPU to the eight of a tile.
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


def precision(dtype: jnp.dtype) -> lax.Precision:
  """Makes float32 mean float32: by default GPUs and TPUs round its operands."""
  exact = dtype == jnp.float32
  return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def _contract(x: jax.Array, weight: jax.Array) -> jax.Array:
  return lax.dot_general(
    x,
    weight,
    (((1,), (1,)), ((), ())),
    precision=precision(weight.dtype),
    preferred_element_type=jnp.float32,
  )


def _contract_as_two_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
  return _contract(jnp.concatenate([x, x]), weight)[:1]


def _contract_as_eight_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
  """On TPU: XLA keeps a single row from the matrix unit."""
  return _contract(jnp.broadcast_to(x, (8, x.shape[1])), weight)[:1]


def rows_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x @ weight.T` in float32, for `x` `[rows, in]`, `weight` `[out, in]`.

  Both must have the same dtype. Which body runs is decided when the program is
  lowered, so one traced program serves every platform.
  """
  if x.shape[0] > 1 or weight.dtype == jnp.float32:
    return _contract(x, weight)
  return lax.platform_dependent(
    x,
    weight,
    cpu=_contract_as_two_rows,
    tpu=_contract_as_eight_rows,
    default=_contract,
  )


@jax.custom_vjp
def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
  return rows_matmul(x, weight)


def _linear_fwd(x, weight):
  return rows_matmul(x, weight), (x, weight)


def _linear_bwd(residuals, grad):
  # The default rule would contract a float32 cotangent with bfloat16 weights,
  # a mixed product that has no fast path anywhere.
  x, weight = residuals
  grad = grad.astype(weight.dtype)
  grad_x = jnp.matmul(grad, weight, preferred_element_type=jnp.float32)
  grad_weight = jnp.matmul(grad.T, x, preferred_element_type=jnp.float32)
  return grad_x.astype(x.dtype), grad_weight.astype(weight.dtype)


_linear.defvjp(_linear_fwd, _linear_bwd)


Matrix = jax.Array | Int8Matrix


def matmul(x: jax.Array, weight: Matrix) -> jax.Array:
  """`x @ weight.T` over the last axis, in the dtype of the weights.

  Args:
    x: `[..., in]`, any float dtype; rounded to that of the weights first.
    weight: `[out, in]`, float32, bfloat16 or in eight bits.

  Returns:
    `[..., out]` float32.
  """
  rows = x.reshape(-1, x.shape[-1])
  if isinstance(weight, Int8Matrix):
    out = int8_matmul(rows, weight)
  else:
    out = _linear(rows.astype(weight.dtype), weight)
  return out.reshape(*x.shape[:-1], weight.shape[0])


def take_rows(weight: Matrix, index: jax.Array) -> jax.Array:
  """Rows `[..., in]` float32 of a matrix `[out, in]`, for `index [...]`."""
  if isinstance(weight, Int8Matrix):
    return weight.values[index] * weight.scale[index][..., None]
  return weight[index].astype(jnp.float32)
