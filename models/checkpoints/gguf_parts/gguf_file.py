"""Reads GGUF files: their metadata, and their tensors.

llama.cpp defines the format (github.com/ggml-org/ggml, docs/gguf.md). The
`gguf` package has a reader, too, but it makes several numpy arrays per string:
it took 37.6 s for a vocabulary of 152k tokens (Qwen2.5) where this one took
0.9 s, measured in turn on a busy machine. Matrices are stored `[out, in]`, in
blocks of numbers of few bits along the last axis.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import mmap
import os
import pathlib
import struct
import types
from typing import Any

import numpy as np

from specdec.models import extras
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import rope as rope_lib
from specdec.text import text_files

_MAGIC = b'GGUF'
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # Alignment of the data, unless the metadata has another.

# Types of metadata, by their numbers.
_SCALARS = dict(enumerate(['<B', '<b', '<H', '<h', '<I', '<i', '<f', '<?'])) | {
  10: '<Q',
  11: '<q',
  12: '<d',
}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Location and type of a stored tensor."""

  file: pathlib.Path
  name: str
  shape: tuple[int, ...]  # The last axis is contiguous, as in numpy.
  kind: int  # Number of its `gguf.GGMLQuantizationType`.
  offset: int  # In bytes, from the beginning of the file.


@dataclasses.dataclass(frozen=True)
class Header:
  """The part of a GGUF file before its data."""

  metadata: dict[str, Any]
  tensors: dict[str, TensorInfo]


class _Reader:
  def __init__(self, buffer: mmap.mmap):
    self.buffer = buffer
    self.offset = 0

  def scalar(self, code: str) -> Any:
    (value,) = struct.unpack_from(code, self.buffer, self.offset)
    self.offset += struct.calcsize(code)
    return value

  def text(self) -> str:
    length = self.scalar('<Q')
    start, self.offset = self.offset, self.offset + length
    if self.offset > len(self.buffer):
      raise ValueError('it ends within a text')
    return self.buffer[start : self.offset].decode('utf-8', 'replace')

  def value(self, type_number: int) -> Any:
    if type_number == _STRING:
      return self.text()
    if type_number == _ARRAY:
      type_number, length = self.scalar('<I'), self.scalar('<Q')
      if type_number in _SCALARS:
        code = f'<{length}{_SCALARS[type_number][1]}'
        values = list(struct.unpack_from(code, self.buffer, self.offset))
        self.offset += struct.calcsize(code)
        return values
      return [self.value(type_number) for _ in range(length)]
    if type_number not in _SCALARS:
      raise ValueError(f'type {type_number} of a value is not known')
    return self.scalar(_SCALARS[type_number])


def _parse(reader: _Reader, path: pathlib.Path) -> Header:
  version = reader.scalar('<I')
  if version & 0xFFFF == 0:
    raise ValueError(
      'it is big-endian; gguf-convert-endian of the package gguf converts it'
    )
  if version not in _VERSIONS:
    raise ValueError(f'version {version} is not known, only {_VERSIONS}')
  num_tensors, num_keys = reader.scalar('<Q'), reader.scalar('<Q')
  metadata = {}
  for _ in range(num_keys):
    key = reader.text()
    if key in metadata:
      raise ValueError(f'key {key} is there twice')
    metadata[key] = reader.value(reader.scalar('<I'))
  tensors = {}
  for _ in range(num_tensors):
    name = reader.text()
    shape = [reader.scalar('<Q') for _ in range(reader.scalar('<I'))]
    kind, offset = reader.scalar('<I'), reader.scalar('<Q')
    if name in tensors:
      raise ValueError(f'tensor {name} is there twice')
    tensors[name] = TensorInfo(path, name, tuple(shape[::-1]), kind, offset)
    # No type stores more than 8 numbers in a byte. Readers ask for memory.
    if math.prod(shape) > 8 * len(reader.buffer):
      raise ValueError(f'tensor {name} of shape {shape} does not fit into it')
  alignment = metadata.get('general.alignment', _ALIGNMENT)
  data = math.ceil(reader.offset / alignment) * alignment
  return Header(
    metadata,
    {
      name: dataclasses.replace(tensor, offset=data + tensor.offset)
      for name, tensor in tensors.items()
    },
  )


@functools.lru_cache(maxsize=4)
def _read(path: pathlib.Path, size: int, modified: int) -> Header:
  del size, modified
  with path.open('rb') as file:
    if file.read(len(_MAGIC)) != _MAGIC:
      text_files.refuse_stand_in(path)
      raise ValueError(f'{path} is not a GGUF file: it begins with other bytes')
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
      reader = _Reader(buffer)
      reader.offset = len(_MAGIC)
      try:
        return _parse(reader, path)
      except (
        ArithmeticError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
      ) as error:
        raise ValueError(
          f'{path} cannot be read as a complete GGUF file: {error}'
        ) from error


