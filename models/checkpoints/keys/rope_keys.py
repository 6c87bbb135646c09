"""Reads and writes the keys of rotary position embeddings.

transformers calls it `rope_parameters`, one object for all layers or one for
each kind of layer; older files have `rope_scaling`, `rope_theta` and others.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from specdec.models.checkpoints.keys import config_keys
from specdec.models.nn import rope as rope_lib
from specdec.text import text_files

_OBJECTS = ('rope_parameters', 'rope_scaling')
_LAYER_TYPES = ('full_attention', 'sliding_attention')
# The sections of an `mrope` rotate by positions within a picture; for text all
# of them are the same.
_UNSCALED = ('default', 'mrope')
_OLDER_TYPES = {'su': 'longrope'}
_TYPES: dict[str, Any] = {
  'rope_type': str,
  'type': str,
  'rope_theta': float,
  'partial_rotary_factor': float,
  'mrope_section': list[int],
  'mrope_interleaved': bool,
}
_GROWTH = 'llama_4_scaling_beta'
_LISTS = ('short_factor', 'long_factor')
_NOT_NUMBERS = {'truncate': bool, **dict.fromkeys(_LISTS, list[float])}
# Fields of scalings, and keys that these follow from.
_SCALING_TYPES = {
  field.name: _NOT_NUMBERS.get(field.name, float)
  for kind in rope_lib.SCALINGS.values()
  for field in dataclasses.fields(kind)
} | dict.fromkeys(('mscale', 'mscale_all_dim', _GROWTH), float)


def _normalized(rope: Mapping[str, Any], context: Any) -> dict[str, Any]:
  """The keys of an object that are not null, checked for transformers.

  YaRN's factor may be null where it follows from the original context and the
  whole context `context`.
  """
  stated = {key: value for key, value in rope.items() if value is not None}
  text_files.check_types(stated, _TYPES | _SCALING_TYPES)
  for key in stated.keys() & {'rope_type', 'type'}:
    stated[key] = _OLDER_TYPES.get(stated[key], stated[key])
  rope_type = stated.get('rope_type', stated.get('type'))
  config_keys.check_same('rope_type', rope_type, 'type', stated.get('type'))
  original = stated.get('original_max_position_embeddings')
  if (
    rope_type == 'yarn'
    and rope.get('factor', 0) is None
    and original
    and context
  ):
    stated['factor'] = context / original
  return stated


def normalized(keys: Mapping[str, Any], ropes: str) -> dict[str, Any]:
  """The keys of a configuration as transformers can read them.

  For `ropes` see `ModelType`; `rope_parameters` of `kinds` has an object for
  each kind of layer.

  Raises:
    ValueError: a key of a rotation is not known, has another type, or
      contradicts another one; names them.
  """
  result, context = dict(keys), keys.get('max_position_embeddings')
  for name in _OBJECTS:
    stated = keys.get(name) or {}
    nested = ropes == 'kinds' and name == 'rope_parameters'
    if wrong := [key for key in stated if (key in _LAYER_TYPES) != nested]:
      expected = (
        f'have the keys {_LAYER_TYPES}' if nested else 'be of all layers'
      )
      raise ValueError(
        f'{name} of such a model must {expected}, but has {wrong[0]!r}'
      )
    if nested:
      text_files.check_types(stated, dict.fromkeys(stated, dict | None))
      new = {key: _normalized(stated[key] or {}, context) for key in stated}
      result[name] = new or None
    elif stated:
      result[name] = _normalized(stated, context)
  if ropes != 'kinds':
    new, old = (result.get(name) or {} for name in _OBJECTS)
    for key in new.keys() & old.keys():
      config_keys.check_same(
        f'rope_parameters: {key}', new[key], f'rope_scaling: {key}', old[key]
      )
  return result


def check_read(keys: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
  """Refuses numbers next to an object that contradict transformers' values."""
  by_layer = {key: parameters[key] for key in _LAYER_TYPES if key in parameters}
  ropes = [rope for rope in by_layer.values() or (parameters,) if rope]
  for key, default in (('rope_theta', None), ('partial_rotary_factor', 1.0)):
    values = [rope.get(key, default) for rope in ropes]
    if keys.get(key) not in values:
      for value in values:
        config_keys.check_same(
          key, keys.get(key), f'rope_parameters: {key}', value
        )


def _attention_factor(
  rope_type: str, values: dict[str, Any], context: int
) -> float | None:
  """Takes the keys that only it follows from; None if it is stated."""
  log = lambda factor: math.log(max(factor, 1))
  if rope_type == 'longrope':
    original = values['original_max_position_embeddings']
    factor = values.pop('factor', context / original)
    result = math.sqrt(1 + log(factor) / math.log(original))
  elif values.get('mscale') and values.get('mscale_all_dim'):
    scale = lambda key: 0.1 * values.pop(key) * log(values['factor']) + 1
    result = scale('mscale') / scale('mscale_all_dim')
  elif values.get('mscale_all_dim') == 0:  # As if neither were stated.
    values.pop('mscale', None)
    del values['mscale_all_dim']
    return None
  else:
    return None
  return result if values.get('attention_factor') is None else None


