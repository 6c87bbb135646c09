"""GPT-2 in Flax NNX, with positions and mask as arguments.

Modules and parameters have the names of the Hugging Face checkpoints, so that
`models/checkpoints/hub` maps one to the other by name. Matrices are in the
compute dtype or in a format of `models/nn/matrices`; the residual stream, norms
and softmax are float32.
"""

import dataclasses
import functools
import math
from typing import ClassVar
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.models.nn import attention
from specdec.models.nn import layers
from specdec.models.nn import matrices as matrices_lib

_Cache = cache_lib.KVCache | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
  """Shape of a GPT-2: everything that changes what it computes.

  What all models of the family have in common are attributes of the class.
  """

  embedding: ClassVar[str] = 'wte'  # Name of the token embedding.
  # Name of another embedding, from which rows are read.
  looked_up: ClassVar[str | None] = 'wpe'
  gated: ClassVar[bool] = False  # Whether feed-forward layers have a gate.
  num_experts = experts_per_token = 1
  state_layers: ClassVar[tuple[int, ...]] = ()  # No layer has a state.

  vocab_size: int
  num_positions: int  # Longest context.
  width: int  # The width of the residual stream.
  num_layers: int
  num_heads: int  # Must divide `width`.
  inner_width: int | None = None  # Feed-forward layers; None: 4 * `width`.
  activation: str = 'gelu_new'  # A key of `layers.ACTIVATIONS`.
  norm_epsilon: float = 1e-5  # Added to the variance in every layer norm.
  scale_attention: bool = True  # By 1 / sqrt(`head_width`).
  scale_attention_by_layer: bool = False  # By 1 / number of the layer, from 1.
  tie_embeddings: bool = True  # Use the token embedding as the head.

  def __post_init__(self) -> None:
    layers.check_config(self)
    if self.width % self.num_heads:
      raise ValueError(
        f'num_heads must divide width {self.width}, got {self.num_heads}'
      )

  @property
  def num_kv_heads(self) -> int:
    return self.num_heads

  @property
  def cache_widths(self) -> tuple[int, ...]:
    return (self.head_width,) * self.num_layers

  @property
  def head_width(self) -> int:
    """Dh, the width of a head."""
    return self.width // self.num_heads


class Attention(nnx.Module):
  """Multi-head self-attention of one block."""

  def __init__(self, config: GPT2Config, layer: int, **new: Unpack[layers.New]):
    self.config = config
    self.layer = layer
    self.dtype = new['dtype']
    self.scale = 1.0
    if config.scale_attention:
      self.scale /= math.sqrt(config.head_width)
    if config.scale_attention_by_layer:
      self.scale /= layer + 1
    make = functools.partial(layers.Linear, config.width, **new)
    self.c_attn = make(3 * config.width)
    self.c_proj = make(
      config.width, stddev=layers.residual_stddev(config.num_layers)
    )

  def __call__(
    self, x: jax.Array, norm: layers.Norm, mask: jax.Array, cache: _Cache
  ) -> tuple[jax.Array, _Cache]:
    heads = attention.Heads(
      layer=self.layer,
      num_kv_heads=self.config.num_heads,
      width=self.config.head_width,
      dtype=self.dtype,
      scale=self.scale,
    )
    projections = [self.c_attn(x, norm=norm)]
    out, cache = attention.self_attention(projections, mask, cache, heads)
    return self.c_proj(out, residual=x), cache


class FeedForward(nnx.Module):
  """Two-layer MLP of one block."""

  def __init__(self, config: GPT2Config, **new: Unpack[layers.New]):
    self.activation = config.activation
    width, inner = config.width, config.inner_width or 4 * config.width
    stddev = layers.residual_stddev(config.num_layers)
    make = functools.partial(layers.Linear, **new)
    self.c_fc = make(width, inner)
    self.c_proj = make(inner, width, stddev=stddev)

  def __call__(self, x: jax.Array, norm: layers.Norm) -> jax.Array:
    inner = self.c_fc(x, norm=norm, activation=self.activation)
    return self.c_proj(inner, residual=x)


class Layer(nnx.Module):
  """Pre-norm transformer block."""

  def __init__(self, config: GPT2Config, layer: int, **new: Unpack[layers.New]):
    self.ln_1 = layers.LayerNorm(config.width, config.norm_epsilon)
    self.attn = Attention(config, layer, **new)
    self.ln_2 = layers.LayerNorm(config.width, config.norm_epsilon)
    self.mlp = FeedForward(config, **new)

  def __call__(
    self, x: jax.Array, mask: jax.Array, cache: _Cache
  ) -> tuple[jax.Array, _Cache]:
    x, cache = self.attn(x, self.ln_1, mask, cache)
    return self.mlp(x, self.ln_2), cache


class GPT2(nnx.Module):
  """GPT-2 language model.

  Args:
    config: shape of the model.
    dtype: dtype of the matrices, and so of every matrix product and of the KV
      cache; norms stay float32.
    rngs: random streams of the initial weights, drawn as in the GPT-2 paper
      (section 2.3).
  """

  def __init__(
    self,
    config: GPT2Config,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    init = jax.nn.initializers.normal
    make_embedding = functools.partial(
      nnx.Embed, features=config.width, param_dtype=dtype, rngs=rngs
    )
    self.wte = make_embedding(config.vocab_size, embedding_init=init(0.02))
    self.wpe = make_embedding(config.num_positions, embedding_init=init(0.01))
    self.h = nnx.List(
      [
        Layer(config, layer, dtype=dtype, rngs=rngs)
        for layer in range(config.num_layers)
      ]
    )
    self.ln_f = layers.LayerNorm(config.width, config.norm_epsilon)
    if not config.tie_embeddings:
      shape = (config.vocab_size, config.width)
      self.lm_head = nnx.Param(init(0.02)(rngs.params(), shape, dtype))

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: _Cache = None,
  ) -> tuple[jax.Array, _Cache]:
    """Computes the logits of L positions.

    Args:
      tokens: `[B, L]` int32.
      positions: `[B, L]` int32. Positions beyond the context (padding) are
        clipped, since an out-of-range embedding would be NaN.
      mask: `[B, L, S]` bool, true where a token may look; without a cache S is
        L, the tokens themselves.
      cache: where to write keys and values, or None (training).

    Returns:
      `[B, L, V]` float32 logits, and the cache with the L entries written.
    """
    positions = jnp.clip(positions, 0, self.config.num_positions - 1)
    embedding = self.wte.embedding.get_value()
    x = matrices_lib.take_rows(embedding, tokens) + self.wpe(positions)
    for layer, block in enumerate(self.h):
      cache = cache_lib.write_hidden(cache, layer, x)
      with jax.named_scope(f'layer_{layer}'):
        x, cache = block(x, mask, cache)
    cache = cache_lib.write_hidden(cache, len(self.h), x)
    tied = self.config.tie_embeddings
    head = embedding if tied else self.lm_head.get_value()
    x = self.ln_f(x)
    cache = cache_lib.write_hidden(cache, cache_lib.AFTER_NORM, x)
    # On a GPU a head has some outputs more.
    return matrices_lib.matmul(x, head)[..., : self.config.vocab_size], cache
