"""The matrix product of all model families.

Weights are stored `[out, in]` and contracted over their last axis, with float32
results for every weight dtype: on CPU this is by far the fastest way to
multiply a few bfloat16 rows (docs/cpu.md has more).
"""

from collections.abc import Iterable
import functools
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from models.nn.cpu import ops
from models.nn.cpu.ops import PackedMatrix

# -128 has no counterpart, so rounding is symmetric without it.
_LARGEST = 127.0


class Int8Matrix(flax.struct.PyTreeNode):
  """A matrix in eight bits, usable wherever a module expects a weight array.

  Attributes:
    values: `[out, in]` int8, between -127 and 127.
    scale: `[out]` float32, positive.
  """

  values: jax.Array
  scale: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape `(out, in)` of the matrix."""
    return self.values.shape


Matrix = jax.Array | Int8Matrix | PackedMatrix


def quantize_rows(rows, xp=jnp):
  """Rounds each row to integers times a scale.

  Args:
    rows: `[n, k]` float32.
    xp: `jax.numpy` or `numpy`.

  Returns:
    `[n, k]` int8 and `[n]` float32. The scale of a row that is not finite is
    not finite either, and so are the products of that row.
  """
  # NaN as inf: a maximum of XLA's CPU backend drops NaN in long rows.
  sizes = xp.where(xp.isnan(rows), xp.inf, xp.abs(rows))
  scale = xp.max(sizes, axis=1) / _LARGEST
  # The scale of a tiny row may be 0, as denormal numbers are.
  scale = xp.where(scale == 0.0, 1.0, scale)
  return xp.round(rows / scale[:, None]).astype(xp.int8), scale


def quantize(matrix: np.ndarray) -> Int8Matrix:
  """Rounds a matrix `[out, in]` row by row; its arrays are on the host.

  Raises:
    ValueError: the matrix has a weight that is not finite.
  """
  matrix = np.asarray(matrix, np.float32)
  if not np.isfinite(matrix).all():
    raise ValueError('a matrix has weights that are not finite')
  values, scale = quantize_rows(matrix, np)
  return Int8Matrix(values=values, scale=scale.astype(np.float32))


def quantize_blocks(
  blocks: Iterable[tuple[Any, np.ndarray]], shape: tuple[int, int]
) -> Int8Matrix:
  """`quantize` of a matrix whose rows come one block after another.

  Args:
    blocks: indices of rows, and their values `[rows, in]`.
    shape: `(out, in)`.

  Raises:
    ValueError: the matrix has a weight that is not finite.
  """
  values: Any = np.empty(shape, np.int8)
  scale: Any = np.empty(shape[0], np.float32)
  for index, rows in blocks:
    part = quantize(rows)
    values[index], scale[index] = part.values, part.scale
  return Int8Matrix(values=values, scale=scale)


def pack(weight: Matrix) -> Matrix:
  """A matrix as the kernels of `models.nn.cpu` read it, if they can."""
  if isinstance(weight, Int8Matrix):
    return ops.pack(np.asarray(weight.values), np.asarray(weight.scale))
  if isinstance(weight, PackedMatrix) or weight.dtype.name not in ops.DTYPES:
    return weight
  return ops.pack(np.asarray(weight))


def precision(dtype: jnp.dtype) -> lax.Precision:
  """Full precision for float32, which GPUs and TPUs round by default."""
  exact = dtype == jnp.float32
  return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def _contract(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x @ weight.T`, accumulated in int32 for int8 and in float32 otherwise."""
  is_int8 = weight.dtype == jnp.int8
  return lax.dot_general(
    x,
    weight,
    (((1,), (1,)), ((), ())),
    precision=precision(weight.dtype),
    preferred_element_type=jnp.int32 if is_int8 else jnp.float32,
  )


def _contract_padded(num_rows: int, x: jax.Array, weight: jax.Array):
  """The product of a single row, computed as `num_rows` equal rows."""
  return _contract(jnp.broadcast_to(x, (num_rows, x.shape[1])), weight)[:1]


