"""LFM2: short convolutions, with attention in some of the layers.

A convolution sees the inputs of three positions, so its state is two vectors
(github.com/huggingface/transformers, models/lfm2). All else is a Llama.
"""

import dataclasses
import functools
import types
from typing import Unpack

import jax
import jax.numpy as jnp

from specdec import recurrent as recurrent_lib
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import mixer
from specdec.models.nn.cpu import ops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(nn_llama.LlamaConfig):
  """Shape of an LFM2."""

  conv_size: int = 3  # Positions that a convolution sees.
  conv_bias: bool = False  # Also of the projections around it.

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.conv_size < 1:
      raise ValueError(f'conv_size must be positive, got {self.conv_size}')

  def state_of_layer(self, batch_size: int) -> recurrent_lib.Recurrent:
    state = {'conv': jnp.zeros((batch_size, self.conv_size - 1, self.width))}
    inputs = {'conv': jnp.zeros((batch_size, 1, 0, self.width))}
    mark = jax.tree.map(jnp.zeros_like, state)
    return recurrent_lib.Recurrent(state, inputs, mark, _step, _fold)


def _step(
  state: dict[str, jax.Array], inputs: dict[str, jax.Array]
) -> dict[str, jax.Array]:
  return {'conv': mixer.shift(state['conv'], inputs['conv'])}


def _fold(
  state: dict[str, jax.Array],
  inputs: dict[str, jax.Array],
  slots: jax.Array,
  count: jax.Array,
) -> dict[str, jax.Array]:
  return {'conv': mixer.fold(state['conv'], inputs['conv'], slots, count)}


class ShortConv(mixer.Mixer):
  """A gated short mixer."""

  def __init__(self, config: Lfm2Config, layer: int, **new: Unpack[layers.New]):
    self.config = config
    self.layer = layer
    width, bias = config.width, config.conv_bias
    make = functools.partial(layers.Linear, width, use_bias=bias, **new)
    self.in_proj = make(3 * width)
    self.conv = mixer.Convolution(
      width, config.conv_size, use_bias=bias, rngs=new['rngs']
    )
    self.o_proj = make(width, stddev=layers.residual_stddev(config.num_layers))

  @property
  def projections(self) -> list[layers.Linear]:
    return [self.in_proj]

  def by_kernel(
    self,
    projected: jax.Array,
    layer_state: recurrent_lib.Recurrent,
    tree: tuple[jax.Array, jax.Array],
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    out, window = ops.mix_convolution(
      projected,
      layer_state.state['conv'],
      layer_state.inputs['conv'],
      tree,
      *self.conv.operands,
    )
    return out, {'conv': window}

  def composed(
    self,
    projected: jax.Array,
    layer_state: recurrent_lib.Recurrent,
    sees: jax.Array,
    first: jax.Array,
    write: mixer.Write,
  ) -> tuple[jax.Array, recurrent_lib.Recurrent]:
    del first
    gate, out_gate, values = jnp.split(projected, 3, axis=-1)
    gated = gate * values
    layer_state = write(layer_state, {'conv': gated})
    return out_gate * self.conv(gated, layer_state, sees), layer_state


class Lfm2(nn_llama.Llama):
  """LFM2 language model."""

  mixers = types.MappingProxyType(
    {'self_attn': nn_llama.Attention, 'conv': ShortConv}
  )
