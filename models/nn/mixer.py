"""Layers with a state in place of attention."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from models.nn import layers
from models.nn import rope as rope_lib
from specdec import cache as cache_lib
from specdec import cached_states as states_lib
from specdec import recurrent as recurrent_lib

Write = Callable[
  [recurrent_lib.Recurrent, Mapping[str, jax.Array]], recurrent_lib.Recurrent
]
"""`(layer, new inputs) -> layer`, see `cached_states.write_inputs`."""


class Mixer(nnx.Module):
  """Called as `models.nn.grouped_query.Attention`; positions are not used."""

  config: Any  # A `LlamaConfig` that has `state_of_layer`.
  layer: int
  o_proj: layers.Linear  # The product behind it.

  @property
  def projections(self) -> Sequence[layers.Linear]:
    """The products of its input, beside one another."""
    raise NotImplementedError

  def by_kernel(
    self,
    projected: jax.Array,
    one: recurrent_lib.Recurrent,
    tree: tuple[jax.Array, jax.Array],
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The result `[B, L, ...]` and the window, by those of `models.nn.cpu`.

    `tree` has the parents `[B, T]` and the first slots `[B]` of the nodes.
    """
    raise NotImplementedError

  def composed(
    self,
    projected: jax.Array,
    one: recurrent_lib.Recurrent,
    sees: jax.Array,
    first: jax.Array,
    write: Write,
  ) -> tuple[jax.Array, recurrent_lib.Recurrent]:
    """The result `[B, L, ...]` and the layer with the nodes.

    `sees` and `first` are those of `cached_states.enter_window`.
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
    # On a GPU there are more rows, of which nothing is written.
    number = None if cache is None else cache.num_new
    mask = mask[:, :number]
    projected = layers.project(x, linears, norm=norm)[:, :number]
    empty = self.config.state_of_layer(x.shape[0], kernels=kernels)
    one, sees, first = states_lib.enter_window(cache, self.layer, mask, empty)
    if kernels:
      tree = recurrent_lib.parents(sees), first
      out, inputs = self.by_kernel(projected, one, tree)
      one = one.replace(inputs=inputs)
    else:
      write = lambda one, new: states_lib.write_inputs(cache, one, new, first)
      out, one = self.composed(projected, one, sees, first, write)
    cache = states_lib.with_recurrent_layer(cache, self.layer, one)
    more = (0, 0), (0, x.shape[1] - out.shape[1]), (0, 0)
    out = jnp.pad(out, more)
    out = layers.project(out, [self.o_proj.parameters], residual=residual)
    return out, cache
