"""Llama and its relatives in Flax NNX, with positions and mask as arguments.

One module for Llama 2 and 3, SmolLM2, Mistral, Qwen 2.5 and Qwen 3: they differ
in what `LlamaConfig` says. `models.mixtral` has the same blocks with experts in
place of the feed-forward layer. Names are those of the Hugging Face
checkpoints. As in `models.gpt2`, matrices are in the compute dtype, and the
residual stream, norms, rotations and softmax are float32; any matrix may be an
`Int8Matrix`.
"""

import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from models.nn.attention import attend
from models.nn.attention import attend_and_write
from models.nn.layers import ACTIVATIONS
from models.nn.layers import Linear
from models.nn.matmul import matmul
from models.nn.matmul import take_rows
from models.nn.rope import Rope
from models.nn.rope import rotate
from specdec import cache as kv


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """The shape of a Llama; everything that changes what it computes.

  Attributes:
    vocab_size: V.
    num_positions: the longest context.
    width: of the residual stream.
    num_layers: transformer blocks.
    num_heads: query heads.
    num_kv_heads: key and value heads, each shared by a group of query heads
      (grouped-query attention, arXiv 2305.13245); must divide `num_heads`.
    head_width: Dh, even; need not be `width / num_heads`.
    inner_width: of the feed-forward layer, or of one expert.
    activation: of the gate, a key of `models.layers.ACTIVATIONS`.
    norm_epsilon: added to the mean square in every norm.
    rope: how positions enter.
    qkv_bias: whether queries, keys and values have biases.
    output_bias: whether the output projection of attention has one.
    mlp_bias: whether the feed-forward layer has them.
    qk_norm: whether every head of queries and keys is normed (Qwen 3).
    tie_embeddings: the head is the token embedding.
  """

  vocab_size: int
  num_positions: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_width: int
  inner_width: int
  activation: str = 'silu'
  norm_epsilon: float = 1e-6
  rope: Rope = dataclasses.field(default_factory=Rope)
  qkv_bias: bool = False
  output_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  tie_embeddings: bool = False

  def __post_init__(self):
    for name in (
      'vocab_size',
      'num_positions',
      'width',
      'num_layers',
      'num_heads',
      'num_kv_heads',
      'head_width',
      'inner_width',
    ):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be positive, got {getattr(self, name)}')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads must divide num_heads {self.num_heads}, got'
        f' {self.num_kv_heads}'
      )
    if self.head_width % 2:
      raise ValueError(f'head_width must be even, got {self.head_width}')
    if self.activation not in ACTIVATIONS:
      raise ValueError(
        f'activation {self.activation!r} is not known; choose from'
        f' {sorted(ACTIVATIONS)}'
      )


