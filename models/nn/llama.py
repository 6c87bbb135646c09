"""Llama and related models in Flax NNX, with positions and mask as arguments.

One module serves Llama 2 and 3, Mistral, Qwen, Gemma, OLMo, Granite, SmolLM and
Phi, which differ in `llama_config.LlamaConfig` only. `models/nn/mixtral` has
the same blocks with experts in place of the feed-forward layer. Names and
dtypes follow the same rules as in `models/nn/gpt2`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import types
from typing import Any
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.models.nn import attention
from specdec.models.nn import grouped_query
from specdec.models.nn import layers
from specdec.models.nn import llama_config
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import rope as rope_lib

LlamaConfig = llama_config.LlamaConfig  # The name that 0.8.0 had.

_Cache = cache_lib.KVCache | None
_ATTENTION = types.MappingProxyType({'self_attn': grouped_query.Attention})


class FeedForward(nnx.Module):
  """Gated MLP (SwiGLU, arXiv 2002.05202) of one block."""

  def __init__(
    self, config: llama_config.LlamaConfig, **new: Unpack[layers.New]
  ):
    self.activation = config.activation
    width, inner = config.width, config.of_layers('inner_width')[0]
    make = functools.partial(layers.Linear, use_bias=config.mlp_bias, **new)
    self.gate_proj = make(width, inner)
    self.up_proj = make(width, inner)
    self.down_proj = make(
      inner, width, stddev=layers.residual_stddev(config.num_layers)
    )

  def __call__(
    self, x: jax.Array, norm: layers.Norm | None, residual: jax.Array | None
  ) -> jax.Array:
    linears = [self.gate_proj.parameters, self.up_proj.parameters]
    inner = layers.project(
      x, linears, norm=norm, activation=self.activation, gated=True
    )
    return self.down_proj(inner, residual=residual)


class Layer(nnx.Module):
  """Transformer block with norms before its two parts, after them, or both."""

  def __init__(
    self,
    config: llama_config.LlamaConfig,
    layer: int,
    feed_forward: Any = FeedForward,
    *,
    mixers: Mapping[str, Any] = _ATTENTION,
    **new: Unpack[layers.New],
  ):
    self.config = config
    norm = lambda wanted: (
      layers.RMSNorm(config.width, config.norm_epsilon) if wanted else None
    )
    both = config.pre_norm and config.post_norm
    self.input_layernorm = norm(config.pre_norm)
    self.mixer = config.of_layers('mixers')[layer]
    mixer = mixers[self.mixer](config, layer, **new)
    setattr(self, self.mixer, mixer)
    # Pre-norm models: before the MLP; post-norm models: after attention.
    self.post_attention_layernorm = norm(True)
    self.pre_feedforward_layernorm = norm(both)
    shape = dataclasses.replace(
      config, inner_width=config.of_layers('inner_width')[layer]
    )
    self.mlp = feed_forward(shape, **new)
    self.post_feedforward_layernorm = norm(config.post_norm)

  def __call__(
    self,
    x: jax.Array,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> tuple[jax.Array, _Cache]:
    config, mixer = self.config, getattr(self, self.mixer)
    kernels = mixer.o_proj.is_packed
    # A part's output joins the stream, at once or after a norm and a factor.
    at_once = not config.post_norm and config.residual_scale == 1.0
    after_attention, before_mlp = None, self.post_attention_layernorm
    if config.post_norm:
      after_attention, before_mlp = before_mlp, self.pre_feedforward_layernorm

    def add(
      x: jax.Array, out: jax.Array, norm: layers.Norm | None
    ) -> jax.Array:
      if at_once:
        return out
      out = layers.normalize(out, norm, kernels=kernels)
      return x + config.residual_scale * out

    out, cache = mixer(
      x, self.input_layernorm, rotation, mask, cache, x if at_once else None
    )
    x = add(x, out, after_attention)
    out = self.mlp(x, before_mlp, x if at_once else None)
    return add(x, out, self.post_feedforward_layernorm), cache


def rotations(
  config: llama_config.LlamaConfig, positions: jax.Array
) -> list[Any]:
  """The rotation of each layer, for `positions [B, L]` int32."""
  ropes = zip(
    config.of_layers('rope'), config.of_layers('head_width'), strict=True
  )
  kinds = [*ropes]
  by_kind = {
    (rope, width): rope and rope.rotation(positions, width)
    for rope, width in dict.fromkeys(kinds)
  }
  return [by_kind[kind] for kind in kinds]


def of_layers(
  config: llama_config.LlamaConfig, positions: jax.Array, mask: jax.Array
) -> list[tuple[rope_lib.Rotation | None, jax.Array]]:
  """The rotation of each layer and what it sees.

  Args:
    config: the shape.
    positions: `[B, L]` int32.
    mask: `[B, L, S]` bool, what a layer without a window sees.
  """
  windows = config.of_layers('window')
  masks = {
    window: attention.within_window(mask, window)
    for window in dict.fromkeys(windows)
  }
  return [
    (rotation, masks[window])
    for rotation, window in zip(
      rotations(config, positions), windows, strict=True
    )
  ]


class Llama(nnx.Module):
  """Llama language model; for the arguments see `gpt2.GPT2`."""

  layer: Any = Layer  # Class of the layers.
  feed_forward: Any = FeedForward  # Class of the MLP of a layer.
  #: Classes of what mixes positions, by `LlamaConfig.mixers`.
  mixers: Mapping[str, Any] = _ATTENTION

  def __init__(
    self,
    config: llama_config.LlamaConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
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
        self.layer(
          config,
          layer,
          self.feed_forward,
          mixers=self.mixers,
          dtype=dtype,
          rngs=rngs,
        )
        for layer in range(config.num_layers)
      ]
    )
    self.norm = layers.RMSNorm(config.width, config.norm_epsilon)
    if not config.tie_embeddings:
      shape = (config.vocab_size, config.width)
      self.lm_head = nnx.Param(init(rngs.params(), shape, dtype))

  def layer_inputs(
    self, tokens: jax.Array, x: jax.Array
  ) -> Sequence[dict[str, jax.Array]]:
    """Further arguments of each layer; the stream begins with `x`."""
    del tokens, x
    return [{}] * self.config.num_layers

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: _Cache = None,
  ) -> tuple[jax.Array, _Cache]:
    """Computes logits and cache as `gpt2.GPT2` does."""
    embedding = self.embed_tokens.embedding.get_value()
    x = matrices_lib.take_rows(embedding, tokens)
    config = self.config
    if config.embedding_scale != 1.0:
      x *= config.embedding_scale
    seen = of_layers(config, positions, mask)
    inputs = self.layer_inputs(tokens, x)
    given = cache
    if cache is None and config.kv_source is not None:
      cache = cache_lib.init_cache(
        x.shape[0],
        mask.shape[2],
        num_heads=config.num_kv_heads,
        head_widths=config.cache_widths,
        dtype=self.dtype,
      )
    for layer, block in enumerate(self.layers):
      cache = cache_lib.write_hidden(cache, layer, x)
      with jax.named_scope(f'layer_{layer}'):
        x, cache = block(x, *seen[layer], cache, **inputs[layer])
    cache = cache_lib.write_hidden(cache, len(self.layers), x)
    tied = config.tie_embeddings
    head = embedding if tied else self.lm_head.get_value()
    x = layers.normalize(x, self.norm, kernels=matrices_lib.uses_kernels(head))
    cache = cache_lib.write_hidden(cache, cache_lib.AFTER_NORM, x)
    # On a GPU a head has some outputs more.
    logits = matrices_lib.matmul(x, head)[..., : config.vocab_size]
    if config.logit_divisor != 1.0:
      logits /= config.logit_divisor
    logits = layers.soft_cap(logits, config.logit_cap)
    return logits, None if given is None else cache
