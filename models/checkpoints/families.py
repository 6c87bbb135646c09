"""Registry of the model families, with the functions that map their formats.

The canonical name of a parameter is its path in the module, joined by dots,
with the leaf names of checkpoints: `h.0.ln_1.weight`.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
import numpy as np
import transformers

from models.checkpoints import gpt2 as checkpoints_gpt2
from models.checkpoints import llama as checkpoints_llama
from models.checkpoints import tensor_names
from models.checkpoints.keys import config_keys
from models.checkpoints.keys import tensor_parts
from models.nn import adapter
from models.nn import delta as delta_lib
from models.nn import gemma as gemma_lib
from models.nn import gpt2 as nn_gpt2
from models.nn import lfm2 as lfm2_lib
from models.nn import llama as nn_llama
from models.nn import llama_config
from models.nn import mixtral as mixtral_lib
from specdec.text import text_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A family of models and its Hugging Face format.

  Attributes:
    name: name in messages.
    model_types: values of `model_type` in config.json.
    module: class of the modules, called with `(config, dtype=, rngs=)`.
    config: class of the shapes.
    read_config: makes a shape of the keys of a config.json; raises ValueError
      if they describe something that the module does not compute.
    to_hugging_face: its inverse, called with `(config, dtype=, eos_token_id=)`.
    canonical_name: maps `(stored name, config)` to a canonical name, or to None
      for a tensor that is not needed.
    parts: maps `(canonical name, config)` to the canonical names of tensors
      that are stored as one under it, and their parts of it; to {} by default,
      for a tensor by itself.
    stored_name: maps `(canonical name, config)` to the name that transformers
      writes.
    is_transposed: whether the axes of a canonical name are stored in reverse,
      such as `[in, out]`.
    convert: makes the values of a canonical name of those that are stored, for
      some rows `[n, in]` or `[n]`; the identity by default.
    to_stored: its inverse.
    is_unused: whether the tensor of a canonical name is stored, but not read;
      called with `(name, config)`.
    stays_float: whether the matrix of a canonical name is never rounded to
      eight bits.
  """

  name: str
  model_types: frozenset[str]
  module: Callable[..., adapter.Module]
  config: type[adapter.Config]
  read_config: Callable[[Mapping[str, Any]], adapter.Config]
  to_hugging_face: Callable[..., transformers.PreTrainedConfig]
  canonical_name: Callable[[str, Any], str | None]
  stored_name: Callable[[str, Any], str]
  parts: Callable[[str, Any], Mapping[str, tensor_parts.Part]] = (
    lambda name, config: {}
  )
  is_transposed: Callable[[str], bool] = lambda name: False
  convert: Callable[[str, np.ndarray], np.ndarray] = lambda name, rows: rows
  to_stored: Callable[[str, np.ndarray], np.ndarray] = lambda name, rows: rows
  is_unused: Callable[[str, Any], bool] = lambda name, config: False
  stays_float: Callable[[str], bool] = lambda name: False


LLAMA = Family(
  name='Llama',
  model_types=checkpoints_llama.types_of(llama_config.LlamaConfig),
  module=nn_llama.Llama,
  config=llama_config.LlamaConfig,
  read_config=checkpoints_llama.read_config,
  to_hugging_face=checkpoints_llama.to_hugging_face,
  canonical_name=tensor_names.canonical_name,
  parts=tensor_names.parts,
  stored_name=tensor_names.stored_name,
)


def _related(
  name: str, config: type[llama_config.LlamaConfig], **others: Any
) -> Family:
  """A family of Llama's kind; for the other fields see `Family`."""
  types = checkpoints_llama.types_of(config)
  return dataclasses.replace(
    LLAMA, name=name, config=config, model_types=types, **others
  )


