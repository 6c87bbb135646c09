"""SVG pictures of one block: the token tree and the attention mask.

All text is escaped. Sources differ in colours, superscripts and line styles.
"""

import collections
from collections.abc import Sequence
import html
import itertools
import unicodedata

from specdec.tracing import trace as trace_lib

_COLUMN = 7.3  # The width of a character of the font of 12 pixels.
_LINE, _MARGIN = 16, 12
_ROW, _BOX, _GAP = 26, 20, 30  # Sizes in the drawing of the tree.
_CELL, _TEXT = 15, 60  # Sizes in the drawing of the mask.
_THIN_SPACE = '\u2009'  # Between a mark and a token that may be a number.
_VISIBLE = str.maketrans(' \n\t\r', '␣⏎⇥␍')
_MARKS = '⁰¹²³⁴⁵⁶⁷⁸⁹'
_CSS = (
  '.paper{fill:var(--paper,#fff)} text,.seen{fill:var(--ink,#111)}'
  ' .box{stroke:var(--line,#555);stroke-width:1} .on{fill:#111}'
  ' .box.yes{stroke:var(--ink,#111);stroke-width:3} .yes{font-weight:bold}'
  ' .box.bonus{stroke:var(--ink,#111);stroke-width:2;stroke-dasharray:4 3}'
  ' .edge,.grid{fill:none;stroke:var(--line,#555)} .text{fill:var(--line,#777)}'
  ' .edge.yes{stroke:var(--ink,#111);stroke-width:3}'
  ' .grid{stroke:var(--faint,#ccc)}'
)
_TREE_LEGEND = (
  'thick: accepted; dashed: bonus token of the target; number: estimated'
  ' acceptance probability'
)
_ENDS = {
  'length': 'the length limit is reached',
  'eos': 'an end-of-text token ends the text',
  'stop': 'a stop string is complete',
  'error': 'the logits of the target are not finite',
}


class _Markup(str):
  def __repr__(self) -> str:  # A notebook stores it, so it must be short.
    return f'<{type(self).__name__} of {len(self):,} characters>'


class Html(_Markup):
  """HTML that a notebook shows."""

  def _repr_html_(self) -> str:
    return str(self)


class Svg(_Markup):
  """A picture that a notebook shows; also a complete SVG file."""

  def _repr_svg_(self) -> str:
    return str(self)


# The background of a source, and the colour and style of its underline.
# The contrast of black text on `fill` is at least 10, of `edge` on white 4.
Style = collections.namedtuple('Style', 'fill edge line')
_STYLES = (
  Style('#ffffff', '#ffffff', 'none'),
  Style('#b5e3b5', '#1b6e2a', 'solid'),
  Style('#ffe08a', '#7a5b00', 'dotted'),
  Style('#a9def2', '#0b5c7a', 'dashed'),
  Style('#f3c3ea', '#8a1f78', 'double'),
)


def style_of(source: int) -> Style:
  """The style of a source; 0 is the target."""
  return _STYLES[(source - 1) % (len(_STYLES) - 1) + 1 if source else 0]


def mark_of(source: int) -> str:
  """The superscript digit of a source; source 10 has the mark of source 0."""
  return _MARKS[source % len(_MARKS)]


def _printable(text: str, kept: str) -> str:
  """Replaces control characters and direction marks, except those in `kept`."""
  kept += ' \u00a0\u2009\u3000'
  return ''.join(x if x.isprintable() or x in kept else '\ufffd' for x in text)


def escape(text: str) -> str:
  """Escapes running text for HTML, SVG and their attributes."""
  return html.escape(_printable(text, '\n\t'))


def visible(text: str, limit: int = 16) -> str:
  """A token with visible white space, shortened to `limit`; not escaped."""
  text = _printable(text.translate(_VISIBLE), '')
  if len(text) > limit:
    half = (limit - 1) // 2
    text = f'{text[: limit - 1 - half]}…{text[len(text) - half :]}'
  return text or '∅'


def plural(count: int, noun: str) -> str:
  """For example 1 token, 2 tokens."""
  return f'{count:,} {noun}' + ('' if count == 1 else 's')


