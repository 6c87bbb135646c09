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
