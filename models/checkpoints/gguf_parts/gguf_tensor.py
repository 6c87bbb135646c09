"""Tensors in GGUF files.

Layouts are as llama.cpp's converters write them
(github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py). Matrices are stored
`[out, in]`, in blocks of numbers of few bits along the last axis.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import math
import types
from typing import Any

import numpy as np

from specdec.models.checkpoints.gguf_parts import gguf_header
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import rope as rope_lib


def quants() -> types.ModuleType:
  """The optional `gguf` package, which knows how numbers are stored."""
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      "a GGUF file needs the package gguf: pip install 'specdec-jax[gguf]'"
    ) from error
  return gguf


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, or one expert's tensor in a stack of all experts."""

  info: gguf_header.TensorInfo
  part: tensor_parts.Part = tensor_parts.Part()
  num_heads: int | None = None  # See `rope.order_of_rows`.
  transposed: bool = False  # A convolution `[size, 1, width]`; its axes.

  @property
  def name(self) -> str:
    return self.part.of(self.info.name)

  @property
  def shape(self) -> tuple[int, ...]:
    outputs, *rest = self.info.shape[self.part.expert is not None :]
    if self.transposed:
      return (*rest, 1, outputs)
    return (len(range(outputs)[self.part.rows]), *rest)

  @property
  def _kind(self) -> Any:
    """Its `gguf.GGMLQuantizationType`."""
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

  def _by_rows(
    self, read: Callable[[int, int], np.ndarray]
  ) -> Iterator[blocks_lib.Rows]:
    return tensor_parts.by_rows(self.shape, self.num_heads, read)

  def blocks(self) -> Iterator[blocks_lib.Rows]:
    """Yields indices of n rows and their values, `[n, ...]` float32.

    Raises:
      ValueError: its type cannot be read, the file is too short, or weights in
        blocks are not finite, because a scale is not.
    """
    per_block, _ = quants().GGML_QUANT_SIZES[self._kind]
    for index, rows in self._expanded():
      if per_block > 1 and not np.isfinite(rows).all():
        raise ValueError(
          'a block has a scale that is not finite; the file is damaged'
        )
      yield index, rows

  def _expanded(self) -> Iterator[blocks_lib.Rows]:
    if self.transposed:
      yield slice(None), self._floats(0, self.info.shape[0]).T[:, None]
    elif len(self.shape) == 1:
      order = rope_lib.order_of_rows(self.shape[0], self.num_heads)
      yield order, self._floats(0, 1)[0, self.part.rows]
    else:
      for index, rows in self._by_rows(self._floats):
        yield index, rows.reshape(-1, *self.shape[1:])

  def in_blocks(self) -> blocks_lib.BlockMatrix | None:
    """See `checkpoint.StoredTensor`."""
    kind = self._kind.name
    if kind not in blocks_lib.KINDS:
      return None
    return blocks_lib.from_raw(self._by_rows(self._raw), self.shape, kind)