def sentence(trace: trace_lib.Trace, block: trace_lib.Block) -> str:
  """A sentence on the draft tokens of a block and on what was accepted."""
  quoted = lambda token: f'“{visible(trace.texts[token])}”'
  drafted = plural(len(block.tokens) - 1, 'draft token')
  levels = plural(max(block.depths), 'level')
  accepted = ' '.join(quoted(block.tokens[node]) for node in block.path[1:])
  end = _ENDS.get(trace.finish_reason, 'the text ends')
  if block.bonus is not None:
    last = f'bonus token: {quoted(block.bonus)}'
  elif len(block.emitted) == len(block.path) - 1:
    last = f'no bonus token: {end}'
  else:
    last = f'only {plural(len(block.emitted), "token")} emitted: {end}'
  return f'{drafted}, {levels}; accepted: {accepted or "none"}; {last}.'


def _width(text: str) -> float:
  wide = sum(unicodedata.east_asian_width(x) in 'WF' for x in text)
  return _COLUMN * (len(text) + wide)


def _picture(
  width: float, height: float, label: str, legend: Sequence[str], body: str
) -> Svg:
  """A picture below a legend; the page may set `--ink`, `--paper`, `--line`."""
  lines = ''.join(
    f'<text x="{_MARGIN}" y="{_LINE * number + 6}">{escape(line)}</text>'
    for number, line in enumerate(legend, 1)
  )
  above = _LINE * len(legend) + 6
  height += above
  width = max(width, max(map(_width, legend)) + 2 * _MARGIN)
  return Svg(
    f'<svg xmlns="http://www.w3.org/2000/svg" role="img"'
    f' aria-label="{escape(label)}" width="{width:.0f}" height="{height:.0f}"'
    f' viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace"'
    f' font-size="12"><style>{_CSS}</style>'
    f'<rect class="paper" width="100%" height="100%"/>{lines}'
    f'<g transform="translate(0 {above})">{body}</g></svg>'
  )


def _block_of(trace: trace_lib.Trace, number: int) -> trace_lib.Block:
  total = len(trace.blocks)
  if -total <= number < total:
    return trace.blocks[number]
  raise ValueError(f'block {number} does not exist; the trace has {total}')


# A node, or the bonus token as a child of the last accepted node.
_Box = collections.namedtuple('_Box', 'parent depth source kind label hint')


def _boxes(trace: trace_lib.Trace, block: trace_lib.Block) -> list[_Box]:
  boxes = []
  for node, token in enumerate(block.tokens):
    source, kind = block.origins[node], 'yes' if node in block.path else ''
    label = visible(trace.texts[token])
    hint = f'node {node}: token {token}, the root: the last token of the text'
    if node:
      label = f'{mark_of(source)}{_THIN_SPACE}{label} {block.probs[node]:.2f}'
      hint = (
        f'node {node}: token {token}, source: {trace.labels[source]};'
        f' estimated acceptance probability {block.probs[node]:.3f} given its'
        f' parent, {block.path_probs[node]:.3f} with its path'
      ) + ('; accepted' if kind else '')
    parent, depth = block.parents[node], block.depths[node]
    boxes.append(_Box(parent, depth, source, kind, label, hint))
  if block.bonus is not None:
    label = f'{mark_of(0)}{_THIN_SPACE}{visible(trace.texts[block.bonus])}'
    hint = f'token {block.bonus}, the bonus token of the target'
    last = block.path[-1]
    boxes.append(_Box(last, len(block.path), 0, 'bonus', label, hint))
  return boxes


def _rows(boxes: list[_Box], probs: Sequence[float]) -> list[int]:
  """The row of each box; the first child is in the row of its parent."""
  children = collections.defaultdict(list)
  for index, box in enumerate(boxes):
    children[box.parent].append(index)
  rows, free = [0] * len(boxes), 0
  stack = [(0, True)]
  while stack:  # Depth first; a long chain would exceed the recursion limit.
    index, is_first = stack.pop()
    rows[index] = rows[boxes[index].parent] if index and is_first else free
    free = max(free, rows[index] + 1)
    ranked = sorted(
      children[index], key=lambda x: (not boxes[x].kind, -probs[x], x)
    )
    stack += reversed([(x, rank == 0) for rank, x in enumerate(ranked)])
  return rows


