"""Causal convolutions over a few positions, each channel by itself.

The last position of a convolution is a node of the tree or a token of the text;
those before it are its parent, the parent of that, and so on, wherever they
lie.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import recurrent as recurrent_lib


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
  known = jnp.concatenate([state, window[:, 0]], axis=1)
  places = jnp.broadcast_to(jnp.arange(size)[None], (len(state), size))
  places = jnp.concatenate([places, size + slots], axis=1)
  last = count[:, None] + jnp.arange(size)[None]
  kept = jnp.take_along_axis(places, last, axis=1)
  return jnp.take_along_axis(known, kept[:, :, None], axis=1)


class Convolution(nnx.Module):
  """A depthwise convolution, in float32."""

  def __init__(self, width: int, size: int, *, use_bias: bool, rngs: nnx.Rngs):
    init = jax.nn.initializers.normal(size**-0.5)
    self.weight = nnx.Param(init(rngs.params(), (width, 1, size), jnp.float32))
    self.bias = nnx.Param(jnp.zeros(width, jnp.float32)) if use_bias else None

  @property
  def operands(self) -> tuple[jax.Array, jax.Array | None]:
    """Weights `[size, width]`, the farthest first, and the bias or None."""
    bias = None if self.bias is None else self.bias[...]
    return self.weight[:, 0].T, bias

  def __call__(
    self,
    x: jax.Array,
    one: recurrent_lib.Recurrent,
    sees: jax.Array,
  ) -> jax.Array:
    """The convolution at every node, `[B, L, width]` float32.

    Args:
      x: `[B, L, width]` float32, its inputs at the nodes.
      one: a layer whose `state` and `inputs` have those before, as `conv`.
      sees: `[B, L, T]` bool, see `specdec.recurrent.ancestor`.
    """
    state, window = one.state['conv'], one.inputs['conv']
    places = recurrent_lib.places_before(sees, state.shape[1])
    weight, bias = self.operands
    known = jnp.concatenate([state, window[:, 0]], axis=1)
    out = jnp.zeros_like(x)
    for place in range(state.shape[1])[::-1]:
      values = jnp.take_along_axis(known, places[:, :, place, None], axis=1)
      out += values * weight[state.shape[1] - 1 - place][None, None]
    out += x * weight[-1][None, None]
    return out if bias is None else out + bias[None, None]
