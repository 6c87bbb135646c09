"""Qwen3.5: gated delta nets, with gated attention in every fourth layer.

A head has a state S, a matrix that maps keys to values, which decays and is
corrected by every token (Gated DeltaNet, arXiv 2412.06464; transformers,
models/qwen3_5):

    S <- decay S + k delta^T    with delta = strength (v - decay S^T k)
    o  = S^T q, with the new S

In the tree nothing but `S^T k` and `S^T q` is computed from the state of the
parent: `o = decay S^T q + (k q) delta`. A state is made for nodes with children
alone, and the accepted path is folded into S without products.
"""

from collections.abc import Callable
import dataclasses
import functools
import types
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as cache_lib
from specdec import recurrent as recurrent_lib
from specdec.models.nn import contraction
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import mixer
from specdec.models.nn import rope as rope_lib
from specdec.models.nn.cpu import ops

_Arrays = dict[str, jax.Array]  # By the names of what they are.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig(nn_llama.LlamaConfig):
  """Shape of a Qwen3.5; `num_heads` and the like describe its attention."""

  key_heads: int = dataclasses.field()
  value_heads: int = dataclasses.field()  # A multiple of `key_heads`.
  key_width: int = dataclasses.field()
  value_width: int = dataclasses.field()
  conv_size: int = dataclasses.field()  # Positions that a convolution sees.
  # Whether heads of values share heads of keys in turns, as in GGUF files, or
  # side by side.
  tiled: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.value_heads % self.key_heads:
      raise ValueError(
        f'key_heads must divide value_heads {self.value_heads}, got'
        f' {self.key_heads}'
      )
    if self.value_heads == self.key_heads:  # Equal models are equal records.
      self._set('tiled', False)

  @property
  def mixed_width(self) -> int:
    """The width of queries, keys and values of all heads of a delta net."""
    keys = self.key_heads * self.key_width
    return 2 * keys + self.value_heads * self.value_width

  def state_of_layer(self, batch_size: int) -> recurrent_lib.Recurrent:
    shape = (self.value_heads, self.key_width, self.value_width)
    state = {
      'conv': jnp.zeros((batch_size, self.conv_size - 1, self.mixed_width)),
      'matrix': jnp.zeros((batch_size, *shape)),
    }
    widths = {
      'conv': self.mixed_width,
      'key': self.key_heads * self.key_width,
      'delta': self.value_heads * self.value_width,
      'decay': self.value_heads,
    }
    inputs = {
      name: jnp.zeros((batch_size, 1, 0, width))
      for name, width in widths.items()
    }
    mark = jax.tree.map(jnp.zeros_like, state)
    kernels = contraction.backend().kernels
    fold = _fold_by_kernel(self.tiled) if kernels else None
    return recurrent_lib.Recurrent(state, inputs, mark, _rule(self.tiled), fold)


def _of_heads(keys: jax.Array, state: jax.Array, tiled: bool) -> jax.Array:
  """Keys or queries `[..., K]` of all heads as `[H, K]` for each state."""
  heads, width = state.shape[:2]
  rows = keys.reshape(-1, width)
  group = heads // rows.shape[0]
  if tiled:
    return jnp.tile(rows, (group, 1))
  return jnp.repeat(rows, group, axis=0)


def _update(matrix: jax.Array, inputs: _Arrays, tiled: bool) -> jax.Array:
  """The states `[H, K, V]` of one row after a token."""
  key = _of_heads(inputs['key'], matrix, tiled)
  delta = inputs['delta'].reshape(matrix.shape[0], 1, -1)
  decay = inputs['decay'][:, None, None]
  return decay * matrix + key[:, :, None] * delta


@functools.cache
def _rule(tiled: bool) -> recurrent_lib.Step:
  """The step of a layer; cached, so that equal layers are equal."""

  def step(state: _Arrays, inputs: _Arrays) -> _Arrays:
    new_state = {'matrix': _update(state['matrix'], inputs, tiled)}
    if 'conv' in state:
      new_state['conv'] = mixer.shift(state['conv'], inputs['conv'])
    return new_state

  return step


@functools.cache
def _fold_by_kernel(tiled: bool) -> Callable[..., _Arrays]:
  """See `Recurrent.fold_all`; with the kernels of `models/nn/cpu`."""

  def fold(
    state: _Arrays, inputs: _Arrays, slots: jax.Array, count: jax.Array
  ) -> _Arrays:
    return {
      'conv': mixer.fold(state['conv'], inputs['conv'], slots, count),
      'matrix': ops.fold_delta(
        state['matrix'], inputs, slots, count, tiled=tiled
      ),
    }

  return fold


def _unit(heads: jax.Array) -> jax.Array:
  squares = jnp.sum(jnp.square(heads), axis=-1, keepdims=True)
  return heads * jax.lax.rsqrt(squares + 1e-6)


def _visit(
  tiled: bool, state: _Arrays, new: _Arrays
) -> tuple[_Arrays, jax.Array]:
  """Computes what a token adds to its parent's state, and its output."""
  matrix = state['matrix']
  key, query = (
    _of_heads(new[name], matrix, tiled)[:, :, None] for name in ('key', 'query')
  )
  decay, strength = new['decay'][:, None], new['strength'][:, None]
  of_key, of_query = (
    jnp.sum(matrix * vector, axis=1) for vector in (key, query)
  )
  value = new['value'].reshape(of_key.shape)
  delta = strength * (value - decay * of_key)
  out = decay * of_query + jnp.sum(key * query, axis=1) * delta
  added = {'key': new['key'], 'decay': new['decay'], 'delta': delta.reshape(-1)}
  return added, out.reshape(-1)


