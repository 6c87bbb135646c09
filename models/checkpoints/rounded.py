"""Folders of models in four bits, which are loaded without rounding."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np

from models.checkpoints import hugging_face
from models.nn import blocks as blocks_lib
from specdec.text import whole_files

_WEIGHTS = 'blocks.safetensors'
# Besides the weights: shape, tokenizer and chat template.
_COPIED = ('*.json', '*.jinja', '*.txt', '*.model')
_ROWS = 1 << 12  # That are computed at once.


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A tensor; of a matrix in blocks its words, see `checkpoint.StoredTensor`.

  Attributes:
    file: that has it.
    name: its canonical name.
    kind: of its blocks, empty for floats.
    shape: of the tensor, not of its words.
  """

  file: pathlib.Path
  name: str
  kind: str
  shape: tuple[int, ...]

  def _read(self) -> np.ndarray:
    with hugging_face.opened(self.file) as mapped:
      values = mapped.get_tensor(self.name)
    if self.kind:
      blocks_lib.check_finite(values, self.kind)
    return values

  def blocks(self) -> Iterator[blocks_lib.Rows]:
    """Yields indices of n rows and their values, `[n, in]` or `[n]`."""
    values = self._read()
    if not self.kind:
      yield slice(None), values
      return
    for start in range(0, len(values), _ROWS):
      rows = slice(start, start + _ROWS)
      yield rows, blocks_lib.expand(values[rows], self.kind, self.shape[1], np)

  def in_blocks(self) -> blocks_lib.BlockMatrix | None:
    if not self.kind:
      return None
    return blocks_lib.BlockMatrix(
      words=self._read(), kind=self.kind, width=self.shape[1], dtype='stored'
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
    (file,) = self._weights()
    with hugging_face.opened(file) as mapped:
      kinds = mapped.metadata() or {}
      shapes = {
        name: tuple(mapped.get_slice(name).get_shape())
        for name in mapped.offset_keys()
      }
    for name, shape in shapes.items():
      kind, _, width = kinds.get(name, '').partition(' ')
      shape = (shape[0], int(width)) if kind else shape
      yield name, _Tensor(file, name, kind, shape)

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
    source: the folder of the model, of which everything else is copied.
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
