"""Layers with a state in place of attention."""

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
from specdec.models.nn import layers
from specdec.models.nn import rope as rope_lib

Write = Callable[
  [recurrent_lib.Recurrent, Mapping[str, jax.Array]], recurrent_lib.Recurrent
]
"""`(layer, new inputs) -> layer`, see `write_inputs`."""


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


def with_recurrent_layer(
  cache: cache_lib.KVCache | None,
  layer: int,
  layer_state: recurrent_lib.Recurrent,
) -> cache_lib.KVCache | None:
  """The cache with another recurrent layer; None without a cache."""
  if cache is None:
    return None
  return cache.replace(recurrent={**cache.recurrent, layer: layer_state})


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
    kernels = self.o_proj.is_packed
    linears = [linear.parameters for linear in self.projections]
    # On a GPU the input is padded; padded rows are not written.
    num_rows = None if cache is None else cache.num_new
    mask = mask[:, :num_rows]
    projected = layers.project(x, linears, norm=norm)[:, :num_rows]
    empty = self.config.state_of_layer(x.shape[0], kernels=kernels)
    layer_state, sees, first = enter_window(cache, self.layer, mask, empty)
    if kernels:
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
    cache = with_recurrent_layer(cache, self.layer, layer_state)
    more = (0, 0), (0, x.shape[1] - out.shape[1]), (0, 0)
    out = jnp.pad(out, more)
    return self.o_proj(out, residual=residual), cache
