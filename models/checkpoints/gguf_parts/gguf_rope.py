"""The rotations that GGUF files describe."""

from collections.abc import Mapping
import math
from typing import Any

import numpy as np

from specdec.models.checkpoints.gguf_parts import gguf_header
from specdec.models.checkpoints.gguf_parts import gguf_tensor
from specdec.models.checkpoints.keys import config_keys
from specdec.models.checkpoints.model_types import architecture
from specdec.models.nn import rope as rope_lib

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
KEYS = {
  'rope.freq_base',
  'rope.scaling.type',
  *_FACTORS,
  _EXTRAPOLATION,
  *(key for keys in _SCALINGS.values() for key in keys),
}
"""The keys that are read here."""

_NEVER = 1e29  # From here on, a frequency is divided to zero.
# The scaling of Llama 3.1 and later; a file has only what follows from it.
_LLAMA3: dict[str, Any] = {
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


def part_of(count: int, whole: int) -> float:
  """`count / whole`, rounded so that the product with `whole` reaches `count`.

  transformers rounds the product down: 15 / 22 * 22 would be 14.
  """
  part = count / whole
  return part if part * whole >= count else math.nextafter(part, 1.0)


def rope_parameters(
  metadata: Mapping[str, Any], header: gguf_header.Header
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
    parameters |= _attention_factor(metadata, stated.get('factor', 1.0))
  if 'mscale_all_dim' in parameters:  # The other factor is one in llama.cpp.
    parameters['mscale'] = 1.0
  if (factors := architecture.ROPE_FACTORS) in header.tensors:
    if scaling != 'none':
      raise ValueError(
        f'rope.scaling.type={scaling!r} and the tensor {factors}'
        ' contradict each other'
      )
    parameters |= _divided(header, parameters['rope_theta'])
  return parameters


def _attention_factor(
  metadata: Mapping[str, Any], factor: float
) -> dict[str, float]:
  """The key of YaRN's factor of queries and keys, if a file states it.

  It is the whole factor, as converters copy it. In a file it is rounded to
  float32; where it is the usual one, it follows from the factor of the context.
  """
  first, second = (metadata.get(key) for key in _FACTORS)
  config_keys.check_same(_FACTORS[0], first, _FACTORS[1], second)
  stated = second if first is None else first
  usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
  if stated is None or np.float32(stated) == np.float32(usual):
    return {}
  return {'attention_factor': stated}


def _longrope(
  metadata: Mapping[str, Any], header: gguf_header.Header
) -> dict[str, Any]:
  """The keys of a rotation that divides frequencies by stored factors."""
  parameters: dict[str, Any] = {'rope_type': 'longrope'}
  for key, name in LONGROPE.items():
    if name not in header.tensors:
      raise ValueError(f'lacks the tensor {name} of its longrope')
    [(_, stored)] = gguf_tensor.Tensor(header.tensors[name]).blocks()
    parameters[key] = stored.tolist()
  whole = metadata['context_length']
  parameters['original_max_position_embeddings'] = metadata.get(
    'rope.scaling.original_context_length', whole
  )
  if (factor := 'rope.scaling.attn_factor') in metadata:
    parameters['attention_factor'] = metadata[factor]
  return parameters


def _divided(header: gguf_header.Header, theta: float) -> dict[str, Any]:
  """The keys of a scaling, from the stored divisors of its frequencies."""
  info = header.tensors[architecture.ROPE_FACTORS]
  [(_, stored)] = gguf_tensor.Tensor(info).blocks()
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
      f'{architecture.ROPE_FACTORS} holds factors {stored[:4]}... that differ'
      " from Llama 3's scaling, and no others are supported"
    )
  return {'rope_type': 'llama3', 'factor': factor, **_LLAMA3}
