"""GPT-2 in Flax NNX, with positions and mask as arguments.

Module and parameter names are those of the Hugging Face checkpoints, so that
`models.hub` maps one to the other by name. Matrices are in the compute dtype;
the residual stream, norms and softmax are float32. Any matrix may be
an `Int8Matrix` instead.
"""

import dataclasses
import functools
import math

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
from specdec import cache as kv


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
  """The shape of a GPT-2; everything that changes what it computes.

  Attributes:
    vocab_size: V.
    num_positions: the longest context.
    width: of the residual stream.
    num_layers: transformer blocks.
    num_heads: attention heads; must divide `width`.
    inner_width: of the feed-forward layer; None means 4 times `width`.
    activation: a key of `models.layers.ACTIVATIONS`.
    norm_epsilon: added to the variance in every layer norm.
    scale_attention: divide scores by the square root of the head width.
    scale_attention_by_layer: divide scores by the layer's number, from 1.
    tie_embeddings: the head is the token embedding.
  """

  vocab_size: int
  num_positions: int
  width: int
  num_layers: int
  num_heads: int
  inner_width: int | None = None
  activation: str = 'gelu_new'
  norm_epsilon: float = 1e-5
  scale_attention: bool = True
  scale_attention_by_layer: bool = False
  tie_embeddings: bool = True

  def __post_init__(self):
    for name in ('vocab_size', 'num_positions', 'width', 'num_layers'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be positive, got {getattr(self, name)}')
    if self.num_heads < 1 or self.width % self.num_heads:
      raise ValueError(
        f'num_heads must divide width {self.width}, got {self.num_heads}'
      )
    if self.activation not in ACTIVATIONS:
      raise ValueError(
        f'activation {self.activation!r} is not known; choose from'
        f' {sorted(ACTIVATIONS)}'
      )

  @property
  def num_kv_heads(self) -> int:
    """Heads of the cache."""
    return self.num_heads

  @property
  def head_width(self) -> int:
    """Dh."""
    return self.width // self.num_heads

  @property
  def feed_forward_width(self) -> int:
    """Of the hidden layer, with the default filled in."""
    return self.inner_width or 4 * self.width


class LayerNorm(nnx.LayerNorm):
  """As XLA makes the fewest kernels of it, for a single position.

  Of several positions it makes one. Of one position it makes three on
  accelerators, or two if statistics take one pass. On a GPU a second row, of
  zeros, makes it one again, and part of the product that follows.
  """

  def __call__(self, x: jax.Array, **kw) -> jax.Array:
    if x.size > x.shape[-1]:
      return super().__call__(x, **kw)
    return lax.platform_dependent(
      x,
      cpu=super().__call__,
      cuda=self._of_two_rows,
      default=self._in_one_pass,
    )

  def _of_two_rows(self, x):
    padding = [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]
    return super().__call__(jnp.pad(x, padding))[..., :1, :]

  def _in_one_pass(self, x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    variance = jnp.maximum(square - jnp.square(mean), 0.0)
    along = lambda param: jnp.expand_dims(param[...], range(x.ndim - 1))
    scale = lax.rsqrt(variance + self.epsilon) * along(self.scale)
    return (x - mean) * scale + along(self.bias)


def _layer_norm(config: GPT2Config, rngs: nnx.Rngs) -> LayerNorm:
  return LayerNorm(
    config.width,
    epsilon=config.norm_epsilon,
    use_fast_variance=False,
    rngs=rngs,
  )


class Attention(nnx.Module):
  """Multi-head self-attention of one block."""

  def __init__(self, config: GPT2Config, layer: int, *, dtype, rngs):
    self.config = config
    self.layer = layer
    self.dtype = dtype
    self.scale = 1.0
    if config.scale_attention:
      self.scale /= math.sqrt(config.head_width)
    if config.scale_attention_by_layer:
      self.scale /= layer + 1
    make = functools.partial(Linear, config.width, dtype=dtype, rngs=rngs)
    self.c_attn = make(3 * config.width, stddev=0.02)
    self.c_proj = make(config.width, stddev=_residual_stddev(config))

  def __call__(self, x, mask, cache):
    heads = (*x.shape[:-1], 3, self.config.num_heads, self.config.head_width)
    query, key, value = (
      self.c_attn(x).astype(self.dtype).reshape(heads).transpose(2, 0, 3, 1, 4)
    )
    if cache is None:
      out = attend(query, key, value, mask, scale=self.scale)
    else:
      out, cache = attend_and_write(
        query, key, value, mask, cache, self.layer, scale=self.scale
      )
    return self.c_proj(out.swapaxes(1, 2).reshape(x.shape)), cache


class FeedForward(nnx.Module):
  """The two-layer perceptron of one block."""

  def __init__(self, config: GPT2Config, *, dtype, rngs):
    self.activation = ACTIVATIONS[config.activation]
    inner = config.feed_forward_width
    make = functools.partial(Linear, dtype=dtype, rngs=rngs)
    self.c_fc = make(config.width, inner, stddev=0.02)
    self.c_proj = make(inner, config.width, stddev=_residual_stddev(config))

  def __call__(self, x):
    return self.c_proj(self.activation(self.c_fc(x)))


class Block(nnx.Module):
  """One pre-norm transformer block."""

  def __init__(self, config: GPT2Config, layer: int, *, dtype, rngs):
    self.ln_1 = _layer_norm(config, rngs)
    self.attn = Attention(config, layer, dtype=dtype, rngs=rngs)
    self.ln_2 = _layer_norm(config, rngs)
    self.mlp = FeedForward(config, dtype=dtype, rngs=rngs)

  def __call__(self, x, mask, cache):
    attended, cache = self.attn(self.ln_1(x), mask, cache)
    x = x + attended
    return x + self.mlp(self.ln_2(x)), cache


class GPT2(nnx.Module):
  """A GPT-2 language model.

  Args:
    config: its shape.
    dtype: of the matrices, and so of every matrix product and of the KV cache;
      norms keep float32.
    rngs: initialises the weights as the GPT-2 paper does (section 2.3).
  """

  def __init__(self, config: GPT2Config, *, dtype=jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    make_embedding = functools.partial(
      nnx.Embed, features=config.width, param_dtype=dtype, rngs=rngs
    )
    self.wte = make_embedding(
      config.vocab_size, embedding_init=jax.nn.initializers.normal(0.02)
    )
    self.wpe = make_embedding(
      config.num_positions, embedding_init=jax.nn.initializers.normal(0.01)
    )
    self.h = nnx.List(
      [
        Block(config, layer, dtype=dtype, rngs=rngs)
        for layer in range(config.num_layers)
      ]
    )
    self.ln_f = _layer_norm(config, rngs)
    if not config.tie_embeddings:
      init = jax.nn.initializers.normal(0.02)
      shape = (config.vocab_size, config.width)
      self.lm_head = nnx.Param(init(rngs.params(), shape, dtype))

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
      positions: `[B, L]` int32. Padding may lie beyond the context; it is
        clipped, since an out-of-range embedding would be NaN.
      mask: `[B, L, S]` bool, true where a token may look; without a cache S is
        L, the tokens themselves.
      cache: where to write keys and values, or None (training).

    Returns:
      `[B, L, V]` float32 logits, and the cache with the L entries written.
    """
    positions = jnp.clip(positions, 0, self.config.num_positions - 1)
    embedding = self.wte.embedding.get_value()
    x = take_rows(embedding, tokens) + self.wpe(positions)
    for layer, block in enumerate(self.h):
      with jax.named_scope(f'layer_{layer}'):
        x, cache = block(x, mask, cache)
    tied = self.config.tie_embeddings
    head = embedding if tied else self.lm_head.get_value()
    return matmul(self.ln_f(x), head), cache


def _residual_stddev(config: GPT2Config) -> float:
  return 0.02 / math.sqrt(2 * config.num_layers)
