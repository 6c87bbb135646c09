"""Layers and checks that all model families share."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import TypedDict

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from specdec.models.nn import contraction
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn.cpu import ops

_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
_TANH = ('new', 'fast', 'accurate', 'pytorch_tanh', 'python_tanh')

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'gelu_python': functools.partial(jax.nn.gelu, approximate=False),
  **{f'gelu_{name}': _gelu_tanh for name in _TANH},
  'quick_gelu': lambda x: x * jax.nn.sigmoid(1.702 * x),
  'relu': jax.nn.relu,
  'relu2': lambda x: jnp.square(jax.nn.relu(x)),
  'relu6': jax.nn.relu6,
  'silu': jax.nn.silu,
  'swish': jax.nn.silu,
  'sigmoid': jax.nn.sigmoid,
  'tanh': jnp.tanh,
  'mish': jax.nn.mish,
  'leaky_relu': jax.nn.leaky_relu,
  'linear': lambda x: x,
}


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """The gate of gpt-oss (arXiv 2508.10925, section 2.2)."""
  gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
  return ACTIVATIONS['quick_gelu'](gate) * (up + 1.0)


# Activations of two arguments, which exist with a gate only.
_GATES = {'clamped_swiglu': _clamped_swiglu}

# The names by which `ops.multiply` knows activations.
_KERNEL_NAMES = {
  **dict.fromkeys((f'gelu_{name}' for name in _TANH), 'gelu_tanh'),
  **{name: name for name in ops.ACTIVATIONS},
  'swish': 'silu',
  'linear': None,
}


def check_config(config: Any) -> None:
  """Checks what the configurations of all families have in common.

  Raises:
    ValueError: a field without a default (a size) is below 1, or the activation
      is not a key of `ACTIVATIONS`.
  """
  for field in dataclasses.fields(config):
    required = field.default is field.default_factory is dataclasses.MISSING
    value = getattr(config, field.name)
    if required and min(value if isinstance(value, tuple) else (value,)) < 1:
      raise ValueError(f'{field.name} must be positive, got {value}')
  if config.activation not in ACTIVATIONS:
    raise ValueError(
      f'activation {config.activation!r} is not known; choose from'
      f' {sorted(ACTIVATIONS)}'
    )


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
  """Values squeezed to between -cap and cap (arXiv 2408.00118, section 2).

  Minus infinity stays: it is of an output that is not computed.
  """
  if cap is None:
    return x
  return jnp.where(x == -jnp.inf, x, cap * jnp.tanh(x / cap))


def residual_stddev(num_layers: int) -> float:
  """Initial deviation of weights that write to the residual stream (GPT-2)."""
  return 0.02 / math.sqrt(2 * num_layers)


# A weight `[out, in]`, and a bias `[out]` or None.
Parameters = tuple[matrices_lib.Weight, jax.Array | None]


class New(TypedDict):
  """How the parameters of a module are made.

  Attributes:
    dtype: of the matrices.
    rngs: random streams of the initial weights.
  """

  dtype: jax.typing.DTypeLike
  rngs: nnx.Rngs


class Linear(nnx.Module):
  """Linear map with its weight `[out, in]` (see `models/nn/matrices`)."""

  def __init__(
    self,
    features_in: int,
    features_out: int,
    *,
    stddev: float = 0.02,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
    use_bias: bool = True,
  ):
    init = jax.nn.initializers.normal(stddev)
    self.weight = nnx.Param(
      init(rngs.params(), (features_out, features_in), dtype)
    )
    self.bias = nnx.Param(jnp.zeros(features_out, dtype)) if use_bias else None

  @property
  def parameters(self) -> Parameters:
    """Weight and bias, for `project`."""
    bias = None if self.bias is None else self.bias[...]
    return self.weight.get_value(), bias

  def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
    """See `project`, also for the options."""
    return project(x, [self.parameters], **options)


def _variance(x: jax.Array, mean: jax.Array) -> jax.Array:
  """Variance `[..., 1]` of `x [..., width]`, which has this mean `[..., 1]`."""
  return jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)


def _variance_by_origin(x: jax.Array, mean: jax.Array) -> jax.Array:
  """`_variance` without waiting for the mean.

  XLA then computes both sums in one kernel on a GPU. The difference of squares
  is taken relative to the first entry, so cancellation costs at most a factor
  of the width in precision, however large the mean is.
  """
  origin = x[..., :1]
  mean_square = jnp.mean(jnp.square(x - origin), axis=-1, keepdims=True)
  return jnp.maximum(mean_square - jnp.square(mean - origin), 0.0)


class LayerNorm(nnx.Module):
  """Layer norm (arXiv 1607.06450) over the last axis, in float32."""

  def __init__(self, width: int, epsilon: float):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(width, jnp.float32))
    self.bias = nnx.Param(jnp.zeros(width, jnp.float32))

  @property
  def operand(self) -> ops.Norm:
    """The norm for the kernels of `models/nn/cpu`."""
    return ops.Norm(self.scale[...], self.bias[...], self.epsilon, center=True)

  def __call__(self, x: jax.Array) -> jax.Array:
    if contraction.backend().kernels:
      return ops.normalize(x, self.operand)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    if x.size == x.shape[-1]:
      variance = lax.platform_dependent(
        x, mean, cuda=_variance_by_origin, default=_variance
      )
    else:  # XLA computes the norm of several rows in one kernel.
      variance = _variance(x, mean)
    scale, bias = (
      jnp.expand_dims(vector[...], range(x.ndim - 1))
      for vector in (self.scale, self.bias)
    )
    factor = lax.rsqrt(variance + self.epsilon) * scale
    return (x - mean) * factor + bias


class RMSNorm(nnx.Module):
  """Root mean square norm (arXiv 1910.07467) over the last axis, in float32."""

  def __init__(self, width: int, epsilon: float, *, has_scale: bool = True):
    self.width = width
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(width, jnp.float32)) if has_scale else None

  @property
  def operand(self) -> ops.Norm:
    """The norm for the kernels of `models/nn/cpu`."""
    ones = jnp.ones(self.width, jnp.float32)
    scale = ones if self.scale is None else self.scale[...]
    return ops.Norm(scale, None, self.epsilon, center=False)

  def __call__(self, x: jax.Array) -> jax.Array:
    if contraction.backend().kernels:
      return ops.normalize(x, self.operand)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    normalized = x * lax.rsqrt(mean_square + self.epsilon)
    if self.scale is None:
      return normalized
    return normalized * jnp.expand_dims(self.scale[...], range(x.ndim - 1))


Norm = LayerNorm | RMSNorm


def _product(x: jax.Array, linear: Parameters) -> jax.Array:
  weight, bias = linear
  out = matrices_lib.matmul(x, weight)
  if bias is None:
    return out
  return out + jnp.expand_dims(bias.astype(jnp.float32), range(x.ndim - 1))


def _project_for_gpu(
  rows: jax.Array,
  linears: Sequence[Parameters],
  activation: str,
  gated: bool,
  residual: jax.Array | None,
) -> jax.Array:
  """`project` of normalised rows, as one call of a library for each product.

  Such a call also adds a bias, applies an activation and adds the residual if
  all are in the dtype of its result. The result has the dtype of the weights
  unless it is added to the residual stream. It computes them in float32.
  """
  results = []
  for weight, bias in linears:
    assert isinstance(weight, jax.Array)
    dtype = weight.dtype if residual is None else jnp.dtype('float32')
    flat = rows.reshape(-1, rows.shape[-1]).astype(weight.dtype)
    out = contraction.rows_matmul(flat, weight, dtype)
    if bias is not None:
      out += bias.astype(out.dtype)[None]
    if residual is not None:
      out += residual.reshape(out.shape)
    results.append(out)
  function = ACTIVATIONS[activation]
  if gated:
    out = function(results[0].astype(jnp.float32)) * results[1]
  else:
    out = function(jnp.concatenate(results, axis=-1))
  return out.astype(jnp.float32).reshape(*rows.shape[:-1], -1)


def projections(
  x: jax.Array, linears: Sequence[Linear], norm: Norm | None
) -> list[jax.Array]:
  """Linear maps of normalised rows, in one array if that is one call."""
  parameters = [linear.parameters for linear in linears]
  if matrices_lib.are_one_call([matrix for matrix, _ in parameters]):
    return [project(x, parameters, norm=norm)]
  rows = norm(x) if norm else x
  return [linear(rows) for linear in linears]


def project(
  x: jax.Array,
  linears: Sequence[Parameters],
  *,
  norm: Norm | None = None,
  activation: str = 'linear',
  gated: bool = False,
  residual: jax.Array | None = None,
) -> jax.Array:
  """Linear maps of rows, the norm before them and what follows them.

  With the kernels of `models/nn/cpu`, all of it is one call, unless the
  matrices are of several formats or the kernels do not have the activation.

  Args:
    x: `[..., in]` float32.
    linears: of `in` inputs each, all or none of them packed.
    norm: of the rows before.
    activation: of the results, a key of `ACTIVATIONS`, or `clamped_swiglu` if
      gated.
    gated: whether the result is the activation of the first of two times the
      second one.
    residual: `[..., out]` float32 that is added in the end.

  Returns:
    `[..., out]` float32, the results of all maps next to one another.
  """
  matrices = [matrix for matrix, _ in linears]
  if matrices_lib.are_one_call(matrices) and activation in _KERNEL_NAMES:
    return matrices_lib.multiply_packed(
      x,
      *zip(*linears, strict=True),
      norm=norm and norm.operand,
      activation=_KERNEL_NAMES[activation],
      gated=gated,
      residual=residual,
    )
  rows = norm(x) if norm else x
  if all(map(contraction.takes_launches, matrices)):
    return _project_for_gpu(rows, linears, activation, gated, residual)
  results = [_product(rows, linear) for linear in linears]
  if activation in _GATES:
    out = _GATES[activation](*results)
  elif gated:
    out = ACTIVATIONS[activation](results[0]) * results[1]
  else:
    out = ACTIVATIONS[activation](jnp.concatenate(results, axis=-1))
  return out if residual is None else residual + out