def tree(trace: trace_lib.Trace, number: int) -> Svg:
  """Draws the tree that the target verified in a block.

  Depth grows to the right; the accepted path is the upper edge. A box shows the
  source of a token (mark and colour), the token, and the estimated probability
  that the target accepts it, given that it accepts the parent. `number` is the
  index of the block, from 0, or from the end if it is negative.

  Raises:
    ValueError: the block does not exist.
  """
  block = _block_of(trace, number)
  boxes = _boxes(trace, block)
  rows = _rows(boxes, [*block.path_probs, 1.0])
  names = [
    f'{mark_of(source)} {trace.labels[source]}'
    for source in sorted({*block.origins[1:], 0})
  ]
  widths = [_width(box.label) + 12 for box in boxes]
  levels = collections.defaultdict(list)
  for box, width in zip(boxes, widths, strict=True):
    levels[box.depth].append(width + _GAP)
  steps = (max(levels[depth]) for depth in range(len(levels)))
  left = list(itertools.accumulate(steps, initial=_MARGIN))
  middle = [_MARGIN + _BOX // 2 + _ROW * row for row in rows]
  edges, nodes = [], []
  for index, box in enumerate(boxes):
    x, y = left[box.depth], middle[index]
    if index:
      above = middle[box.parent]
      start, way = left[box.depth - 1] + widths[box.parent], f'H{x:.1f}'
      if above != y:  # All edges of a level turn at the same x.
        start, way = x - _GAP, f'h10V{y}{way}'
      edges.append(
        f'<path class="edge {box.kind}" d="M{start:.1f} {above}{way}"/>'
      )
    nodes.append(
      f'<g><title>{escape(box.hint)}</title><rect class="box {box.kind}"'
      f' x="{x:.1f}" y="{y - _BOX // 2}" width="{widths[index]:.1f}"'
      f' height="{_BOX}" rx="4" fill="{style_of(box.source).fill}"/><text'
      f' class="on {box.kind}" x="{x + 6:.1f}" y="{y + 4}"'
      f' xml:space="preserve">{escape(box.label)}</text></g>'
    )
  edges.sort(key=lambda edge: 'yes' in edge)  # Thick edges are drawn on top.
  return _picture(
    left[-1] - _GAP + _MARGIN,
    _MARGIN + _ROW * max(rows) + _BOX + _MARGIN,
    f'Token tree. {sentence(trace, block)}',
    (f'sources: {", ".join(names)}', _TREE_LEGEND),
    ''.join(edges + nodes),
  )


def ancestors(block: trace_lib.Block) -> list[list[int]]:
  """The nodes from the root to each node, including both."""
  lists: list[list[int]] = []
  for node, parent in enumerate(block.parents):
    lists.append([*(lists[parent] if node else []), node])
  return lists


def mask(trace: trace_lib.Trace, number: int) -> Svg:
  """Draws the attention mask of the nodes of a block; arguments as in `tree`.

  A row per node; a column for the text before the root, and a column per node.
  """
  block = _block_of(trace, number)
  labels = [
    f'{visible(trace.texts[token], 12)} {node}'
    for node, token in enumerate(block.tokens)
  ]
  left = _MARGIN + max(map(_width, labels)) + 8
  grid, top, size = left + _TEXT, _MARGIN + 18, _CELL * len(labels)
  seen, lines = [], []
  for node, above in enumerate(ancestors(block)):
    y = top + _CELL * node
    seen += [
      f'M{grid + _CELL * x:.1f} {y}h{_CELL}v{_CELL}h-{_CELL}z' for x in above
    ]
    lines.append(
      f'<text class="{"yes" if node in block.path else ""}" x="{left - 8:.1f}"'
      f' y="{y + 11}" text-anchor="end" xml:space="preserve">'
      f'{escape(labels[node])}</text>'
    )
  rulers = ''.join(
    f'M{grid:.1f} {top + offset}h{size}M{grid + offset:.1f} {top}v{size}'
    for offset in range(0, size + 1, _CELL)
  )
  return _picture(
    grid + size + _MARGIN + 40,
    top + size + _MARGIN,
    f'Attention mask of {plural(len(labels), "node")}: each sees the text'
    ' before the root, its ancestors and itself.',
    ['row: a node; black: the nodes it sees; bold: accepted'],
    f'<text x="{left:.1f}" y="{_MARGIN + 10}">text</text>'
    f'<text x="{grid + 4:.1f}" y="{_MARGIN + 10}">nodes</text>'
    f'<rect class="text" x="{left:.1f}" y="{top}" width="{_TEXT - 6}"'
    f' height="{size}"/><path class="seen" d="{"".join(seen)}"/>'
    f'<path class="grid" d="{rulers}"/>{"".join(lines)}',
  )
