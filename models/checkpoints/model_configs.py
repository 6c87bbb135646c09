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


def _layer_types(config: Any, known: Collection[str]) -> list[str]:
  """The kind of each layer; ValueError if there are others than are known."""
  types, number = config.layer_types, config.num_hidden_layers
  if unknown := {*types} - {*known}:
    raise ValueError(f'layer_types has {sorted(unknown)}, not supported')
  if len(types) != number:
    raise ValueError(
      f'layer_types has {len(types)} entries for {number} layers'
    )
  return types


def _read_windows(
  config: Any, kind: model_types.ModelType
) -> tuple[int | None, ...]:
  """The window of each layer, None where it sees the whole text."""
  window = getattr(config, 'sliding_window', None)
  if kind.mixers or 'layer_types' not in kind.own:
    return (window,) * config.num_hidden_layers
  slides = {model_types.SLIDING} if 'sliding_window' in kind.own else set()
  types = _layer_types(config, {model_types.FULL, *slides})
  return tuple(window if one == model_types.SLIDING else None for one in types)


def _check_windows(
  keys: Mapping[str, Any],
  shape: llama_config.LlamaConfig,
  kind: model_types.ModelType,
) -> None:
  """Refuses windows that transformers ignores, and others do not."""
  unread = [
    key
    for key in model_types.WINDOWS
    if keys.get(key) and key not in kind.reads
  ]
  number, window = shape.num_layers, keys.get('sliding_window')
  types = keys.get('layer_types') or [model_types.SLIDING] * number
  if keys.get('use_sliding_window') is False:
    window = None
  if window is not None and window >= shape.num_positions:
    window = None
  stated = tuple(
    window if one == model_types.SLIDING else None for one in types
  )
  if unread and (
    stated != shape.of_layers('window')
    or {*types} - {model_types.FULL, model_types.SLIDING}
  ):
    raise config_keys.UnreadKey(
      f'{unread[0]}={keys[unread[0]]!r:.60}: the layers of such a model have no'
      ' such window'
    )


def _read_mixers(config: Any, kind: model_types.ModelType) -> tuple[str, ...]:
  """The mixer of each layer, see `LlamaConfig.mixers`."""
  types = _layer_types(config, kind.mixers)
  stated = getattr(config, 'full_attn_idxs', None)
  with_attention = [
    at for at, one in enumerate(types) if one == model_types.FULL
  ]
  if stated is not None and sorted(stated) != with_attention:
    raise ValueError(
      f'full_attn_idxs={stated!r:.60} and layer_types={types!r:.60} contradict'
      ' each other'
    )
  return tuple(kind.mixers[one] for one in types)


