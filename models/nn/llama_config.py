"""Shape of Llama and related models."""

import dataclasses
import math
from typing import Any
from typing import ClassVar

from specdec import recurrent as recurrent_lib
from specdec.models.nn import layers
from specdec.models.nn import rope as rope_lib

_Rope = rope_lib.Rope | None
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

  def state_of_layer(
    self, batch_size: int, *, kernels: bool
  ) -> recurrent_lib.Recurrent:
    """A layer without keys and values before any token, its window empty.

    `kernels` says whether the kernels of `models/nn/cpu` compute.
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
