"""The record of a `model_type`: all that distinguishes it from a Llama.

It says what the keys of `config.json` and of GGUF files mean, and the canonical
names of tensors. GGUF files have the keys and names that llama.cpp's converters
write (github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import itertools
import re
from typing import Any

import numpy as np

from specdec.models.checkpoints.keys import config_keys
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import llama as nn_llama

Keys = Mapping[str, Any]

INNER, KV_HEADS = 'feed_forward_length', 'attention.head_count_kv'
ROPE_FACTORS = 'rope_freqs.weight'
# Keys of the metadata, after the architecture, and keys of config.json.
KEYS = {
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'block_count': 'num_hidden_layers',
  'attention.head_count': 'num_attention_heads',
  KV_HEADS: 'num_key_value_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'attention.key_length': 'head_dim',
  'attention.sliding_window': 'sliding_window',
  INNER: 'intermediate_size',
  'expert_count': 'num_local_experts',
  'expert_used_count': 'num_experts_per_tok',
  'expert_feed_forward_length': 'moe_intermediate_size',
  'attn_logit_softcapping': 'attn_logit_softcapping',
  'final_logit_softcapping': 'final_logit_softcapping',
}
MULTIPLIER_KEYS = KEYS | {
  'embedding_scale': 'embedding_multiplier',
  'logit_scale': 'logits_scaling',
  'residual_scale': 'residual_multiplier',
}
GRANITE_KEYS = MULTIPLIER_KEYS | {'attention.scale': 'attention_multiplier'}
# Names of tensors, and their canonical names (`ModelType`). A name
# without a leaf, such as `weight`, stands for all of its leaves.
NAMES = {
  'token_embd': 'embed_tokens',
  'output_norm': 'norm',
  'output': 'lm_head',
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'ffn_norm': 'post_attention_layernorm',
  'post_ffw_norm': 'post_feedforward_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
  'ffn_gate_inp': 'mlp.gate',
  'ffn_gate_exps': 'mlp.experts.gate_proj',
  'ffn_up_exps': 'mlp.experts.up_proj',
  'ffn_down_exps': 'mlp.experts.down_proj',
  'ffn_gate_shexp': 'mlp.shared_expert.gate_proj',
  'ffn_up_shexp': 'mlp.shared_expert.up_proj',
  'ffn_down_shexp': 'mlp.shared_expert.down_proj',
}
POST_NORM_NAMES = NAMES | {'post_attention_norm': 'post_attention_layernorm'}
# Drafting heads and block drafters have these, too.
DRAFTER_NAMES = NAMES | {
  'fc': 'fc',
  'attn_norm_2': 'hidden_norm',
  'enc.output_norm': 'hidden_norm',
  'markov_w1': 'markov_head.markov_w1',
  'markov_w2': 'markov_head.markov_w2',
  'conf_proj': 'confidence_head.proj',
  'attn_conv_base': 'attention_conv.base_kernel',
  'attn_conv_proj': 'attention_conv.kernel_projection',
  'ffn_conv_base': 'mlp_conv.base_kernel',
  'ffn_conv_proj': 'mlp_conv.kernel_projection',
  'selector_predecessor': 'markov_head.markov_w1',
  'selector_successor': 'markov_head.markov_w2',
  'selector_hidden': 'markov_head.hidden_projection',
}


@dataclasses.dataclass(frozen=True)
class Architecture:
  """The files of an architecture, by default as a Llama's."""

  name: str
  _: dataclasses.KW_ONLY
  # The `model_type` of files with experts. None: no file has experts; the type
  # that has this record: every file has them.
  experts: str | None = None
  # The `model_type` if layers have a window, None if it is the same.
  windowed: str | None = None

  keys: Mapping[str, str] = dataclasses.field(default_factory=KEYS.copy)
  needed: Collection[str] = ()  # Keys that are optional elsewhere.
  lists: Collection[str] = ()  # Keys that may differ between layers.
  # Further keys of config.json that all files have.
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Default n if a file does not say it: every n-th layer has no window. 0: all
  # layers have a window; None: there is no default.
  pattern: int | None = None
  # Default base of the rotation of layers with a window; None: the base is the
  # same for all layers.
  local_base: float | None = None
  # A model with this number of layers divides its scores by the square root of
  # the width over the number of heads; others by the root of a head's width.
  head_from_width: int | None = None
  # Maps keys of config.json, and the metadata, to further keys or other values.
  finish: Callable[[Keys, Keys], dict[str, Any]] = lambda keys, metadata: {}

  names: Mapping[str, str] = dataclasses.field(default_factory=NAMES.copy)
  layers: str = 'layers'  # Canonical name of the list of layers.
  # Whether rows of queries and keys have llama.cpp's order.
  swaps_rows: bool = False


