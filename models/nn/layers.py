"""Layers and checks that all model families share."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from models.nn import matrices as matrices_lib
from models.nn.cpu import ops

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


def check_config(config: Any) -> None:
  """Checks what the configurations of all families have in common.

  Raises:
    ValueError: a field without a default (a size) is below 1, or the activation
      is not a key of `ACTIVATIONS`.
  """
  for field in dataclasses.fields(config):
    required = field.default is field.default_factory is dataclasses.MISSING
    value = getattr(config, field.name)
    if required and value < 1:
      raise ValueError(f'{field.name} must be positive, got {value}')
  if config.activation not in ACTIVATIONS:
    raise ValueError(
      f'activation {config.activation!r} is not known; choose from'
      f' {sorted(ACTIVATIONS)}'
    )


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
  """Values squeezed to between -cap and cap (arXiv 2408.00118, section 2)."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def residual_stddev(num_layers: int) -> float:
  """Initial deviation of weights that write to the residual stream (GPT-2)."""
  return 0.02 / math.sqrt(2 * num_layers)


class Linear(nnx.Module):
  """Linear map with its weight `[out, in]` (see `models.nn.matrices`)."""

  def __init__(
    self, features_in, features_out, *, stddev=0.02, dtype, rngs, use_bias=True
  ):
    init = jax.nn.initializers.normal(stddev)
    self.weight = nnx.Param(
      init(rngs.params(), (features_out, features_in), dtype)
    )
    self.bias = nnx.Param(jnp.zeros(features_out, dtype)) if use_bias else None

  @property
  def is_packed(self) -> bool:
    """Whether the weight is packed for the kernels of `models.nn.cpu`."""
    return matrices_lib.uses_kernels(self.weight.get_value())

  def __call__(self, x: jax.Array) -> jax.Array:
    out = matrices_lib.matmul(x, self.weight.get_value())
    if self.bias is None:
      return out
    bias = self.bias[...].astype(jnp.float32)
    return out + jnp.expand_dims(bias, range(x.ndim - 1))


class LayerNorm(nnx.LayerNorm):
  """Layer norm (arXiv 1607.06450) over the last axis, in float32."""

  def __init__(self, width: int, epsilon: float, *, rngs: nnx.Rngs):
    # A difference of squares, which is fast, would cancel.
    super().__init__(width, epsilon=epsilon, use_fast_variance=False, rngs=rngs)

  def normalize(self, x: jax.Array, *, kernels: bool) -> jax.Array:
    """Normalizes `[..., width]`, with the kernels of `models.nn.cpu` or not."""
    if not kernels:
      return self(x)
    assert self.scale is not None
    assert self.bias is not None
    scale, bias = self.scale[...], self.bias[...]
    out = ops.normalize(x, scale, epsilon=self.epsilon, center=True)
    return out + jnp.expand_dims(bias, range(x.ndim - 1))


class RMSNorm(nnx.Module):
  """Root mean square norm (arXiv 1910.07467) over the last axis, in float32."""

  def __init__(self, width: int, epsilon: float):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(width, jnp.float32))

  def normalize(self, x: jax.Array, *, kernels: bool) -> jax.Array:
    """Normalizes `[..., width]`, with the kernels of `models.nn.cpu` or not."""
    scale = self.scale[...]
    if kernels:
      return ops.normalize(x, scale, epsilon=self.epsilon, center=False)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    normalized = x * lax.rsqrt(mean_square + self.epsilon)
    return normalized * jnp.expand_dims(scale, range(x.ndim - 1))
