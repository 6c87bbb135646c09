"""Tensors that are parts of stored ones, whatever the file."""

from typing import NamedTuple


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
