"""The keys of config.json, rotations included, that follow from a GGUF file."""

from collections.abc import Collection
from collections.abc import Mapping
import math
import re
from typing import Any

import numpy as np

from specdec.models.checkpoints.gguf_parts import gguf_file
from specdec.models.checkpoints.keys import config_keys as config_keys_lib
from specdec.models.checkpoints.model_types import model_type as row_lib
from specdec.models.checkpoints.model_types import registry
from specdec.models.nn import rope as rope_lib
from specdec.text import text_files

LONGROPE = {
  'short_factor': 'rope_factors_short.weight',
  'long_factor': 'rope_factors_long.weight',
}
"""Tensors of the divisors of the frequencies of pairs, of longrope."""

# Keys of each scaling, and keys of `rope_parameters`.
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
# Keys of the factor of queries and keys, by older and newer converters, and a
# key that is 1 in every model of transformers.
_FACTORS = 'rope.scaling.attn_factor', 'rope.scaling.yarn_attn_factor'
_EXTRAPOLATION = 'rope.scaling.yarn_ext_factor'
_ROPE_KEYS = {
  'rope.freq_base',
  'rope.scaling.type',
  *_FACTORS,
  _EXTRAPOLATION,
  *(key for keys in _SCALINGS.values() for key in keys),
}
_NEVER = 1e29  # From here on, a frequency is divided to zero.
# The scaling of Llama 3.1 and later; a file has only what follows from it.
_LLAMA3: dict[str, Any] = {
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}
# Keys that 0 turns off, as in llama.cpp, and the values that do so here.
_OFF_AT_ZERO: dict[str, float | None] = {
  'attention.scale': None,
  'attention.sliding_window': None,
  'attn_logit_softcapping': None,
  'embedding_scale': 1.0,
  'final_logit_softcapping': None,
  'logit_scale': 1.0,
  'residual_scale': 1.0,
}
# Parts that a model may have: prefixes of their keys, and texts in the names of
# their tensors. Converters write these keys for models without the part, too: a
# Granite 4 without Mamba layers is a `granite`.
_OPTIONAL_PARTS = {
  'ssm.': '.ssm_',
  'shortconv.': '.shortconv.',
  'expert_shared_': 'shexp.',
}
_NEXTN = 'nextn_predict_layers'
PATTERN = 'attention.sliding_window_pattern'
"""For each layer, whether it has the window; or n: every n-th layer has not."""

_OPTIONAL = {row_lib.KV_HEADS, 'attention.key_length', *_OFF_AT_ZERO}
# Keys that are read elsewhere, or that change nothing.
_OTHER_KEYS = {
  *_ROPE_KEYS,
  PATTERN,
  _NEXTN,
  'attention.value_length',
  'attention.value_length_swa',
  'rope.dimension_count',
  'rope.dimension_count_swa',
  'rope.dimension_sections',
  'rope.freq_base_swa',
  'rope.scaling.finetuned',
  'ssm.inner_size',
  'tensor_data_layout',
  'vocab_size',
}
# Types of keys that are not integers; a key with a part from `_NUMBERS` is a
# number.
_LISTS: dict[str, Any] = {
  PATTERN: int | list[bool] | list[int],
  'extract_layers': list[int],
  'rope.dimension_sections': list[int],
  'target_layers': list[int],
}
_TYPES = _LISTS | {
  'rope.scaling.type': str,
  'tensor_data_layout': str,
  'rope.scaling.finetuned': bool,
  'norm_before_residual': bool,
  'attention.causal': bool,
  'sample_from_anchor': bool,
  'rope_is_neox_style': bool,
  row_lib.INNER: int | list[int],
  row_lib.KV_HEADS: int | list[int],
}
_NUMBERS = re.compile(r'epsilon|scale|softcapping|freq_base|factor|beta|multi')
_PROJECTOR = 'the projector (mmproj) of a vision model, without the model'
# Files with other contents, by their `general.type` or architecture.
_NO_MODELS = {
  'adapter': 'an adapter (LoRA) of one; merge it into the model it is for',
  'clip': _PROJECTOR,
  'mmproj': _PROJECTOR,
  'controlvector': 'a control vector of one; give the file of the model',
  'imatrix': 'an importance matrix, with which models are rounded',
  'vocab': 'a vocabulary without a model; give the file of the model',
}


def check_is_model(header: gguf_file.Header) -> None:
  """Refuses a file that holds something else, or a part of a model."""
  for key in ('general.type', 'general.architecture'):
    if other := _NO_MODELS.get(str(header.metadata.get(key))):
      raise ValueError(f'it is not a model but {other}')
  if (num_files := header.metadata.get('split.count', 0)) > 1:  # 0: merged.
    raise ValueError(
      f'it is one of {num_files} parts of a model; merge them with'
      ' llama-gguf-split --merge'
    )


