"""Names of the tensors of gpt-oss, whose experts lie in one for all of them."""

import functools
import re

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import tensor_names
from models.nn import mixtral as mixtral_lib

_PARTS = ('gate_up_proj', 'down_proj')
_ENDS = {'': 'weight', '_bias': 'bias', checkpoint_lib.BLOCKS: 'weight'}
_EXPERT = re.compile(r'\.experts\.\d+\.(gate|up|down)_proj\.')

parts = functools.partial(tensor_names.parts, interleaved=True)


def canonical_name(stored: str, config: mixtral_lib.GptOssConfig) -> str | None:
  """The canonical name of a stored tensor; see `families.Family`.

  The exponents of a matrix in blocks belong to the tensor of its blocks.
  """
  if stored.endswith(checkpoint_lib.SCALES):
    return None
  path, _, own = stored.rpartition('.')
  for part in _PARTS:
    if path.endswith('.experts') and (end := own.removeprefix(part)) in _ENDS:
      stored = f'{path}.{part}.{_ENDS[end]}'
  name = stored.replace('.mlp.router.', '.mlp.gate.')
  return tensor_names.canonical_name(name, config)


def stored_name(name: str, config: mixtral_lib.GptOssConfig) -> str:
  """The name that transformers stores a canonical name under."""
  name = name.replace('.mlp.gate.', '.mlp.router.')
  is_bias = name.endswith('.bias')
  if found := _EXPERT.search(name):
    own = 'down_proj' if found[1] == 'down' else 'gate_up_proj'
    name = f'{name[: found.start()]}.experts.{own}{"_bias" if is_bias else ""}'
  return tensor_names.stored_name(name, config)


def is_transposed(name: str) -> bool:
  """Whether a matrix is stored `[in, out]`, unless it is in blocks."""
  return '.experts.' in name and name.endswith('.weight')
