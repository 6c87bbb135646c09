"""What the layers of all model families are made of."""

from collections.abc import Callable
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from models.nn.matmul import matmul

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'gelu_python': functools.partial(jax.nn.gelu, approximate=False),
  'gelu_new': functools.partial(jax.nn.gelu, approximate=True),
  'gelu_fast': functools.partial(jax.nn.gelu, approximate=True),
  'gelu_accurate': functools.partial(jax.nn.gelu, approximate=True),
  'gelu_pytorch_tanh': functools.partial(jax.nn.gelu, approximate=True),
  'gelu_python_tanh': functools.partial(jax.nn.gelu, approximate=True),
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


class Linear(nnx.Module):
  """A linear map with its weight stored `[out, in]` (see `models.matmul`)."""

  def __init__(
    self, features_in, features_out, *, stddev, dtype, rngs, use_bias=True
  ):
    init = jax.nn.initializers.normal(stddev)
    self.weight = nnx.Param(
      init(rngs.params(), (features_out, features_in), dtype)
    )
    self.bias = nnx.Param(jnp.zeros(features_out, dtype)) if use_bias else None

  def __call__(self, x: jax.Array) -> jax.Array:
    out = matmul(x, self.weight.get_value())
    if self.bias is None:
      return out
    bias = self.bias[...].astype(jnp.float32)
    return out + jnp.expand_dims(bias, range(x.ndim - 1))