def _rows_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x @ weight.T` for `x` `[rows, in]` and `weight` `[out, in]` of one dtype.

  The padding is chosen when the program is lowered, so one traced program
  serves every platform.
  """
  if x.shape[0] > 1 or weight.dtype == jnp.float32:
    return _contract(x, weight)
  return lax.platform_dependent(
    x,
    weight,
    # bfloat16, 24 products: 187 ms for one row, 12.5 ms for two
    # (docs/cpu.md, AMD EPYC Zen 5); int8 takes the same path.
    cpu=functools.partial(_contract_padded, 2),
    # 8 to 17 times fewer cycles by the estimate of the v5e compiler, not timed:
    # a single row never reaches the matrix unit (docs/accelerators.md).
    tpu=functools.partial(_contract_padded, 8),
    default=_contract,
  )


def int8_matmul(x: jax.Array, weight: Int8Matrix) -> jax.Array:
  """`x @ weight.T` for `x` `[rows, in]` of any float dtype, in float32.

  The sums are exact integers, so a row does not depend on the other rows.
  """
  values, scale = quantize_rows(x.astype(jnp.float32))
  product = _rows_matmul(values, weight.values)
  scales = scale[:, None] * weight.scale[None]
  return product.astype(jnp.float32) * scales


@jax.custom_vjp
def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
  return _rows_matmul(x, weight)


def _linear_fwd(x, weight):
  return _rows_matmul(x, weight), (x, weight)


def _linear_bwd(residuals, grad):
  # The default rule would contract a float32 cotangent with bfloat16 weights,
  # a mixed product that has no fast kernel on any platform.
  x, weight = residuals
  grad = grad.astype(weight.dtype)
  grad_x = jnp.matmul(grad, weight, preferred_element_type=jnp.float32)
  grad_weight = jnp.matmul(grad.T, x, preferred_element_type=jnp.float32)
  return grad_x.astype(x.dtype), grad_weight.astype(weight.dtype)


_linear.defvjp(_linear_fwd, _linear_bwd)


def matmul(x: jax.Array, weight: Matrix) -> jax.Array:
  """`x @ weight.T` over the last axis, in the dtype of the weights.

  Args:
    x: `[..., in]` of any float dtype; rounded to the dtype of the weights.
    weight: `[out, in]`, float32, bfloat16 or another `Matrix`.

  Returns:
    `[..., out]` float32.
  """
  rows = x.reshape(-1, x.shape[-1])
  if isinstance(weight, PackedMatrix):
    out = ops.multiply(rows, weight)
  elif isinstance(weight, Int8Matrix):
    out = int8_matmul(rows, weight)
  else:
    out = _linear(rows.astype(weight.dtype), weight)
  return out.reshape(*x.shape[:-1], weight.shape[0])


def take_rows(weight: Matrix, index: jax.Array) -> jax.Array:
  """Rows `[..., in]` float32 of a matrix `[out, in]`, for `index [...]`."""
  if isinstance(weight, PackedMatrix):
    return ops.take_rows(weight, index)
  if index.size == 1 and not jax.sharding.get_abstract_mesh().empty:
    # The compiler for GPUs makes a slice of the lookup of a single row, for
    # which it gathers a matrix that is divided among devices.
    return lax.platform_dependent(
      weight, index, cuda=_take_row_twice, default=_take_rows
    )
  return _take_rows(weight, index)


def _take_row_twice(weight: Matrix, index: jax.Array) -> jax.Array:
  rows = _take_rows(weight, jnp.broadcast_to(index.ravel(), 2))
  return rows[0].reshape(*index.shape, -1)


def _take_rows(weight: Matrix, index: jax.Array) -> jax.Array:
  if isinstance(weight, Int8Matrix):
    return weight.values[index] * weight.scale[index][..., None]
  take = lambda weight, index: weight[index].astype(jnp.float32)
  if weight.dtype == jnp.float32:
    return take(weight, index)
  # XLA's CPU backend gathers 16-bit floats as float32. In a loop it converts
  # the whole matrix, once, before the loop (933 MB for 151,936 rows of 1,536).
  # A barrier ties the matrix to the index, which changes in the loop, so that
  # rows are converted when they are gathered.
  return lax.platform_dependent(
    weight,
    index,
    cpu=lambda *args: take(*lax.optimization_barrier(args)),
    default=take,
  )
