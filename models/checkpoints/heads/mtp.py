"""MTP layers: heads that models bring along, in their own folders and files.

Such a layer is of the same kind as a layer of its target. The config of the
target says its whole shape. Names of tensors:

    Qwen3.5    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden,
               mtp.norm, mtp.layers.0.*
    MiMo       model.mtp_layers.0.*, among them input_proj, token_layernorm,
               hidden_layernorm, final_layernorm
    GGUF       blk.N.* after the target's blocks, among them nextn.eh_proj,
               nextn.enorm, nextn.hnorm, nextn.shared_head_norm
"""

from collections.abc import Iterator
import dataclasses
import functools
import pathlib
import re
from typing import Any

from specdec import cache as cache_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints.gguf_parts import gguf_file
from specdec.models.checkpoints.gguf_parts import gguf_keys
from specdec.models.checkpoints.heads import head_tensors
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.checkpoints.model_types import model_type
from specdec.models.checkpoints.model_types import registry
from specdec.models.nn import delta as delta_lib
from specdec.models.nn import eagle
from specdec.models.nn import llama as nn_llama

# Names in folders: MiMo's have the number of the layer.
_STORED = re.compile(r'(?:model\.)?mtp(?:_layers\.(\d+))?\.(.+)\.(weight|bias)')
# Parts of stored names, and of canonical names (`models/nn/eagle`).
_NAMES = {
  'pre_fc_norm_embedding': 'enorm',
  'pre_fc_norm_hidden': 'hnorm',
  'token_layernorm': 'enorm',
  'hidden_layernorm': 'hnorm',
  'input_proj': 'fc',
  'final_layernorm': 'norm',
}
_NAMES_IN_FILES = {
  'nextn.eh_proj': 'fc',
  'nextn.enorm': 'enorm',
  'nextn.hnorm': 'hnorm',
  'nextn.shared_head_norm': 'norm',
  'nextn.embed_tokens': 'embed_tokens',
  'nextn.shared_head_head': 'lm_head',
}
_LAYER = re.compile(r'layers\.(\d+)\.(.+\..+)')


class _Folder(head_tensors.HeadFolder):
  """The MTP layers in a folder."""

  def named(self) -> Iterator[tuple[str, Any]]:
    try:
      self._weights()
    except ValueError:  # The reader of the rest of the folder raises it.
      return
    for tensor in self.stored():
      if not (match := _STORED.fullmatch(tensor.name)):
        continue
      layer, stem, leaf = match.groups()
      if layer and stem not in _NAMES:
        stem = f'layers.{layer}.{stem}'
      yield f'{_NAMES.get(stem, stem)}.{leaf}', tensor


class _File(head_tensors.HeadFile):
  """The MTP layers in a GGUF file."""

  def named(self) -> Iterator[tuple[str, Any]]:
    header = gguf_file.read_header(self.path)
    name = str(header.metadata.get('general.architecture'))
    if name not in registry.ARCHITECTURES:
      return
    _, files = registry.ARCHITECTURES[name]
    mtp_tensors = gguf_keys.of_further_tokens(header, name)
    names = {**files.names, **_NAMES_IN_FILES}
    first = gguf_keys.num_layers(header, name)
    if mtp_tensors and files.swaps_rows:
      raise ValueError(f'MTP layers of a {name} are not supported')
    tensors = dict[str, gguf_file.Tensor]()
    for stored in sorted(mtp_tensors):
      canonical = model_type.canonical_of_gguf(stored, names, files.layers)
      if canonical is None:
        raise ValueError(f'tensor {stored} is not part of an MTP layer')
      _, layer, rest = canonical.split('.', 2)
      if rest.rpartition('.')[0] not in _NAMES_IN_FILES.values():
        rest = f'layers.{int(layer) - first}.{rest}'
      tensors[rest] = gguf_file.Tensor(header.tensors[stored])
    if tensors and 'norm.weight' not in tensors:  # It has the target's.
      norm = header.tensors['output_norm.weight']
      tensors['norm.weight'] = gguf_file.Tensor(norm)
    yield from tensors.items()


class StoredMTP(head_tensors.Drafter):
  """An MTP layer in the folder or file of its target, or apart from it."""

  name = 'MTP layer'
  as_drafter = staticmethod(eagle.as_head)
  module = staticmethod(
    lambda config, num_outputs, **options: eagle.Head(config, **options)
  )
  containers = _Folder, _File

  def tensors(self) -> Iterator[tuple[str, Any]]:
    convert = families.family_of(self.target).convert
    for name, tensor in self.stored.all.items():
      if isinstance(tensor, tensor_parts.Tensor):
        tensor = dataclasses.replace(
          tensor, convert=functools.partial(convert, name)
        )
      yield name, tensor

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> eagle.HeadConfig:
    """The shape; raises ValueError if such layers are not supported."""
    target, names = self.target, self.stored.all
    if not isinstance(target, nn_llama.LlamaConfig):
      raise ValueError('has an MTP layer, and the target is not a Llama')
    if self.stored.num_layers > 1:
      raise ValueError(
        f'has {self.stored.num_layers} MTP layers; one is supported, which'
        ' drafts at all depths'
      )
    layer = nn_llama.fields_of(target) | {
      'num_layers': 1,
      'mixers': 'self_attn',
      'tie_embeddings': False,
    }
    is_mimo = any('.input_proj.' in names[name].name for name in names)
    return eagle.HeadConfig(
      **layer,
      kind=eagle.MTP,
      target_width=target.width,
      reads=(cache_lib.AFTER_NORM,),
      state_first=is_mimo,
      gated_attention=isinstance(target, delta_lib.DeltaConfig),
    )


def find(path: pathlib.Path, target: Any) -> StoredMTP | None:
  """The MTP layer in a folder or file, None if it has none.

  Raises:
    ValueError: the folder or file cannot be read.
  """
  with checkpoint_lib.naming(path):
    layer = StoredMTP(path, target)
    return layer if layer.stored.all else None
