"""Tensors in GGUF files.

Layouts are those that llama.cpp's converters write
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py). Matrices are stored
`[out, in]`, in blocks of numbers of few bits along the last axis.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import math
import pathlib
import types
from typing import Any

import numpy as np

from models.checkpoints.gguf_parts import gguf_header
from models.checkpoints.keys import tensor_parts
from models.nn import blocks as blocks_lib
from models.nn import rope as rope_lib

_BLOCK_BYTES = 1 << 24  # Bytes of a tensor, as float32, converted at once.


def quants() -> types.ModuleType:
  """The optional `gguf` package, which knows how numbers are stored."""
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      "a GGUF file needs the package gguf: pip install -e '.[gguf]'"
    ) from error
  return gguf


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, or that of one expert in a stack of them."""

  file: pathlib.Path
  info: gguf_header.TensorInfo
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

  def check(self, expected: tuple[int, ...]) -> None:
    """Raises ValueError on another shape, or a type that cannot be read."""
    where = f'{self.file}: tensor {self.part.of(self.name)}'
    if self.shape != expected:
      raise ValueError(f'{where} has shape {self.shape}, expected {expected}')
    gguf = quants()
    try:
      kind = gguf.GGMLQuantizationType(self.info.kind)
    except ValueError as error:
      raise ValueError(
        f'{where} is of type {self.info.kind}, which gguf does not know'
      ) from error
    per_block, _ = gguf.GGML_QUANT_SIZES[kind]
    if self.shape[-1] % per_block:
      raise ValueError(
        f'{where} is of type {kind.name}, in blocks of {per_block} numbers,'
        f' which do not divide {self.shape[-1]}'
      )
    num_rows, size = math.prod(self.info.shape[:-1]), self.file.stat().st_size
    end = self.info.offset + self._row_bytes(gguf) * num_rows
    if size < end:
      raise ValueError(
        f'{where} would end at byte {end}, but the file has {size}; was it'
        ' downloaded completely?'
      )
    try:
      self._block(gguf, 0, 1)
    except (AttributeError, NotImplementedError) as error:
      raise ValueError(
        f'{where} is of type {kind.name}, which gguf cannot read'
      ) from error

  def _row_bytes(self, gguf: types.ModuleType) -> int:
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[self.info.kind]
    return self.info.shape[-1] // per_block * block_bytes

  def _raw_rows(
    self, gguf: types.ModuleType, start: int, count: int
  ) -> np.ndarray:
    """Rows of the tensor as they are stored, `[count, bytes]` uint8."""
    row_bytes = self._row_bytes(gguf)
    axes = self.info.shape[self.part.expert is not None : -1]
    start += (self.part.rows.start or 0) if axes else 0
    start += (self.part.expert or 0) * math.prod(axes)
    offset = self.info.offset + start * row_bytes
    raw = np.fromfile(self.file, np.uint8, count * row_bytes, offset=offset)
    return raw.reshape(count, row_bytes)

  def _block(
    self, gguf: types.ModuleType, start: int, count: int
  ) -> np.ndarray:
    """Rows of the tensor, as float32."""
    kind = gguf.GGMLQuantizationType(self.info.kind)
    return gguf.dequantize(self._raw_rows(gguf, start, count), kind)

  def _by_rows(
    self, read: Callable[[Any, int, int], np.ndarray]
  ) -> Iterator[blocks_lib.Rows]:
    gguf = quants()
    order = rope_lib.order_of_rows(self.shape[0], self.num_heads)
    step = max(1, _BLOCK_BYTES // (4 * self.shape[1]))
    for start in range(0, self.shape[0], step):
      end = min(start + step, self.shape[0])
      yield order[start:end], read(gguf, start, end - start)

  def blocks(self) -> Iterator[blocks_lib.Rows]:
    """Yields indices of n rows and their values, `[n, in]` or `[n]` float32.

    Raises:
      ValueError: weights in blocks are not finite, because a scale is not.
    """
    per_block, _ = quants().GGML_QUANT_SIZES[self.info.kind]
    for index, rows in self._expanded():
      if per_block > 1 and not np.isfinite(rows).all():
        raise ValueError(
          'a block has a scale that is not finite; the file is damaged'
        )
      yield index, rows

  def _expanded(self) -> Iterator[blocks_lib.Rows]:
    if self.transposed:
      yield slice(None), self._block(quants(), 0, self.info.shape[0]).T[:, None]
    elif len(self.shape) == 1:
      order = rope_lib.order_of_rows(self.shape[0], self.num_heads)
      yield order, self._block(quants(), 0, 1)[0, self.part.rows]
    else:
      for index, rows in self._by_rows(self._block):
        yield index, rows.reshape(-1, *self.shape[1:])

  def in_blocks(self) -> blocks_lib.BlockMatrix | None:
    """See `checkpoint.StoredTensor`."""
    kind = quants().GGMLQuantizationType(self.info.kind).name
    if kind not in blocks_lib.KINDS:
      return None
    return blocks_lib.from_raw(self._by_rows(self._raw_rows), self.shape, kind)
