"""The shapes that config.json describes, and its keys of a shape."""

from collections.abc import Collection
from collections.abc import Mapping
import functools
import math
from typing import Any

from huggingface_hub.errors import StrictDataclassError
import transformers

from specdec.models.checkpoints.keys import config_keys
from specdec.models.checkpoints.keys import model_types
from specdec.models.checkpoints.keys import rope_keys
from specdec.models.nn import adapter
from specdec.models.nn import layers
from specdec.models.nn import llama_config
from specdec.text import text_files

# The multipliers of a MiniCPM (arXiv 2404.06395), which is saved as a Granite.
_MINICPM = ('scale_emb', 'scale_depth', 'dim_model_base')


def _layer_types(config: Any, supported: Collection[str]) -> list[str]:
  """The kind of each layer; ValueError if there are others than are known."""
  types, num_layers = config.layer_types, config.num_hidden_layers
  if unknown := {*types} - {*supported}:
    raise ValueError(f'layer_types has {sorted(unknown)}, not supported')
  if len(types) != num_layers:
    raise ValueError(
      f'layer_types has {len(types)} entries for {num_layers} layers'
    )
  return types


def _read_windows(
  config: Any, model_type: model_types.ModelType
) -> tuple[int | None, ...]:
  """The window of each layer, None where it sees the whole text."""
  window = getattr(config, 'sliding_window', None)
  if model_type.mixers or 'layer_types' not in model_type.class_keys:
    return (window,) * config.num_hidden_layers
  slides = (
    {model_types.SLIDING}
    if 'sliding_window' in model_type.class_keys
    else set()
  )
  types = _layer_types(config, {model_types.FULL, *slides})
  return tuple(
    window if layer_type == model_types.SLIDING else None
    for layer_type in types
  )


def _check_windows(
  keys: Mapping[str, Any],
  shape: llama_config.LlamaConfig,
  model_type: model_types.ModelType,
) -> None:
  """Refuses windows that transformers ignores, and others do not."""
  unread = [
    key
    for key in model_types.WINDOWS
    if keys.get(key) and key not in model_type.reads
  ]
  num_layers, window = shape.num_layers, keys.get('sliding_window')
  types = keys.get('layer_types') or [model_types.SLIDING] * num_layers
  if keys.get('use_sliding_window') is False:
    window = None
  if window is not None and window >= shape.num_positions:
    window = None
  stated = tuple(
    window if layer_type == model_types.SLIDING else None
    for layer_type in types
  )
  if unread and (
    stated != shape.of_layers('window')
    or {*types} - {model_types.FULL, model_types.SLIDING}
  ):
    raise config_keys.UnreadKey(
      f'{unread[0]}={keys[unread[0]]!r:.60}: the layers of such a model have no'
      ' such window'
    )


def _read_mixers(
  config: Any, model_type: model_types.ModelType
) -> tuple[str, ...]:
  """The mixer of each layer, see `LlamaConfig.mixers`."""
  types = _layer_types(config, model_type.mixers)
  stated = getattr(config, 'full_attn_idxs', None)
  with_attention = [
    at for at, layer_type in enumerate(types) if layer_type == model_types.FULL
  ]
  if stated is not None and sorted(stated) != with_attention:
    raise ValueError(
      f'full_attn_idxs={stated!r:.60} and layer_types={types!r:.60} contradict'
      ' each other'
    )
  return tuple(model_type.mixers[layer_type] for layer_type in types)


