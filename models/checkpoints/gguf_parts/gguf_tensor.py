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
from typing import Any

import numpy as np

from models.checkpoints.gguf_parts import gguf_header
from models.nn import blocks as blocks_lib

_BLOCK_BYTES = 1 << 24  # Bytes of a tensor, as float32, converted at once.


def quants():
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
  expert: int | None = None
  num_heads: int | None = (
    None  # Set if rows are in the order of llama.cpp's Llama.
  )

  @property
  def name(self) -> str:
    return self.info.name

  @property
  def shape(self) -> tuple[int, ...]:
    return self.info.shape[self.expert is not None :]

  def check(self, expected: tuple[int, ...]) -> None:
    """Raises ValueError on another shape, or a type that cannot be read."""
    where = f'{self.file}: tensor {self.name}'
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

  def _row_bytes(self, gguf) -> int:
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[self.info.kind]
    return self.shape[-1] // per_block * block_bytes

  def _raw_rows(self, gguf, start: int, count: int) -> np.ndarray:
    """Rows of the tensor as they are stored, `[count, bytes]` uint8."""
    row_bytes = self._row_bytes(gguf)
    start += (self.expert or 0) * math.prod(self.shape[:-1])
    offset = self.info.offset + start * row_bytes
    raw = np.fromfile(self.file, np.uint8, count * row_bytes, offset=offset)
    return raw.reshape(count, row_bytes)

  def _block(self, gguf, start: int, count: int) -> np.ndarray:
    """Rows of the tensor, as float32."""
    kind = gguf.GGMLQuantizationType(self.info.kind)
    return gguf.dequantize(self._raw_rows(gguf, start, count), kind)

  def _by_rows(
    self, read: Callable[[Any, int, int], np.ndarray]
  ) -> Iterator[tuple[Any, np.ndarray]]:
    gguf, order = quants(), self._order(self.shape[0])
    step = max(1, _BLOCK_BYTES // (4 * self.shape[1]))
    for start in range(0, self.shape[0], step):
      end = min(start + step, self.shape[0])
      yield order[start:end], read(gguf, start, end - start)

  def blocks(self) -> Iterator[tuple[Any, np.ndarray]]:
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

  def _expanded(self) -> Iterator[tuple[Any, np.ndarray]]:
    if len(self.shape) == 1:
      yield self._order(self.shape[0]), self._block(quants(), 0, 1)[0]
    else:
      for index, rows in self._by_rows(self._block):
        yield index, rows.reshape(-1, *self.shape[1:])

  def in_blocks(self) -> blocks_lib.BlockMatrix | None:
    """See `checkpoint.StoredTensor`."""
    kind = quants().GGMLQuantizationType(self.info.kind).name
    if kind not in blocks_lib.KINDS:
      return None
    return blocks_lib.from_raw(self._by_rows(self._raw_rows), self.shape, kind)

  def _order(self, length: int) -> np.ndarray:
    """Where each stored row goes.

    llama.cpp rotates neighbours `2 i` and `2 i + 1` of a head, transformers
    and `models.nn.rope` rotate `i` and `i + Dh / 2`.
    """
    order = np.arange(length)
    if self.num_heads is None:
      return order
    return order.reshape(self.num_heads, 2, -1).swapaxes(1, 2).reshape(-1)
