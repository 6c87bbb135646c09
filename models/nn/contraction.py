"""Products of rows with matrices `[out, in]` of plain numbers, by XLA."""

from collections.abc import Iterator
import contextlib
import contextvars
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp


class Backend(NamedTuple):
  """Kernels or XLA compute a model; by default XLA, on any platform.

  Attributes:
    kernels: whether the kernels of `models/nn/cpu` do.
    gpu: whether a GPU does, where a product may be a call of a library.
  """

  kernels: bool = False
  gpu: bool = False


_XLA = Backend()
_backend = contextvars.ContextVar('backend', default=_XLA)


@contextlib.contextmanager
def in_use(backend: Backend) -> Iterator[None]:
  """A context in which models are traced that this backend computes."""
  before = _backend.set(backend)
  try:
    yield
  finally:
    _backend.reset(before)


def backend() -> Backend:
  """The backend in use."""
  return _backend.get()


def takes_launches(weight: Any) -> bool:
  """Whether it is a matrix of 16-bit floats that a GPU multiplies.

  Libraries then compute bias, activation and residual within its products, if
  these are written in its dtype.
  """
  is_array = isinstance(weight, jax.Array)
  return backend().gpu and is_array and weight.dtype.itemsize == 2


def precision(dtype: jnp.dtype) -> lax.Precision:
  """Full precision for float32, which GPUs and TPUs round by default."""
  exact = dtype == jnp.float32
  return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def _contract(
  x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
  """`x @ weight.T`, accumulated in int32 for int8 and in float32 otherwise.

  `dtype`: the result's; None: the dtype in which it is accumulated.
  """
  is_int8 = weight.dtype == jnp.int8
  inputs = tuple(range(1, x.ndim))
  return lax.dot_general(
    x,
    weight,
    ((inputs, inputs), ((), ())),
    precision=precision(weight.dtype),
    preferred_element_type=dtype or (jnp.int32 if is_int8 else jnp.float32),
  )


def _contract_padded(
  num_rows: int, x: jax.Array, weight: jax.Array
) -> jax.Array:
  """The product of a single row, computed as `num_rows` equal rows."""
  return _contract(jnp.broadcast_to(x, (num_rows, *x.shape[1:])), weight)[:1]


def rows_matmul(
  x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
  """`x @ weight.T` for `x` `[rows, in]` and `weight` `[out, in]` of one dtype.

  Inputs may have several axes.

  The padding is chosen when the program is lowered, so one traced program
  serves every platform.
  """
  if x.shape[0] > 1 or weight.dtype == jnp.float32 or dtype is not None:
    return _contract(x, weight, dtype)
  return lax.platform_dependent(
    x,
    weight,
    # bfloat16, 24 products: 187 ms for one row, 12.5 ms for two
    # (AMD EPYC Zen 5); int8 takes the same path.
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
