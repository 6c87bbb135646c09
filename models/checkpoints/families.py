"""The shapes that the keys of models describe.

Every model type is a row of `models/checkpoints/model_types`.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import math
import pathlib
import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints.keys import config_keys
from specdec.models.checkpoints.keys import rope_keys
from specdec.models.checkpoints.model_types import model_type as row_lib
from specdec.models.checkpoints.model_types import registry
from specdec.models.nn import adapter
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import rope as rope_lib
from specdec.text import text_files

ASSISTANT = 'gemma4_assistant'
NO_ASSISTANTS = (
  "Google's drafters of Gemma 4 read the states of their target; give it as the"
  ' head'
)
_WITH_PICTURES = (
  'vision_config',
  'mm_tokens_per_image',
  'vision_feature_layer',
  'multimodal_projector_bias',
  'projector_hidden_act',
  'spatial_merge_size',
  'audio_config',
  'vision_soft_tokens_per_image',
)
# Layers are unrolled: shapes alone of 4,000 take over a minute.
_MAX_LAYERS = 256
# The model types of models that are saved, and of the layers of heads.
SAVED = ('gpt2', 'llama', 'qwen3')
SAVED_LAYERS = ('llama', 'qwen3', 'phi3')
_QUOTED = re.compile(r"field '(\w+)'")


def family_of(config: adapter.Config) -> row_lib.ModelType:
  """The first model type with a shape of this class."""
  return next(row for row in registry.ROWS if row.shape is type(config))


def parameter_name(path: tuple[Any, ...]) -> str:
  """The canonical name of the parameter at a path of a module.

  Embeddings call their array `embedding` and norms `scale`; checkpoints call
  both `weight`.
  """
  if path == ('lm_head',):
    return 'lm_head.weight'
  *parents, leaf = (str(part) for part in path)
  leaf = 'weight' if leaf in ('embedding', 'scale') else leaf
  return '.'.join([*parents, leaf])


def _layer_types(config: Any, supported: Collection[str]) -> list[str]:
  types, num_layers = config.layer_types, config.num_hidden_layers
  if unknown := {*types} - {*supported}:
    raise ValueError(f'layer_types has {sorted(unknown)}, not supported')
  if len(types) != num_layers:
    raise ValueError(
      f'layer_types has {len(types)} entries for {num_layers} layers'
    )
  return types


def _check_windows(
  keys: Mapping[str, Any],
  shape: nn_llama.LlamaConfig,
  row: row_lib.ModelType,
) -> None:
  """Refuses windows that transformers ignores, and others do not."""
  unread = [
    key for key in row_lib.WINDOWS if keys.get(key) and key not in row.reads
  ]
  num_layers, window = shape.num_layers, keys.get('sliding_window')
  types = keys.get('layer_types') or [row_lib.SLIDING] * num_layers
  if keys.get('use_sliding_window') is False:
    window = None
  if window is not None and window >= shape.num_positions:
    window = None
  stated = tuple(
    window if layer_type == row_lib.SLIDING else None for layer_type in types
  )
  if unread and (
    stated != shape.of_layers('window')
    or {*types} - {row_lib.FULL, row_lib.SLIDING}
  ):
    raise config_keys.UnreadKey(
      f'{unread[0]}={keys[unread[0]]!r:.60}: the layers of such a model have no'
      ' such window'
    )


def _read_shape(config: Any, row: row_lib.ModelType) -> Any:
  keys = row.key_of_field
  for key, value in row.constants.items():
    if getattr(config, key) != value:
      raise ValueError(
        f'{key}={getattr(config, key)!r} is not supported, only {value}'
      )
  by_layer = row.read(config)  # First: it refuses what differs by layer.
  fields = {field: getattr(config, key) for field, key in keys.items()}
  fields |= by_layer
  if fields.get('activation', 'silu') not in layers.ACTIVATIONS:
    raise ValueError(
      f'{keys["activation"]}={fields["activation"]!r} is not known; choose from'
      f' {sorted(layers.ACTIVATIONS)}'
    )
  if not row.is_llama:
    return row.shape(**fields)
  window: int | None = getattr(config, 'sliding_window', None)
  windows = (window,) * config.num_hidden_layers
  if 'layer_types' in row.class_keys and not row.mixers:
    slides = {row_lib.SLIDING} if 'sliding_window' in row.class_keys else set()
    types = _layer_types(config, {row_lib.FULL, *slides})
    windows = tuple(
      window if layer_type == row_lib.SLIDING else None for layer_type in types
    )
  ropes = rope_keys.read_all(config, row.ropes, is_partial=row.is_partial)
  if row_lib.QUERY_SCALAR in keys.values():
    fields['attention_scale'] = 1 / math.sqrt(fields['attention_scale'])
  if row.mixers:
    types = _layer_types(config, row.mixers)
    fields['mixers'] = tuple(row.mixers[layer_type] for layer_type in types)
  if 'head_width' not in fields:
    from_width = config.hidden_size // config.num_attention_heads
    fields['head_width'] = getattr(config, 'head_dim', None) or from_width
  return row.shape(
    **{**fields, **row.fixed},
    num_positions=rope_keys.context_of(config, ropes),
    rope=ropes,
    window=windows,
  )


def _read(
  raw: Mapping[str, Any],
) -> tuple[row_lib.ModelType, adapter.Config]:
  name, supported = raw.get('model_type'), registry.MODEL_TYPES
  if not isinstance(name, str) or name not in supported:
    raise ValueError(
      f'model_type {name!r} is not known; choose from {sorted(supported)}'
    )
  row = supported[name]
  # None is the default, which is above 0.
  if row.mixture and raw.get('num_local_experts') != 0:
    row = row.mixture
  raw = row.translate(raw)
  text_files.check_types(raw, row.types)
  if raw.get('num_attention_heads') == 0:  # transformers would divide by it.
    raise ValueError('num_attention_heads must be positive, got 0')
  read = config_keys.select(row.config, raw, row.reads)
  normalized = rope_keys.normalized(read, row.ropes)
  config = row.config.from_dict({**normalized, **row.given})
  shape, idle = _read_shape(config, row), row.idle
  if row.is_llama:
    rope_keys.check_read(read, config.rope_parameters)
    _check_windows(raw, shape, row)
    idle += row_lib.WINDOWS
  unread = dict(raw)
  rounding = raw.get(row_lib.ROUNDED) or {}
  if rounding.get('quant_method') in row.rounded:
    del unread[row_lib.ROUNDED]
  config_keys.refuse_unread(
    unread, {*row.reads, *read}, idle=idle, resolved=config
  )
  return row, shape


def _of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
  """The keys of the language model; ValueError if the others matter."""
  row = registry.WHOLES.get(str(raw.get('model_type')))
  if row is None:
    return raw
  text: Any = raw.get('text_config')
  text_files.check_types({'text_config': text}, {'text_config': dict})
  shared = {'text_config', 'tie_word_embeddings'}
  config_keys.refuse_unread(raw, shared, idle=_WITH_PICTURES)
  tied = raw.get('tie_word_embeddings', row.whole_is_tied)
  return {'tie_word_embeddings': tied} | text


def read(
  raw: Mapping[str, Any], path: pathlib.Path
) -> tuple[row_lib.ModelType, adapter.Config]:
  """The model type and the shape that the keys of a `config.json` describe.

  Raises:
    ValueError: no model type supports it; the message begins with the path, and
      names the key and its value.
  """
  with checkpoint_lib.naming(path):
    try:
      raw = _of_text(raw)
      if raw.get('model_type') == ASSISTANT:
        raise ValueError(f'model_type {ASSISTANT!r}: {NO_ASSISTANTS}')
      row, config = _read(raw)
    except config_keys.UnreadKey as error:
      if not (path.is_dir() or path.suffix == '.json'):
        raise  # Nobody removes a key of a GGUF file.
      raise ValueError(
        f'{error}; remove the key if the model is the same without it'
      ) from error
    except KeyError as error:  # transformers misses a key of a rotation.
      raise ValueError(error.args[0]) from error
    except StrictDataclassError as error:
      # It names the class, then the key and the reason, which is its cause.
      reason = str(error.__cause__ or error).partition('. Errors:')[0]
      field = _QUOTED.search(str(error))
      named = f'{field[1]}={raw.get(field[1])!r:.40}: ' if field else ''
      raise ValueError(f'{named}{reason}') from error
    if config.num_layers > _MAX_LAYERS:
      raise ValueError(
        f'{config.num_layers} layers, at most {_MAX_LAYERS} are supported'
      )
  return row, config


def written_keys(
  config: adapter.Config,
  types: Sequence[str],
  *,
  dtype: str,
  eos_token_id: int | None = None,
) -> dict[str, Any]:
  """The `config.json` of a shape, as the first of some types that has it.

  Only shapes that are trained here are written: GPT-2, Llama, and the layers of
  drafting heads. Queries of heads may be normalised (Qwen 3) and partly rotated
  (Phi-3).

  Raises:
    ValueError: none of the types has the shape.
  """
  tokens = ('bos_token_id', 'eos_token_id', 'pad_token_id')
  for name in types:
    row = registry.MODEL_TYPES[name]
    if row.shape is not type(config):
      continue
    keys = {
      key: getattr(config, field) for field, key in row.key_of_field.items()
    }
    if isinstance(rope := getattr(config, 'rope', None), rope_lib.Rope):
      rotation = rope_keys.write(rope)
      keys |= {
        'max_position_embeddings': config.num_positions,
        'head_dim': config.head_width,
        'rope_parameters': rotation,
      }
      if (key := row_lib.ORIGINAL) in row.class_keys:
        keys[key] = rotation.get(key, config.num_positions)
    class_name = row.config.__name__.removesuffix('Config')
    head = 'ForCausalLM' if row.is_llama else 'LMHeadModel'
    keys |= dict.fromkeys(tokens, eos_token_id) | {
      'model_type': name,
      'architectures': [class_name + head],
      'dtype': dtype,
    }
    try:
      if _read(keys) == (row, config):
        return keys
    except (KeyError, StrictDataclassError, ValueError):
      pass  # No such model has these keys.
  raise ValueError(
    f'only the shapes of {", ".join(types)} can be saved, not {config}'
  )
