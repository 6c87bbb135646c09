"""Tensors that are parts of stored ones, and blocks of rows, of any file."""

from collections.abc import Callable
from collections.abc import Iterator
import math
from typing import NamedTuple

import numpy as np

from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn import rope as rope_lib

_BLOCK_BYTES = 1 << 24  # Bytes of a tensor, as float32, that are read at once.


class Part(NamedTuple):
  """A part of a stored tensor, which holds several.

  Attributes:
    rows: its outputs.
    expert: its place in a stack of the tensors of all experts, or None.
    experts: how many these are.
  """

  rows: slice = slice(None)
  expert: int | None = None
  experts: int | None = None

  def of(self, name: str) -> str:
    """The name of the stored tensor, with the rows that are meant."""
    start, stop, step = self.rows.start or 0, self.rows.stop, self.rows.step
    if (start, stop, step or 1) == (0, None, 1):
      return name
    by = '' if step is None else f':{step}'
    return f'{name}[{start}:{"" if stop is None else stop}{by}]'


def by_rows(
  shape: tuple[int, ...],
  num_heads: int | None,
  read: Callable[[int, int], np.ndarray],
) -> Iterator[blocks_lib.Rows]:
  """Yields indices of n rows of a tensor, and these.

  Args:
    shape: of the tensor.
    num_heads: see `rope.order_of_rows`.
    read: makes the rows as they are stored, from a start to an end.
  """
  order = rope_lib.order_of_rows(shape[0], num_heads)
  step = max(1, _BLOCK_BYTES // (4 * max(1, math.prod(shape[1:]))))
  for start in range(0, shape[0], step):
    end = min(start + step, shape[0])
    rows = slice(start, end)
    yield rows if num_heads is None else order[rows], read(start, end)