def architecture_of(
  header: gguf_file.Header,
) -> tuple[row_lib.ModelType, row_lib.Architecture]:
  """The architecture of a file, and its row; ValueError if it is not known."""
  check_is_model(header)
  name = header.metadata.get('general.architecture')
  if name not in registry.ARCHITECTURES:
    raise ValueError(
      f'architecture {name!r} is not known; choose from'
      f' {sorted(registry.ARCHITECTURES)}'
    )
  return registry.ARCHITECTURES[name]


def num_layers(header: gguf_file.Header, name: str) -> int:
  """The number of layers, without layers that predict further tokens.

  The last layers of a file may be such (MTP), and are not read.
  """
  keys = f'{name}.block_count', f'{name}.{_NEXTN}'
  text_files.check_types(header.metadata, dict.fromkeys(keys, int))
  num_blocks, others = (header.metadata.get(key, 0) for key in keys)
  if not 0 <= others <= num_blocks:
    raise ValueError(f'{keys[1]}={others} contradicts {keys[0]}={num_blocks}')
  return num_blocks - others


def of_further_tokens(header: gguf_file.Header, name: str) -> set[str]:
  """The tensors of the layers that predict further tokens."""
  last = header.metadata.get(f'{name}.block_count', 0)
  blocks = range(num_layers(header, name), last)
  prefixes = tuple(f'blk.{block}.' for block in blocks)
  return {tensor for tensor in header.tensors if tensor.startswith(prefixes)}


def own_keys(
  header: gguf_file.Header,
  files: row_lib.Architecture,
  keys: Collection[str],
) -> dict[str, Any]:
  """The keys of an architecture, without its name before them.

  A list that repeats a value, once for each layer, is this value. `keys` are
  the known keys.

  Raises:
    ValueError: a key is not known, a value has another type, or the values of a
      list differ or have another number than the layers.
  """
  prefix = f'{files.name}.'
  num_blocks = header.metadata.get(f'{prefix}block_count')
  left_over = tuple(
    start
    for start, part in _OPTIONAL_PARTS.items()
    if not any(part in name for name in header.tensors)
  )
  metadata = {}
  for full, value in header.metadata.items():
    key = full.removeprefix(prefix)
    if key == full or (key not in keys and key.startswith(left_over)):
      continue
    if key not in keys:
      raise ValueError(f'{full} is not supported')
    if key == 'block_count':
      value = num_layers(header, files.name)
    if isinstance(value, list) and (key == PATTERN or key not in _LISTS):
      if len(value) != num_blocks:
        raise ValueError(
          f'{full} has {len(value)} values for block_count={num_blocks!r}'
        )
      value = value[: num_layers(header, files.name)]
    if isinstance(value, list) and key not in _LISTS:
      differs = not value or any(entry != value[0] for entry in value)
      if differs and key not in files.lists:
        raise ValueError(
          f'{full} differs between layers; this is not supported'
        )
      value = value if differs else value[0]
    value_type = _TYPES.get(key, float if _NUMBERS.search(key) else int)
    text_files.check_types({full: value}, {full: value_type})
    if value == 0 and key in _OFF_AT_ZERO:
      value = _OFF_AT_ZERO[key]
    elif isinstance(value, float):  # 1e-05 in place of 9.99999974737875e-06.
      value = float(str(np.float32(value)))
    metadata[key] = value
  return metadata


def check_widths(
  name: str, metadata: Mapping[str, Any], widths: Mapping[str, int]
) -> None:
  """Refuses keys that contradict the width of a head."""
  for key, width in widths.items():
    if metadata.get(key, width) != width:
      raise ValueError(
        f'{name}.{key}={metadata[key]} is not the width of a head, {width}'
      )


