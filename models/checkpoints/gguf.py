"""Models in GGUF files.

Names are those that llama.cpp's converters write
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import math
import pathlib
import re
from typing import Any

import numpy as np
import transformers

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import families
from models.checkpoints.gguf_parts import gguf_config
from models.checkpoints.gguf_parts import gguf_header
from models.checkpoints.gguf_parts import gguf_tensor
from models.checkpoints.gguf_parts import gguf_tokenizer
from models.checkpoints.keys import tensor_parts
from models.nn import adapter
from models.nn import blocks as blocks_lib
from models.nn import rope as rope_lib

SUFFIX = '.gguf'
_NAME = re.compile(r'(?:blk\.(\d+)\.)?(\w+(?:\.\w+)?)\.(weight|bias)')
_EXPERT_NAMES = {
  'ffn_gate_exps': 'gate_proj',
  'ffn_up_exps': 'up_proj',
  'ffn_down_exps': 'down_proj',
}

# Keys of each scaling, and those of `rope_parameters`.
_SCALINGS: dict[str, dict[str, str]] = {
  'none': {},
  'longrope': {},
  'linear': {'rope.scaling.factor': 'factor'},
  'yarn': {
    'rope.scaling.factor': 'factor',
    'rope.scaling.original_context_length': 'original_max_position_embeddings',
    'rope.scaling.yarn_beta_fast': 'beta_fast',
    'rope.scaling.yarn_beta_slow': 'beta_slow',
    'rope.scaling.yarn_log_multiplier': 'mscale_all_dim',
    'attention.temperature_scale': 'llama_4_scaling_beta',
  },
}
_NEVER = 1e29  # From here on, a frequency is divided to zero.
# The scaling of Llama 3.1 and later; a file has only what follows from it.
_LLAMA3: dict[str, Any] = {
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


def rope_parameters(
  path: pathlib.Path, metadata: Mapping[str, Any], header: gguf_header.Header
) -> dict[str, Any]:
  """Makes the `rope_parameters` of transformers.

  Args:
    path: of the file.
    metadata: of the architecture, without its name before the keys.
    header: of the file.

  Raises:
    ValueError: the rotation is not supported.
  """
  parameters = {'rope_theta': metadata.get('rope.freq_base', 10000.0)}
  default = 'linear' if 'rope.scaling.factor' in metadata else 'none'
  kind = metadata.get('rope.scaling.type', default)
  if kind == 'longrope' or header.tensors.keys() & {
    *gguf_config.LONGROPE.values()
  }:
    return _longrope(path, metadata, header) | parameters
  if metadata.get('rope.scaling.attn_factor', 1.0) != 1.0:
    raise ValueError(
      f'{path}: rope.scaling.attn_factor='
      f'{metadata["rope.scaling.attn_factor"]} is not supported'
    )
  if kind not in _SCALINGS:
    raise ValueError(f'{path}: rope.scaling.type {kind!r} is not supported')
  if kind == 'linear' and 'rope.scaling.factor' not in metadata:
    raise ValueError(
      f'{path}: rope.scaling.type=linear needs rope.scaling.factor'
    )
  keys = _SCALINGS[kind]
  found = {keys[key]: metadata[key] for key in keys if key in metadata}
  if kind != 'none':
    parameters |= {'rope_type': kind, **found}
  if 'mscale_all_dim' in parameters:  # The other factor is one in llama.cpp.
    parameters['mscale'] = 1.0
  if (factors := gguf_config.ROPE_FACTORS) in header.tensors:
    if kind != 'none':
      raise ValueError(
        f'{path}: rope.scaling.type={kind!r} and the tensor {factors}'
        ' contradict each other'
      )
    parameters |= _divided(path, header, parameters['rope_theta'])
  return parameters


def _longrope(
  path: pathlib.Path, metadata: Mapping[str, Any], header: gguf_header.Header
) -> dict[str, Any]:
  """The keys of a rotation whose frequencies are divided by stored factors.

  Raises:
    ValueError: there are none.
  """
  found: dict[str, Any] = {'rope_type': 'longrope'}
  for key, name in gguf_config.LONGROPE.items():
    if name not in header.tensors:
      raise ValueError(f'{path} lacks the tensor {name} of its longrope')
    [(_, stored)] = gguf_tensor.Tensor(path, header.tensors[name]).blocks()
    found[key] = stored.tolist()
  whole = metadata['context_length']
  found['original_max_position_embeddings'] = metadata.get(
    'rope.scaling.original_context_length', whole
  )
  if (factor := 'rope.scaling.attn_factor') in metadata:
    found['attention_factor'] = metadata[factor]
  return found


def _divided(
  path: pathlib.Path, header: gguf_header.Header, theta: float
) -> dict[str, Any]:
  """The keys of a scaling of which a file has the divisors of frequencies.

  Raises:
    ValueError: no scaling that is known has these.
  """
  [(_, stored)] = gguf_tensor.Tensor(
    path, header.tensors[gguf_config.ROPE_FACTORS]
  ).blocks()
  kept = np.count_nonzero(stored == 1)
  if np.all(stored[:kept] == 1) and np.all(stored[kept:] >= _NEVER):
    part = kept / len(stored)
    return {'rope_type': 'proportional', 'partial_rotary_factor': part}
  exponents = np.arange(len(stored), dtype=np.float32) / len(stored)
  frequencies = np.float32(1) / np.float32(theta) ** exponents
  factor = float(np.max(stored))
  scaling = rope_lib.Llama3Scaling(factor=factor, **_LLAMA3)
  scaled = frequencies / scaling.scale(frequencies, theta)
  if not np.allclose(stored, scaled, rtol=1e-3):
    raise ValueError(
      f'{path}: {gguf_config.ROPE_FACTORS} holds factors {stored[:4]}... that'
      " are not those of Llama 3's scaling, and no others are supported"
    )
  return {'rope_type': 'llama3', 'factor': factor, **_LLAMA3}


def config_keys(path: pathlib.Path) -> dict[str, Any]:
  """Makes the keys that the `config.json` of the same model would have.

  Raises:
    ValueError: the architecture or one of its keys is not known, or a key is
      missing; the message names it.
  """
  header = gguf_header.read_header(path)
  name = gguf_config.architecture_of(path, header)
  kind = gguf_config.ARCHITECTURES[name]
  metadata = gguf_config.own_keys(path, header, name)
  num_experts = metadata.get('expert_count', 0)
  model_type = kind.mixture if num_experts > 0 else kind.plain
  if model_type is None:
    raise ValueError(
      f'{path}: {name} with {num_experts} experts is not supported'
    )
  gguf_config.check_keys(path, name, metadata)
  if 'token_embd.weight' not in header.tensors:
    raise ValueError(f'{path} lacks the tensor token_embd.weight')
  found = {
    theirs: metadata[key]
    for key, theirs in kind.keys.items()
    if key in metadata and (num_experts > 0 or not key.startswith('expert_'))
  }
  vocab_size = header.tensors['token_embd.weight'].shape[0]
  if metadata.get('vocab_size', vocab_size) != vocab_size:
    raise ValueError(
      f'{path}: {name}.vocab_size={metadata["vocab_size"]} contradicts the'
      f' {vocab_size} rows of token_embd.weight'
    )
  found |= {
    'model_type': model_type,
    'vocab_size': vocab_size,
    'tie_word_embeddings': 'output.weight' not in header.tensors,
  }
  found |= kind.fixed
  if kind.state_layers:
    found['layer_types'] = _layer_types(path, name, header)
  if name == 'qwen35':
    inner, heads = (
      metadata.get(key, 0) for key in ('ssm.inner_size', 'ssm.time_step_rank')
    )
    found['linear_value_head_dim'] = inner // max(heads, 1)
  if num_experts > 0:
    found |= {'norm_topk_prob': True, 'num_experts': num_experts}
  if kind.rotates:
    # Classes of transformers have other defaults.
    found.setdefault('num_key_value_heads', found['num_attention_heads'])
    found['rope_parameters'] = rope_parameters(path, metadata, header)
    found['attention_bias'] = 'blk.0.attn_q.bias' in header.tensors
    _add_heads(path, name, metadata, found)
    _add_windows(path, name, metadata, found)
    _add_own(name, metadata, found)
  if name == 'gemma4':
    _add_layers(path, found)
  return found


def _add_own(
  name: str, metadata: Mapping[str, Any], found: dict[str, Any]
) -> None:
  """Adds what follows from the architecture alone."""
  rope, original = found['rope_parameters'], 'original_max_position_embeddings'
  if name == 'phi3' and original in rope:  # It has a default beside these.
    found[original] = rope[original]
  if name == 'gpt-oss' and rope.get('rope_type') == 'yarn':
    rope['truncate'] = False  # No file says that pairs are not rounded.
  if name == 'minicpm':
    found['attention_multiplier'] = 1 / math.sqrt(found['head_dim'])
  if name == 'mistral3' and 'llama_4_scaling_beta' not in rope:
    found['model_type'] = 'mistral'  # Such as Mistral Small 3.
  if name in ('granite', 'granitemoe'):
    _add_rotation(metadata, found)


def _add_layers(path: pathlib.Path, found: dict[str, Any]) -> None:
  """Adds what differs between the layers of a Gemma 4.

  Raises:
    ValueError: their sizes are not those of such a model, or its rotation is
      missing.
  """
  rope = found['rope_parameters'].get('full_attention', {})
  if rope.get('rope_type') != 'proportional':
    raise ValueError(f'{path} lacks the tensor {gguf_config.ROPE_FACTORS}')
  sizes, shared = found['intermediate_size'], found['num_kv_shared_layers']
  if isinstance(sizes, list):
    first = len(sizes) - shared
    if sizes != [sizes[0]] * first + [2 * sizes[0]] * shared:
      raise ValueError(
        f'{path}: gemma4.{gguf_config.INNER}={sizes!r:.60} is not supported,'
        f' only one size, and twice that in the last {shared} layers'
      )
    found |= {'intermediate_size': sizes[0], 'use_double_wide_mlp': True}
  found['vocab_size_per_layer_input'] = found['vocab_size']


def _add_rotation(metadata: Mapping[str, Any], found: dict[str, Any]) -> None:
  """Adds the keys of a Granite that has experts or rotates nothing."""
  rotates = metadata.get('rope.scaling.finetuned', True)
  if rotates and found['model_type'] == 'granite':
    return
  number = found.pop('num_experts', 0)
  size = 0 if number else found['intermediate_size']
  found |= {
    'model_type': 'granitemoehybrid',
    'num_local_experts': number,
    'shared_intermediate_size': found.get('shared_intermediate_size', size),
    'layer_types': ['attention'] * found['num_hidden_layers'],
    'position_embedding_type': 'rope' if rotates else None,
  }


def _layer_types(
  path: pathlib.Path, name: str, header: gguf_header.Header
) -> list[str]:
  """Which layers have a state in place of keys and values."""
  key = f'{name}.{gguf_config.KV_HEADS}'
  heads, number = (
    header.metadata.get(key),
    header.metadata[f'{name}.block_count'],
  )
  if not isinstance(heads, list) or len(heads) != number:
    raise ValueError(
      f'{path}: {key} must say for each of {number} layers how many heads it'
      f' has, got {heads!r:.60}'
    )
  states = str(gguf_config.ARCHITECTURES[name].state_layers)
  return ['full_attention' if one else states for one in heads]


def _add_heads(
  path: pathlib.Path,
  name: str,
  metadata: Mapping[str, Any],
  found: dict[str, Any],
) -> None:
  """Adds the width of a head, and what its scores are divided by."""
  from_width = found['hidden_size'] // max(found['num_attention_heads'], 1)
  head_width = found.setdefault('head_dim', from_width)
  special = gguf_config.ARCHITECTURES[name].head_from_width
  if special is not None:
    found['query_pre_attn_scalar'] = (
      from_width if special == found['num_hidden_layers'] else head_width
    )
  rotated = metadata.get('rope.dimension_count', head_width)
  whole = found.get('global_head_dim', head_width)
  is_partial = gguf_config.ARCHITECTURES[name].is_partial
  if is_partial and rotated < head_width:
    fraction = rotated / head_width
    found['rope_parameters']['partial_rotary_factor'] = fraction
  count, values = 'rope.dimension_count', 'attention.value_length'
  widths = {values: whole} if is_partial else {values: whole, count: whole}
  widths |= {f'{values}_swa': head_width, f'{count}_swa': head_width}
  for key, width in widths.items():
    if metadata.get(key, width) != width:
      raise ValueError(
        f'{path}: {name}.{key}={metadata[key]} is not the width of a head,'
        f' {width}'
      )


def _add_windows(
  path: pathlib.Path,
  name: str,
  metadata: Mapping[str, Any],
  found: dict[str, Any],
) -> None:
  """Adds which layers have the window, and how those rotate."""
  kind, number = gguf_config.ARCHITECTURES[name], found['num_hidden_layers']
  stated, theta = metadata.get(gguf_config.PATTERN), 'rope.freq_base_swa'
  base = found['rope_parameters']['rope_theta']
  if not kind.local_rope and metadata.get(theta, base) != base:
    raise ValueError(
      f'{path}: {name}.{theta}={metadata[theta]} is not supported, since all'
      f' layers rotate by the base {base}'
    )
  window = found.get('sliding_window')
  if not window:  # 0 in files of Phi 4.
    found.pop('sliding_window', None)
    if stated is not None:
      raise ValueError(
        f'{path}: {name}.{gguf_config.PATTERN} says which layers have a window,'
        f' but {name}.attention.sliding_window is {window}'
      )
    return
  pattern = kind.pattern if stated is None else stated
  if pattern is None:
    raise ValueError(
      f'{path}: {name}.attention.sliding_window={window}, but no'
      f' {name}.{gguf_config.PATTERN} says which layers have it'
    )
  if not isinstance(pattern, list):
    pattern = [pattern == 0 or (at + 1) % pattern for at in range(number)]
  elif len(pattern) != number:
    raise ValueError(
      f'{path}: {name}.{gguf_config.PATTERN} has {len(pattern)} values for'
      f' {number} layers'
    )
  if name == 'llama' and found['model_type'] == 'llama':
    found['model_type'] = 'mistral' if all(pattern) else 'ministral'
  types = ['sliding_attention' if one else 'full_attention' for one in pattern]
  found |= {'layer_types': types, 'use_sliding_window': True}
  if kind.local_rope:
    local = {'rope_theta': metadata.get(theta, 10000.0)}
    found['rope_parameters'] = {
      'full_attention': found['rope_parameters'],
      'sliding_attention': local | {'rope_type': 'default'},
    }


def _canonical(name: str, kind: gguf_config.Architecture) -> str | None:
  """The canonical name of a tensor, with `{}` for the number of an expert."""
  block, number, own = (*name.split('.', 2), '', '')[:3]
  if block == 'blk' and own in kind.vectors:
    return f'{kind.layers}.{number}.{kind.vectors[own]}'
  found = _NAME.fullmatch(name)
  if found is None:
    return None
  layer, part, leaf = found.groups()
  prefix = '' if layer is None else f'{kind.layers}.{layer}.'
  if part in _EXPERT_NAMES:
    return f'{prefix}mlp.experts.{{}}.{_EXPERT_NAMES[part]}.{leaf}'
  if part not in kind.names:
    return None
  if part == 'attn_sinks':  # They are a parameter by themselves.
    return prefix + kind.names[part]
  return f'{prefix}{kind.names[part]}.{leaf}'


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """A file with a whole model; see `checkpoint.Checkpoint`."""

  path: pathlib.Path

  @staticmethod
  def holds(path: pathlib.Path) -> bool:
    """Whether a path is a file that is named or begins as GGUF files do."""
    named = path.suffix.lower() == SUFFIX
    return path.is_file() and (named or gguf_header.begins_as_gguf(path))

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> adapter.Config:
    return families.config_from_keys(config_keys(self.path), self.path)

  @functools.cached_property
  @checkpoint_lib.named
  def tokenizer(self) -> transformers.PreTrainedTokenizerBase | None:
    return gguf_tokenizer.load_tokenizer(self.path)

  @property
  @checkpoint_lib.named
  def eos_ids(self) -> tuple[int, ...]:
    """The ids of the file, or of the tokenizer."""
    of_tokenizer = getattr(self.tokenizer, 'eos_token_id', None)
    stated = (gguf_tokenizer.eos_ids(self.path), of_tokenizer)
    return checkpoint_lib.usable_ids(self.path, stated, self.config.vocab_size)

  @property
  @checkpoint_lib.named
  def stored_dtypes(self) -> list[str]:
    """See `Checkpoint`.

    Blocks of few bits have scales in float16 and are made from models in either
    16-bit type.
    """
    kind = gguf_tensor.quants().GGMLQuantizationType
    tensors = gguf_header.read_header(self.path).tensors.values()
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    if kinds == {kind.F32}:
      return ['float32']
    exact = {kind.BF16: 'bfloat16', kind.F16: 'float16'}
    known = [exact[one] for one in exact if one in kinds]
    if kinds <= {*exact, kind.F32}:
      return known
    computed = any(one.name in blocks_lib.KINDS for one in map(kind, kinds))
    return ['stored'] * computed + ['bfloat16', 'float16']

  @property
  def files(self) -> list[pathlib.Path]:
    return [self.path]

  @property
  def size(self) -> int:
    return self.path.stat().st_size

  def tensors(self) -> Iterator[tuple[str, gguf_tensor.Tensor]]:
    """Yields canonical names and tensors, in the order of the file."""
    header = gguf_header.read_header(self.path)
    arch = gguf_config.architecture_of(self.path, header)
    kind = gguf_config.ARCHITECTURES[arch]
    keys = gguf_config.own_keys(self.path, header, arch)
    num_heads = keys.get('attention.head_count')
    num_kv_heads = keys.get('attention.head_count_kv')
    family = families.family_of(self.config)
    heads = {'attn_q': num_heads, 'attn_k': num_kv_heads or num_heads}
    tensor = functools.partial(gguf_tensor.Tensor, self.path)
    for name, info in header.tensors.items():
      if name in (gguf_config.ROPE_FACTORS, *gguf_config.LONGROPE.values()):
        continue
      canonical = _canonical(name, kind)
      if canonical is None:
        raise ValueError(f'{self.path}: tensor {name} is not part of a {arch}')
      if family.is_unused(canonical, self.config):
        continue
      # A convolution has a weight of one input per channel.
      if canonical.endswith(('.conv.weight', '.conv1d.weight')):
        channels, size = info.shape
        info = dataclasses.replace(info, shape=(channels, 1, size))
      if '{}' in canonical:
        for expert in range(info.shape[0]):
          part = tensor_parts.Part(expert=expert)
          yield canonical.format(expert), tensor(info, part)
        continue
      if parts := family.parts(canonical, self.config):
        yield from ((one, tensor(info, parts[one])) for one in parts)
        continue
      rotated = heads.get(name.split('.')[-2]) if kind.swaps_rows else None
      yield canonical, tensor(info, num_heads=rotated)

  def stored_size(self) -> tuple[int, int]:
    """The number of elements of all tensors, and their bytes."""
    sizes = gguf_tensor.quants().GGML_QUANT_SIZES
    elements = total = 0
    for tensor in gguf_header.read_header(self.path).tensors.values():
      number = math.prod(tensor.shape)
      per_block, block_bytes = sizes[tensor.kind]
      elements += number
      total += number // per_block * block_bytes
    return elements, total
