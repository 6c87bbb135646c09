"""Tensor names of Hugging Face's formats, and what their values say."""

from collections.abc import Mapping
import functools
import re
from typing import Any

import numpy as np

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import model_configs
from specdec.models.checkpoints.keys import model_types
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import llama_config
from specdec.models.nn import mixtral as mixtral_lib

_PREFIX = re.compile(r'(transformer|model)\.')
# Buffers of old checkpoints: frequencies, which follow from the config, and the
# causal mask, which is an argument here.
_BUFFERS = re.compile(
  r'layers\.\d+\.self_attn\.rotary_emb\.inv_freq'
  r'|h\.\d+\.attn\.(bias|masked_bias)'
)
# The four `Conv1D` matrices of each block of a GPT-2 are stored `[in, out]`.
_CONV1D = re.compile(r'h\.\d+\.(attn|mlp)\.\w+\.weight')

# Matrices that Phi-3 stores as one, row after row.
_FUSED = {
  'qkv_proj': ('q_proj', 'k_proj', 'v_proj'),
  'gate_up_proj': ('gate_proj', 'up_proj'),
}
# Tensors that make the keys and values of attention.
_ENTRIES = re.compile(r'layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\..*')
# The parts of a model that sees, hears or predicts several tokens, and the
# prefix of its language model.
_VISION = re.compile(
  r'(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower'
  r'|embed_vision|embed_audio|mtp|mtp_layers)\..*'
)
_LANGUAGE = re.compile(r'(model\.)?language_model\.')


def _with_parts(name: str, renames: Mapping[str, str]) -> str:
  """A name with renamed parts; dots separate parts."""
  name = f'.{name}.'
  for old, new in renames.items():
    name = name.replace(f'.{old}.', f'.{new}.')
  return name[1:-1]


@functools.lru_cache
def _renamed(shape: Any) -> dict[str, str]:
  """Stored names of parts, and canonical ones, of shapes of a class."""
  renames = dict[str, str]()
  for model_type in model_types.MODEL_TYPES.values():
    for variant in filter(None, (model_type, model_type.mixture)):
      if variant.shape is shape:
        renames |= {stored: ours for ours, stored in variant.renames.items()}
  return renames


def canonical_name(stored: str, config: Any) -> str | None:
  """The canonical name of a stored tensor, or None for a known buffer.

  Bare models lack the prefix. A tied head may be stored too; it is the token
  embedding. Models that see have other tensors, which are not needed.
  """
  if _VISION.fullmatch(stored):
    return None
  name = _LANGUAGE.sub('', stored, count=1)
  name = name[prefix.end() :] if (prefix := _PREFIX.match(name)) else name
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and config.tie_embeddings:
    return f'{config.embedding}.weight'
  name = _with_parts(name, _renamed(config.__class__))
  if not isinstance(config, mixtral_lib.MixtralConfig):
    name = name.replace('.shared_expert.', '.')
  return name


def reads_another(name: str, config: llama_config.LlamaConfig) -> bool:
  """Whether a tensor makes keys of a layer that reads another layer's keys."""
  match, sources = _ENTRIES.fullmatch(name), config.of_layers('kv_source')
  layer = int(match[1]) if match else len(sources)
  return layer < len(sources) and sources[layer] is not None


def gpt_oss_name(stored: str, config: mixtral_lib.GptOssConfig) -> str | None:
  """`canonical_name` of a gpt-oss.

  The exponents of a matrix in blocks belong to the tensor of its blocks.
  """
  if stored.endswith(checkpoint_lib.SCALES):
    return None
  name = stored.removesuffix(checkpoint_lib.BLOCKS)
  path, _, leaf = name.rpartition('.')
  if path.endswith('.experts'):
    matrix = leaf.removesuffix('_bias')
    name = f'{path}.{matrix}.{"weight" if matrix == leaf else "bias"}'
  return canonical_name(name, config)


def is_conv1d(name: str) -> bool:
  """Whether a tensor of a GPT-2 is stored `[in, out]`."""
  return _CONV1D.fullmatch(name) is not None


def is_convolution(name: str) -> bool:
  """Whether a tensor is the weight of a layer's convolution."""
  return name.endswith(('.conv.weight', '.conv1d.weight'))


def parts(
  name: str, config: Any, *, interleaved: bool = False
) -> Mapping[str, tensor_parts.Part]:
  """The tensors that a stored tensor holds; {} if it holds only itself.

  The last one has all rows that are left, so that a tensor with too many rows
  is refused.

  Args:
    name: canonical name of the stored tensor.
    config: the shape.
    interleaved: whether the rows of several tensors alternate.
  """
  sizes: dict[str, Any] = {'gate_proj': config.inner_width}
  sizes['q_proj'] = config.num_heads * config.head_width
  sizes['k_proj'] = config.num_kv_heads * config.head_width
  parts: dict[str, tensor_parts.Part] = {}
  *parents, stem, leaf = name.split('.')
  experts: tuple[int | None, ...] = (None,)
  if parents[-1:] == ['experts']:  # A stack of all experts' tensors.
    experts = tuple(range(config.num_experts))
  elif stem not in _FUSED:
    return {}
  elif parents[-1] == 'shared_expert' and isinstance(
    config, mixtral_lib.MixtralConfig
  ):
    sizes['gate_proj'] = config.shared_width or 0
  for expert in experts:
    start, path = 0, parents if expert is None else [*parents, str(expert)]
    matrices = _FUSED.get(stem, (stem,))
    for matrix in matrices:
      end = start + sizes[matrix] if matrix in sizes else None
      rows = slice(start, end)
      if interleaved:
        rows = slice(matrices.index(matrix), None, len(matrices))
      count = None if expert is None else len(experts)
      key = '.'.join([*path, matrix, leaf])
      parts[key] = tensor_parts.Part(rows, expert, count)
      start = end or 0
  return parts


def stored_name(name: str, config: Any) -> str:
  """The name that transformers stores a canonical name under."""
  if name == 'lm_head.weight':
    return name
  type_name, model_type = model_configs.type_of(config)
  if type_name == 'gpt2':
    return f'transformer.{name}'
  if type_name in ('gpt_oss', 'granitemoehybrid'):
    name = re.sub(r'\.experts\.\d+\.', '.experts.', name)
    name = re.sub(r'\.(gate|up)_proj\b', '.gate_up_proj', name)
  if type_name == 'gpt_oss' and '.experts.' in name:
    name = name.removesuffix('.weight').replace('.bias', '_bias')
  if type_name == 'granitemoehybrid' and model_type.mixture:
    name = name.replace('.mlp.', '.mlp.shared_expert.')
  if type_name == 'phi3':
    fused_names = {
      matrix: fused for fused, names in _FUSED.items() for matrix in names
    }
    name = _with_parts(name, fused_names)
  return f'model.{_with_parts(name, model_type.renames)}'


def shift_norms(sign: int, name: str, rows: np.ndarray) -> np.ndarray:
  """Our values of stored ones of a Gemma, or the reverse (`sign` -1).

  Gemma's folders have the scales of norms minus one.
  """
  is_norm = name.endswith('norm.weight')
  return rows.astype(np.float32) + np.float32(sign) if is_norm else rows


def shift_rates(sign: int, name: str, rows: np.ndarray) -> np.ndarray:
  """`shift_norms` of a Qwen3.5, whose folders have logarithms of rates."""
  if name.endswith('linear_attn.rate'):
    return -np.exp(rows.astype(np.float32)) if sign > 0 else np.log(-rows)
  is_unshifted = name.endswith('linear_attn.norm.weight')
  return rows if is_unshifted else shift_norms(sign, name, rows)
