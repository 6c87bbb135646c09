"""Llama and related models in Flax NNX, with positions and mask as arguments.

One module serves Llama 2 and 3, SmolLM2, Mistral, Qwen 2.5 and Qwen 3, which
differ in `LlamaConfig` only. `models.nn.mixtral` has the same blocks with
experts in place of the feed-forward layer. Names and dtypes follow the same
rules as in `models.nn.gpt2`.
"""

import dataclasses
import functools
import math
from typing import Any
from typing import ClassVar

from flax import nnx
import jax
import jax.numpy as jnp

from models.nn import attention
from models.nn import layers
from models.nn import matrices as matrices_lib
from models.nn import rope as rope_lib
from specdec import cache as cache_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """Shape of a Llama: everything that changes what it computes.

  Each key and value head is shared by a group of query heads (grouped-query
  attention, arXiv 2305.13245). What all models of the family have in common are
  attributes of the class.
  """

  embedding: ClassVar[str] = 'embed_tokens'  # Name of the token embedding.
  position_embedding: ClassVar[str | None] = None
  gated: ClassVar[bool] = True  # Whether feed-forward layers have a gate.
  num_experts = experts_per_token = 1

  vocab_size: int
  num_positions: int  # Longest context.
  width: int  # Of the residual stream.
  num_layers: int
  num_heads: int  # Of queries.
  num_kv_heads: int  # Divides `num_heads`.
  head_width: int  # Dh, even; need not be `width / num_heads`.
  inner_width: int  # Of the feed-forward layer, or of one expert.
  activation: str = 'silu'  # Of the gate, a key of `layers.ACTIVATIONS`.
  norm_epsilon: float = 1e-6  # Added to the mean square in every norm.
  rope: rope_lib.Rope = dataclasses.field(default_factory=rope_lib.Rope)
  qkv_bias: bool = False
  output_bias: bool = False  # Of the output projection of attention.
  mlp_bias: bool = False
  qk_norm: bool = False  # Whether queries and keys are normalised (Qwen 3).
  tie_embeddings: bool = False  # Use the token embedding as the head.

  def __post_init__(self):
    layers.check_config(self)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads must divide num_heads {self.num_heads}, got'
        f' {self.num_kv_heads}'
      )
    if self.head_width % 2:
      raise ValueError(f'head_width must be even, got {self.head_width}')


class Attention(nnx.Module):
  """Grouped-query self-attention of one block."""

  def __init__(
    self,
    config: LlamaConfig,
    layer: int,
    *,
    dtype,
    rngs,
    input_width: int | None = None,  # None: that of the residual stream.
  ):
    self.config = config
    self.layer = layer
    self.dtype = dtype
    make = functools.partial(layers.Linear, dtype=dtype, rngs=rngs)
    width = input_width or config.width
    make_head = functools.partial(make, width, use_bias=config.qkv_bias)
    self.q_proj = make_head(config.num_heads * config.head_width)
    self.k_proj = make_head(config.num_kv_heads * config.head_width)
    self.v_proj = make_head(config.num_kv_heads * config.head_width)
    self.o_proj = make(
      config.num_heads * config.head_width,
      config.width,
      stddev=layers.residual_stddev(config.num_layers),
      use_bias=config.output_bias,
    )
    if config.qk_norm:
      self.q_norm = layers.RMSNorm(config.head_width, config.norm_epsilon)
      self.k_norm = layers.RMSNorm(config.head_width, config.norm_epsilon)

  def _heads(self, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:-1], -1, self.config.head_width)
    return x.reshape(heads).swapaxes(1, 2)

  def __call__(self, x, rotation, mask, cache):
    kernels = self.o_proj.is_packed
    query, key = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
    if self.config.qk_norm:
      query = self.q_norm.normalize(query, kernels=kernels)
      key = self.k_norm.normalize(key, kernels=kernels)
    query = rope_lib.rotate(query, rotation).astype(self.dtype)
    key = rope_lib.rotate(key, rotation).astype(self.dtype)
    value = self._heads(self.v_proj(x)).astype(self.dtype)
    scale = 1 / math.sqrt(self.config.head_width)
    out, cache = attention.self_attention(
      query,
      key,
      value,
      mask,
      cache,
      self.layer,
      scale=scale,
      kernels=kernels,
    )
    out = out.swapaxes(1, 2).reshape(*x.shape[:-1], -1)
    return self.o_proj(out), cache


