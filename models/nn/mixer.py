"""Layers with a state in place of attention, and their convolutions."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import recurrent as recurrent_lib
from specdec.models.nn import contraction
from specdec.models.nn import layers
from specdec.models.nn import rope as rope_lib

Write = Callable[
  [recurrent_lib.Recurrent, Mapping[str, jax.Array]], recurrent_lib.Recurrent
]
"""`(layer, new inputs) -> layer`, see `write_inputs`."""


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
  """A causal depthwise convolution over a few positions, in float32.

  The last position is a node of the tree or a token of the text. The positions
  before it are its parent, its grandparent, and so on, in whatever slots.
  """

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


def enter_window(
  cache: cache_lib.KVCache | None,
  layer: int,
  mask: jax.Array,
  empty: recurrent_lib.Recurrent,
) -> tuple[recurrent_lib.Recurrent, jax.Array, jax.Array]:
  """A recurrent layer at the beginning of a forward over L tokens.

  Args:
    cache: the cache; without one (training), the L tokens are the whole text.
    layer: a key of `KVCache.recurrent`.
    mask: `[B, L, S]` bool over the slots of the cache, `[B, L, L]` without one.
    empty: the layer before any token, used without a cache.

  Returns:
    The layer, `[B, L, T]` bool, the slots of the window that each token sees,
    and `[B]` int32, the slot of the first one. A forward of T tokens or more
    has a window of its own.
  """
  layer_state = empty if cache is None else cache.recurrent[layer]
  if mask.shape[1] >= layer_state.num_slots:
    layer_state = layer_state.with_window(mask.shape[1])
  if cache is None:
    return layer_state, mask, jnp.zeros(mask.shape[0], jnp.int32)
  window = lambda row, at: lax.dynamic_slice_in_dim(
    row, at, layer_state.num_slots, axis=1
  )
  sees = jax.vmap(window)(mask, cache.length)
  return layer_state, sees, cache.write_at - cache.length


def write_inputs(
  cache: cache_lib.KVCache | None,
  layer_state: recurrent_lib.Recurrent,
  new: Mapping[str, jax.Array],
  first: jax.Array,
) -> recurrent_lib.Recurrent:
  """Writes inputs `[B, L, width]` to the window, from slots `first [B]` on.

  NaN and inf are written as zeros. Other inputs stay as they are.
  """
  inputs = dict(layer_state.inputs)
  for name, array in new.items():
    array = cache_lib.finite(array)[:, None]
    if array.shape[2] < layer_state.num_slots:
      assert cache is not None
      array = cache.ops.write(inputs[name], array, first)
    inputs[name] = array
  return layer_state.replace(inputs=inputs)


class Mixer(nnx.Module):
  """Called as `llama.Attention`; positions are not used."""

  config: Any  # A `LlamaConfig` that has `state_of_layer`.
  layer: int
  o_proj: layers.Linear  # The product after it.

  @property
  def projections(self) -> Sequence[layers.Linear]:
    """The products of its input, next to one another."""
    raise NotImplementedError

  def by_kernel(
    self,
    projected: jax.Array,
    layer_state: recurrent_lib.Recurrent,
    tree: tuple[jax.Array, jax.Array],
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The result `[B, L, ...]` and the window, by kernels of `models/nn/cpu`.

    `tree` has the parents `[B, T]` and the first slots `[B]` of the nodes.
    """
    raise NotImplementedError

  def composed(
    self,
    projected: jax.Array,
    layer_state: recurrent_lib.Recurrent,
    sees: jax.Array,
    first: jax.Array,
    write: Write,
  ) -> tuple[jax.Array, recurrent_lib.Recurrent]:
    """The result `[B, L, ...]` and the layer with the nodes.

    For `sees` and `first` see `enter_window`.
    """
    raise NotImplementedError

  def __call__(
    self,
    x: jax.Array,
    norm: layers.Norm | None,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: cache_lib.KVCache | None,
    residual: jax.Array | None,
  ) -> tuple[jax.Array, cache_lib.KVCache | None]:
    del rotation
    linears = [linear.parameters for linear in self.projections]
    # On a GPU the input is padded; padded rows are not written.
    num_rows = None if cache is None else cache.num_new
    mask = mask[:, :num_rows]
    projected = layers.project(x, linears, norm=norm)[:, :num_rows]
    empty = self.config.state_of_layer(x.shape[0])
    layer_state, sees, first = enter_window(cache, self.layer, mask, empty)
    if contraction.backend().kernels:
      tree = recurrent_lib.parents(sees), first
      out, inputs = self.by_kernel(projected, layer_state, tree)
      layer_state = layer_state.replace(inputs=inputs)
    else:
      write = lambda layer_state, new: write_inputs(
        cache, layer_state, new, first
      )
      out, layer_state = self.composed(
        projected, layer_state, sees, first, write
      )
    if cache is not None:
      layer_states = {**cache.recurrent, self.layer: layer_state}
      cache = cache.replace(recurrent=layer_states)
    out = jnp.pad(out, ((0, 0), (0, x.shape[1] - out.shape[1]), (0, 0)))
    return self.o_proj(out, residual=residual), cache