def config_keys(header: gguf_file.Header) -> dict[str, Any]:
  """Makes the keys that the `config.json` of the same model would have.

  Raises:
    ValueError: the architecture or one of its keys is not known, or a key is
      missing; the message names it.
  """
  row, files = architecture_of(header)
  name = files.name
  metadata = own_keys(header, files, {*files.keys, *_OTHER_KEYS})
  num_experts = metadata.get('expert_count', 0)
  model_type = files.experts if num_experts > 0 else row.name
  if model_type is None or (num_experts == 0 and files.experts == row.name):
    raise ValueError(f'{name} with {num_experts} experts is not supported')
  optional = {key for key in files.keys if key.startswith('expert_')}
  needed = {*files.needed, files.pattern and 'attention.sliding_window'}
  optional |= _OPTIONAL - needed
  if missing := sorted(files.keys.keys() - metadata.keys() - optional):
    raise ValueError(f'lacks the key {name}.{missing[0]}')
  if 'token_embd.weight' not in header.tensors:
    raise ValueError('lacks the tensor token_embd.weight')
  keys = {
    theirs: metadata[key]
    for key, theirs in files.keys.items()
    if key in metadata and (num_experts > 0 or not key.startswith('expert_'))
  }
  vocab_size = header.tensors['token_embd.weight'].shape[0]
  keys |= {
    'model_type': model_type,
    'vocab_size': vocab_size,
    'tie_word_embeddings': 'output.weight' not in header.tensors,
  }
  keys |= files.fixed
  if num_experts > 0:
    keys |= {'norm_topk_prob': True, 'num_experts': num_experts}
  if row.is_llama:
    # Classes of transformers have other defaults.
    keys.setdefault('num_key_value_heads', keys['num_attention_heads'])
    keys['rope_parameters'] = rope_parameters(metadata, header)
    keys['attention_bias'] = 'blk.0.attn_q.bias' in header.tensors
    if row_lib.ORIGINAL in row.class_keys & keys['rope_parameters'].keys():
      # Such a class has this key outside of the rotation, too.
      keys[row_lib.ORIGINAL] = keys['rope_parameters'][row_lib.ORIGINAL]
    _add_heads(files, metadata, keys)
    _add_windows(files, metadata, keys)
  return keys | files.finish(keys, metadata)


def _add_heads(
  files: row_lib.Architecture,
  metadata: Mapping[str, Any],
  keys: dict[str, Any],
) -> None:
  """Adds the width of a head, and what its scores are divided by."""
  from_width = keys['hidden_size'] // max(keys['num_attention_heads'], 1)
  head_width = keys.setdefault('head_dim', from_width)
  if files.head_from_width is not None:
    by_width = files.head_from_width == keys['num_hidden_layers']
    keys[row_lib.QUERY_SCALAR] = from_width if by_width else head_width
  row = registry.MODEL_TYPES[keys['model_type']]
  if 'attention_multiplier' in row.class_keys:
    keys['attention_multiplier'] = keys.get(
      'attention_multiplier'
    ) or 1 / math.sqrt(head_width)
  rotated = metadata.get('rope.dimension_count', head_width)
  whole = keys.get('global_head_dim', head_width)
  if row.is_partial and rotated < head_width:
    fraction = part_of(rotated, head_width)
    keys['rope_parameters']['partial_rotary_factor'] = fraction
  count, values = 'rope.dimension_count', 'attention.value_length'
  widths = {values: whole} if row.is_partial else {values: whole, count: whole}
  widths |= {f'{values}_swa': head_width, f'{count}_swa': head_width}
  check_widths(files.name, metadata, widths)


def _add_windows(
  files: row_lib.Architecture,
  metadata: Mapping[str, Any],
  keys: dict[str, Any],
) -> None:
  """Adds which layers have the window, and how those rotate."""
  name, num_layers = files.name, keys['num_hidden_layers']
  stated, theta = metadata.get(PATTERN), 'rope.freq_base_swa'
  window = keys.get('sliding_window')
  if window and files.windowed:
    keys['model_type'] = files.windowed
  is_local = registry.MODEL_TYPES[keys['model_type']].ropes == 'kinds'
  base = keys['rope_parameters']['rope_theta']
  if not is_local and metadata.get(theta, base) != base:
    raise ValueError(
      f'{name}.{theta}={metadata[theta]} is not supported, since all'
      f' layers rotate by the base {base}'
    )
  if not window:
    keys.pop('sliding_window', None)
    if stated is not None:
      raise ValueError(
        f'{name}.{PATTERN} says which layers have a window,'
        f' but {name}.attention.sliding_window is missing or 0'
      )
    return
  pattern = files.pattern if stated is None else stated
  if pattern is None:
    raise ValueError(
      f'{name}.attention.sliding_window={window}, but no'
      f' {name}.{PATTERN} says which layers have it'
    )
  if not isinstance(pattern, list):
    pattern = [pattern == 0 or (at + 1) % pattern for at in range(num_layers)]
  types = [row_lib.SLIDING if slides else row_lib.FULL for slides in pattern]
  keys |= {'layer_types': types, 'use_sliding_window': True}
  if is_local:
    local = {'rope_theta': metadata.get(theta, files.local_base or base)}
    keys['rope_parameters'] = {
      row_lib.FULL: keys['rope_parameters'],
      row_lib.SLIDING: local | {'rope_type': 'default'},
    }


