"""Llama and related models in Flax NNX, with positions and mask as arguments.

One module serves Llama 2 and 3, Mistral, Qwen, Gemma, OLMo, Granite, SmolLM and
Phi, which differ in `LlamaConfig` only. `models.nn.mixtral` has the same blocks
with experts in place of the feed-forward layer. Names and dtypes follow the
same rules as in `models.nn.gpt2`.
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

from flax import nnx
import jax
import jax.numpy as jnp

from models.nn import attention
from models.nn import layers
from models.nn import matrices as matrices_lib
from models.nn import rope as rope_lib
from models.nn.cpu import ops
from specdec import cache as cache_lib
from specdec import recurrent as recurrent_lib

_Rope = rope_lib.Rope | None
_Cache = cache_lib.KVCache | None
_Attended = tuple[jax.Array, _Cache]
_FACTORS = (
  *('embedding_scale', 'attention_scale', 'residual_scale'),
  *('logit_divisor', 'score_cap', 'logit_cap'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """Shape of a Llama: everything that changes what it computes.

  Each key and value head is shared by a group of query heads (grouped-query
  attention, arXiv 2305.13245). What all models of the family have in common are
  attributes of the class.
  """

  embedding: ClassVar[str] = 'embed_tokens'  # Name of the token embedding.
  looked_up: ClassVar[str | None] = None  # Another one, of which rows are read.
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
  # Where else norms are: before attention and perceptron, behind them (OLMo 2),
  # or both (Gemma 2).
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
    own = (layer for layer, one in enumerate(sources) if one is None)
    return tuple(layer for layer in own if layer not in states)

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

  def state_of_layer(
    self, batch_size: int, *, kernels: bool
  ) -> recurrent_lib.Recurrent:
    """A layer without keys and values before any token, its window empty.

    `kernels` says whether those of `models.nn.cpu` compute.
    """
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
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
    input_width: int | None = None,  # None: that of the residual stream.
  ):
    self.config = config
    source = config.of_layers('kv_source')[layer]
    self.writes = source is None
    # Counted among those that have keys and values.
    self.layer = config.attention_layers.index(layer if self.writes else source)
    self.dtype = dtype
    self.head_width = config.of_layers('head_width')[layer]
    self.scale = config.attention_scale or 1 / math.sqrt(self.head_width)
    make = functools.partial(layers.Linear, dtype=dtype, rngs=rngs)
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
  ) -> _Attended:
    # No kernel caps scores or has sinks.
    plain = self.config.score_cap is None and not self.config.sinks
    fused = self.o_proj.is_packed and plain
    attend = self._fused if fused else self._composed
    out, cache = attend(x, norm, rotation, mask, cache)
    out = layers.project(out, [self.o_proj.parameters], residual=residual)
    return out, cache

  def _fused(
    self,
    x: jax.Array,
    norm: layers.Norm | None,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> _Attended:
    """With the kernels of `models.nn.cpu`, in two calls."""
    others = (self.k_proj, self.v_proj) if self.writes else ()
    linears = self.q_proj, *others
    projections = layers.project(
      x, [one.parameters for one in linears], norm=norm
    )
    return self._attend_projections(projections, rotation, mask, cache)

  def _attend_projections(
    self,
    projections: jax.Array,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> _Attended:
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
      found = (getattr(self, name, None) for name in names)
      norms = tuple(one and one.operand for one in found)
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
    x: jax.Array,
    norm: layers.Norm | None,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> _Attended:
    rows = layers.normalize(x, norm, kernels=self.o_proj.is_packed)
    query = self._normalized_heads(self.q_proj(rows), 'q_norm')
    query = rope_lib.rotate(query, rotation)
    if rotation is not None and rotation.query_scale is not None:
      query *= rotation.query_scale[:, None, :, None]
    query = query.astype(self.dtype)
    key, value = self._entries(rows, rotation) if self.writes else (None, None)
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
    return out.swapaxes(1, 2).reshape(*x.shape[:-1], -1), cache

  def _entries(
    self, rows: jax.Array, rotation: rope_lib.Rotation | None
  ) -> tuple[jax.Array, jax.Array]:
    """Keys and values of normalised rows."""
    key = self._normalized_heads(self.k_proj(rows), 'k_norm')
    key = rope_lib.rotate(key, rotation).astype(self.dtype)
    value = self._normalized_heads(self.v_proj(rows), 'v_norm')
    return key, value.astype(self.dtype)

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
      key, value = self._entries(rows, rotation)
      return cache_lib.write(cache, self.layer, key, value)
    # The kernel that attends writes, so that bits do not depend on the caller.
    linears = [self.k_proj.parameters, self.v_proj.parameters]
    width = self.config.num_heads * self.head_width
    queries = jnp.zeros((*rows.shape[:-1], width))
    projections = [queries, layers.project(rows, linears)]
    mask = jnp.zeros((*rows.shape[:-1], cache.num_slots), bool)
    _, written = self._attend_projections(
      jnp.concatenate(projections, axis=-1), rotation, mask, cache
    )
    return cast(cache_lib.KVCache, written)


class FeedForward(nnx.Module):
  """Gated perceptron (SwiGLU, arXiv 2002.05202) of one block."""

  def __init__(
    self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
  ):
    self.activation = config.activation
    width, inner = config.width, config.of_layers('inner_width')[0]
    make = functools.partial(
      layers.Linear, dtype=dtype, rngs=rngs, use_bias=config.mlp_bias
    )
    self.gate_proj = make(width, inner)
    self.up_proj = make(width, inner)
    self.down_proj = make(
      inner, width, stddev=layers.residual_stddev(config.num_layers)
    )

  def __call__(
    self, x: jax.Array, norm: layers.Norm | None, residual: jax.Array | None
  ) -> tuple[jax.Array, tuple[()]]:
    linears = [self.gate_proj.parameters, self.up_proj.parameters]
    inner = layers.project(
      x, linears, norm=norm, activation=self.activation, gated=True
    )
    linears = [self.down_proj.parameters]
    return layers.project(inner, linears, residual=residual), ()


class Layer(nnx.Module):
  """Transformer block with norms before its two parts, behind them, or both."""

  def __init__(
    self,
    config: LlamaConfig,
    layer: int,
    feed_forward: Any,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
    mixers: Mapping[str, Any] = types.MappingProxyType(
      {'self_attn': Attention}
    ),
  ):
    self.config = config
    norm = lambda wanted: (
      layers.RMSNorm(config.width, config.norm_epsilon) if wanted else None
    )
    both = config.pre_norm and config.post_norm
    self.input_layernorm = norm(config.pre_norm)
    self.mixer = config.of_layers('mixers')[layer]
    mixer = mixers[self.mixer](config, layer, dtype=dtype, rngs=rngs)
    setattr(self, self.mixer, mixer)
    # Before the perceptron where nothing is normalised behind attention.
    self.post_attention_layernorm = norm(True)
    self.pre_feedforward_layernorm = norm(both)
    shape = dataclasses.replace(
      config, inner_width=config.of_layers('inner_width')[layer]
    )
    self.mlp = feed_forward(shape, dtype=dtype, rngs=rngs)
    self.post_feedforward_layernorm = norm(config.post_norm)

  def __call__(
    self,
    x: jax.Array,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: _Cache,
  ) -> tuple[jax.Array, _Cache, Any]:
    config, mixer = self.config, getattr(self, self.mixer)
    kernels = mixer.o_proj.is_packed
    # A part's output joins the stream, at once or after a norm and a factor.
    at_once = not config.post_norm and config.residual_scale == 1.0
    behind, before = None, self.post_attention_layernorm
    if config.post_norm:
      behind, before = before, self.pre_feedforward_layernorm

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
    x = add(x, out, behind)
    out, routing = self.mlp(x, before, x if at_once else None)
    return add(x, out, self.post_feedforward_layernorm), cache, routing


def rotations(config: LlamaConfig, positions: jax.Array) -> list[Any]:
  """The rotation of each layer, for `positions [B, L]` int32."""
  ropes = zip(
    config.of_layers('rope'), config.of_layers('head_width'), strict=True
  )
  kinds = [*ropes]
  found = {
    (rope, width): rope and rope.rotation(positions, width)
    for rope, width in dict.fromkeys(kinds)
  }
  return [found[kind] for kind in kinds]


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


class Llama(nnx.Module):
  """Llama language model; the arguments are those of `models.nn.gpt2.GPT2`."""

  layer: Any = Layer  # Class of the layers.
  feed_forward: Any = FeedForward  # Class of what is behind attention in them.
  #: Classes of what mixes positions, by `LlamaConfig.mixers`.
  mixers: Mapping[str, Any] = types.MappingProxyType({'self_attn': Attention})

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
          dtype=dtype,
          rngs=rngs,
          mixers=self.mixers,
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

  def with_routing(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: _Cache = None,
  ) -> tuple[jax.Array, _Cache, tuple[Any, ...]]:
    """Computes logits and cache as `models.nn.gpt2.GPT2` does.

    Returns:
      `[B, L, V]` float32 logits, the cache, and for each layer the
      `models.nn.experts.Routing`, of shapes `[B, L, ...]`; () without experts.
    """
    embedding = self.embed_tokens.embedding.get_value()
    x = matrices_lib.take_rows(embedding, tokens)
    config = self.config
    if config.embedding_scale != 1.0:
      x *= config.embedding_scale
    seen = of_layers(config, positions, mask)
    inputs = self.layer_inputs(tokens, x)
    given, routings = cache, []
    if cache is None and config.kv_source is not None:
      cache = cache_lib.init_cache(
        *(x.shape[0], mask.shape[2]),
        num_heads=config.num_kv_heads,
        head_widths=config.cache_widths,
        dtype=self.dtype,
      )
    for layer, block in enumerate(self.layers):
      cache = cache_lib.write_hidden(cache, layer, x)
      with jax.named_scope(f'layer_{layer}'):
        x, cache, routing = block(x, *seen[layer], cache, **inputs[layer])
      routings.append(routing)
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
    return logits, None if given is None else cache, tuple(routings)

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: _Cache = None,
  ) -> _Attended:
    return self.with_routing(tokens, positions, mask, cache)[:2]
