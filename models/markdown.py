"""Tables that read well in a terminal and in a browser."""

from collections.abc import Iterable
from collections.abc import Sequence


def to_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table with columns padded to the same width.

  Args:
    head: of each column.
    rows: as many cells each.
  """
  table = [head, *rows]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  table.insert(1, ['-' * width for width in widths])
  return '\n'.join(
    f'| {" | ".join(map(str.ljust, row, widths))} |' for row in table
  )
