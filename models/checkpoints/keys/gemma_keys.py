"""The keys of Gemma 4 (text) from which fields of single layers follow."""

import itertools
from typing import Any

from specdec.models.nn import gemma as gemma_lib

_SHARED = 'num_kv_shared_layers'


def read(config: Any) -> dict[str, Any]:
  """Fields of the shape that a config of transformers describes.

  Raises:
    ValueError: the keys contradict one another.
  """
  overrides = config.to_dict().get('per_layer_config') or {}
  if others := {*itertools.chain(*overrides.values())} - {'head_dim'}:
    raise ValueError(
      f'per_layer_config has {sorted(others)}, but only head_dim may differ'
      ' between layers'
    )
  num_layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
  types, first = config.layer_types, num_layers - shared
  if not 0 < first <= num_layers:
    raise ValueError(
      f'{_SHARED}={shared} must lie between 0 and {num_layers - 1}, one below'
      f' num_hidden_layers'
    )
  sources: list[int | None] = [None] * first
  for layer_type in types[first:]:
    if layer_type not in types[:first]:
      raise ValueError(
        f'{_SHARED}={shared}: none of the others is of {layer_type}'
      )
    sources.append(max(at for at in range(first) if types[at] == layer_type))
  width, words = config.hidden_size_per_layer_input, config.vocab_size
  stated = config.vocab_size_per_layer_input
  if width and stated != words:
    raise ValueError(
      f'vocab_size_per_layer_input={stated} is not supported, only the'
      f' vocab_size, {words}'
    )
  size = config.intermediate_size
  wide = size * (2 if config.use_double_wide_mlp else 1)
  return {
    'kv_source': tuple(sources),
    'inner_width': (size,) * first + (wide,) * shared,
    'head_width': tuple(layer.head_dim for layer in config.per_layer_config),
  }


def write(config: gemma_lib.Gemma4Config) -> dict[str, Any]:
  """The keys of a shape."""
  windows = config.of_layers('window')
  widths = {
    window is None: width
    for window, width in zip(
      windows, config.of_layers('head_width'), strict=True
    )
  }
  sizes = config.of_layers('inner_width')
  sources = config.of_layers('kv_source')
  return {
    _SHARED: sum(source is not None for source in sources),
    'use_double_wide_mlp': sizes[-1] != sizes[0],
    'intermediate_size': sizes[0],
    'head_dim': widths.get(False, widths.get(True)),
    'global_head_dim': widths.get(True, widths.get(False)),
    'vocab_size_per_layer_input': config.vocab_size,
  }