class RMSNorm(nnx.Module):
  """Root mean square norm (arXiv 1910.07467) over the last axis, in float32."""

  def __init__(self, width: int, epsilon: float):
    self.epsilon = epsilon
    self.scale = nnx.Param(jnp.ones(width, jnp.float32))

  def __call__(self, x: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
    return x * lax.rsqrt(mean_square + self.epsilon) * scale


class Attention(nnx.Module):
  """Grouped-query self-attention of one block."""

  def __init__(self, config: LlamaConfig, layer: int, *, dtype, rngs):
    self.config = config
    self.layer = layer
    self.dtype = dtype
    make = functools.partial(Linear, dtype=dtype, rngs=rngs)
    make_head = functools.partial(
      make, config.width, stddev=0.02, use_bias=config.qkv_bias
    )
    self.q_proj = make_head(config.num_heads * config.head_width)
    self.k_proj = make_head(config.num_kv_heads * config.head_width)
    self.v_proj = make_head(config.num_kv_heads * config.head_width)
    self.o_proj = make(
      config.num_heads * config.head_width,
      config.width,
      stddev=residual_stddev(config),
      use_bias=config.output_bias,
    )
    if config.qk_norm:
      self.q_norm = RMSNorm(config.head_width, config.norm_epsilon)
      self.k_norm = RMSNorm(config.head_width, config.norm_epsilon)

  def _heads(self, x: jax.Array) -> jax.Array:
    heads = (*x.shape[:-1], -1, self.config.head_width)
    return x.reshape(heads).swapaxes(1, 2)

  def __call__(self, x, rotation, mask, cache):
    query, key = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
    if self.config.qk_norm:
      query, key = self.q_norm(query), self.k_norm(key)
    query = rotate(query, rotation).astype(self.dtype)
    key = rotate(key, rotation).astype(self.dtype)
    value = self._heads(self.v_proj(x)).astype(self.dtype)
    scale = 1 / math.sqrt(self.config.head_width)
    if cache is None:
      out = attend(query, key, value, mask, scale=scale)
    else:
      out, cache = attend_and_write(
        query, key, value, mask, cache, self.layer, scale=scale
      )
    out = out.swapaxes(1, 2).reshape(*x.shape[:-1], -1)
    return self.o_proj(out), cache


class FeedForward(nnx.Module):
  """The gated perceptron (SwiGLU, arXiv 2002.05202) of one block."""

  def __init__(self, config: LlamaConfig, *, dtype, rngs):
    self.activation = ACTIVATIONS[config.activation]
    make = functools.partial(
      Linear, dtype=dtype, rngs=rngs, use_bias=config.mlp_bias
    )
    self.gate_proj = make(config.width, config.inner_width, stddev=0.02)
    self.up_proj = make(config.width, config.inner_width, stddev=0.02)
    self.down_proj = make(
      config.inner_width, config.width, stddev=residual_stddev(config)
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    gate = self.activation(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x))


class Block(nnx.Module):
  """One pre-norm transformer block."""

  def __init__(self, config: LlamaConfig, layer: int, *, dtype, rngs):
    make_norm = lambda: RMSNorm(config.width, config.norm_epsilon)
    self.input_layernorm = make_norm()
    self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
    self.post_attention_layernorm = make_norm()
    self.mlp = self.make_mlp(config, dtype=dtype, rngs=rngs)

  def make_mlp(self, config, *, dtype, rngs) -> Any:
    """What comes after attention."""
    return FeedForward(config, dtype=dtype, rngs=rngs)

  def attend(self, x, rotation, mask, cache):
    """The first half of the block."""
    attended, cache = self.self_attn(
      self.input_layernorm(x), rotation, mask, cache
    )
    return x + attended, cache

  def __call__(self, x, rotation, mask, cache):
    x, cache = self.attend(x, rotation, mask, cache)
    return x + self.mlp(self.post_attention_layernorm(x)), cache


class Llama(nnx.Module):
  """A Llama language model.

  Args:
    config: its shape.
    dtype: of the matrices, and so of every matrix product and of the KV cache;
      norms keep float32.
    rngs: initialises the weights, as GPT-2's.
  """

  block: Any = Block  # The class of its blocks.

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
        self.block(config, layer, dtype=dtype, rngs=rngs)
        for layer in range(config.num_layers)
      ]
    )
    self.norm = RMSNorm(config.width, config.norm_epsilon)
    if not config.tie_embeddings:
      shape = (config.vocab_size, config.width)
      self.lm_head = nnx.Param(init(rngs.params(), shape, dtype))

  def embed(self, tokens: jax.Array, positions: jax.Array):
    """The residual stream `[B, L, width]` and the rotation of the heads."""
    x = take_rows(self.embed_tokens.embedding.get_value(), tokens)
    return x, self.config.rope.rotation(positions, self.config.head_width)

  def head(self, x: jax.Array) -> jax.Array:
    """The logits of the last residual stream."""
    embedding = self.embed_tokens.embedding
    head = embedding if self.config.tie_embeddings else self.lm_head
    return matmul(self.norm(x), head.get_value())

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: kv.KVCache | None = None,
  ) -> tuple[jax.Array, kv.KVCache | None]:
    """One forward.

    Args:
      tokens: `[B, L]` int32.
      positions: `[B, L]` int32. Padding may lie beyond the context.
      mask: `[B, L, S]` bool, true where a token may look; without a cache S is
        L, the tokens themselves.
      cache: where to write keys and values, or None (training).

    Returns:
      `[B, L, V]` float32 logits, and the cache with the L entries written.
    """
    x, rotation = self.embed(tokens, positions)
    for layer, block in enumerate(self.layers):
      with jax.named_scope(f'layer_{layer}'):
        x, cache = block(x, rotation, mask, cache)
    return self.head(x), cache


def residual_stddev(config: LlamaConfig) -> float:
  """Of the initial weights that write to the residual stream."""
  return 0.02 / math.sqrt(2 * config.num_layers)