FAMILIES = (
  Family(
    name='GPT-2',
    model_types=frozenset({'gpt2'}),
    module=nn_gpt2.GPT2,
    config=nn_gpt2.GPT2Config,
    read_config=checkpoints_gpt2.read_config,
    to_hugging_face=checkpoints_gpt2.to_hugging_face,
    canonical_name=checkpoints_gpt2.canonical_name,
    stored_name=checkpoints_gpt2.stored_name,
    is_transposed=checkpoints_gpt2.is_transposed,
    stays_float=lambda name: name == 'wpe.weight',
  ),
  LLAMA,
  _related(
    'Mixtral',
    mixtral_lib.MixtralConfig,
    module=mixtral_lib.Mixtral,
    # A router in eight bits would route tokens to other experts.
    stays_float=lambda name: 'gate.' in name,
  ),
  _related(
    'gpt-oss',
    mixtral_lib.GptOssConfig,
    module=mixtral_lib.Mixtral,
    canonical_name=tensor_names.gpt_oss_name,
    parts=functools.partial(tensor_names.parts, interleaved=True),
    is_transposed=lambda name: '.experts.' in name and name.endswith('.weight'),
    stays_float=lambda name: 'gate.' in name,
  ),
  _related(
    'Gemma',
    gemma_lib.GemmaConfig,
    convert=functools.partial(tensor_names.shift_norms, 1.0),
    to_stored=functools.partial(tensor_names.shift_norms, -1.0),
  ),
  _related(
    'Gemma 4',
    gemma_lib.Gemma4Config,
    module=gemma_lib.Gemma4,
    parts=lambda name, config: {},
    is_unused=tensor_names.reads_another,
  ),
  _related(
    'LFM2',
    lfm2_lib.Lfm2Config,
    module=lfm2_lib.Lfm2,
    canonical_name=functools.partial(tensor_names.renamed, 'lfm2'),
    is_transposed=tensor_names.is_convolution,
  ),
  _related(
    'Qwen3.5',
    delta_lib.DeltaConfig,
    module=delta_lib.Delta,
    canonical_name=tensor_names.delta_name,
    is_transposed=tensor_names.is_convolution,
    convert=tensor_names.to_rates,
    to_stored=tensor_names.from_rates,
  ),
)

# Models that have more than a language model, by the `model_type` of the whole,
# and whether their embeddings are tied if they do not say it.
_WITH_TEXT = {
  'gemma3': True,
  'gemma4': True,
  'mistral3': True,
  'qwen3_5': False,
}
ASSISTANT = 'gemma4_assistant'
NO_ASSISTANTS = (
  "Google's drafters of Gemma 4 read the keys and values of their target, which"
  ' is not supported; give another draft, such as a smaller Gemma 4'
)
_WITH_PICTURES = (
  *('vision_config', 'mm_tokens_per_image', 'vision_feature_layer'),
  *('multimodal_projector_bias', 'projector_hidden_act', 'spatial_merge_size'),
  *('audio_config', 'vision_soft_tokens_per_image'),
)

# Errors of transformers and the families on values of another type.
_WRONG_VALUES = (
  *(AttributeError, IndexError, KeyError, TypeError, ValueError),
  *(OverflowError, ZeroDivisionError),
)
# Layers are unrolled: shapes alone of 4,000 take over a minute.
_MAX_LAYERS = 256
_QUOTED = re.compile(r"field '(\w+)'")


def family_of(config: adapter.Config) -> Family:
  """The family of a shape."""
  return next(family for family in FAMILIES if family.config is type(config))


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


def read_config(path: pathlib.Path) -> adapter.Config:
  """The shape that a `config.json` describes; see `config_from_keys`."""
  return config_from_keys(text_files.read_object(path), path)


def _of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
  """The keys of the language model; ValueError if the others matter."""
  if str(raw.get('model_type')) not in _WITH_TEXT:
    return raw
  text: Any = raw.get('text_config')
  config_keys.check_type('text_config', text, dict)
  shared = {'text_config', 'tie_word_embeddings'}
  config_keys.refuse_unread(raw, shared, idle=_WITH_PICTURES)
  tied = raw.get('tie_word_embeddings', _WITH_TEXT[str(raw['model_type'])])
  return {'tie_word_embeddings': tied} | text


def _family_of_type(kind: Any) -> Family:
  """The family of a `model_type`; raises ValueError if there is none."""
  if kind == ASSISTANT:
    raise ValueError(f'model_type {kind!r}: {NO_ASSISTANTS}')
  by_type = {kind: family for family in FAMILIES for kind in family.model_types}
  if not isinstance(kind, str) or kind not in by_type:
    raise ValueError(
      f'model_type {kind!r} is not known; choose from {sorted(by_type)}'
    )
  return by_type[kind]


def config_from_keys(
  raw: Mapping[str, Any], path: pathlib.Path
) -> adapter.Config:
  """The shape that the keys of a `config.json` describe.

  Raises:
    ValueError: no family supports it; the message begins with the path, and
      names the key and its value.
  """
  try:
    raw = _of_text(raw)
    config = _family_of_type(raw.get('model_type')).read_config(raw)
  except StrictDataclassError as error:
    # It names the class, then the key and the reason, which is its cause.
    reason = str(error.__cause__ or error).partition('. Errors:')[0]
    found = _QUOTED.search(str(error))
    named = f'{found[1]}={raw.get(found[1])!r:.40}: ' if found else ''
    raise ValueError(f'{path}: {named}{reason}') from error
  except _WRONG_VALUES as error:
    raise ValueError(f'{path}: {error or repr(error)}') from error
  if config.num_layers > _MAX_LAYERS:
    raise ValueError(
      f'{path}: {config.num_layers} layers, at most {_MAX_LAYERS} are supported'
    )
  return config
