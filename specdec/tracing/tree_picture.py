"""The token tree of a block: guesses, their probabilities, what was accepted.

Levels go to the right. The first child of a node is in the line of the node,
and the accepted child comes first, so what was accepted is the upper edge.
"""

import collections
import dataclasses

from specdec.tracing import words
from specdec.tracing.markup import COLUMN
from specdec.tracing.markup import columns
from specdec.tracing.markup import escape
from specdec.tracing.markup import picture
from specdec.tracing.markup import Svg
from specdec.tracing.markup import visible
from specdec.tracing.style import mark_of
from specdec.tracing.style import style_of
from specdec.tracing.trace import Block
from specdec.tracing.trace import Trace

_ROW, _BOX, _GAP, _MARGIN = 26, 20, 30, 12
_THIN = '\u2009'  # between a mark and a token that may be a number
_CSS = (
  '.box{stroke:var(--line,#555);stroke-width:1} .on{fill:#111}'
  ' .box.yes{stroke:var(--ink,#111);stroke-width:3} .yes{font-weight:bold}'
  ' .box.bonus{stroke:var(--ink,#111);stroke-width:2;stroke-dasharray:4 3}'
  ' .edge{fill:none;stroke:var(--line,#555)}'
  ' .edge.yes{stroke:var(--ink,#111);stroke-width:3}'
)


@dataclasses.dataclass(frozen=True)
class _Box:
  """A node, or the bonus token behind the last accepted one."""

  parent: int
  depth: int
  label: str
  fill: str
  kind: str
  hint: str


def _boxes(trace: Trace, block: Block) -> list[_Box]:
  accepted = set(block.path)
  boxes = []
  for node, token in enumerate(block.tokens):
    origin = block.origins[node]
    label = visible(trace.texts[token])
    hint = f'node {node}: token {token}'
    if node:
      label = f'{mark_of(origin)}{_THIN}{label} {block.probs[node]:.2f}'
      hint += (
        f', proposed by {trace.labels[origin]}; thought to be accepted with'
        f' probability {block.probs[node]:.3f} after its parent,'
        f' {block.path_probs[node]:.3f} in all'
      )
    hint += '; accepted' if node in accepted and node else ''
    boxes.append(
      _Box(
        parent=block.parents[node],
        depth=block.depths[node],
        label=label,
        fill=style_of(origin).fill,
        kind='yes' if node in accepted else '',
        hint=hint if node else f'{hint}, the root: the last token of the text',
      )
    )
  if block.bonus is not None:
    boxes.append(
      _Box(
        parent=block.path[-1],
        depth=len(block.path),
        label=f'{mark_of(0)}{_THIN}{visible(trace.texts[block.bonus])}',
        fill=style_of(0).fill,
        kind='bonus',
        hint=f'token {block.bonus}, what the target says itself',
      )
    )
  return boxes


def _rows(boxes: list[_Box], block: Block) -> list[int]:
  """The line of each box."""
  children = collections.defaultdict(list)
  for index, box in enumerate(boxes):
    children[box.parent].append(index)
  probs = [*block.path_probs, 1.0]
  rows, free = [0] * len(boxes), 0
  stack = [(0, True)]
  while stack:  # depth first; recursion would not do for long chains
    index, is_first = stack.pop()
    rows[index] = rows[boxes[index].parent] if index and is_first else free
    free = max(free, rows[index] + 1)
    ranked = sorted(
      children[index], key=lambda one: (not boxes[one].kind, -probs[one], one)
    )
    stack += reversed([(one, rank == 0) for rank, one in enumerate(ranked)])
  return rows


def _edge(start: float, end: float, above: float, below: float, kind: str):
  way = f'H{end:.1f}'
  if above != below:
    way = f'h10V{below}{way}'
  return f'<path class="edge {kind}" d="M{start:.1f} {above}{way}"/>'


def legend(trace: Trace, block: Block) -> list[str]:
  """What marks, lines and numbers mean, in lines of text."""
  origins = sorted({*block.origins[1:], 0})
  who = ', '.join(f'{mark_of(one)} {trace.labels[one]}' for one in origins)
  return [
    f'proposed by: {who}',
    'thick: accepted; dashed: the own token of the target; number: how likely'
    ' the guess was thought to be',
  ]


def tree(trace: Trace, number: int, *, with_legend: bool = True) -> Svg:
  """Draws the tree that the target verified in a block.

  Args:
    trace: of a decode.
    number: of the block, from 0; negative ones count from the end.
    with_legend: whether to say above it what the marks mean.

  Returns:
    SVG. A box says who proposed the token (superscript and colour), the token
    itself, white space made visible, and how likely the drafters thought that
    the target would accept it, given its parent. More when hovering.

  Raises:
    ValueError: there is no such block.
  """
  block = words.block_of(trace, number)
  boxes = _boxes(trace, block)
  rows = _rows(boxes, block)
  widths = [COLUMN * columns(box.label) + 12 for box in boxes]
  widest: dict[int, float] = collections.defaultdict(float)
  for box, width in zip(boxes, widths, strict=True):
    widest[box.depth] = max(widest[box.depth], width)
  left = [float(_MARGIN)]
  for depth in range(len(widest)):
    left.append(left[-1] + widest[depth] + _GAP)
  middle = [_MARGIN + _BOX // 2 + _ROW * row for row in rows]
  edges, nodes = [], []
  for index, box in enumerate(boxes):
    x, y = left[box.depth], middle[index]
    if index:
      above = box.parent
      start = left[box.depth - 1] + widths[above]
      if middle[above] != y:  # all of a level turn at one place
        start = x - _GAP
      edges.append(_edge(start, x, middle[above], y, box.kind))
    nodes.append(
      f'<g><title>{escape(box.hint)}</title><rect class="box {box.kind}"'
      f' x="{x:.1f}" y="{y - _BOX // 2}" width="{widths[index]:.1f}"'
      f' height="{_BOX}" rx="4" fill="{box.fill}"/><text'
      f' class="on {box.kind}" x="{x + 6:.1f}" y="{y + 4}"'
      f' xml:space="preserve">{escape(box.label)}</text></g>'
    )
  return picture(
    left[-1] - _GAP + _MARGIN,
    _MARGIN + _ROW * max(rows) + _BOX + _MARGIN,
    f'Token tree. {words.sentence(trace, block)}',
    # Thick edges last, so that nothing crosses them.
    ''.join(sorted(edges, key=lambda one: 'yes' in one) + nodes),
    _CSS,
    legend(trace, block) if with_legend else (),
  )
