"""The stored tensors of drafting heads, by the names of their modules."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import re
from typing import Any

import numpy as np

from models.checkpoints import gguf
from models.checkpoints import hugging_face
from models.checkpoints.heads import gguf_head
from specdec.text import text_files

MARKOV = 'markov_head.markov_w1.weight', 'markov_head.markov_w2.weight'
"""The matrices of the term of a block drafter for the token before."""

_BLOCK = r'(?:model\.)?(?:layers\.\d+|mtp_layers\.0)\.'
# Stored names and canonical ones, those of parameters in `models.nn`.
_RENAMED = tuple(
  (re.compile(pattern), new)
  for pattern, new in (
    (r'(?:model\.)?midlayer\.', 'layers.0.'),
    (_BLOCK + r'(?:eh_proj|input_proj)\.', 'fc.'),
    (_BLOCK + r'(?:enorm|token_layernorm)\.', 'enorm.'),
    (_BLOCK + r'(?:hnorm|hidden_layernorm)\.', 'hnorm.'),
    (_BLOCK + r'(?:shared_head\.norm|final_layernorm)\.', 'norm.'),
    (_BLOCK + r'shared_head\.head\.', 'lm_head.'),
    (_BLOCK + r'embed_tokens\.', 'embed_tokens.'),
    (r'(?:model\.)?mtp_layers\.', 'layers.'),
    (r'model\.', ''),
    # The term of DFlash 2 for the token before is almost that of DSpark.
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


@dataclasses.dataclass(frozen=True)
class HeadTensors:
  """A folder or GGUF file with a head; see `checkpoint.StoredTensors`.

  Attributes:
    path: the folder or file.
    rotates_neighbours: whether neighbours of a head are rotated together; rows
      are then put in the order of `models.nn.rope`.
  """

  path: pathlib.Path
  rotates_neighbours: bool = False

  @property
  def _file(self) -> Any:
    if gguf.GGUFFile.holds(self.path):
      return gguf_head.GGUFHead(self.path)
    return hugging_face.HuggingFaceFolder(self.path)

  @functools.cached_property
  def keys(self) -> Mapping[str, Any]:
    """The keys of config.json."""
    file = self._file
    if isinstance(file, gguf_head.GGUFHead):
      return file.keys()
    return text_files.read_object(self.path / hugging_face.CONFIG)

  @functools.cached_property
  def all(self) -> dict[str, Any]:
    """Stored tensors by their canonical names."""
    file = self._file
    if isinstance(file, gguf_head.GGUFHead):
      return dict(file.stored())
    pickled = self.path / _PICKLED
    if pickled.exists() and not (self.path / hugging_face.WEIGHTS).exists():
      raise ValueError(
        f'{self.path} has only pickled weights ({_PICKLED}), which can run code'
        ' when read; convert them where torch is installed: python -c "import'
        ' torch, safetensors.torch as s;'
        f" s.save_file(torch.load('{pickled}', weights_only=True),"
        f" '{self.path / hugging_face.WEIGHTS}')\""
      )
    found: dict[str, Any] = {}
    for tensor in file.stored():
      if not _BUFFERS.fullmatch(tensor.name):
        found[_canonical(tensor.name)] = tensor
    return _with_first_layer_0(found)

  def tensors(self) -> Iterator[tuple[str, Any]]:
    """Yields canonical names and tensors, except `d2t` and `t2d`."""
    for name, tensor in self.all.items():
      if name in (D2T, T2D):
        continue
      if self.rotates_neighbours and (one := _ROTATED.fullmatch(name)):
        width = self.shape(f'{one[1]}_norm.weight')[0]
        number = tensor.shape[0] // width
        tensor = dataclasses.replace(tensor, num_heads=number)
      yield name, tensor

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor; ValueError if there is none of that name."""
    if name not in self.all:
      raise ValueError(f'lacks the tensor {name} of a drafting head')
    return self.all[name].shape

  @property
  def num_layers(self) -> int:
    """The number of layers, by the names of tensors."""
    numbers = [int(one[1]) for one in map(_LAYER.fullmatch, self.all) if one]
    return 1 + max(numbers, default=0)

  @property
  def size(self) -> int:
    """Bytes of the files with weights."""
    return self._file.size

  @property
  def files(self) -> list[pathlib.Path]:
    """See `models.checkpoints.checkpoint.Checkpoint`."""
    return self._file.files

  @property
  def stored_dtypes(self) -> list[str]:
    """See `models.checkpoints.checkpoint.Checkpoint`."""
    return self._file.stored_dtypes

  def vocabulary(self, vocab_size: int) -> np.ndarray | None:
    """The ids `[D]` of a reduced vocabulary, None if it has all tokens.

    Raises:
      ValueError: `d2t` and `t2d` contradict each other, or ids are none.
    """
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


def _canonical(name: str) -> str:
  for pattern, new in _RENAMED:
    if found := pattern.match(name):
      return new + name[found.end() :]
  return name


def _with_first_layer_0(found: dict[str, Any]) -> dict[str, Any]:
  """Numbers layers from 0: DeepSeek counts on from those of the target."""
  numbers = [int(one[1]) for one in map(_LAYER.fullmatch, found) if one]
  first = min(numbers, default=0)
  renamed = {}
  for name, tensor in found.items():
    if one := _LAYER.fullmatch(name):
      name = f'layers.{int(one[1]) - first}.{one[2]}'
    renamed[name] = tensor
  return renamed


def _values(tensor: Any) -> np.ndarray:
  """All of a stored vector."""
  return np.concatenate([rows for _, rows in tensor.rows()])
