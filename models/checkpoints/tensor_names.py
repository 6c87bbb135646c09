"""Tensor names of Llama, related models and mixtures."""

from collections.abc import Mapping
import re
from typing import Any

import numpy as np

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import llama as checkpoints_llama
from models.checkpoints.keys import model_types
from models.checkpoints.keys import tensor_parts
from models.nn import delta as delta_lib
from models.nn import llama_config
from models.nn import mixtral as mixtral_lib

_PREFIX = 'model.'
# Buffers of old checkpoints: frequencies, which follow from the config.
_BUFFERS = re.compile(r'layers\.\d+\.self_attn\.rotary_emb\.inv_freq')

# Names of the parts of a perceptron, and what Mixtral calls them.
_MIXTRAL_NAMES = {
  **{'mlp': 'block_sparse_moe', 'gate_proj': 'w1'},
  **{'up_proj': 'w3', 'down_proj': 'w2'},
}
# Matrices that Phi-3 stores as one, whose rows lie one after the other.
_FUSED = {
  'qkv_proj': ('q_proj', 'k_proj', 'v_proj'),
  'gate_up_proj': ('gate_proj', 'up_proj'),
}
# Names of Granite 4, which has the matrices of all experts in one tensor.
_GRANITE_NAMES = {
  'block_sparse_moe.router.layer': 'mlp.gate',
  'block_sparse_moe.input_linear': 'mlp.experts.gate_up_proj',
  'block_sparse_moe.output_linear': 'mlp.experts.down_proj',
  'shared_mlp.input_linear': 'mlp.shared_expert.gate_up_proj',
  'shared_mlp.output_linear': 'mlp.shared_expert.down_proj',
}
# Tensors by which attention makes keys and values.
_ENTRIES = re.compile(r'layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\..*')
# The parts of a model that sees or hears, and the prefix of its language model.
_VISION = re.compile(
  r'(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower'
  r'|embed_vision|embed_audio)\..*'
)
_LANGUAGE = re.compile(r'(model\.)?language_model\.')


def _with_parts(name: str, renames: Mapping[str, str]) -> str:
  """A name whose parts, between dots, are called otherwise."""
  name = f'.{name}.'
  for old, new in renames.items():
    name = name.replace(f'.{old}.', f'.{new}.')
  return name[1:-1]


def _inverse(renames: Mapping[str, str]) -> dict[str, str]:
  return {new: old for old, new in renames.items()}


def canonical_name(stored: str, config: llama_config.LlamaConfig) -> str | None:
  """The canonical name of a stored tensor, or None for a known buffer.

  Bare models lack the `model.` prefix. A tied head may be stored too. Models
  that see have other tensors, which are not needed.
  """
  if _VISION.fullmatch(stored):
    return None
  name = _LANGUAGE.sub('', stored, count=1).removeprefix(_PREFIX)
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and config.tie_embeddings:
    return 'embed_tokens.weight'
  name = _with_parts(name, _GRANITE_NAMES)
  if not isinstance(config, mixtral_lib.MixtralConfig):
    name = name.replace('.shared_expert.', '.')
  if '.block_sparse_moe.' in name:
    name = _with_parts(name, _inverse(_MIXTRAL_NAMES))
  return name


def reads_another(name: str, config: llama_config.LlamaConfig) -> bool:
  """Whether a tensor makes keys of a layer that reads those of another."""
  found, sources = _ENTRIES.fullmatch(name), config.of_layers('kv_source')
  layer = int(found[1]) if found else len(sources)
  return layer < len(sources) and sources[layer] is not None


def renamed(
  kind: str, stored: str, config: llama_config.LlamaConfig
) -> str | None:
  """The same as `canonical_name`, where a `model_type` has other names."""
  name = canonical_name(stored, config)
  ours = _inverse(model_types.MODEL_TYPES[kind].renames)
  return name and _with_parts(name, ours)


def delta_name(stored: str, config: delta_lib.DeltaConfig) -> str | None:
  """The same as `canonical_name`, of a Qwen3.5 that may see.

  What predicts several tokens is not read.
  """
  if _VISION.fullmatch(stored) or stored.startswith('mtp.'):
    return None
  return renamed('qwen3_5_text', _LANGUAGE.sub('', stored, count=1), config)


