"""Folders of models in four bits, which are loaded without rounding."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np

from specdec.models.checkpoints import hugging_face
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import blocks as blocks_lib
from specdec.text import whole_files

_WEIGHTS = 'blocks.safetensors'
# Besides the weights: shape, tokenizer and chat template.
_COPIED = ('*.json', '*.jinja', '*.txt', '*.model')


@dataclasses.dataclass(frozen=True)
class _Matrix(tensor_parts.Packed):
  """A matrix in blocks; a stored tensor has its words."""

  words: tensor_parts.Tensor
  kind: str  # The kind of its blocks.
  width: int

  @property
  def name(self) -> str:
    return self.words.name

  @property
  def shape(self) -> tuple[int, int]:
    return self.words.shape[0], self.width

  def in_blocks(self) -> blocks_lib.BlockMatrix:
    words = np.empty(self.words.shape, np.uint32)
    for index, rows in self.words.rows():
      words[index] = rows
    blocks_lib.check_finite(words, self.kind)
    return blocks_lib.BlockMatrix(
      words=words, kind=self.kind, width=self.width, dtype='stored'
    )


@dataclasses.dataclass(frozen=True)
class RoundedFolder(hugging_face.HuggingFaceFolder):
  """A folder that `save` wrote; see `checkpoint.Checkpoint`."""

  @staticmethod
  def holds(path: pathlib.Path) -> bool:
    """Whether a path is such a folder."""
    return (path / _WEIGHTS).is_file()

  @property
  def stored_dtypes(self) -> list[str]:
    return ['stored', 'bfloat16']

  def tensors(self) -> Iterator[tuple[str, Any]]:
    """Yields canonical names and tensors."""
    with tensor_parts.opened(self.path / _WEIGHTS) as mapped:
      kinds = mapped.metadata() or {}
    for tensor in self.stored():
      kind, _, width = kinds.get(tensor.name, '').partition(' ')
      yield tensor.name, _Matrix(tensor, kind, int(width)) if kind else tensor

  def _index(self) -> dict[str, str]:
    return {}  # One that was copied is of other weights.

  def _weights(self) -> list[pathlib.Path]:
    return [self.path / _WEIGHTS]


def save(
  parameters: Mapping[str, Any],
  source: pathlib.Path,
  folder: pathlib.Path,
) -> None:
  """Writes a folder with parameters in blocks, which is made if need be.

  Args:
    parameters: by canonical names, on the host: arrays and `BlockMatrix`.
    source: the folder of the model; everything but the weights is copied.
    folder: to be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  tensors, kinds = dict[str, np.ndarray](), dict[str, str]()
  for name, value in parameters.items():
    if isinstance(value, blocks_lib.BlockMatrix):
      kinds[name] = f'{value.kind} {value.width}'
      value = value.words
    tensors[name] = value
  for pattern in _COPIED:
    for file in source.glob(pattern):
      shutil.copy(file, folder)
  # Last, because by this file the folder is known.
  whole_files.write_tensors(folder / _WEIGHTS, tensors, kinds)
