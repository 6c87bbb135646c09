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

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import model_configs
from specdec.models.checkpoints import tensor_names
from specdec.models.checkpoints.keys import config_keys
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import adapter
from specdec.models.nn import delta as delta_lib
from specdec.models.nn import gemma as gemma_lib
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import lfm2 as lfm2_lib
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import llama_config
from specdec.models.nn import mixtral as mixtral_lib
from specdec.text import text_files


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models and its Hugging Face format, by default Llama's.

  Attributes:
    name: name in messages.
    config: class of the shapes; see `model_configs` for its keys.
    module: class of the modules, called with `(config, dtype=, rngs=)`.
    canonical_name: maps `(stored name, config)` to a canonical name, or to None
      for a tensor that is not needed.
    parts: maps `(canonical name, config)` to the canonical names of tensors
      that are stored as one under it, and their parts of it; to {} for a tensor
      by itself.
    is_transposed: whether the axes of a canonical name are stored in reverse,
      such as `[in, out]`.
    convert: called with `(sign, canonical name, rows)`; `rows` is a slice of
      the tensor's rows, `[n, in]` or `[n]`. Makes our values of stored values
      (sign 1) or stored values of ours (-1), by default the same.
    is_unused: whether the tensor of a canonical name is stored, but not read;
      called with `(name, config)`.
    stays_float: whether the matrix of a canonical name is never rounded to
      eight bits.
    extras: paths and shapes of matrices that are stored next to the module.
  """

  name: str
  config: type[adapter.Config]
  _: dataclasses.KW_ONLY
  module: Callable[..., adapter.Module] = nn_llama.Llama
  canonical_name: Callable[[str, Any], str | None] = tensor_names.canonical_name
  parts: Callable[[str, Any], Mapping[str, tensor_parts.Part]] = (
    tensor_names.parts
  )
  is_transposed: Callable[[str], bool] = lambda name: False
  convert: Callable[[int, str, np.ndarray], np.ndarray] = (
    lambda sign, name, rows: rows
  )
  is_unused: Callable[[str, Any], bool] = lambda name, config: False
  stays_float: Callable[[str], bool] = lambda name: False
  extras: tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...] = ()


FAMILIES = (
  Family(
    'GPT-2',
    nn_gpt2.GPT2Config,
    module=nn_gpt2.GPT2,
    is_transposed=tensor_names.is_conv1d,
    stays_float=lambda name: name == 'wpe.weight',
  ),
  Family('Llama', llama_config.LlamaConfig),
  Family(
    'Mixtral',
    mixtral_lib.MixtralConfig,
    module=mixtral_lib.Mixtral,
    # A router in eight bits would route tokens to other experts.
    stays_float=lambda name: 'gate.' in name,
  ),
  Family(
    'gpt-oss',
    mixtral_lib.GptOssConfig,
    module=mixtral_lib.Mixtral,
    canonical_name=tensor_names.gpt_oss_name,
    parts=functools.partial(tensor_names.parts, interleaved=True),
    is_transposed=lambda name: '.experts.' in name and name.endswith('.weight'),
    stays_float=lambda name: 'gate.' in name,
  ),
  Family('Gemma', gemma_lib.GemmaConfig, convert=tensor_names.shift_norms),
  Family(
    'Gemma 4',
    gemma_lib.Gemma4Config,
    module=gemma_lib.Gemma4,
    parts=lambda name, config: {},
    is_unused=tensor_names.reads_another,
  ),
  Family(
    'LFM2',
    lfm2_lib.Lfm2Config,
    module=lfm2_lib.Lfm2,
    is_transposed=tensor_names.is_convolution,
  ),
  Family(
    'Qwen3.5',
    delta_lib.DeltaConfig,
    module=delta_lib.Delta,
    is_transposed=tensor_names.is_convolution,
    convert=tensor_names.shift_rates,
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


def _of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
  """The keys of the language model; ValueError if the others matter."""
  if str(raw.get('model_type')) not in _WITH_TEXT:
    return raw
  text: Any = raw.get('text_config')
  text_files.check_types({'text_config': text}, {'text_config': dict})
  shared = {'text_config', 'tie_word_embeddings'}
  config_keys.refuse_unread(raw, shared, idle=_WITH_PICTURES)
  tied = raw.get('tie_word_embeddings', _WITH_TEXT[str(raw['model_type'])])
  return {'tie_word_embeddings': tied} | text


def config_from_keys(
  raw: Mapping[str, Any], path: pathlib.Path
) -> adapter.Config:
  """The shape that the keys of a `config.json` describe.

  Raises:
    ValueError: no family supports it; the message begins with the path, and
      names the key and its value.
  """
  with checkpoint_lib.naming(path):
    try:
      raw = _of_text(raw)
      if raw.get('model_type') == ASSISTANT:
        raise ValueError(f'model_type {ASSISTANT!r}: {NO_ASSISTANTS}')
      config = model_configs.read_config(raw)
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
  return config