def gpt_oss_name(stored: str, config: mixtral_lib.GptOssConfig) -> str | None:
  """The same as `canonical_name`, of a gpt-oss.

  The exponents of a matrix in blocks belong to the tensor of its blocks.
  """
  if stored.endswith(checkpoint_lib.SCALES):
    return None
  name = stored.removesuffix(checkpoint_lib.BLOCKS)
  path, _, own = name.rpartition('.')
  if path.endswith('.experts'):
    part = own.removesuffix('_bias')
    name = f'{path}.{part}.{"weight" if part == own else "bias"}'
  return canonical_name(name.replace('.mlp.router.', '.mlp.gate.'), config)


def is_convolution(name: str) -> bool:
  """Whether a tensor is the weight of a layer's convolution."""
  return name.endswith(('.conv.weight', '.conv1d.weight'))


def to_rates(name: str, rows: np.ndarray) -> np.ndarray:
  """Values of a Qwen3.5, whose folders have scales minus one and logarithms."""
  if name.endswith('linear_attn.rate'):
    return -np.exp(rows.astype(np.float32))
  own = name.endswith('linear_attn.norm.weight')
  return rows if own else shift_norms(1.0, name, rows)


def from_rates(name: str, rows: np.ndarray) -> np.ndarray:
  """The inverse of `to_rates`."""
  if name.endswith('linear_attn.rate'):
    return np.log(-rows)
  own = name.endswith('linear_attn.norm.weight')
  return rows if own else shift_norms(-1.0, name, rows)


def parts(
  name: str, config: llama_config.LlamaConfig, *, interleaved: bool = False
) -> Mapping[str, tensor_parts.Part]:
  """The tensors that are stored as one, and their parts; {} if it is but one.

  The last has all rows that are left, so that too many do not pass.

  Args:
    name: canonical name of the one.
    config: the shape.
    interleaved: whether the rows of several lie in turn.
  """
  sizes: dict[str, Any] = {'gate_proj': config.inner_width}
  sizes['q_proj'] = config.num_heads * config.head_width
  sizes['k_proj'] = config.num_kv_heads * config.head_width
  found: dict[str, tensor_parts.Part] = {}
  *parents, own, leaf = name.split('.')
  experts: tuple[int | None, ...] = (None,)
  if parents[-1:] == ['experts']:  # A stack of those of all.
    experts = tuple(range(config.num_experts))
  elif own not in _FUSED:
    return {}
  elif parents[-1] == 'shared_expert' and isinstance(
    config, mixtral_lib.MixtralConfig
  ):
    sizes['gate_proj'] = config.shared_width or 0
  for expert in experts:
    start, path = 0, parents if expert is None else [*parents, str(expert)]
    together = _FUSED.get(own, (own,))
    for one in together:
      end = start + sizes[one] if one in sizes else None
      rows = slice(start, end)
      if interleaved:
        rows = slice(together.index(one), None, len(together))
      count = None if expert is None else len(experts)
      key = '.'.join([*path, one, leaf])
      found[key] = tensor_parts.Part(rows, expert, count)
      start = end or 0
  return found


def stored_name(name: str, config: llama_config.LlamaConfig) -> str:
  """The name that transformers stores a canonical name under."""
  if name == 'lm_head.weight':
    return name
  kind, _ = checkpoints_llama.type_of(config)
  name = _with_parts(name, model_types.MODEL_TYPES[kind].renames)
  if kind == 'mixtral':
    name = _with_parts(name, _MIXTRAL_NAMES)
  if kind in ('gpt_oss', 'granitemoehybrid'):
    name = re.sub(r'\.experts\.\d+\.', '.experts.', name)
    name = re.sub(r'\.(gate|up)_proj\b', '.gate_up_proj', name)
  if kind == 'gpt_oss':
    name = name.replace('.mlp.gate.', '.mlp.router.')
    if '.experts.' in name:
      name = name.removesuffix('.weight').replace('.bias', '_bias')
  if kind == 'granitemoehybrid':
    if not isinstance(config, mixtral_lib.MixtralConfig):
      name = name.replace('.mlp.', '.mlp.shared_expert.')
    name = _with_parts(name, _inverse(_GRANITE_NAMES))
  if kind == 'phi3':
    own = {one: fused for fused, names in _FUSED.items() for one in names}
    name = _with_parts(name, own)
  return _PREFIX + name


def shift_norms(by: float, name: str, rows: np.ndarray) -> np.ndarray:
  """Values of a Gemma, whose folders have the scales of norms minus one."""
  is_norm = name.endswith('norm.weight')
  return rows.astype(np.float32) + np.float32(by) if is_norm else rows
