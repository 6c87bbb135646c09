"""EAGLE-3 heads in GGUF files, as llama.cpp writes them.

It counts the layers that read a state, as `models.checkpoints.heads` does, and
stores the ids of a reduced vocabulary where others store offsets.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

import numpy as np

from models.checkpoints import gguf
from models.checkpoints.gguf_parts import gguf_config
from models.checkpoints.gguf_parts import gguf_header
from models.checkpoints.gguf_parts import gguf_tensor
from models.nn import blocks as blocks_lib

_ARCHITECTURE = 'eagle3'
# Keys of the metadata, and those of config.json.
_KEYS = {
  'embedding_length': 'hidden_size',
  'attention.head_count': 'num_attention_heads',
  'attention.head_count_kv': 'num_key_value_heads',
  'attention.key_length': 'head_dim',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'context_length': 'max_position_embeddings',
  'feed_forward_length': 'intermediate_size',
  'rope.freq_base': 'rope_theta',
  'extract_layers': 'eagle_aux_hidden_state_layer_ids',
  'norm_before_residual': 'norm_before_residual',
  'target_hidden_size': 'target_hidden_size',
  'vocab_size': 'vocab_size',
}
# Keys that the tensors say, and those that may say one thing only.
_OTHER_KEYS = {'block_count', 'tensor_data_layout'}
_OTHER_KEYS |= {'attention.value_length', 'rope.dimension_count'}
_OTHER_KEYS |= {'rope.scaling.type'}
_NAMES = {
  'fc': 'fc',
  'output_norm': 'norm',
  'output': 'lm_head',
  'token_embd': 'embed_tokens',
  'attn_norm': 'input_layernorm',
  'attn_norm_2': 'hidden_norm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_INTEGERS = {26: np.int32, 27: np.int64}  # By their numbers in GGUF.


@dataclasses.dataclass(frozen=True)
class _Ids:
  """The ids of a reduced vocabulary, as the offsets of other formats."""

  file: pathlib.Path
  info: gguf_header.TensorInfo
  name = 'd2t'

  @property
  def shape(self) -> tuple[int, ...]:
    return self.info.shape

  def blocks(self) -> Iterator[blocks_lib.Rows]:
    """Yields all of them."""
    if self.info.kind not in _INTEGERS:
      raise ValueError(
        f'{self.file}: tensor {self.info.name} has no integers, but the type'
        f' {self.info.kind}'
      )
    kind, (number,) = _INTEGERS[self.info.kind], self.shape
    ids = np.fromfile(self.file, kind, number, offset=self.info.offset)
    yield slice(0, number), ids - np.arange(number)


@dataclasses.dataclass(frozen=True)
class GGUFHead:
  """A file with a head; see `models.checkpoints.heads`."""

  path: pathlib.Path

  @property
  def size(self) -> int:
    return self.path.stat().st_size

  @property
  def files(self) -> list[pathlib.Path]:
    return [self.path]

  @property
  def stored_dtypes(self) -> list[str]:
    return gguf.GGUFFile(self.path).stored_dtypes

  def keys(self) -> Mapping[str, Any]:
    """The contents of the config.json that the same head would have.

    Raises:
      ValueError: the file holds no head, or one with a scaled rotation.
    """
    header = gguf_header.read_header(self.path)
    found = header.metadata.get('general.architecture')
    if found != _ARCHITECTURE:
      raise ValueError(
        f'{self.path}: architecture {found!r} is no drafting head; expected'
        f' {_ARCHITECTURE!r}'
      )
    metadata = gguf_config.own_keys(
      self.path, header, _ARCHITECTURE, {*_KEYS, *_OTHER_KEYS}
    )
    where = f'{self.path}: {_ARCHITECTURE}'
    scaling = metadata.get('rope.scaling.type', 'none')
    if scaling != 'none':
      raise ValueError(
        f'{where}.rope.scaling.type={scaling!r} is not supported'
      )
    stated = {
      theirs: metadata[key] for key, theirs in _KEYS.items() if key in metadata
    }
    head_width = metadata.get('attention.key_length')
    for key in ('attention.value_length', 'rope.dimension_count'):
      if head_width and metadata.get(key, head_width) != head_width:
        raise ValueError(
          f'{where}.{key}={metadata[key]} is not the width of a head,'
          f' {head_width}'
        )
    return {'model_type': 'llama'} | stated

  def stored(self) -> Iterator[tuple[str, Any]]:
    """Yields the names of other formats, and the tensors.

    Raises:
      ValueError: a tensor is not known; names it.
    """
    keys = self.keys()
    heads = {'attn_q': keys.get('num_attention_heads')}
    heads['attn_k'] = keys.get('num_key_value_heads', heads['attn_q'])
    for name, info in gguf_header.read_header(self.path).tensors.items():
      if name.removesuffix('.weight') == 'd2t':
        yield 'd2t', _Ids(self.path, info)
        continue
      *layer, part = name.removesuffix('.weight').split('.')
      if part not in _NAMES or len(layer) not in (0, 2):
        raise ValueError(
          f'{self.path}: tensor {name} is not part of an {_ARCHITECTURE}'
        )
      prefix = f'layers.{layer[1]}.' if layer else ''
      # llama.cpp rotates the neighbours of a head.
      tensor = gguf_tensor.Tensor(self.path, info, num_heads=heads.get(part))
      yield f'{prefix}{_NAMES[part]}.weight', tensor
