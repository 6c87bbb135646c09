"""EAGLE-3 heads and block drafters in GGUF files, as llama.cpp writes them.

It counts the layers that read a state, as `models.checkpoints.heads` does, and
stores the ids of a reduced vocabulary where others store offsets.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from models.checkpoints import gguf
from models.checkpoints.gguf_parts import gguf_config
from models.checkpoints.gguf_parts import gguf_header
from models.checkpoints.gguf_parts import gguf_rope
from models.checkpoints.gguf_parts import gguf_tensor
from models.nn import blocks as blocks_lib

_EAGLE3, _BLOCK = 'eagle3', 'dflash'
_MASK = 'tokenizer.ggml.mask_token_id'
# Keys of the metadata, and those of config.json.
_KEYS = gguf_config.LLAMA_KEYS | {
  'rope.freq_base': 'rope_theta',
  'vocab_size': 'vocab_size',
}
_OWN_KEYS = {
  _EAGLE3: {
    'extract_layers': 'eagle_aux_hidden_state_layer_ids',
    'norm_before_residual': 'norm_before_residual',
    'target_hidden_size': 'target_hidden_size',
  },
  _BLOCK: {
    'attention.causal': 'is_causal',
    'embedding_scale': 'input_embedding_scale',
    'final_logit_softcapping': 'final_logit_softcapping',
    'logit_scale': 'output_multiplier',
    **{
      key: key
      for key in (
        *('block_size', 'sample_from_anchor', 'rope_is_neox_style'),
        *('conv_kernel_size', 'conv_group_size'),
        *('selector_rank', 'selector_top_k'),
      )
    },
  },
}
# Keys that may say one thing only.
_WIDTHS = {'attention.value_length', 'rope.dimension_count'}
_OTHER_KEYS = {'tensor_data_layout', 'rope.scaling.type', *_WIDTHS}
_OF_BLOCK = {'target_layers', gguf_config.PATTERN, 'rope.dimension_sections'}
_INTEGERS = {26: np.int32, 27: np.int64}  # By their numbers in GGUF.


@dataclasses.dataclass(frozen=True)
class _Ids:
  """The ids of a reduced vocabulary, as the offsets of other formats."""

  info: gguf_header.TensorInfo
  name = 'd2t'

  def rows(self) -> Iterator[blocks_lib.Rows]:
    """Yields all of them."""
    if self.info.kind not in _INTEGERS:
      raise ValueError(
        f'tensor {self.info.name} has no integers, but the type'
        f' {self.info.kind}'
      )
    kind, (number,) = _INTEGERS[self.info.kind], self.info.shape
    ids = np.fromfile(self.info.file, kind, number, offset=self.info.offset)
    yield slice(0, number), ids - np.arange(number)


class GGUFHead(gguf.GGUFFile):
  """A file with a head; see `models.checkpoints.heads`."""

  @property
  def _architecture(self) -> str:
    header = gguf_header.read_header(self.path)
    found = header.metadata.get('general.architecture')
    if found not in _OWN_KEYS:
      raise ValueError(
        f'architecture {found!r} is no drafting head; expected one'
        f' of {[*_OWN_KEYS]}'
      )
    return found

  def keys(self) -> Mapping[str, Any]:
    """The contents of the config.json that the same head would have.

    Raises:
      ValueError: the file holds no head, or one with a scaled rotation.
    """
    name, header = self._architecture, gguf_header.read_header(self.path)
    names = _KEYS | _OWN_KEYS[name]
    others = _OTHER_KEYS | (_OF_BLOCK if name == _BLOCK else set())
    metadata = gguf_config.own_keys(header, name, {*names, *others})
    scaling = metadata.get('rope.scaling.type', 'none')
    if scaling != 'none':
      raise ValueError(f'{name}.rope.scaling.type={scaling!r} is not supported')
    stated = {
      theirs: metadata[key] for key, theirs in names.items() if key in metadata
    }
    if width := metadata.get('attention.key_length'):
      widths = dict.fromkeys(_WIDTHS, width)
      gguf_config.check_widths(name, metadata, widths)
    if name == _BLOCK:
      stated |= self._of_block(header, metadata)
    return {'model_type': 'qwen3' if name == _BLOCK else 'llama'} | stated

  def _of_block(
    self, header: gguf_header.Header, metadata: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Keys of a block drafter that are written otherwise in config.json."""
    found: dict[str, Any] = {'mask_token_id': header.metadata.get(_MASK)}
    # It counts the layers that read a state.
    layers = metadata.get('target_layers', [])
    found['target_layer_ids'] = [layer - 1 for layer in layers]
    if 'markov_w1.weight' in header.tensors:
      found['markov_rank'] = header.tensors['markov_w1.weight'].shape[1]
    if gguf_config.ROPE_FACTORS in header.tensors:
      found['rope_parameters'] = gguf_rope.rope_parameters(metadata, header)
    if metadata.get('attention.sliding_window'):
      pattern = metadata.get(gguf_config.PATTERN)
      if not isinstance(pattern, list):
        raise ValueError(
          f'{_BLOCK}.{gguf_config.PATTERN} must say for each layer'
          ' whether it has the window'
        )
      types = ('full_attention', 'sliding_attention')
      found['layer_types'] = [types[bool(one)] for one in pattern]
      found['use_sliding_window'] = True
    return found

  def stored(self) -> Iterator[tuple[str, Any]]:
    """Yields the names of other formats, and the tensors.

    Raises:
      ValueError: a tensor is not known; names it.
    """
    keys, name_of_kind = self.keys(), self._architecture
    heads: dict[str, Any] = {}
    if name_of_kind == _EAGLE3:  # Neighbours of a head are rotated.
      heads['attn_q'] = keys.get('num_attention_heads')
      heads['attn_k'] = keys.get('num_key_value_heads', heads['attn_q'])
    for name, info in gguf_header.read_header(self.path).tensors.items():
      if name.removesuffix('.weight') == 'd2t':
        yield 'd2t', _Ids(info)
        continue
      if name == gguf_config.ROPE_FACTORS and name_of_kind == _BLOCK:
        continue  # It is read with the keys.
      ours = gguf_config.canonical_name(name, gguf_config.NAMES)
      if ours is None:
        raise ValueError(f'tensor {name} is not part of an {name_of_kind}')
      number = heads.get(name.rpartition('.')[0].rpartition('.')[2])
      yield ours, gguf_tensor.Tensor(info, num_heads=number)
