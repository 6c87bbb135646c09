"""The attention mask of a block: every node sees the text and its ancestors."""

from specdec.tracing import words
from specdec.tracing.markup import COLUMN
from specdec.tracing.markup import columns
from specdec.tracing.markup import escape
from specdec.tracing.markup import picture
from specdec.tracing.markup import Svg
from specdec.tracing.markup import visible
from specdec.tracing.trace import Block
from specdec.tracing.trace import Trace

_CELL, _MARGIN, _TEXT = 15, 12, 60
_CSS = (
  '.seen{fill:var(--ink,#111)} .text{fill:var(--line,#777)}'
  ' .grid{fill:none;stroke:var(--faint,#ccc)} .yes{font-weight:bold}'
)


def ancestors(block: Block) -> list[list[int]]:
  """Of each node itself and all above it, from the root down.

  What `specdec.tree.ancestor_mask` says on the device.
  """
  lists: list[list[int]] = []
  for node, parent in enumerate(block.parents):
    lists.append([*(lists[parent] if node else []), node])
  return lists


def mask(trace: Trace, number: int) -> Svg:
  """Draws which nodes each node of a block sees in the target's forward.

  Args:
    trace: of a decode.
    number: of the block, from 0; negative ones count from the end.

  Returns:
    SVG: a line per node, a column for the text before the root, which all see,
    and one for each node. Accepted nodes are bold.

  Raises:
    ValueError: there is no such block.
  """
  block = words.block_of(trace, number)
  labels = [
    f'{visible(trace.texts[token], 12)} {node}'
    for node, token in enumerate(block.tokens)
  ]
  total = len(labels)
  left = _MARGIN + COLUMN * max(map(columns, labels)) + 8
  grid = left + _TEXT
  top = _MARGIN + 18
  seen, lines = [], []
  for node, above in enumerate(ancestors(block)):
    y = top + _CELL * node
    seen += [
      f'M{grid + _CELL * one:.1f} {y}h{_CELL}v{_CELL}h-{_CELL}z'
      for one in above
    ]
    kind = 'yes' if node in block.path else ''
    lines.append(
      f'<text class="{kind}" x="{left - 8:.1f}" y="{y + 11}"'
      f' text-anchor="end" xml:space="preserve">{escape(labels[node])}</text>'
    )
  size = _CELL * total
  rulers = ''.join(
    f'M{grid:.1f} {top + _CELL * one}h{size}M{grid + _CELL * one:.1f}'
    f' {top}v{size}'
    for one in range(total + 1)
  )
  body = (
    f'<text x="{left:.1f}" y="{_MARGIN + 10}">text</text>'
    f'<text x="{grid + 4:.1f}" y="{_MARGIN + 10}">nodes</text>'
    f'<rect class="text" x="{left:.1f}" y="{top}" width="{_TEXT - 6}"'
    f' height="{size}"/><path class="seen" d="{"".join(seen)}"/>'
    f'<path class="grid" d="{rulers}"/>'
  )
  return picture(
    grid + size + _MARGIN + 40,
    top + size + _MARGIN,
    f'Attention mask of {words.plural(total, "node")}: each sees the text'
    ' before the root, its ancestors and itself.',
    body + ''.join(lines),
    _CSS,
    ['line: a node; black: what it sees; bold: accepted'],
  )
