"""What `models.hub` must know of a kind of model to read and write it."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

import transformers

from models.nn.gpt2 import GPT2
from models.nn.gpt2 import GPT2Config
from models.nn.llama import Llama
from models.nn.llama import LlamaConfig

# What a module and its shape may be, wherever it does not matter which.
Module = GPT2 | Llama
Config = GPT2Config | LlamaConfig

# Where a parameter is in a module, e.g. `('h', 0, 'ln_1', 'scale')`.
Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Family:
  """A kind of model, and Hugging Face's format of it.

  Attributes:
    name: for messages.
    model_types: of config.json.
    module: the class, made of `(config, dtype=, rngs=)`.
    config: the class of its shapes.
    read_config: from the keys of a config.json; raises ValueError if they say
      what the module does not know.
    to_hugging_face: the inverse: `(config, dtype=, eos_token_id=)`.
    canonical_name: `(stored name, config)` to `parameter_name`; None for a
      tensor that is not needed.
    stored_name: `(path, config)` to the name that transformers writes.
    is_transposed: whether the parameter at a path is stored `[in, out]`.
    stays_float: whether the matrix at a path is never in eight bits.
  """

  name: str
  model_types: frozenset[str]
  module: Callable[..., Module]
  config: type[Config]
  read_config: Callable[[Mapping[str, Any]], Config]
  to_hugging_face: Callable[..., transformers.PreTrainedConfig]
  canonical_name: Callable[[str, Any], str | None]
  stored_name: Callable[[Path, Any], str]
  is_transposed: Callable[[Path], bool]
  stays_float: Callable[[Path], bool]


def parameter_name(path: Path) -> str:
  """The name of a parameter as checkpoints have it, without their prefix.

  Embeddings call their array `embedding`, norms `scale`; checkpoints `weight`.
  """
  if path == ('lm_head',):
    return 'lm_head.weight'
  *parents, leaf = (str(part) for part in path)
  leaf = 'weight' if leaf in ('embedding', 'scale') else leaf
  return '.'.join([*parents, leaf])
