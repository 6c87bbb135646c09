"""The record of a `model_type`: all that distinguishes it from a Llama."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import numpy as np

from specdec.models.checkpoints.keys import config_keys
from specdec.models.checkpoints.model_types import architecture
from specdec.models.nn import llama as nn_llama

FULL, SLIDING = 'full_attention', 'sliding_attention'
QUERY_SCALAR = 'query_pre_attn_scalar'  # Scores are divided by its square root.
# Fields of shapes, and their keys in config.json. Where a class of transformers
# has several of them, the last one counts.
_KEYS = {
  'vocab_size': ('vocab_size',),
  'width': ('hidden_size',),
  'num_layers': ('num_hidden_layers',),
  'num_heads': ('num_attention_heads',),
  'num_kv_heads': ('num_key_value_heads',),
  'inner_width': ('intermediate_size',),
  'activation': ('hidden_act', 'hidden_activation'),
  'norm_epsilon': ('rms_norm_eps', 'norm_eps'),
  'tie_embeddings': ('tie_word_embeddings',),
  'qkv_bias': ('attention_bias', 'qkv_bias'),
  'output_bias': ('attention_bias',),
  'mlp_bias': ('mlp_bias',),
  'embedding_scale': ('embedding_multiplier',),
  'attention_scale': ('attention_multiplier', QUERY_SCALAR),
  'residual_scale': ('residual_multiplier',),
  'logit_divisor': ('logits_scaling',),
  'score_cap': ('attn_logit_softcapping',),
  'logit_cap': ('final_logit_softcapping',),
  'layer_width': ('hidden_size_per_layer_input',),
  'num_experts': ('num_local_experts', 'num_experts'),
  'experts_per_token': ('num_experts_per_tok',),
  'renormalize': ('norm_topk_prob',),
  'shared_width': (
    'shared_intermediate_size',
    'shared_expert_intermediate_size',
  ),
  'conv_size': ('conv_L_cache', 'linear_conv_kernel_dim'),
  'conv_bias': ('conv_bias',),
  'key_heads': ('linear_num_key_heads',),
  'key_width': ('linear_key_head_dim',),
  'value_heads': ('linear_num_value_heads',),
  'value_width': ('linear_value_head_dim',),
}
ROUNDED = 'quantization_config'
# Further keys that all read, and their types where a class has no such field.
_TYPES = {
  'head_dim': int | None,
  'rope_theta': float | None,
  'partial_rotary_factor': float | None,
  'rope_parameters': dict | None,
  'rope_scaling': dict | None,
  'sliding_window': int | None,
  'use_sliding_window': bool | None,
  'max_window_layers': int | None,
  'layer_types': list[str] | None,
  ROUNDED: dict | None,
}
WINDOWS = (
  'sliding_window',
  'layer_types',
  'use_sliding_window',
  'max_window_layers',
)
_TOKENS = frozenset({'bos_token_id', 'eos_token_id', 'pad_token_id'})
_ROPE_KEYS = _TOKENS | {'max_position_embeddings', *_TYPES}
_ROPE_KEYS -= {*WINDOWS, ROUNDED}
ORIGINAL = 'original_max_position_embeddings'
# Keys that are read if the class has such a field.
_SOMETIMES = (
  'no_rope_layers',
  'no_rope_layer_interval',
  'position_embedding_type',
  'num_local_experts',
  ORIGINAL,
)


@dataclasses.dataclass(frozen=True)
class Family:
  """How the weights of a network are loaded, whatever file has them."""

  name: str  # In messages.
  _: dataclasses.KW_ONLY
  # The class of the module, called with `(shape, dtype=, rngs=)`.
  module: Callable[..., Any] = nn_llama.Llama
  # Whether the matrix of a canonical name is never rounded to eight bits.
  stays_float: Callable[[str], bool] = lambda name: False
  # Paths and shapes of matrices that are stored next to the module.
  extras: tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelType(Family):
  """A `model_type`, which is its name, by default of a Llama.

  The canonical name of a parameter is its path in the module, joined by dots,
  with the leaf names of checkpoints: `h.0.ln_1.weight`.
  """

  config: Any  # The class of transformers; its fields are keys of config.json.
  _: dataclasses.KW_ONLY
  shape: Any = nn_llama.LlamaConfig  # The class of the shape.
  # The `model_type` of a model that has this language model as a part, and
  # whether its embeddings are tied if it does not say it.
  whole: str | None = None
  whole_is_tied: bool = True
  # The row that is used in place of this one if num_local_experts is not 0.
  mixture: 'ModelType | None' = None

  # Fields of the shape with other keys in config.json than usual, and further
  # fields with the values that they have in all such models.
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # `one`: the same rotation in all layers that rotate. `kinds`: one for layers
  # with a window and one for the others. `growing`: as `one`, and queries grow
  # with the position.
  ropes: str = 'one'
  is_partial: bool = False  # Whether partial_rotary_factor may be below 1.
  # Keys that transformers reads in addition to the fields of its class, and
  # their types.
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  idle: tuple[str, ...] = ()  # Keys that change nothing.
  # Keys, and the only values of them that are computed.
  constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rounded: tuple[str, ...] = ()  # Values of quant_method that are read.
  # Keys that the class needs, for parts that no model here has.
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # The mixer of positions in a layer, by its entry in `layer_types`.
  mixers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Makes keys that the class knows of the keys of config.json; makes further
  # fields of the shape of a config of the class.
  translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda keys: (
    keys
  )
  read: Callable[[Any], dict[str, Any]] = lambda config: {}

  # Parts of the names of stored tensors, and canonical ones.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Maps a stored name to one with a stem and a leaf, or to None for a tensor
  # that belongs to another one.
  spelling: Callable[[str], str | None] = lambda stored: stored
  # Whether the rows of matrices that are stored as one alternate.
  interleaved: bool = False
  # Whether the axes of a canonical name are stored in reverse, such as
  # `[in, out]`; convolutions always are.
  is_transposed: Callable[[str], bool] = lambda name: False
  # Maps a canonical name and stored rows, `[n, in]` or `[n]`, to our values.
  convert: Callable[[str, np.ndarray], np.ndarray] = lambda name, rows: rows
  # Whether a tensor is stored, but not read; called with `(name, shape)`.
  is_unused: Callable[[str, Any], bool] = lambda name, shape: False
  gguf: architecture.Architecture | None = None  # GGUF files, if there are any.

  @functools.cached_property
  def class_keys(self) -> frozenset[str]:
    """The keys that the class has."""
    return frozenset(field.name for field in dataclasses.fields(self.config))

  @functools.cached_property
  def rotates(self) -> bool:
    """Whether positions are rotations: whether it is of Llama's kind."""
    return issubclass(self.shape, nn_llama.LlamaConfig)

  @functools.cached_property
  def key_of_field(self) -> dict[str, str]:
    """Fields of the shape, and their keys in config.json."""
    fields = {field.name for field in dataclasses.fields(self.shape)}
    usual = {
      field: key
      for field, keys in _KEYS.items()
      for key in keys
      if key in self.class_keys and field in fields - {*self.fixed}
    }
    return {**usual, **self.keys}

  @functools.cached_property
  def types(self) -> dict[str, Any]:
    """Keys and their types."""
    return {**_TYPES, **config_keys.types_of(self.config), **self.extra}

  @functools.cached_property
  def reads(self) -> frozenset[str]:
    """The keys that are read."""
    sometimes = self.class_keys & {*WINDOWS, *_SOMETIMES}
    named = {*self.key_of_field.values(), *self.extra, *self.constants}
    return (_ROPE_KEYS if self.rotates else _TOKENS) | named | sometimes
