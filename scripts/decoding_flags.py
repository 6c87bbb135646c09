"""Flags that every decoding script shares, and what they stand for."""

import hashlib
import json
import pathlib
import sys
from typing import Any

from absl import flags
import jax.numpy as jnp

import specdec

DEFAULT_PROMPT = '''def copy_file(source, destination):
    """Copy a file, and its permissions."""
    if'''

TARGET = flags.DEFINE_string(
  'target', 'demo', 'demo (embedded), a model folder or a hub id'
)
DRAFT = flags.DEFINE_string(
  'draft', 'demo', 'demo (embedded), a model folder, a hub id, or none'
)
REVISION = flags.DEFINE_string('revision', None, 'of the target, on the hub')
PROMPT_FILE = flags.DEFINE_string(
  'prompt_file',
  None,
  'prompts: one JSON object per line with the key prompt (*.jsonl), else one'
  ' prompt per line',
)
MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', 128, 'tokens to generate at most'
)
TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 is greedy')
TOP_K = flags.DEFINE_integer('top_k', None, 'keep the k likeliest tokens')
TOP_P = flags.DEFINE_float(
  'top_p', None, 'keep the likeliest tokens up to this probability'
)
MIN_P = flags.DEFINE_float(
  'min_p', None, 'keep tokens this likely relative to the likeliest'
)
SEED = flags.DEFINE_integer('seed', 0, 'of the sampling')
NUM_DRAFT_TOKENS = flags.DEFINE_integer(
  'num_draft_tokens', 4, 'tokens drafted per target forward'
)
DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'of weights and cache'
)


def sampling() -> specdec.Sampling:
  """What the sampling flags say."""
  return specdec.Sampling(
    temperature=TEMPERATURE.value,
    top_k=TOP_K.value,
    top_p=TOP_P.value,
    min_p=MIN_P.value,
  )


def draft_name() -> str | None:
  """What `--draft` says, in the terms of `models.pair.load_pair`."""
  return None if DRAFT.value == 'none' else DRAFT.value


def dtype() -> jnp.dtype:
  """What `--dtype` says."""
  return jnp.dtype(DTYPE.value)


def read_prompts(name: str, limit: int | None = None) -> list[str]:
  """The first prompts of a file, see `--prompt_file`.

  Args:
    name: of the file.
    limit: how many, or None for all.

  Raises:
    ValueError: the file cannot be read, or has fewer; names file and line.
  """
  path = pathlib.Path(name)
  try:
    text = path.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'--prompt_file={path} cannot be read: {error}') from error
  numbered = enumerate(text.split('\n'), 1)  # JSON may hold other line ends
  lines = [(number, line) for number, line in numbered if line.strip()]
  if not lines or (limit and len(lines) < limit):
    raise ValueError(
      f'--prompt_file={path} has {len(lines)} prompts, {limit or 1} needed'
    )
  prompts = []
  for number, line in lines[:limit]:
    if path.suffix == '.jsonl':
      try:
        line = json.loads(line)['prompt']
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
          f'--prompt_file={path}, line {number}: expected a JSON object with'
          ' the key prompt'
        ) from error
      if not isinstance(line, str):
        raise ValueError(
          f'--prompt_file={path}, line {number}: prompt must be a string'
        )
    prompts.append(line)
  return prompts


def as_dict() -> dict[str, Any]:
  """All flags of the running script, for the record of a result."""
  record = {
    flag.name: flag.value
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])
  } | {
    flag.name: flag.value
    for flag in flags.FLAGS.flags_by_module_dict()[__name__]
  }
  path = record.pop('prompt_file')
  if path is not None:  # The name may be private; the contents are what counts.
    digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    record |= {'prompts': pathlib.Path(path).name, 'prompts_sha256': digest}
  return record
