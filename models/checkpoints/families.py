"""The kinds of models there are; see `models.family` for what makes one."""

import json
import pathlib
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from models.checkpoints import gpt2 as gpt2_checkpoint
from models.checkpoints import llama as llama_checkpoint
from models.checkpoints.family import Config
from models.checkpoints.family import Family

FAMILIES = (
  gpt2_checkpoint.FAMILY,
  llama_checkpoint.LLAMA,
  llama_checkpoint.MIXTRAL,
)

# Config keys that change the computation in ways that no module here knows,
# each with the only values that leave it alone.
_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
  'add_cross_attention': (False, None),
  'auto_map': (None,),
  'pruned_heads': ({}, None),
  'quantization_config': (None,),
}


def family_of(config: Config) -> Family:
  """That of a shape."""
  return next(one for one in FAMILIES if one.config is type(config))


def read_config(path: pathlib.Path) -> Config:
  """Reads a `config.json`.

  Args:
    path: of the file.

  Returns:
    The shape of the model, of the class of its family.

  Raises:
    ValueError: the file describes something that no family here is; names the
      key and its value.
  """
  try:
    raw = json.loads(path.read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON: {error}') from error
  kind = raw.get('model_type') if isinstance(raw, dict) else raw
  by_type = {kind: one for one in FAMILIES for kind in one.model_types}
  if not isinstance(raw, dict) or kind not in by_type:
    raise ValueError(
      f'{path}: model_type {kind!r} is not known; choose from {sorted(by_type)}'
    )
  for key, harmless in _REFUSED_UNLESS.items():
    if raw.get(key) not in harmless:
      raise ValueError(f'{path}: {key}={raw[key]!r} is not supported')
  try:
    return by_type[kind].read_config(raw)
  except (
    StrictDataclassError,
    KeyError,
    TypeError,
    ValueError,
  ) as error:
    raise ValueError(f'{path}: {error}') from error