class DeltaNet(mixer.Mixer):
  """A gated delta net."""

  def __init__(
    self, config: DeltaConfig, layer: int, **new: Unpack[layers.New]
  ):
    self.config = config
    self.layer = layer
    heads, width = config.value_heads, config.value_heads * config.value_width
    make = functools.partial(layers.Linear, use_bias=False, **new)
    self.in_proj_qkv = make(config.width, config.mixed_width)
    self.in_proj_z = make(config.width, width)
    self.in_proj_b = make(config.width, heads)
    self.in_proj_a = make(config.width, heads)
    self.conv1d = mixer.Convolution(
      config.mixed_width, config.conv_size, use_bias=False, rngs=new['rngs']
    )
    self.rate = nnx.Param(-jnp.ones(heads, jnp.float32))
    self.dt_bias = nnx.Param(jnp.ones(heads, jnp.float32))
    self.norm = layers.RMSNorm(config.value_width, config.norm_epsilon)
    stddev = layers.residual_stddev(config.num_layers)
    self.o_proj = make(width, config.width, stddev=stddev)

  @property
  def projections(self) -> list[layers.Linear]:
    return [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]

  def by_kernel(
    self,
    projected: jax.Array,
    layer_state: recurrent_lib.Recurrent,
    tree: tuple[jax.Array, jax.Array],
  ) -> tuple[jax.Array, _Arrays]:
    weight, _ = self.conv1d.operands
    return ops.mix_delta(
      projected,
      layer_state.state,
      layer_state.inputs,
      tree,
      weight,
      (self.rate[...], self.dt_bias[...]),
      self.norm.operand,
      tiled=self.config.tiled,
    )

  def composed(
    self,
    projected: jax.Array,
    layer_state: recurrent_lib.Recurrent,
    sees: jax.Array,
    first: jax.Array,
    write: mixer.Write,
  ) -> tuple[jax.Array, recurrent_lib.Recurrent]:
    config = self.config
    width = config.value_heads * config.value_width
    ends = np.cumsum([config.mixed_width, width, config.value_heads])
    mixed, gate, strength, alpha = jnp.split(projected, ends, axis=-1)
    layer_state = write(layer_state, {'conv': mixed})
    mixed = jax.nn.silu(self.conv1d(mixed, layer_state, sees))
    keys = config.key_heads * config.key_width
    query, key, value = jnp.split(mixed, (keys, 2 * keys), axis=-1)
    split = lambda x: x.reshape(*x.shape[:2], config.key_heads, -1)
    step = jax.nn.softplus(alpha + self.dt_bias[...][None, None])
    new = {
      'query': _unit(split(query)) * config.key_width**-0.5,
      'key': _unit(split(key)).reshape(key.shape),
      'value': value,
      'decay': jnp.exp(self.rate[...][None, None] * step),
      'strength': jax.nn.sigmoid(strength),
    }
    names = ('key', 'delta', 'decay')
    matrix = layer_state.replace(
      state={'matrix': layer_state.state['matrix']},
      inputs={name: layer_state.inputs[name] for name in names},
    )
    visit = functools.partial(_visit, config.tiled)
    added, out = recurrent_lib.walk(matrix, sees, first, new, visit)
    heads = out.reshape(*out.shape[:2], -1, config.value_width)
    out = self.norm(heads).reshape(out.shape) * jax.nn.silu(gate)
    return out, write(layer_state, added)


class GatedAttention(nn_llama.Attention):
  """Attention whose heads are multiplied with gates of their own.

  In its matrix the gate of each head comes after the query.
  """

  def __init__(
    self, config: DeltaConfig, layer: int, **new: Unpack[layers.New]
  ):
    super().__init__(config, layer, **new)
    outputs = 2 * config.num_heads * self.head_width
    self.q_proj = layers.Linear(
      config.width, outputs, use_bias=config.qkv_bias, **new
    )

  def __call__(
    self,
    x: jax.Array,
    norm: layers.Norm | None,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: cache_lib.KVCache | None,
    residual: jax.Array | None,
  ) -> tuple[jax.Array, cache_lib.KVCache | None]:
    linears = (self.q_proj, self.k_proj, self.v_proj)
    projected = layers.project(
      x, [linear.parameters for linear in linears], norm=norm
    )
    heads = projected.reshape(*x.shape[:2], -1, self.head_width)
    both, others = jnp.split(heads, [2 * self.config.num_heads], axis=2)
    query, gate = both[:, :, ::2], both[:, :, 1::2]
    products = [
      part.reshape(*x.shape[:2], -1)
      for part in (query, *jnp.split(others, 2, axis=2))
    ]
    out, cache = self.attend(products, rotation, mask, cache)
    gate = gate.reshape(out.shape)
    kernels = contraction.backend().kernels
    out = ops.gate(out, gate) if kernels else out * jax.nn.sigmoid(gate)
    return self.o_proj(out, residual=residual), cache


class Delta(nn_llama.Llama):
  """Qwen3.5 language model."""

  mixers = types.MappingProxyType(
    {'self_attn': GatedAttention, 'linear_attn': DeltaNet}
  )
