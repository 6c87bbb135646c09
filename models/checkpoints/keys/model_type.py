"""A `model_type` of Llama's kind: which keys it has, and what they say."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from models.checkpoints.keys import config_keys
from models.nn import llama_config

FULL, SLIDING = 'full_attention', 'sliding_attention'
QUERY_SCALAR = 'query_pre_attn_scalar'  # Scores are divided by its square root.
# Fields of a `LlamaConfig`, and their keys in config.json.
_KEYS = {
  'vocab_size': 'vocab_size',
  'width': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'num_kv_heads': 'num_key_value_heads',
  'inner_width': 'intermediate_size',
  'activation': 'hidden_act',
  'norm_epsilon': 'rms_norm_eps',
  'tie_embeddings': 'tie_word_embeddings',
}
ROUNDED = 'quantization_config'
# Further keys that all read, and their types where a class has no such field.
_TYPES = {
  'head_dim': int | None,
  'rope_theta': float | None,
  'partial_rotary_factor': float | None,
  **{'rope_parameters': dict | None, 'rope_scaling': dict | None},
  **{'sliding_window': int | None, 'use_sliding_window': bool | None},
  **{'max_window_layers': int | None, 'layer_types': list[str] | None},
  ROUNDED: dict | None,
}
WINDOWS = (
  *('sliding_window', 'use_sliding_window', 'max_window_layers'),
  'layer_types',
)
_ALWAYS = {'max_position_embeddings', *_TYPES} - {*WINDOWS, ROUNDED}
_ALWAYS |= {'bos_token_id', 'eos_token_id', 'pad_token_id'}
ORIGINAL = 'original_max_position_embeddings'
# Keys that are read if the class has such a field.
_SOMETIMES = (
  *('no_rope_layers', 'no_rope_layer_interval'),
  *('mlp_only_layers', 'decoder_sparse_step', 'position_embedding_type'),
  *('num_local_experts', ORIGINAL),
)
# Fields that follow from several keys, or from a key and others.
COMPUTED = {'num_positions', 'head_width', 'rope', 'window', 'mixers'}
COMPUTED |= {'attention_scale', 'embedding_scale', 'kv_source'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
  """A `model_type`: the keys that it has besides those that all have.

  Attributes:
    config: class of transformers.
    shape: class of the shape.
    keys: further fields of the shape, and their keys in config.json.
    fixed: further fields, and the values that they have in all such models.
    windows: which layers may have a window: `none`, `all` by the key
      sliding_window, `some` by layer_types, or `switched`, some only if
      use_sliding_window is true.
    ropes: `one` for all layers, one for each of the `kinds` of layers with a
      window and without, or one for the layers of the key `no_rope_layers` that
      are not 0; `growing`, one whose queries grow with the position; `stated`,
      one if the key position_embedding_type says so.
    is_partial: whether partial_rotary_factor may be below 1.
    extra: keys that transformers reads besides the fields of its class, and
      their types.
    idle: keys that change nothing.
    constants: keys, and the only values of them that are computed.
    rounded: ways in which weights may be rounded, see quantization_config.
    given: keys that the class is made with, of what no model here has.
    mixture: the same for models with experts, by the key num_local_experts.
    mixers: what mixes positions in a layer, by its entry in `layer_types`.
    renames: parts of canonical names, and of the names that are stored.
    of_layers: makes further fields of a config of transformers.
    to_keys: its inverse, makes keys of a shape.
  """

  config: Any
  shape: type[llama_config.LlamaConfig] = llama_config.LlamaConfig
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  windows: str = 'none'
  ropes: str = 'one'
  is_partial: bool = False
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  idle: tuple[str, ...] = ()
  constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rounded: tuple[str, ...] = ()
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  mixture: 'ModelType | None' = None
  mixers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
  of_layers: Callable[[Any], dict[str, Any]] = lambda config: {}
  to_keys: Callable[[Any], dict[str, Any]] = lambda config: {}

  @functools.cached_property
  def names(self) -> dict[str, str]:
    """Fields of the shape, and their keys in config.json."""
    named = {**_KEYS, **self.keys}.items()
    return {ours: key for ours, key in named if ours not in self.fixed}

  @functools.cached_property
  def types(self) -> dict[str, Any]:
    """The keys whose types are known, and these."""
    return {**_TYPES, **config_keys.types_of(self.config), **self.extra}

  @functools.cached_property
  def reads(self) -> frozenset[str]:
    """The keys that are read."""
    own = {one.name for one in dataclasses.fields(self.config)}
    read = {*self.names.values(), *_ALWAYS}
    read |= {*self.extra, *self.constants}
    windows = () if self.windows == 'none' else WINDOWS
    return frozenset(read | own & {*windows, *_SOMETIMES})
