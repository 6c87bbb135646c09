"""Canonical names of the tensors of folders; the tensors that one holds."""

from collections.abc import Iterator
from collections.abc import Mapping
import itertools
import re
from typing import Any

from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.checkpoints.model_types import model_type

_PREFIX = re.compile(r'(transformer|model)\.')
# Buffers of old checkpoints: frequencies, which follow from the config, and the
# causal mask, which is an argument here.
_BUFFERS = re.compile(
  r'layers\.\d+\.self_attn\.rotary_emb\.inv_freq'
  r'|h\.\d+\.attn\.(bias|masked_bias)'
)
# Matrices that are stored as one.
_FUSED = {
  'qkv_proj': ('q_proj', 'k_proj', 'v_proj'),
  'gate_up_proj': ('gate_proj', 'up_proj'),
}
# The parts of a model that sees, hears or predicts several tokens, and the
# prefix of its language model.
_VISION = re.compile(
  r'(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower'
  r'|embed_vision|embed_audio|mtp|mtp_layers)\..*'
)
_LANGUAGE = re.compile(r'(model\.)?language_model\.')


def canonical_name(
  stored: str, row: model_type.ModelType, shape: Any
) -> str | None:
  """The canonical name of a stored tensor, or None if it is not read.

  Bare models lack the prefix. A tied head may be stored too; it is the token
  embedding. Models that see have other tensors, which are not needed.
  """
  spelled = None if _VISION.fullmatch(stored) else row.spelling(stored)
  if spelled is None:
    return None
  name = _LANGUAGE.sub('', spelled, count=1)
  name = name[prefix.end() :] if (prefix := _PREFIX.match(name)) else name
  if _BUFFERS.fullmatch(name):
    return None
  if name == 'lm_head.weight' and shape.tie_embeddings:
    return f'{shape.embedding}.weight'
  name = f'.{name}.'
  for part, canonical in row.names.items():
    name = name.replace(f'.{part}.', f'.{canonical}.')
  name = name[1:-1]
  return None if row.is_unused(name, shape) else name


def is_convolution(name: str) -> bool:
  """Whether a tensor is the weight of a layer's convolution."""
  return name.endswith(('.conv.weight', '.conv1d.weight'))


def parts(
  name: str, row: model_type.ModelType, shape: Any
) -> Mapping[str, tensor_parts.Part]:
  """The tensors that a stored tensor holds, by their canonical names.

  The last one has all rows that are left, so that a tensor with too many rows
  is refused.

  Args:
    name: canonical name of the stored tensor.
    row: of the model.
    shape: of the model.
  """
  *parents, stem, leaf = name.split('.')
  is_stack = parents[-1:] == ['experts']  # Tensors of all experts.
  if not is_stack and stem not in _FUSED:
    return {name: tensor_parts.Part()}
  experts = range(shape.num_experts) if is_stack else (None,)
  return {
    '.'.join([*path, matrix, leaf]): tensor_parts.Part(
      rows, expert, shape.num_experts
    )
    for expert in experts
    for path in [parents if expert is None else [*parents, str(expert)]]
    for matrix, rows in _rows(stem, parents, row, shape)
  }


def _rows(
  stem: str, parents: list[str], row: model_type.ModelType, shape: Any
) -> Iterator[tuple[str, slice]]:
  """Yields matrices that are stored as one, and their rows."""
  matrices = _FUSED.get(stem, (stem,))
  if row.interleaved:
    for first, matrix in enumerate(matrices):
      yield matrix, slice(first, None, len(matrices))
    return
  sizes = []
  if stem == 'qkv_proj':
    sizes = [shape.num_heads, shape.num_kv_heads]
    sizes = [count * shape.head_width for count in sizes]
  elif stem == 'gate_up_proj':
    is_shared = parents[-1] == 'shared_expert'
    sizes = [shape.shared_width or 0 if is_shared else shape.inner_width]
  ends = [*itertools.accumulate(sizes), None]
  for matrix, start, end in zip(matrices, [0, *ends], ends, strict=False):
    yield matrix, slice(start, end)