def begins_as_gguf(path: pathlib.Path) -> bool:
  """Whether there is a file that begins as GGUF files do."""
  try:
    with path.open('rb') as file:
      return file.read(len(_MAGIC)) == _MAGIC
  except OSError:
    return False


def read_header(path: pathlib.Path) -> Header:
  """Reads the header of a file, once as long as the file does not change.

  Raises:
    ValueError: it is not a GGUF file, or it is cut off; the message has its
      name.
  """
  try:
    status = os.stat(path)
    return _read(path, status.st_size, status.st_mtime_ns)
  except OSError as error:
    raise ValueError(f'{path} cannot be read: {error}') from error


def quants() -> types.ModuleType:
  """The optional `gguf` package, which knows how numbers are stored."""
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      f'a GGUF file needs the package gguf: {extras.command("gguf")}'
    ) from error
  return gguf


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, or one expert's tensor in a stack of all experts."""

  info: TensorInfo
  part: tensor_parts.Part = tensor_parts.Part()
  num_heads: int | None = None  # See `rope.order_of_rows`.
  transposed: bool = False  # A convolution `[size, 1, width]`; its axes.

  @property
  def name(self) -> str:
    return self.info.name

  @property
  def shape(self) -> tuple[int, ...]:
    outputs, *rest = self.info.shape[self.part.expert is not None :]
    if self.transposed:
      return (*rest, 1, outputs)
    return (len(range(outputs)[self.part.rows]), *rest)

  @property
  def _kind(self) -> Any:
    try:
      return quants().GGMLQuantizationType(self.info.kind)
    except ValueError as error:
      raise ValueError(
        f'it is of type {self.info.kind}, which gguf does not know'
      ) from error

  @property
  def _row_bytes(self) -> int:
    """Bytes along the last axis; ValueError if the file does not have all."""
    per_block, block_bytes = quants().GGML_QUANT_SIZES[self._kind]
    blocks, rest = divmod(self.info.shape[-1], per_block)
    if rest:
      raise ValueError(
        f'it is of type {self._kind.name}, in blocks of {per_block} numbers,'
        f' which do not divide {self.info.shape[-1]}'
      )
    row_bytes = blocks * block_bytes
    end = self.info.offset + row_bytes * math.prod(self.info.shape[:-1])
    if (size := self.info.file.stat().st_size) < end:
      raise ValueError(
        f'it would end at byte {end}, but the file has {size}; was it'
        ' downloaded completely?'
      )
    return row_bytes

  def _raw(self, start: int, end: int) -> np.ndarray:
    """Some rows as they are stored, `[rows, bytes]`; a vector is a row."""
    self.part.check(self.info.shape)
    count = end - start
    whole = self.info.shape[self.part.expert is not None :]
    size = self._row_bytes * math.prod(whole[1:-1])
    start += (self.part.rows.start or 0) if len(whole) > 1 else 0
    before = (self.part.expert or 0) * self._row_bytes * math.prod(whole[:-1])
    raw = np.fromfile(
      self.info.file,
      np.uint8,
      count * size,
      offset=self.info.offset + before + start * size,
    )
    return raw.reshape(count, size)

  def _floats(self, start: int, end: int) -> np.ndarray:
    """Rows as float32, with their inner axes flattened."""
    raw = self._raw(start, end)
    try:
      return quants().dequantize(raw, self._kind)
    except (AttributeError, NotImplementedError) as error:
      raise ValueError(
        f'it is of type {self._kind.name}, which gguf cannot read'
      ) from error

  def row_batches(self) -> Iterator[blocks_lib.Rows]:
    per_block, _ = quants().GGML_QUANT_SIZES[self._kind]
    expanded: Iterator[blocks_lib.Rows]
    if self.transposed:
      matrix = self._floats(0, self.info.shape[0]).T[:, None]
      expanded = iter([(slice(None), matrix)])
    elif len(self.shape) == 1:
      order = rope_lib.order_of_rows(self.shape[0], self.num_heads)
      expanded = iter([(order, self._floats(0, 1)[0, self.part.rows])])
    else:
      expanded = tensor_parts.by_rows(self.shape, self.num_heads, self._floats)
    for index, rows in expanded:
      if per_block > 1 and not np.isfinite(rows).all():
        raise ValueError(
          'a block has a scale that is not finite; the file is damaged'
        )
      yield index, rows.reshape(-1, *self.shape[1:])

  def in_blocks(self) -> blocks_lib.BlockMatrix | None:
    kind = self._kind.name
    if kind not in blocks_lib.KINDS:
      return None
    rows = tensor_parts.by_rows(self.shape, self.num_heads, self._raw)
    return blocks_lib.from_raw(rows, self.shape, kind)