def part_of(count: int, whole: int) -> float:
  """`count / whole`, rounded so that the product with `whole` reaches `count`.

  transformers rounds the product down: 15 / 22 * 22 would be 14.
  """
  part = count / whole
  return part if part * whole >= count else math.nextafter(part, 1.0)


def rope_parameters(
  metadata: Mapping[str, Any], header: gguf_file.Header
) -> dict[str, Any]:
  """The `rope_parameters` of transformers, of `gguf_keys.own_keys`.

  Raises:
    ValueError: the rotation is not supported.
  """
  parameters = {'rope_theta': metadata.get('rope.freq_base', 10000.0)}
  default = 'linear' if 'rope.scaling.factor' in metadata else 'none'
  scaling = metadata.get('rope.scaling.type', default)
  if scaling == 'longrope' or header.tensors.keys() & {*LONGROPE.values()}:
    return _longrope(metadata, header) | parameters
  for key in (*_FACTORS, _EXTRAPOLATION):
    if metadata.get(key, 1.0) != 1.0 and (
      scaling != 'yarn' or key == _EXTRAPOLATION
    ):
      raise ValueError(
        f'{key}={metadata[key]} is not supported with'
        f' rope.scaling.type={scaling}'
      )
  if scaling not in _SCALINGS:
    raise ValueError(f'rope.scaling.type {scaling!r} is not supported')
  if scaling == 'linear' and 'rope.scaling.factor' not in metadata:
    raise ValueError('rope.scaling.type=linear needs rope.scaling.factor')
  keys = _SCALINGS[scaling]
  stated = {keys[key]: metadata[key] for key in keys if key in metadata}
  if scaling != 'none':
    parameters |= {'rope_type': scaling, **stated}
  if scaling == 'yarn':
    # In a file the factor of queries and keys is rounded to float32; where it
    # is the usual one, it follows from the factor of the context.
    first, second = (metadata.get(key) for key in _FACTORS)
    config_keys_lib.check_same(_FACTORS[0], first, _FACTORS[1], second)
    factor = second if first is None else first
    usual = 0.1 * math.log(max(stated.get('factor', 1.0), 1.0)) + 1.0
    if factor is not None and np.float32(factor) != np.float32(usual):
      parameters['attention_factor'] = factor
  if 'mscale_all_dim' in parameters:  # The other factor is one in llama.cpp.
    parameters['mscale'] = 1.0
  if (factors := row_lib.ROPE_FACTORS) in header.tensors:
    if scaling != 'none':
      raise ValueError(
        f'rope.scaling.type={scaling!r} and the tensor {factors}'
        ' contradict each other'
      )
    parameters |= _divided(header, parameters['rope_theta'])
  return parameters


def _longrope(
  metadata: Mapping[str, Any], header: gguf_file.Header
) -> dict[str, Any]:
  """The keys of a rotation that divides frequencies by stored factors."""
  parameters: dict[str, Any] = {'rope_type': 'longrope'}
  for key, name in LONGROPE.items():
    if name not in header.tensors:
      raise ValueError(f'lacks the tensor {name} of its longrope')
    [(_, stored)] = gguf_file.Tensor(header.tensors[name]).row_batches()
    parameters[key] = stored.tolist()
  whole = metadata['context_length']
  parameters['original_max_position_embeddings'] = metadata.get(
    'rope.scaling.original_context_length', whole
  )
  if (factor := 'rope.scaling.attn_factor') in metadata:
    parameters['attention_factor'] = metadata[factor]
  return parameters


def _divided(header: gguf_file.Header, theta: float) -> dict[str, Any]:
  """The keys of a scaling, from the stored divisors of its frequencies."""
  info = header.tensors[row_lib.ROPE_FACTORS]
  [(_, stored)] = gguf_file.Tensor(info).row_batches()
  kept = np.count_nonzero(stored == 1)
  if np.all(stored[:kept] == 1) and np.all(stored[kept:] >= _NEVER):
    part = part_of(int(kept), len(stored))
    return {'rope_type': 'proportional', 'partial_rotary_factor': part}
  exponents = np.arange(len(stored), dtype=np.float32) / len(stored)
  frequencies = np.float32(1) / np.float32(theta) ** exponents
  factor = float(np.max(stored))
  scaling = rope_lib.Llama3Scaling(factor=factor, **_LLAMA3)
  scaled = frequencies / scaling.scale(frequencies, theta)
  if not np.allclose(stored, scaled, rtol=1e-3):
    raise ValueError(
      f'{row_lib.ROPE_FACTORS} holds factors {stored[:4]}... that differ'
      " from Llama 3's scaling, and no others are supported"
    )
  return {'rope_type': 'llama3', 'factor': factor, **_LLAMA3}
