"""The stored tensors of drafting heads, by the names of their modules.

GGUF files count the layers that read a state, as `models/checkpoints/heads`
does, and store the ids of a reduced vocabulary where others store offsets.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import re
import types
from typing import Any
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import gguf
from specdec.models.checkpoints import hub
from specdec.models.checkpoints import hugging_face
from specdec.models.checkpoints.gguf_parts import gguf_file
from specdec.models.checkpoints.gguf_parts import gguf_keys
from specdec.models.checkpoints.keys import block_keys
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.checkpoints.model_types import model_type
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import rope as rope_lib
from specdec.text import text_files

MARKOV = 'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'
"""The matrices of the term of a block drafter for the token before."""

# Stored names, and canonical names, which parameters have in `models/nn`.
_RENAMED = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    (r'(?:model\.)?midlayer\.', 'layers.0.'),
    (r'model\.', ''),
    # DFlash 2 and DSpark have almost the same term for the token before.
    (r'candidate_selector\.predecessor_codebook$', MARKOV[0]),
    (r'candidate_selector\.successor_codebook$', MARKOV[1]),
    (r'candidate_selector\.', 'markov_head.'),
  )
)
# The target has its own norm and output matrix.
_BUFFERS = re.compile(r'.*rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight')
_LAYER = re.compile(r'layers\.(\d+)\.(.*)')
_ROTATED = re.compile(r'(.*self_attn\.[qk])_(?:proj|norm)\.(?:weight|bias)')
_PICKLED = 'pytorch_model.bin'
# For a reduced vocabulary: offsets of its tokens, and whether a token is one.
D2T, T2D = 'd2t', 't2d'

_EAGLE3, _DFLASH = 'eagle3', 'dflash'
_MASK = 'tokenizer.ggml.mask_token_id'
# Keys of the metadata, and keys of config.json.
_KEYS = model_type.KEYS | {
  'rope.freq_base': 'rope_theta',
  'vocab_size': 'vocab_size',
}
_OWN_KEYS = {
  _EAGLE3: {
    'extract_layers': 'eagle_aux_hidden_state_layer_ids',
    'norm_before_residual': 'norm_before_residual',
    'target_hidden_size': 'target_hidden_size',
  },
  _DFLASH: {
    'attention.causal': 'is_causal',
    'embedding_scale': 'input_embedding_scale',
    'final_logit_softcapping': 'final_logit_softcapping',
    'logit_scale': 'output_multiplier',
    **{
      key: key
      for key in (
        'block_size',
        'sample_from_anchor',
        'rope_is_neox_style',
        'conv_kernel_size',
        'conv_group_size',
        'selector_rank',
        'selector_top_k',
      )
    },
  },
}
# Keys that may say one thing only.
_WIDTHS = {'attention.value_length', 'rope.dimension_count'}
_OTHER_KEYS = {'tensor_data_layout', 'rope.scaling.type', *_WIDTHS}
_OTHER_DFLASH_KEYS = {
  'target_layers',
  gguf_keys.PATTERN,
  'rope.dimension_sections',
}
_INTEGERS = {26: np.int32, 27: np.int64}  # By their numbers in GGUF.


@dataclasses.dataclass(frozen=True)
class _Ids:
  """The ids of a reduced vocabulary, as the offsets of other formats."""

  info: gguf_file.TensorInfo
  name = 'd2t'

  def rows(self) -> Iterator[blocks_lib.Rows]:
    if self.info.kind not in _INTEGERS:
      raise ValueError(
        f'tensor {self.info.name} has no integers, but the type'
        f' {self.info.kind}'
      )
    dtype, (size,) = _INTEGERS[self.info.kind], self.info.shape
    ids = np.fromfile(self.info.file, dtype, size, offset=self.info.offset)
    yield slice(0, size), ids - np.arange(size)


class HeadTensors:
  """The tensors of a head in a folder or file."""

  path: pathlib.Path

  def named(self) -> Iterator[tuple[str, Any]]:
    """Yields canonical names and tensors, `d2t` and `t2d` among them."""
    raise NotImplementedError

  @property
  def keys(self) -> Mapping[str, Any]:
    """The keys of config.json, which a GGUF file of the same head says."""
    return text_files.read_object(self.path / hugging_face.CONFIG)

  @functools.cached_property
  def all(self) -> dict[str, Any]:
    return dict(self.named())

  def tensors(self) -> Iterator[tuple[str, Any]]:
    """Yields canonical names and tensors, except `d2t` and `t2d`.

    Rows are in the order of `models/nn/rope`.
    """
    # Whether neighbours of a head are rotated together.
    reorders = block_keys.flat(self.keys).get('rope_is_neox_style') is False
    for name, tensor in self.all.items():
      if name in (D2T, T2D):
        continue
      if reorders and (match := _ROTATED.fullmatch(name)):
        if (norm := f'{match[1]}_norm.weight') not in self.all:
          raise ValueError(
            'rope_is_neox_style=False is supported of block drafters only'
          )
        width = self.shape(norm)[0]
        num_heads = tensor.shape[0] // width
        tensor = dataclasses.replace(tensor, num_heads=num_heads)
      yield name, tensor

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor; ValueError if no tensor has this name."""
    if name not in self.all:
      raise ValueError(f'lacks the tensor {name} of a drafting head')
    return self.all[name].shape

  @property
  def num_layers(self) -> int:
    """The number of layers, by the names of tensors."""
    numbers = [
      int(match[1]) for match in map(_LAYER.fullmatch, self.all) if match
    ]
    return 1 + max(numbers, default=0)

  def vocabulary(self, vocab_size: int) -> np.ndarray | None:
    """The ids `[D]` of a reduced vocabulary, None if it has all tokens."""
    if D2T not in self.all:
      return None
    ids = _values(self.all[D2T]).astype(np.int64)
    ids = ids + np.arange(len(ids))  # Offsets are stored.
    if T2D in self.all:
      marked = np.flatnonzero(_values(self.all[T2D]))
      if not np.array_equal(ids, marked):
        raise ValueError(
          'd2t (offsets of the ids) and t2d (which tokens are'
          ' drafted) do not say the same'
        )
    if (
      len({*ids.tolist()}) < len(ids)
      or ids.min() < 0
      or ids.max() >= vocab_size
    ):
      raise ValueError(
        f'd2t: ids must differ and lie below the vocabulary of'
        f' {vocab_size} tokens'
      )
    return ids