class FeedForward(nnx.Module):
  """Gated perceptron (SwiGLU, arXiv 2002.05202) of one block."""

  def __init__(self, config: LlamaConfig, *, dtype, rngs):
    self.activation = layers.ACTIVATIONS[config.activation]
    width, inner = config.width, config.inner_width
    make = functools.partial(
      layers.Linear, dtype=dtype, rngs=rngs, use_bias=config.mlp_bias
    )
    self.gate_proj = make(width, inner)
    self.up_proj = make(width, inner)
    self.down_proj = make(
      inner, width, stddev=layers.residual_stddev(config.num_layers)
    )

  def __call__(self, x: jax.Array) -> tuple[jax.Array, tuple[()]]:
    gate = self.activation(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x)), ()


class Layer(nnx.Module):
  """Pre-norm transformer block."""

  def __init__(
    self, config: LlamaConfig, layer: int, feed_forward: Any, *, dtype, rngs
  ):
    self.input_layernorm = layers.RMSNorm(config.width, config.norm_epsilon)
    self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
    self.post_attention_layernorm = layers.RMSNorm(
      config.width, config.norm_epsilon
    )
    self.mlp = feed_forward(config, dtype=dtype, rngs=rngs)

  def __call__(self, x, rotation, mask, cache):
    kernels = self.self_attn.o_proj.is_packed
    normalized = self.input_layernorm.normalize(x, kernels=kernels)
    attended, cache = self.self_attn(normalized, rotation, mask, cache)
    x = x + attended
    normalized = self.post_attention_layernorm.normalize(x, kernels=kernels)
    out, routing = self.mlp(normalized)
    return x + out, cache, routing


class Llama(nnx.Module):
  """Llama language model; the arguments are those of `models.nn.gpt2.GPT2`."""

  feed_forward: Any = FeedForward  # Class of the layers after attention.

  def __init__(self, config: LlamaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    init = jax.nn.initializers.normal(0.02)
    self.embed_tokens = nnx.Embed(
      config.vocab_size,
      config.width,
      embedding_init=init,
      param_dtype=dtype,
      rngs=rngs,
    )
    self.layers = nnx.List(
      [
        Layer(config, layer, self.feed_forward, dtype=dtype, rngs=rngs)
        for layer in range(config.num_layers)
      ]
    )
    self.norm = layers.RMSNorm(config.width, config.norm_epsilon)
    if not config.tie_embeddings:
      shape = (config.vocab_size, config.width)
      self.lm_head = nnx.Param(init(rngs.params(), shape, dtype))

  def with_routing(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache | None = None,
  ) -> tuple[jax.Array, cache_lib.KVCache | None, tuple[Any, ...]]:
    """Computes logits and cache as `models.nn.gpt2.GPT2` does.

    Returns:
      `[B, L, V]` float32 logits, the cache, and for each layer the
      `models.nn.experts.Routing`, of shapes `[B, L, ...]`; () without experts.
    """
    embedding = self.embed_tokens.embedding.get_value()
    x = matrices_lib.take_rows(embedding, tokens)
    rotation = self.config.rope.rotation(positions, self.config.head_width)
    routings = []
    for layer, block in enumerate(self.layers):
      cache = cache_lib.write_hidden(cache, layer, x)
      with jax.named_scope(f'layer_{layer}'):
        x, cache, routing = block(x, rotation, mask, cache)
      routings.append(routing)
    cache = cache_lib.write_hidden(cache, len(self.layers), x)
    tied = self.config.tie_embeddings
    head = embedding if tied else self.lm_head.get_value()
    x = self.norm.normalize(x, kernels=matrices_lib.uses_kernels(head))
    cache = cache_lib.write_hidden(cache, cache_lib.AFTER_NORM, x)
    return matrices_lib.matmul(x, head), cache, tuple(routings)

  def __call__(self, tokens, positions, mask, cache=None):
    return self.with_routing(tokens, positions, mask, cache)[:2]
