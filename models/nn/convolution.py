"""Causal convolutions over a few positions, each channel by itself.

The last position of a `Convolution` is a node of the tree or a token of the
text. The positions before it are its parent, its grandparent, and so on, in
whatever slots.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import recurrent as recurrent_lib
from specdec.models.nn import layers


def shift(state: jax.Array, new: jax.Array) -> jax.Array:
  """The last n inputs `[n, width]` after one more, `[width]`."""
  return jnp.concatenate([state, new[None]])[1:]


def fold(
  state: jax.Array, window: jax.Array, slots: jax.Array, count: jax.Array
) -> jax.Array:
  """`shift` for the first `count [B]` of `slots [B, m]` of a window.

  Args:
    state: `[B, n, width]`.
    window: `[B, 1, T, width]`.
    slots: see above.
    count: see above.
  """
  size = state.shape[1]
  inputs = jnp.concatenate([state, window[:, 0]], axis=1)
  places = jnp.broadcast_to(jnp.arange(size)[None], (len(state), size))
  places = jnp.concatenate([places, size + slots], axis=1)
  last = count[:, None] + jnp.arange(size)[None]
  kept = jnp.take_along_axis(places, last, axis=1)
  return jnp.take_along_axis(inputs, kept[:, :, None], axis=1)


class Convolution(nnx.Module):
  """A depthwise convolution, in float32."""

  def __init__(self, width: int, size: int, *, use_bias: bool, rngs: nnx.Rngs):
    init = jax.nn.initializers.normal(size**-0.5)
    # As the kernels read it; checkpoints store `[width, 1, size]`.
    self.weight = nnx.Param(init(rngs.params(), (size, 1, width), jnp.float32))
    self.bias = nnx.Param(jnp.zeros(width, jnp.float32)) if use_bias else None

  @property
  def operands(self) -> tuple[jax.Array, jax.Array | None]:
    """Weights `[size, width]`, the farthest first, and the bias or None."""
    bias = None if self.bias is None else self.bias[...]
    return self.weight[:, 0], bias

  def __call__(
    self,
    x: jax.Array,
    layer_state: recurrent_lib.Recurrent,
    sees: jax.Array,
  ) -> jax.Array:
    """The convolution at every node, `[B, L, width]` float32.

    Args:
      x: `[B, L, width]` float32, its inputs at the nodes.
      layer_state: its `state` and `inputs` have the inputs before, as `conv`.
      sees: `[B, L, T]` bool, see `specdec.recurrent.ancestor`.
    """
    state, window = layer_state.state['conv'], layer_state.inputs['conv']
    places = recurrent_lib.places_before(sees, state.shape[1])
    weight, bias = self.operands
    inputs = jnp.concatenate([state, window[:, 0]], axis=1)
    out = jnp.zeros_like(x)
    for place in range(state.shape[1])[::-1]:
      values = jnp.take_along_axis(inputs, places[:, :, place, None], axis=1)
      out += values * weight[state.shape[1] - 1 - place][None, None]
    out += x * weight[-1][None, None]
    return out if bias is None else out + bias[None, None]


class BlockConvolution(nnx.Module):
  """Two causal convolutions within blocks, before and after a layer's part.

  Each tap of a channel is a constant plus a number of the row, shared by a
  group of channels. The numbers of both follow from the part's input.
  """

  def __init__(
    self,
    width: int,
    block_size: int,
    size: int,
    group: int,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.block_size = block_size
    self.shape = (2, size, width // group)
    start = jnp.zeros((2, size, width)).at[:, 0].set(1.0)
    self.base_kernel = nnx.Param(start)
    outputs = 2 * size * self.shape[2]
    self.kernel_projection = layers.Linear(
      width, outputs, dtype=dtype, rngs=rngs, use_bias=False
    )

  def before(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The input `[B, L, H]` of the part, and what `after` takes."""
    dynamic = self.kernel_projection(rows)
    dynamic = dynamic.reshape(*rows.shape[:2], *self.shape)
    return self._apply(0, rows, dynamic), dynamic

  def after(self, rows: jax.Array, dynamic: jax.Array) -> jax.Array:
    """The output `[B, L, H]` of the part, convolved."""
    return self._apply(1, rows, dynamic)

  def _apply(
    self, place: int, rows: jax.Array, dynamic: jax.Array
  ) -> jax.Array:
    _, size, groups = self.shape
    batch, length, width = rows.shape
    channels = (batch, -1, self.block_size, groups, width // groups)
    blocks = rows.reshape(channels)
    dynamic = dynamic[:, :, place].reshape(*channels[:3], size, groups, 1)
    base = self.base_kernel[...][place].reshape(1, 1, 1, size, *channels[3:])
    out = jnp.zeros_like(blocks)
    for tap in range(size):
      shifted = jnp.pad(blocks, ((0, 0), (0, 0), (tap, 0), (0, 0), (0, 0)))
      factor = base[:, :, :, tap] + dynamic[:, :, :, tap]
      out += factor * shifted[:, :, : self.block_size]
    return out.reshape(batch, length, width)