class HeadFolder(HeadTensors, hugging_face.HuggingFaceFolder):
  """A folder with a head."""

  def stored(self) -> Iterator[tensor_parts.Tensor]:
    pickled = self.path / _PICKLED
    if pickled.exists() and not (self.path / hugging_face.WEIGHTS).exists():
      raise ValueError(
        f'{self.path} has only pickled weights ({_PICKLED}), which can run code'
        ' when read; convert them where torch is installed: python -c "import'
        ' torch, safetensors.torch as s;'
        f" s.save_file(torch.load('{pickled}', weights_only=True),"
        f" '{self.path / hugging_face.WEIGHTS}')\""
      )
    yield from super().stored()

  def named(self) -> Iterator[tuple[str, Any]]:
    tensors = dict[str, tensor_parts.Tensor]()
    for tensor in self.stored():
      if _BUFFERS.fullmatch(tensor.name):
        continue
      name = tensor.name
      for pattern, new in _RENAMED:
        if match := pattern.match(name):
          name = new + name[match.end() :]
          break
      tensors[name] = tensor
    yield from tensors.items()


class _NoTensors(HeadFolder):
  """The config.json of a head without weights."""

  all: Any = types.MappingProxyType({})  # No tensors.


class HeadFile(HeadTensors, gguf.GGUFFile):
  """A GGUF file with a head, as llama.cpp writes it."""

  @property
  def _architecture(self) -> str:
    header = gguf_file.read_header(self.path)
    gguf_keys.check_is_model(header)
    name = header.metadata.get('general.architecture')
    if name not in _OWN_KEYS:
      raise ValueError(
        f'architecture {name!r} is not a drafting head'
        f' ({", ".join(_OWN_KEYS)}); a language model is a draft'
      )
    return name

  @functools.cached_property
  def keys(self) -> Mapping[str, Any]:
    name, header = self._architecture, gguf_file.read_header(self.path)
    names, files = _KEYS | _OWN_KEYS[name], model_type.Architecture(name)
    others = _OTHER_KEYS | (_OTHER_DFLASH_KEYS if name == _DFLASH else set())
    metadata = gguf_keys.own_keys(header, files, {*names, *others})
    scaling = metadata.get('rope.scaling.type', 'none')
    if scaling != 'none':
      raise ValueError(f'{name}.rope.scaling.type={scaling!r} is not supported')
    stated = {
      theirs: metadata[key] for key, theirs in names.items() if key in metadata
    }
    if width := metadata.get('attention.key_length'):
      widths = dict.fromkeys(_WIDTHS, width)
      gguf_keys.check_widths(name, metadata, widths)
    if name == _DFLASH:
      stated |= self._of_block(header, metadata)
    return {'model_type': 'qwen3' if name == _DFLASH else 'llama'} | stated

  def _of_block(
    self, header: gguf_file.Header, metadata: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Keys of a block drafter that are written otherwise in config.json."""
    keys: dict[str, Any] = {'mask_token_id': header.metadata.get(_MASK)}
    # It counts the layers that read a state.
    layers = metadata.get('target_layers', [])
    keys['target_layer_ids'] = [layer - 1 for layer in layers]
    if 'markov_w1.weight' in header.tensors:
      keys['markov_rank'] = header.tensors['markov_w1.weight'].shape[1]
    if model_type.ROPE_FACTORS in header.tensors:
      keys['rope_parameters'] = gguf_keys.rope_parameters(metadata, header)
    if metadata.get('attention.sliding_window'):
      pattern = metadata.get(gguf_keys.PATTERN)
      if not isinstance(pattern, list):
        raise ValueError(
          f'{_DFLASH}.{gguf_keys.PATTERN} must say for each layer'
          ' whether it has the window'
        )
      types = ('full_attention', 'sliding_attention')
      keys['layer_types'] = [types[bool(slides)] for slides in pattern]
      keys['use_sliding_window'] = True
    return keys

  def named(self) -> Iterator[tuple[str, Any]]:
    keys, kind = self.keys, self._architecture
    heads: dict[str, Any] = {}
    if kind == _EAGLE3:  # Neighbours of a head are rotated.
      heads['attn_q'] = keys.get('num_attention_heads')
      heads['attn_k'] = keys.get('num_key_value_heads', heads['attn_q'])
    for name, info in gguf_file.read_header(self.path).tensors.items():
      if name.removesuffix('.weight') == 'd2t':
        yield D2T, _Ids(info)
        continue
      if name == model_type.ROPE_FACTORS and kind == _DFLASH:
        continue  # It is read with the keys.
      ours = model_type.canonical_of_gguf(name, model_type.DRAFTER_NAMES)
      if ours is None:
        raise ValueError(f'tensor {name} is not part of an {kind}')
      num_heads = heads.get(name.rpartition('.')[0].rpartition('.')[2])
      yield ours, gguf_file.Tensor(info, num_heads=num_heads)


@dataclasses.dataclass(frozen=True)
class Drafter:
  """A folder or GGUF file of a drafter, for a target of a given shape.

  Attributes:
    path: the folder or file.
    target: the shape of the target.
    drawn: whether it has random weights, and only keys are read.
  """

  path: pathlib.Path
  target: Any
  drawn: bool = False
  # The readers of the tensors of a folder and of a file.
  containers: ClassVar[tuple[type[HeadFolder], type[HeadFile]]] = (
    HeadFolder,
    HeadFile,
  )

  @property
  def size(self) -> int:
    return self.stored.size

  def tensors(self) -> Iterator[tuple[str, Any]]:
    return self.stored.tensors()

  @functools.cached_property
  @checkpoint_lib.named
  def ids(self) -> np.ndarray | None:
    """The ids `[D]` of a reduced vocabulary, None if it has all tokens."""
    return self.stored.vocabulary(self.target.vocab_size)

  @functools.cached_property
  def family(self: Any) -> model_type.Family:
    config, ids = self.config, self.ids
    size = config.vocab_size if ids is None else len(ids)
    extras = (
      (('embed_tokens', 'embedding'), (config.vocab_size, config.width)),
      (('lm_head',), (size, config.width)),
    )
    is_stored = lambda path: families.parameter_name(path) in self.stored.all
    return model_type.Family(
      self.name,
      module=functools.partial(self.module, num_outputs=size),
      stays_float=lambda name: name.startswith('confidence_head.'),
      extras=tuple(extra for extra in extras if is_stored(extra[0])),
    )

  @functools.cached_property
  def stored(self) -> HeadFolder | HeadFile:
    if self.drawn:
      return _NoTensors(self.path)
    return self.containers[gguf.GGUFFile.holds(self.path)](self.path)


def _values(tensor: Any) -> np.ndarray:
  return np.concatenate([rows for _, rows in tensor.rows()])


def write(
  module: Any,
  folder: pathlib.Path,
  keys: Mapping[str, Any],
  *,
  lm_head: Any,
  ids: np.ndarray | None,
  dtype: jax.typing.DTypeLike,
  first_layer: str = 'layers.0.',
) -> None:
  """Writes the folder of a drafter; see `heads.save`.

  `keys` are added to the keys of the layers in config.json. `first_layer` is
  the prefix of the names of the first layer's tensors.

  Raises:
    ValueError: the layers have several rotations.
  """
  config, dtype = module.config, jnp.dtype(dtype)
  if not isinstance(config.rope, rope_lib.Rope):
    raise ValueError('a head without one rotation of all layers is not saved')
  layers = families.written_keys(
    nn_llama.LlamaConfig(**nn_llama.fields_of(config)),
    families.SAVED_LAYERS,
    dtype=dtype.name,
  )
  stored = dict[str, np.ndarray]()
  for path, leaf in hub.flat_params(module)[1].items():
    name = families.parameter_name(path)
    if name.startswith('layers.0.'):
      name = first_layer + name.removeprefix('layers.0.')
    stored[name] = np.asarray(leaf, dtype=dtype)
  if lm_head is not None:
    stored['lm_head.weight'] = np.asarray(lm_head, dtype=dtype)
  if ids is not None:
    stored[D2T] = np.asarray(ids - np.arange(len(ids)), np.int64)
    tokens = np.arange(config.vocab_size)
    stored[T2D] = np.isin(tokens, ids)
  described = {**layers, 'rope_theta': config.rope.theta, **keys}
  hugging_face.write(folder, described, stored)
