"""Llama and related models in Flax NNX, with positions and mask as arguments.

One module serves Llama 2 and 3, Mistral, Qwen, Gemma, OLMo, Granite, SmolLM and
Phi, which differ in `LlamaConfig` only. `models/nn/mixtral` has the same blocks
with experts in place of the feed-forward layer. Names and dtypes follow the
same rules as in `models/nn/gpt2`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
import types
from typing import Any
from typing import cast
from typing import ClassVar
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import recurrent as recurrent_lib
from specdec.models.nn import attention
from specdec.models.nn import layers
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import rope as rope_lib

_Rope = rope_lib.Rope | None
_Cache = cache_lib.KVCache | None
_FACTORS = (
  'embedding_scale',
  'attention_scale',
  'residual_scale',
  'logit_divisor',
  'score_cap',
  'logit_cap',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """Shape of a Llama: everything that changes what it computes.

  Each key and value head is shared by a group of query heads (grouped-query
  attention, arXiv 2305.13245). What all models of the family have in common are
  attributes of the class.
  """

  embedding: ClassVar[str] = 'embed_tokens'  # Name of the token embedding.
  # Name of another embedding, from which rows are read.
  looked_up: ClassVar[str | None] = None
  gated: ClassVar[bool] = True  # Whether feed-forward layers have a gate.
  num_experts = experts_per_token = 1

  vocab_size: int
  num_positions: int  # Longest context.
  width: int  # The width of the residual stream.
  num_layers: int
  num_heads: int  # Heads of queries.
  num_kv_heads: int  # Divides `num_heads`.
  # One for all layers, or a tuple with one for each, as some fields below.
  head_width: int | tuple[int, ...]  # Dh, even; not always width / num_heads.
  inner_width: int | tuple[int, ...]  # Feed-forward layer, or one expert.
  activation: str = 'silu'  # A key of `layers.ACTIVATIONS`.
  norm_epsilon: float = 1e-6  # Added to the mean square in every norm.
  rope: _Rope | tuple[_Rope, ...] = rope_lib.Rope()  # None rotates nothing.
  window: int | tuple[int | None, ...] | None = None  # See `within_window`.
  qkv_bias: bool = False
  output_bias: bool = False  # In attention's output projection.
  mlp_bias: bool = False
  qk_norm: bool = False  # Whether queries and keys are normalised (Qwen 3),
  joint_qk_norm: bool = False  # and that over all heads together (OLMo 2).
  value_norm: bool = False  # Whether values are, without a scale (Gemma 4).
  # Where else norms are: before attention and MLP, after them (OLMo 2), or both
  # (Gemma 2).
  pre_norm: bool = True
  post_norm: bool = False
  embedding_scale: float = 1.0  # Factor of the embeddings (Granite, Gemma).
  attention_scale: float | None = None  # None: 1 / sqrt(Dh).
  residual_scale: float = 1.0  # Scales each addition (Granite).
  logit_divisor: float = 1.0  # Divides the logits (Granite).
  score_cap: float | None = None  # See `layers.soft_cap` (Gemma 2).
  logit_cap: float | None = None
  sinks: bool = False  # Whether heads have them, see `self_attention`.
  tie_embeddings: bool = False  # Use the token embedding as the head.
  # The kind of each layer, a key of `Llama.mixers`.
  mixers: str | tuple[str, ...] = 'self_attn'
  # The earlier layer whose keys and values one reads; None: it has its own.
  kv_source: int | tuple[int | None, ...] | None = None

  def __post_init__(self) -> None:
    layers.check_config(self)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads must divide num_heads {self.num_heads}, got'
        f' {self.num_kv_heads}'
      )
    widths = self.of_layers('head_width')
    for width in widths:
      if width % 2:
        raise ValueError(f'head_width must be even, got {width}')
    if not (self.pre_norm or self.post_norm):
      raise ValueError('pre_norm and post_norm are both False')
    for name in _FACTORS:
      factor = getattr(self, name)
      if factor is not None and not factor > 0:
        raise ValueError(f'{name} must be positive, got {factor}')
    # Equal models are equal records.
    if {self.attention_scale} == {1 / math.sqrt(width) for width in widths}:
      self._set('attention_scale', None)
    windows = self.of_layers('window')
    for window in windows:
      if window is not None and window < 1:
        raise ValueError(f'sliding_window must be positive, got {window}')
    slides = lambda size: size is not None and size < self.num_positions
    self._set_layers('window', tuple(w if slides(w) else None for w in windows))
    ropes = zip(self.of_layers('rope'), widths, strict=True)
    for rope, width in dict.fromkeys(ropes):
      if rope:
        rope.frequencies(width)  # Factors of each pair must be as many.
      if rope and rope.query_growth and self.qk_norm:
        raise ValueError('qk_norm with queries that grow is not supported')
    if self.value_norm and (self.joint_qk_norm or not self.qk_norm):
      raise ValueError('value_norm needs qk_norm of each head')
    sources = self.of_layers('kv_source')
    for layer, source in enumerate(sources):
      if source is not None and not (
        0 <= source < layer
        and sources[source] is None
        and widths[source] == widths[layer]
      ):
        raise ValueError(
          f'kv_source of layer {layer} must be an earlier one that has keys and'
          f' values, as wide as its own would be, got {source}'
        )
    for field in ('head_width', 'inner_width', 'rope', 'mixers', 'kv_source'):
      self._set_layers(field, self.of_layers(field))

  @property
  def ends_with_training(self) -> bool:
    """Whether longer texts than in the training are rotated otherwise."""
    scalings = (rope and rope.scaling for rope in self.of_layers('rope'))
    return any(isinstance(s, rope_lib.LongRopeScaling) for s in scalings)

  @property
  def attention_layers(self) -> tuple[int, ...]:
    """The layers that have keys and values of their own."""
    sources, states = self.of_layers('kv_source'), self.state_layers
    layers = (layer for layer, source in enumerate(sources) if source is None)
    return tuple(layer for layer in layers if layer not in states)

  @property
  def state_layers(self) -> tuple[int, ...]:
    """The layers that have a state in place of attention."""
    mixers = enumerate(self.of_layers('mixers'))
    return tuple(layer for layer, name in mixers if name != 'self_attn')

  @property
  def cache_widths(self) -> tuple[int, ...]:
    """The widths of keys and values in a cache, by `attention_layers`."""
    widths = self.of_layers('head_width')
    return tuple(widths[layer] for layer in self.attention_layers)

  def state_of_layer(self, batch_size: int) -> recurrent_lib.Recurrent:
    """A layer without keys and values before any token, its window empty."""
    raise NotImplementedError

  def _set(self, field: str, value: Any) -> None:
    object.__setattr__(self, field, value)

  def _set_layers(self, field: str, values: tuple[Any, ...]) -> None:
    self._set(field, values if len(set(values)) > 1 else values[0])

  def of_layers(self, field: str) -> tuple[Any, ...]:
    """A field with one value for all layers or one for each, for each."""
    value = getattr(self, field)
    if not isinstance(value, tuple):
      return (value,) * self.num_layers
    if len(value) != self.num_layers:
      raise ValueError(
        f'{field} has {len(value)} values, expected one for each of'
        f' {self.num_layers} layers'
      )
    return value


def fields_of(config: LlamaConfig) -> dict[str, Any]:
  """The fields by name, without those that a subclass adds."""
  fields = dataclasses.fields(LlamaConfig)
  return {field.name: getattr(config, field.name) for field in fields}


class Attention(nnx.Module):
  """Grouped-query self-attention of one block."""

  def __init__(
    self,
    config: LlamaConfig,
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

  def attend(
    self,
    projections: Sequence[jax.Array],
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> tuple[jax.Array, _Cache]:
    """See `attention.self_attention`."""
    names = ('q_norm', 'k_norm', 'v_norm')
    heads = attention.Heads(
      layer=self.layer,
      num_kv_heads=self.config.num_kv_heads,
      width=self.head_width,
      dtype=self.dtype,
      scale=self.scale,
      norms=tuple(getattr(self, name, None) for name in names),
      joint_norms=self.config.joint_qk_norm,
      writes=self.writes,
      cap=self.config.score_cap,
      sinks=self.sinks[...] if self.config.sinks else None,
    )
    return attention.self_attention(projections, mask, cache, heads, rotation)

  def __call__(
    self,
    x: jax.Array,
    norm: layers.Norm | None,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
    residual: jax.Array | None,
  ) -> tuple[jax.Array, _Cache]:
    others = (self.k_proj, self.v_proj) if self.writes else ()
    projections = layers.projections(x, (self.q_proj, *others), norm)
    out, cache = self.attend(projections, rotation, mask, cache)
    return self.o_proj(out, residual=residual), cache

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
    # The function that attends writes, so bits do not depend on the caller. XLA
    # leaves out the attention, which nobody reads.
    width = self.config.num_heads * self.head_width
    entries = layers.projections(rows, (self.k_proj, self.v_proj), None)
    queries = jnp.zeros((*rows.shape[:-1], width))
    # A cache that grows has no slots before.
    num_slots = cache.num_slots or rows.shape[1]
    mask = jnp.zeros((*rows.shape[:-1], num_slots), bool)
    _, written = self.attend([queries, *entries], rotation, mask, cache)
    return cast(cache_lib.KVCache, written)


_ATTENTION = types.MappingProxyType({'self_attn': Attention})


class FeedForward(nnx.Module):
  """Gated MLP (SwiGLU, arXiv 2002.05202) of one block."""

  def __init__(self, config: LlamaConfig, **new: Unpack[layers.New]):
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
    config: LlamaConfig,
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
      return x + config.residual_scale * (norm(out) if norm else out)

    out, cache = mixer(
      x, self.input_layernorm, rotation, mask, cache, x if at_once else None
    )
    x = add(x, out, after_attention)
    out = self.mlp(x, before_mlp, x if at_once else None)
    return add(x, out, self.post_feedforward_layernorm), cache


def rotations(config: LlamaConfig, positions: jax.Array) -> list[Any]:
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
  config: LlamaConfig, positions: jax.Array, mask: jax.Array
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


def scores(
  config: LlamaConfig, states: jax.Array, head: matrices_lib.Weight
) -> jax.Array:
  """Logits `[..., V]` float32, for normalised states `[..., width]`."""
  logits = matrices_lib.matmul(states, head)
  if config.logit_divisor != 1.0:
    logits /= config.logit_divisor
  return layers.soft_cap(logits, config.logit_cap)


class Llama(nnx.Module):
  """Llama language model; for the arguments see `gpt2.GPT2`."""

  layer: Any = Layer  # Class of the layers.
  feed_forward: Any = FeedForward  # Class of the MLP of a layer.
  #: Classes of what mixes positions, by `LlamaConfig.mixers`.
  mixers: Mapping[str, Any] = _ATTENTION

  def __init__(
    self,
    config: LlamaConfig,
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
    x = self.norm(x)
    cache = cache_lib.write_hidden(cache, cache_lib.AFTER_NORM, x)
    # On a GPU a head has some outputs more.
    logits = scores(config, x, head)[..., : config.vocab_size]
    return logits, None if given is None else cache