def _read(
  raw: Mapping[str, Any], context: int, ropes: str, *, is_partial: bool
) -> rope_lib.Rope:
  fraction = raw.get('partial_rotary_factor', 1.0)
  rope_type, theta = raw.get('rope_type', 'default'), raw['rope_theta']
  of_pairs = rope_type == rope_lib.ProportionalScaling.rope_type
  if fraction != 1.0 and not (is_partial or of_pairs):
    raise ValueError(f'partial_rotary_factor={fraction!r} is not supported')
  scaling, fields = rope_lib.SCALINGS.get(rope_type), set[str]()
  if scaling is not None:
    fields = {field.name for field in dataclasses.fields(scaling)}
  elif rope_type not in _UNSCALED:
    raise ValueError(
      f'rope_type={rope_type!r} is not supported; choose from'
      f' {["default", *rope_lib.SCALINGS]}'
    )
  values = {key: raw[key] for key in raw if key not in _TYPES}
  if of_pairs:
    values['partial_rotary_factor'], fraction = fraction, 1.0
  if rope_type == 'linear':  # Some checkpoints have it; it has no effect.
    values.pop('original_max_position_embeddings', None)
  growth = 0.0
  if ropes == 'growing':
    if _GROWTH not in values:
      raise ValueError(f'rope_parameters of such a model must have {_GROWTH}')
    growth = values.pop(_GROWTH)
    whole = values.pop('max_position_embeddings', None)
    key = 'max_position_embeddings'
    config_keys.check_same(f'rope_parameters: {key}', whole, key, context)
  if rope_type in ('yarn', 'longrope') and (
    factor := _attention_factor(rope_type, values, context)
  ):
    values['attention_factor'] = factor
  for key in sorted(values.keys() - fields):
    raise ValueError(
      f'{key}={values[key]!r:.60} is not supported with rope_type={rope_type!r}'
    )
  lists = {key: tuple(values[key]) for key in values if key in _LISTS}
  made = None if scaling is None else scaling(**values | lists)
  return rope_lib.Rope(
    theta=theta, fraction=fraction, scaling=made, query_growth=growth
  )


def read_all(
  config: Any, ropes: str, *, is_partial: bool
) -> tuple[rope_lib.Rope | None, ...]:
  """The rotation of each layer, None for a layer without one.

  For `ropes` and `is_partial` see `ModelType`.
  """
  num_layers, raw = config.num_hidden_layers, config.rope_parameters
  read = functools.partial(
    _read,
    context=config.max_position_embeddings,
    ropes=ropes,
    is_partial=is_partial,
  )
  if ropes == 'kinds':
    layer_types = dict.fromkeys(config.layer_types)
    if missing := [key for key in layer_types if not raw.get(key)]:
      raise ValueError(f'rope_parameters lacks {missing[0]!r}')
    by_type = {key: read(raw[key]) for key in layer_types}
    return tuple(by_type[key] for key in config.layer_types)
  if getattr(config, 'position_embedding_type', 'rope') != 'rope':
    return (None,) * num_layers
  rope = read(raw)
  rotates = getattr(config, 'no_rope_layers', [1] * num_layers)
  if len(rotates) != num_layers:
    raise ValueError(
      f'no_rope_layers has {len(rotates)} entries for {num_layers} layers'
    )
  return tuple(rope if has_rope else None for has_rope in rotates)


def context_of(config: Any, ropes: Iterable[rope_lib.Rope | None]) -> int:
  """The longest context; a rotation may limit it."""
  longest = config.max_position_embeddings
  for rope in filter(None, ropes):
    if isinstance(rope.scaling, rope_lib.LongRopeScaling):
      longest = min(longest, rope.scaling.original_max_position_embeddings)
  return longest


def write(rope: rope_lib.Rope) -> dict[str, Any]:
  """Returns the `rope_parameters` of transformers."""
  keys: dict[str, Any] = {'rope_theta': rope.theta, 'rope_type': 'default'}
  if rope.fraction != 1.0:
    keys['partial_rotary_factor'] = rope.fraction
  if rope.scaling is not None:
    keys['rope_type'] = rope.scaling.rope_type
    keys |= dataclasses.asdict(rope.scaling)
    keys |= {key: [*keys[key]] for key in _LISTS if key in keys}
  if rope.query_growth:
    keys[_GROWTH] = rope.query_growth
  return keys
