"""Tensors that are parts of stored ones, whatever the file."""

from typing import NamedTuple


class Part(NamedTuple):
  """What a tensor is of a stored one, which holds several.

  Attributes:
    rows: its outputs.
    expert: its place in a stack of the tensors of all experts, or None.
    experts: how many these are.
  """

  rows: slice = slice(None)
  expert: int | None = None
  experts: int | None = None
