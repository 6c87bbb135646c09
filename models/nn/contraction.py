"""Products of rows with matrices `[out, in]` of plain numbers, by XLA."""

import functools

import jax
from jax import lax
import jax.numpy as jnp


def precision(dtype: jnp.dtype) -> lax.Precision:
  """Full precision for float32, which GPUs and TPUs round by default."""
  exact = dtype == jnp.float32
  return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def _contract(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x @ weight.T`, accumulated in int32 for int8 and in float32 otherwise."""
  is_int8 = weight.dtype == jnp.int8
  inputs = tuple(range(1, x.ndim))
  return lax.dot_general(
    x,
    weight,
    ((inputs, inputs), ((), ())),
    precision=precision(weight.dtype),
    preferred_element_type=jnp.int32 if is_int8 else jnp.float32,
  )


def _contract_padded(
  num_rows: int, x: jax.Array, weight: jax.Array
) -> jax.Array:
  """The product of a single row, computed as `num_rows` equal rows."""
  return _contract(jnp.broadcast_to(x, (num_rows, *x.shape[1:])), weight)[:1]


def rows_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x @ weight.T` for `x` `[rows, in]` and `weight` `[out, in]` of one dtype.

  Inputs may have several axes.

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


_Operands = tuple[jax.Array, jax.Array]


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x @ weight.T`, `[n, out]` float32, of floats of one dtype."""
  return rows_matmul(x, weight)


def _linear_fwd(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, _Operands]:
  return rows_matmul(x, weight), (x, weight)


def _linear_bwd(residuals: _Operands, grad: jax.Array) -> _Operands:
  # The default rule would contract a float32 cotangent with bfloat16 weights,
  # a mixed product that has no fast kernel on any platform.
  x, weight = residuals
  grad = grad.astype(weight.dtype)
  grad_x = jnp.matmul(grad, weight, preferred_element_type=jnp.float32)
  grad_weight = jnp.matmul(grad.T, x, preferred_element_type=jnp.float32)
  return grad_x.astype(x.dtype), grad_weight.astype(weight.dtype)


linear.defvjp(_linear_fwd, _linear_bwd)
