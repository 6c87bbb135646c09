"""Stored tensors: parts of them, and how their rows are read."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import math
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np
import safetensors

from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import rope as rope_lib
from specdec.text import text_files

# Folders store a matrix in MXFP4 as two tensors with these endings.
BLOCKS, SCALES = '_blocks', '_scales'
_ROWS = 1 << 12  # Rows in blocks of few bits that are expanded at once.
_BLOCK_BYTES = 1 << 24  # Bytes of a tensor, as float32, that are read at once.

FLOATS = {
  'F32': 'float32',
  'F16': 'float16',
  'BF16': 'bfloat16',
  'F64': 'float64',
}
"""Types of tensors that are read, and their names in NumPy."""


class Part(NamedTuple):
  """A part of a stored tensor, which holds several.

  Attributes:
    rows: its outputs.
    expert: its place in a stack of the tensors of all experts, or None.
    experts: the number of experts.
  """

  rows: slice = slice(None)
  expert: int | None = None
  experts: int | None = None

  def check(self, stored: tuple[int, ...]) -> None:
    """Raises ValueError if the stored shape has another number of experts."""
    if self.expert is not None and stored[0] != self.experts:
      raise ValueError(f'it has {stored[0]} experts, expected {self.experts}')


def by_rows(
  shape: tuple[int, ...],
  num_heads: int | None,
  read: Callable[[int, int], np.ndarray],
) -> Iterator[blocks_lib.Rows]:
  """Yields indices of n rows of a tensor, and these.

  `read` returns rows as they are stored, from a start to an end. For
  `num_heads` see `rope.order_of_rows`.
  """
  order = rope_lib.order_of_rows(shape[0], num_heads)
  step = max(1, _BLOCK_BYTES // (4 * max(1, math.prod(shape[1:]))))
  for start in range(0, shape[0], step):
    end = min(start + step, shape[0])
    rows = slice(start, end)
    yield rows if num_heads is None else order[rows], read(start, end)


@contextlib.contextmanager
def opened(file: pathlib.Path) -> Iterator[Any]:
  """A safetensors file; ValueError if it has another format."""
  try:
    with safetensors.safe_open(file, 'numpy') as mapped:
      yield mapped
  except (OSError, safetensors.SafetensorError) as error:
    text_files.refuse_stand_in(file)
    raise ValueError(f'{file} is not a safetensors file: {error}') from error


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Location and type of a stored tensor."""

  file: pathlib.Path
  key: str  # The name in the file.
  dtype: str
  stored_shape: tuple[int, ...]
  part: Part = Part()
  transposed: bool = False  # Whether its axes are stored in reverse.
  convert: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
  num_heads: int | None = None  # See `rope.order_of_rows`.

  @property
  def name(self) -> str:
    return self.key

  @property
  def shape(self) -> tuple[int, ...]:
    shape = self.stored_shape[self.part.expert is not None :]
    outputs, *rest = shape[::-1] if self.transposed else shape
    return (len(range(outputs)[self.part.rows]), *rest)

  def row_batches(self) -> Iterator[blocks_lib.Rows]:
    if self.dtype not in FLOATS:
      raise ValueError(
        f'it has dtype {self.dtype}, expected one of {sorted(FLOATS)}'
      )
    return self.rows()

  def rows(self) -> Iterator[blocks_lib.Rows]:
    """Yields the same as `blocks`, of a tensor of any type.

    The file is mapped again for every block: pages of a mapping that were
    touched stay resident until it is closed, and would double the peak memory.
    """
    self.part.check(self.stored_shape)
    return by_rows(self.shape, self.num_heads, self._read)

  def _read(self, start: int, end: int) -> np.ndarray:
    first, by = self.part.rows.start or 0, self.part.rows.step or 1
    rows = slice(first + by * start, first + by * (end - 1) + 1, by)
    stack = () if self.part.expert is None else (self.part.expert,)
    with opened(self.file) as mapped:
      stored = mapped.get_slice(self.key)
      if not self.transposed:
        return self.convert(stored[*stack, rows])
      # An older safetensors knows no ellipsis.
      inner = (slice(None),) * (len(self.shape) - 1)
      return self.convert(stored[*stack, *inner, rows].T)

  def in_blocks(self) -> None:
    """There are no blocks of few bits."""


@dataclasses.dataclass(frozen=True)
class HostTensor:
  """An array on the host as a stored tensor."""

  name: str
  array: np.ndarray

  @property
  def shape(self) -> tuple[int, ...]:
    return self.array.shape

  def row_batches(self) -> Iterator[blocks_lib.Rows]:
    yield slice(None), np.asarray(self.array, np.float32)

  def in_blocks(self) -> None:
    """There are no blocks of few bits."""


class Packed:
  """A matrix in blocks of few bits; see `checkpoint.StoredTensor`."""

  def in_blocks(self) -> blocks_lib.BlockMatrix:
    raise NotImplementedError

  def row_batches(self) -> Iterator[blocks_lib.Rows]:
    matrix = self.in_blocks()
    for start in range(0, len(matrix.words), _ROWS):
      rows = slice(start, start + _ROWS)
      words = matrix.words[rows]
      yield rows, blocks_lib.expand(words, matrix.kind, matrix.width, np)


@dataclasses.dataclass(frozen=True)
class Mxfp4(Packed):
  """A matrix in MXFP4: a tensor of blocks and a tensor of exponents.

  A block has 32 inputs, neighbours in the halves of a byte; in a GGUF file it
  is the exponent, and then inputs 16 apart in the halves of a byte.
  """

  blocks_of: Tensor  # `[out, groups, 16]`
  exponents: Tensor  # `[out, groups]`

  @property
  def name(self) -> str:
    return self.blocks_of.name

  @property
  def shape(self) -> tuple[int, ...]:
    outputs, groups = (*self.blocks_of.shape, 0, 0)[:2]
    return outputs, 32 * groups

  def in_blocks(self) -> blocks_lib.BlockMatrix:
    if (shape := self.exponents.shape) != self.blocks_of.shape[:-1]:
      raise ValueError(f'{self.exponents.name} has shape {shape}')
    if {self.blocks_of.dtype, self.exponents.dtype} != {'U8'}:
      raise ValueError('its bytes have another dtype than U8')
    read = lambda tensor: np.concatenate([rows for _, rows in tensor.rows()])
    pairs = read(self.blocks_of)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1)
    low, high = np.split(codes.reshape(*pairs.shape[:-1], 32), 2, axis=-1)
    pieces = [read(self.exponents)[..., None], low | high << 4]
    raw = np.concatenate(pieces, axis=-1).reshape(len(pairs), -1)
    return blocks_lib.from_raw([(slice(None), raw)], self.shape, 'MXFP4')
