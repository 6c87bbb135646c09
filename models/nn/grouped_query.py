"""Grouped-query self-attention of Llama and related models."""

from collections.abc import Sequence
import functools
import math
from typing import cast
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.models.nn import attention
from specdec.models.nn import layers
from specdec.models.nn import llama_config
from specdec.models.nn import rope as rope_lib
from specdec.models.nn.cpu import ops

_Cache = cache_lib.KVCache | None


class Attention(nnx.Module):
  """Grouped-query self-attention of one block."""

  def __init__(
    self,
    config: llama_config.LlamaConfig,
    layer: int,
    *,
    input_width: int | None = None,  # None: the residual stream's.
    **new: Unpack[layers.New],
  ):
    self.config = config
    source = config.of_layers('kv_source')[layer]
    self.writes = source is None
    # Counted among the layers that have keys and values.
    self.layer = config.attention_layers.index(layer if self.writes else source)
    self.dtype = new['dtype']
    self.head_width = config.of_layers('head_width')[layer]
    self.scale = config.attention_scale or 1 / math.sqrt(self.head_width)
    make = functools.partial(layers.Linear, **new)
    width = input_width or config.width
    make_head = functools.partial(make, width, use_bias=config.qkv_bias)
    self.q_proj = make_head(config.num_heads * self.head_width)
    if self.writes:
      self.k_proj = make_head(config.num_kv_heads * self.head_width)
      self.v_proj = make_head(config.num_kv_heads * self.head_width)
    self.o_proj = make(
      config.num_heads * self.head_width,
      config.width,
      stddev=layers.residual_stddev(config.num_layers),
      use_bias=config.output_bias,
    )
    if config.sinks:
      self.sinks = nnx.Param(jnp.zeros(config.num_heads, jnp.float32))
    if config.qk_norm:
      make_norm = functools.partial(layers.RMSNorm, epsilon=config.norm_epsilon)
      joint = config.joint_qk_norm
      self.q_norm = make_norm(
        self.head_width * (config.num_heads if joint else 1)
      )
      if self.writes:
        self.k_norm = make_norm(
          self.head_width * (config.num_kv_heads if joint else 1)
        )
      if self.writes and config.value_norm:
        self.v_norm = make_norm(self.head_width, has_scale=False)

  def _heads(self, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:-1], -1, self.head_width)
    return x.reshape(heads).swapaxes(1, 2)

  def __call__(
    self,
    x: jax.Array,
    norm: layers.Norm | None,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
    residual: jax.Array | None,
  ) -> tuple[jax.Array, _Cache]:
    # No kernel caps scores or has sinks.
    plain = self.config.score_cap is None and not self.config.sinks
    others = (self.k_proj, self.v_proj) if self.writes else ()
    linears = (self.q_proj, *others)
    if self.o_proj.is_packed and plain:
      matrices = [linear.parameters for linear in linears]
      projections = layers.project(x, matrices, norm=norm)
      out, cache = self._fused(projections, rotation, mask, cache)
    else:
      rows = layers.normalize(x, norm, kernels=self.o_proj.is_packed)
      products = [linear(rows) for linear in linears]
      out, cache = self._composed(products, rotation, mask, cache)
    return self.o_proj(out, residual=residual), cache

  def _fused(
    self,
    projections: jax.Array,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> tuple[jax.Array, _Cache]:
    """With the kernels of `models/nn/cpu`."""
    config = self.config
    norms: tuple[ops.Norm | None, ...] = ()
    if rotation is not None and rotation.query_scale is not None:
      # A rotation keeps factors; norms, which would not, are refused.
      factors = jnp.ones(projections.shape[-1], jnp.float32)
      queries = jnp.arange(len(factors)) < config.num_heads * self.head_width
      scale = rotation.query_scale[..., None]
      projections *= jnp.where(queries[None, None], scale, factors[None, None])
    if config.qk_norm and config.joint_qk_norm:
      width = config.num_heads * self.head_width
      ends = width, width + config.num_kv_heads * self.head_width
      query, key, value = jnp.split(projections, ends, axis=-1)
      query = ops.normalize(query, self.q_norm.operand)
      key = ops.normalize(key, self.k_norm.operand)
      projections = jnp.concatenate([query, key, value], axis=-1)
    elif config.qk_norm:
      names = ('q_norm', 'k_norm', 'v_norm')
      modules = (getattr(self, name, None) for name in names)
      norms = tuple(module and module.operand for module in modules)
    return attention.attend_projections(
      projections,
      mask,
      cache,
      self.layer,
      slots_shape=(config.num_kv_heads, self.head_width),
      dtype=self.dtype,
      scale=self.scale,
      norms=norms,
      writes=self.writes,
      rotation=rotation and rotation[:2],
    )

  def _normalized_heads(self, x: jax.Array, name: str) -> jax.Array:
    norm = functools.partial(
      layers.normalize,
      norm=getattr(self, name, None),
      kernels=self.o_proj.is_packed,
    )
    joint = self.config.joint_qk_norm
    return self._heads(norm(x)) if joint else norm(self._heads(x))

  def _composed(
    self,
    products: Sequence[jax.Array],
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> tuple[jax.Array, _Cache]:
    """By XLA; `products`: queries and, if it writes, keys and values."""
    query, *entries = products
    query = self._normalized_heads(query, 'q_norm')
    query = rope_lib.rotate(query, rotation)
    if rotation is not None and rotation.query_scale is not None:
      query *= rotation.query_scale[:, None, :, None]
    query = query.astype(self.dtype)
    key, value = self._entries(rotation, *entries) if entries else (None, None)
    out, cache = attention.self_attention(
      query,
      key,
      value,
      mask,
      cache,
      self.layer,
      scale=self.scale,
      cap=self.config.score_cap,
      sinks=self.sinks[...] if self.config.sinks else None,
    )
    return out.swapaxes(1, 2).reshape(products[0].shape), cache

  def _entries(
    self,
    rotation: rope_lib.Rotation | None,
    key: jax.Array,
    value: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Keys and values as the cache has them."""
    key = rope_lib.rotate(self._normalized_heads(key, 'k_norm'), rotation)
    value = self._normalized_heads(value, 'v_norm')
    return key.astype(self.dtype), value.astype(self.dtype)

  def write(
    self,
    rows: jax.Array,
    rotation: rope_lib.Rotation,
    cache: cache_lib.KVCache,
  ) -> cache_lib.KVCache:
    """Writes keys and values of rows `[B, L, width]` that attend to nothing.

    Returns:
      The cache.
    """
    if not self.o_proj.is_packed:
      key, value = self._entries(rotation, self.k_proj(rows), self.v_proj(rows))
      return cache_lib.write(cache, self.layer, key, value)
    # The kernel that attends writes, so that bits do not depend on the caller.
    linears = [self.k_proj.parameters, self.v_proj.parameters]
    width = self.config.num_heads * self.head_width
    queries = jnp.zeros((*rows.shape[:-1], width))
    projections = [queries, layers.project(rows, linears)]
    mask = jnp.zeros((*rows.shape[:-1], cache.num_slots), bool)
    _, written = self._fused(
      jnp.concatenate(projections, axis=-1), rotation, mask, cache
    )
    return cast(cache_lib.KVCache, written)