def canonical_of_gguf(
  name: str, names: Mapping[str, str], layers: str = 'layers'
) -> str | None:
  """The canonical name of a tensor; None if it is not among the names."""
  block, layer, rest = (*name.split('.', 2), '', '')[:3]
  if block != 'blk':
    rest = name
  stem, _, leaf = rest.rpartition('.')
  ours = names.get(rest)
  if ours is None and stem in names:
    ours = f'{names[stem]}.{leaf}'
  return ours and (f'{layers}.{layer}.{ours}' if block == 'blk' else ours)


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
  """A value of `model_type`, which is its name; all defaults are a Llama's.

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
  gguf: Architecture | None = None  # GGUF files, if there are any.

  @functools.cached_property
  def class_keys(self) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(self.config))

  @functools.cached_property
  def is_llama(self) -> bool:
    """Whether its shape is a `LlamaConfig`."""
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
    return {**_TYPES, **config_keys.types_of(self.config), **self.extra}

  @functools.cached_property
  def reads(self) -> frozenset[str]:
    sometimes = self.class_keys & {*WINDOWS, *_SOMETIMES}
    named = {*self.key_of_field.values(), *self.extra, *self.constants}
    return (_ROPE_KEYS if self.is_llama else _TOKENS) | named | sometimes


_PREFIX = re.compile(r'(transformer|model)\.')
# Buffers of old checkpoints: frequencies, which follow from the config, and the
# causal mask, which is an argument here.
_BUFFERS = re.compile(
  r'layers\.\d+\.self_attn\.rotary_emb\.inv_freq'
  r'|h\.\d+\.attn\.(bias|masked_bias)'
)
# Matrices that are stored as one.
_FUSED = {
  'qkv_proj': ('q_proj', 'k_proj', 'v_proj'),
  'gate_up_proj': ('gate_proj', 'up_proj'),
}
# The parts of a model that sees, hears or predicts several tokens, and the
# prefix of its language model.
_VISION = re.compile(
  r'(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower'
  r'|embed_vision|embed_audio|mtp|mtp_layers)\..*'
)
_LANGUAGE = re.compile(r'(model\.)?language_model\.')


def canonical_name(stored: str, row: ModelType, shape: Any) -> str | None:
  """The canonical name of a stored tensor, or None if it is not read.

  Bare models lack the prefix. A tied head may be stored too; it is the token
  embedding. Models that see have other tensors, which are not needed.
  """
  spelled = None if _VISION.fullmatch(stored) else row.spelling(stored)
  if spelled is None:
    return None
  name = _LANGUAGE.sub('', spelled, count=1)
  name = name[prefix.end() :] if (prefix := _PREFIX.match(name)) else name
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and shape.tie_embeddings:
    return f'{shape.embedding}.weight'
  name = f'.{name}.'
  for part, canonical in row.names.items():
    name = name.replace(f'.{part}.', f'.{canonical}.')
  name = name[1:-1]
  return None if row.is_unused(name, shape) else name


def is_convolution(name: str) -> bool:
  """Whether a tensor is the weight of a layer's convolution."""
  return name.endswith(('.conv.weight', '.conv1d.weight'))


def parts(
  name: str, row: ModelType, shape: Any
) -> Mapping[str, tensor_parts.Part]:
  """The tensors that a stored tensor holds, by their canonical names.

  The last one has all rows that are left, so that a tensor with too many rows
  is refused. `name` is the canonical name of the stored tensor.
  """
  *parents, stem, leaf = name.split('.')
  is_stack = parents[-1:] == ['experts']  # Tensors of all experts.
  if not is_stack and stem not in _FUSED:
    return {name: tensor_parts.Part()}
  experts = range(shape.num_experts) if is_stack else (None,)
  return {
    '.'.join([*path, matrix, leaf]): tensor_parts.Part(
      rows, expert, shape.num_experts
    )
    for expert in experts
    for path in [parents if expert is None else [*parents, str(expert)]]
    for matrix, rows in _rows(stem, parents, row, shape)
  }


def _rows(
  stem: str, parents: list[str], row: ModelType, shape: Any
) -> Iterator[tuple[str, slice]]:
  """Yields matrices that are stored as one, and their rows."""
  matrices = _FUSED.get(stem, (stem,))
  if row.interleaved:
    for first, matrix in enumerate(matrices):
      yield matrix, slice(first, None, len(matrices))
    return
  sizes = []
  if stem == 'qkv_proj':
    sizes = [shape.num_heads, shape.num_kv_heads]
    sizes = [count * shape.head_width for count in sizes]
  elif stem == 'gate_up_proj':
    is_shared = parents[-1] == 'shared_expert'
    sizes = [shape.shared_width or 0 if is_shared else shape.inner_width]
  ends = [*itertools.accumulate(sizes), None]
  for matrix, start, end in zip(matrices, [0, *ends], ends, strict=False):
    yield matrix, slice(start, end)