def _adjusted_width(config: Any) -> int:
  """The width of a perceptron of an LFM2 (transformers, models/lfm2)."""
  width = int(2 * config.intermediate_size / 3)
  factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
  if factor is None:
    return width
  if multiple < 1:
    raise ValueError(f'block_multiple_of must be positive, got {multiple}')
  return -(-int(factor * width) // multiple) * multiple


def _read_shape(config: Any, kind: model_types.ModelType) -> Any:
  """The shape that a transformers config describes."""
  keys = kind.names
  for key, value in kind.constants.items():
    if getattr(config, key) != value:
      raise ValueError(
        f'{key}={getattr(config, key)!r} is not supported, only {value}'
      )
  own = kind.of_layers(config)
  fields = {ours: getattr(config, key) for ours, key in keys.items()} | own
  if fields.get('activation', 'silu') not in layers.ACTIVATIONS:
    raise ValueError(
      f'{keys["activation"]}={fields["activation"]!r} is not known; choose from'
      f' {sorted(layers.ACTIVATIONS)}'
    )
  if not kind.rotates:
    return kind.shape(**fields)
  windows = _read_windows(config, kind)
  ropes = rope_keys.read_all(config, kind.ropes, is_partial=kind.is_partial)
  if model_types.QUERY_SCALAR in keys.values():
    fields['attention_scale'] = 1 / math.sqrt(fields['attention_scale'])
  if kind.mixers:
    fields['mixers'] = _read_mixers(config, kind)
  if getattr(config, 'linear_heads_tiled', False):
    fields['tiled'] = True
  if getattr(config, 'block_auto_adjust_ff_dim', False):
    fields['inner_width'] = _adjusted_width(config)
  if 'head_width' not in fields:
    from_width = config.hidden_size // config.num_attention_heads
    fields['head_width'] = getattr(config, 'head_dim', None) or from_width
  return kind.shape(
    **{**fields, **kind.fixed},
    num_positions=rope_keys.context_of(config, ropes),
    rope=ropes,
    window=windows,
  )


def _as_granite(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The keys of a MiniCPM as those of the Granite that computes the same."""
  text_files.check_types(raw, dict.fromkeys(_MINICPM, float))
  for key in _MINICPM:
    if not raw.get(key, 0) > 0:
      raise ValueError(f'{key}={raw.get(key)!r}: a MiniCPM needs one above 0')
  width = raw['hidden_size']
  head_width = raw.get('head_dim') or width // raw['num_attention_heads']
  own = {key: raw[key] for key in raw if key not in _MINICPM}
  own['model_type'] = 'granite'
  own['embedding_multiplier'] = raw['scale_emb']
  own['residual_multiplier'] = (
    raw['scale_depth'] / raw['num_hidden_layers'] ** 0.5
  )
  own['logits_scaling'] = width / raw['dim_model_base']
  own['attention_multiplier'] = 1 / math.sqrt(head_width)
  return {'tie_word_embeddings': True} | own


def read_config(raw: Mapping[str, Any]) -> Any:
  """The shape that the keys of a `config.json` describe; raises ValueError."""
  name, known = raw.get('model_type'), {*model_types.MODEL_TYPES, 'minicpm'}
  if not isinstance(name, str) or name not in known:
    raise ValueError(
      f'model_type {name!r} is not known; choose from {sorted(known)}'
    )
  if name == 'minicpm':
    raw = _as_granite(raw)
  kind = model_types.MODEL_TYPES[raw['model_type']]
  if kind.mixture and raw.get('num_local_experts') != 0:  # None: the default
    kind = kind.mixture
  text_files.check_types(raw, kind.types)
  if raw.get('num_attention_heads') == 0:  # transformers would divide by it.
    raise ValueError('num_attention_heads must be positive, got 0')
  read = config_keys.select(kind.config, raw, kind.reads)
  normalized = rope_keys.normalized(read, kind.ropes)
  config = kind.config.from_dict({**normalized, **kind.given})
  shape, idle = _read_shape(config, kind), kind.idle
  if kind.rotates:
    rope_keys.check_read(read, config.rope_parameters)
    _check_windows(raw, shape, kind)
    idle += model_types.WINDOWS
  unread = dict(raw)
  if (
    raw.get(model_types.ROUNDED)
    and raw[model_types.ROUNDED].get('quant_method') in kind.rounded
  ):
    del unread[model_types.ROUNDED]
  config_keys.refuse_unread(
    unread, {*kind.reads, *read}, idle=idle, resolved=config
  )
  return shape


def _can_state(kind: model_types.ModelType, config: adapter.Config) -> bool:
  """Whether a config of this type can have a shape."""
  if type(config) is not kind.shape:
    return False
  try:
    written = kind.config(**_to_keys(config, kind))
    return _read_shape(written, kind) == config
  except (StrictDataclassError, ValueError):  # It has no such models.
    return False


@functools.lru_cache
def type_of(config: adapter.Config) -> tuple[str, model_types.ModelType]:
  """The `model_type` whose config can state a shape, and the type."""
  for name, known in model_types.MODEL_TYPES.items():
    for kind in filter(None, (known, known.mixture)):
      if _can_state(kind, config):
        return name, kind
  raise ValueError(
    f'no model of transformers has this shape; it cannot be saved: {config}'
  )


def _layer_keys(
  config: llama_config.LlamaConfig, kind: model_types.ModelType
) -> dict[str, Any]:
  """The keys of what layers see, and how they rotate."""
  windows, ropes = config.of_layers('window'), config.of_layers('rope')
  slides = [window is not None for window in windows]
  types = [model_types.SLIDING if one else model_types.FULL for one in slides]
  window = next((one for one in windows if one is not None), None)
  keys: dict[str, Any] = {}
  if 'sliding_window' in kind.reads:
    # Where layers say whether they have it, transformers needs one.
    is_switched = 'use_sliding_window' in kind.own
    needed = 'layer_types' in kind.own and not is_switched
    whole = config.num_positions if needed else None
    keys['sliding_window'] = window or whole
  if 'layer_types' in kind.own:
    names = {ours: theirs for theirs, ours in kind.mixers.items()}
    mixers = config.of_layers('mixers') if names else types
    keys['layer_types'] = [names.get(one, one) for one in mixers]
  if 'use_sliding_window' in kind.own:
    keys['use_sliding_window'] = any(slides)
  # Some classes have another default than 1.
  part = lambda rope: (
    {'partial_rotary_factor': rope.fraction} if kind.is_partial else {}
  )
  by_type = {
    name: rope_keys.write(rope) | part(rope)
    for name, rope in zip(types, ropes, strict=True)
    if rope is not None
  }
  if kind.ropes == 'kinds':
    return keys | {'rope_parameters': by_type}
  if 'no_rope_layers' in kind.own:
    keys['no_rope_layers'] = [int(rope is not None) for rope in ropes]
  if 'position_embedding_type' in kind.own:
    keys['position_embedding_type'] = 'rope' if by_type else None
  stated, original = next(iter(by_type.values()), None), model_types.ORIGINAL
  if original in kind.reads:
    keys[original] = (stated or {}).get(original, config.num_positions)
  return keys | {'rope_parameters': stated}


def _to_keys(config: Any, kind: model_types.ModelType) -> dict[str, Any]:
  """The keys of a config of a type that are to state a shape."""
  keys = {key: getattr(config, ours) for ours, key in kind.names.items()}
  if not kind.rotates:
    return keys
  if key := kind.names.get('attention_scale'):
    (width,) = {*config.of_layers('head_width')}
    scale = config.attention_scale or 1 / math.sqrt(width)
    keys[key] = round(scale**-2) if key == model_types.QUERY_SCALAR else scale
  return {**keys, **kind.given} | {
    'max_position_embeddings': config.num_positions,
    'head_dim': config.head_width,
    **_layer_keys(config, kind),
    **kind.to_keys(config),
  }


def to_hugging_face(
  config: adapter.Config, *, dtype: str, eos_token_id: int | None
) -> transformers.PreTrainedConfig:
  """The transformers config of a shape; raises ValueError if there is none."""
  _, kind = type_of(config)
  made = kind.config(
    **_to_keys(config, kind),
    bos_token_id=eos_token_id,
    eos_token_id=eos_token_id,
    pad_token_id=eos_token_id,  # Some defaults lie beyond small vocabularies.
    dtype=dtype,
  )
  head = 'ForCausalLM' if kind.rotates else 'LMHeadModel'
  name = type(made).__name__.replace('TextConfig', 'Config')
  made.architectures = [name.replace('Config', head)]
  return made