def _adjusted_width(config: Any) -> int:
  """The width of an MLP of an LFM2 (transformers, models/lfm2)."""
  width = int(2 * config.intermediate_size / 3)
  factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
  if factor is None:
    return width
  if multiple < 1:
    raise ValueError(f'block_multiple_of must be positive, got {multiple}')
  return -(-int(factor * width) // multiple) * multiple


def _read_shape(config: Any, model_type: model_types.ModelType) -> Any:
  """The shape that a transformers config describes."""
  keys = model_type.names
  for key, value in model_type.constants.items():
    if getattr(config, key) != value:
      raise ValueError(
        f'{key}={getattr(config, key)!r} is not supported, only {value}'
      )
  by_layer = model_type.of_layers(config)
  fields = {ours: getattr(config, key) for ours, key in keys.items()} | by_layer
  if fields.get('activation', 'silu') not in layers.ACTIVATIONS:
    raise ValueError(
      f'{keys["activation"]}={fields["activation"]!r} is not known; choose from'
      f' {sorted(layers.ACTIVATIONS)}'
    )
  if not model_type.rotates:
    return model_type.shape(**fields)
  windows = _read_windows(config, model_type)
  ropes = rope_keys.read_all(
    config, model_type.ropes, is_partial=model_type.is_partial
  )
  if model_types.QUERY_SCALAR in keys.values():
    fields['attention_scale'] = 1 / math.sqrt(fields['attention_scale'])
  if model_type.mixers:
    fields['mixers'] = _read_mixers(config, model_type)
  if getattr(config, 'linear_heads_tiled', False):
    fields['tiled'] = True
  if getattr(config, 'block_auto_adjust_ff_dim', False):
    fields['inner_width'] = _adjusted_width(config)
  if 'head_width' not in fields:
    from_width = config.hidden_size // config.num_attention_heads
    fields['head_width'] = getattr(config, 'head_dim', None) or from_width
  return model_type.shape(
    **{**fields, **model_type.fixed},
    num_positions=rope_keys.context_of(config, ropes),
    rope=ropes,
    window=windows,
  )


def _as_granite(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of the Granite that computes the same as a MiniCPM."""
  text_files.check_types(raw, dict.fromkeys(_MINICPM, float))
  for key in _MINICPM:
    if not raw.get(key, 0) > 0:
      raise ValueError(f'{key}={raw.get(key)!r}: a MiniCPM needs one above 0')
  width = raw['hidden_size']
  head_width = raw.get('head_dim') or width // raw['num_attention_heads']
  keys = {key: raw[key] for key in raw if key not in _MINICPM}
  keys['model_type'] = 'granite'
  keys['embedding_multiplier'] = raw['scale_emb']
  keys['residual_multiplier'] = (
    raw['scale_depth'] / raw['num_hidden_layers'] ** 0.5
  )
  keys['logits_scaling'] = width / raw['dim_model_base']
  keys['attention_multiplier'] = 1 / math.sqrt(head_width)
  return {'tie_word_embeddings': True} | keys


def read_config(raw: Mapping[str, Any]) -> Any:
  """The shape that the keys of a `config.json` describe; raises ValueError."""
  name, supported = raw.get('model_type'), {*model_types.MODEL_TYPES, 'minicpm'}
  if not isinstance(name, str) or name not in supported:
    raise ValueError(
      f'model_type {name!r} is not known; choose from {sorted(supported)}'
    )
  if name == 'minicpm':
    raw = _as_granite(raw)
  model_type = model_types.MODEL_TYPES[raw['model_type']]
  # None is the default, which is above 0.
  if model_type.mixture and raw.get('num_local_experts') != 0:
    model_type = model_type.mixture
  text_files.check_types(raw, model_type.types)
  if raw.get('num_attention_heads') == 0:  # transformers would divide by it.
    raise ValueError('num_attention_heads must be positive, got 0')
  read = config_keys.select(model_type.config, raw, model_type.reads)
  normalized = rope_keys.normalized(read, model_type.ropes)
  config = model_type.config.from_dict({**normalized, **model_type.given})
  shape, idle = _read_shape(config, model_type), model_type.idle
  if model_type.rotates:
    rope_keys.check_read(read, config.rope_parameters)
    _check_windows(raw, shape, model_type)
    idle += model_types.WINDOWS
  unread = dict(raw)
  if (
    raw.get(model_types.ROUNDED)
    and raw[model_types.ROUNDED].get('quant_method') in model_type.rounded
  ):
    del unread[model_types.ROUNDED]
  config_keys.refuse_unread(
    unread, {*model_type.reads, *read}, idle=idle, resolved=config
  )
  return shape


def _can_state(
  model_type: model_types.ModelType, config: adapter.Config
) -> bool:
  """Whether a config of this type can have a shape."""
  if type(config) is not model_type.shape:
    return False
  try:
    written = model_type.config(**_to_keys(config, model_type))
    return _read_shape(written, model_type) == config
  except (StrictDataclassError, ValueError):  # It has no such models.
    return False


@functools.lru_cache
def type_of(config: adapter.Config) -> tuple[str, model_types.ModelType]:
  """The name of the first `model_type` that can state a shape, and the type."""
  for name, plain in model_types.MODEL_TYPES.items():
    for model_type in filter(None, (plain, plain.mixture)):
      if _can_state(model_type, config):
        return name, model_type
  raise ValueError(
    f'no model of transformers has this shape; it cannot be saved: {config}'
  )


def _layer_keys(
  config: llama_config.LlamaConfig, model_type: model_types.ModelType
) -> dict[str, Any]:
  """The keys of what layers see, and how they rotate."""
  windows, ropes = config.of_layers('window'), config.of_layers('rope')
  slides = [window is not None for window in windows]
  types = [model_types.SLIDING if on else model_types.FULL for on in slides]
  window = next((window for window in windows if window is not None), None)
  keys: dict[str, Any] = {}
  if 'sliding_window' in model_type.reads:
    # Where layers say whether they have it, transformers needs one.
    is_switched = 'use_sliding_window' in model_type.class_keys
    needed = 'layer_types' in model_type.class_keys and not is_switched
    whole = config.num_positions if needed else None
    keys['sliding_window'] = window or whole
  if 'layer_types' in model_type.class_keys:
    names = {ours: theirs for theirs, ours in model_type.mixers.items()}
    mixers = config.of_layers('mixers') if names else types
    keys['layer_types'] = [names.get(mixer, mixer) for mixer in mixers]
  if 'use_sliding_window' in model_type.class_keys:
    keys['use_sliding_window'] = any(slides)
  # Some classes have another default than 1.
  part = lambda rope: (
    {'partial_rotary_factor': rope.fraction} if model_type.is_partial else {}
  )
  by_type = {
    name: rope_keys.write(rope) | part(rope)
    for name, rope in zip(types, ropes, strict=True)
    if rope is not None
  }
  if model_type.ropes == 'kinds':
    return keys | {'rope_parameters': by_type}
  if 'no_rope_layers' in model_type.class_keys:
    keys['no_rope_layers'] = [int(rope is not None) for rope in ropes]
  if 'position_embedding_type' in model_type.class_keys:
    keys['position_embedding_type'] = 'rope' if by_type else None
  stated, original = next(iter(by_type.values()), None), model_types.ORIGINAL
  if original in model_type.reads:
    keys[original] = (stated or {}).get(original, config.num_positions)
  return keys | {'rope_parameters': stated}


def _to_keys(config: Any, model_type: model_types.ModelType) -> dict[str, Any]:
  """The keys of a config of a type that are to state a shape."""
  keys = {key: getattr(config, ours) for ours, key in model_type.names.items()}
  if not model_type.rotates:
    return keys
  if key := model_type.names.get('attention_scale'):
    (width,) = {*config.of_layers('head_width')}
    scale = config.attention_scale or 1 / math.sqrt(width)
    keys[key] = round(scale**-2) if key == model_types.QUERY_SCALAR else scale
  return {**keys, **model_type.given} | {
    'max_position_embeddings': config.num_positions,
    'head_dim': config.head_width,
    **_layer_keys(config, model_type),
    **model_type.to_keys(config),
  }


def to_hugging_face(
  config: adapter.Config, *, dtype: str, eos_token_id: int | None
) -> transformers.PreTrainedConfig:
  """The transformers config of a shape; raises ValueError if there is none."""
  _, model_type = type_of(config)
  made = model_type.config(
    **_to_keys(config, model_type),
    bos_token_id=eos_token_id,
    eos_token_id=eos_token_id,
    pad_token_id=eos_token_id,  # Some defaults exceed small vocabularies.
    dtype=dtype,
  )
  head = 'ForCausalLM' if model_type.rotates else 'LMHeadModel'
  name = type(made).__name__.replace('TextConfig', 'Config')
  made.architectures = [name.replace('Config', head)]
  return made
