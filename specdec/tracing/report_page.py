"""One page of HTML that shows a decode block by block.

It needs no network, no server and no other file: styles, script and the trace
itself are in it. Without its script, all blocks are there one below the other.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from importlib import resources

from specdec.tracing import words
from specdec.tracing.charts import shares
from specdec.tracing.charts import survivors
from specdec.tracing.markup import escape
from specdec.tracing.markup import Html
from specdec.tracing.markup import visible
from specdec.tracing.mask_picture import mask
from specdec.tracing.text_picture import legend
from specdec.tracing.text_picture import spans
from specdec.tracing.timeline_picture import timeline
from specdec.tracing.trace import Block
from specdec.tracing.trace import Trace
from specdec.tracing.tree_picture import legend as legend_of_tree
from specdec.tracing.tree_picture import tree

_KEYS = (
  ('Home', 'First'),
  ('ArrowLeft', 'Previous'),
  ('ArrowRight', 'Next'),
  ('End', 'Last'),
)
_INTRODUCTION = (
  'A block is one forward of the target over a tree of guesses; the root, at'
  ' the left, is the last token of the text so far, and the number in a box is'
  ' how likely the drafters thought that the target would accept the guess, if'
  ' it accepts the one before.'
)


def _asset(name: str) -> str:
  return resources.files('specdec.tracing').joinpath(name).read_text('utf-8')


def _scrolling(shown: str, label: str) -> str:
  return (
    f'<div class="scroll" tabindex="0" role="region"'
    f' aria-label="{escape(label)}">{shown}</div>'
  )


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence]) -> str:
  """Cells of numbers are set as such; texts are escaped."""

  def cell(value):
    if isinstance(value, Html):
      return f'<td>{value}</td>'
    if isinstance(value, str):
      return f'<td>{escape(value)}</td>'
    shown = f'{value:.3f}' if isinstance(value, float) else f'{value:,}'
    return f'<td class="number">{shown}</td>'

  columns = ''.join(f'<th scope="col">{escape(one)}</th>' for one in head)
  body = ''.join(f'<tr>{"".join(map(cell, row))}</tr>' for row in rows)
  return (
    f'<table><caption>{escape(caption)}</caption><thead><tr>{columns}</tr>'
    f'</thead><tbody>{body}</tbody></table>'
  )


def _bar(share: float) -> Html:
  # Of no meaning to those who hear it: the number is in the cell before.
  return Html(f'<i aria-hidden="true" style="width:{10 * share:.2f}rem"></i>')


def _nodes(trace: Trace, block: Block) -> str:
  accepted = set(block.path)
  return _table(
    'The nodes of the tree',
    ('node', 'token', 'id', 'parent', 'depth', 'proposed by', 'probability',
     'of the whole path', 'accepted'),
    (
      (
        node,
        visible(trace.texts[token]),
        token,
        block.parents[node] if node else '',
        block.depths[node],
        trace.labels[block.origins[node]] if node else 'root',
        block.probs[node],
        block.path_probs[node],
        'yes' if node in accepted else 'no',
      )
      for node, token in enumerate(block.tokens)
    ),
  )  # fmt: skip


def _block(trace: Trace, number: int) -> str:
  block, total = trace.blocks[number], len(trace.blocks)
  sentence = words.sentence(trace, block)
  summary = f'Block {number + 1} of {total}. {sentence}'
  return (
    f'<section class="block" aria-labelledby="block-{number}"'
    f' data-summary="{escape(summary)}">'
    f'<h2 id="block-{number}">Block {number + 1} of {total}</h2>'
    f'<p>{escape(sentence)} Forwards: {escape(words.forwards(block))}.</p>'
    f'<p>{"<br>".join(map(escape, legend_of_tree(trace, block)))}</p>'
    f'{_scrolling(tree(trace, number, with_legend=False), "Token tree")}'
    f'<details><summary>The nodes as a table</summary>'
    f'{_scrolling(_nodes(trace, block), "Nodes")}</details>'
    f'<details><summary>Who sees whom</summary>'
    f'{_scrolling(mask(trace, number), "Attention mask")}</details></section>'
  )


def _summary(trace: Trace) -> str:
  histogram = trace.accepted_histogram
  # Of the last block more may have been accepted than was emitted.
  lengths = [len(block.path) for block in trace.blocks]
  accepted = [lengths.count(n) for n in range(1, max(lengths, default=0) + 1)]
  stages = trace.stage_forwards.items()
  new = max(len(trace.tokens), 1)
  return (
    '<section aria-labelledby="all"><h2 id="all">All blocks</h2>'
    f'{_scrolling(timeline(trace), "Forwards of all stages, block by block")}'
    '<div class="pair">'
    + _table(
      'Tokens that a target forward emitted',
      ('tokens', 'forwards', 'share', ''),
      (
        (size, count, share, _bar(share))
        for size, (count, share) in enumerate(
          zip(histogram, shares(histogram), strict=True), 1
        )
      ),
    )
    + _table(
      'Forwards in which at least so many guesses were accepted',
      ('guesses', 'share', ''),
      (
        (depth, share, _bar(share))
        for depth, share in enumerate(survivors(accepted), 1)
      ),
    )
    + _table(
      'Forwards by stage',
      ('stage', 'forwards', 'per token'),
      ((name, count, count / new) for name, count in stages),
    )
    + '</div></section>'
  )


def _controls() -> str:
  buttons = ' '.join(
    f'<button type="button" value="{key}">{name}</button>'
    for key, name in _KEYS
  )
  return (
    f'<nav aria-label="Blocks" hidden>{buttons} <span>or <kbd>←</kbd>'
    ' <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd></span>'
    '<div id="status" role="status" aria-live="polite"></div></nav>'
  )


def report(trace: Trace, *, title: str = 'Decoding, block by block') -> Html:
  """A page that shows a decode, to be stepped through with keys or buttons.

  Args:
    trace: of a decode.
    title: of the page.

  Returns:
    HTML, to be written to a file (UTF-8). It loads nothing. The element
    `trace` holds the trace as `Trace.to_json` gives it.
  """
  blocks = len(trace.blocks)
  figures = (
    f'{words.plural(len(trace.tokens), "token")} in'
    f' {words.plural(blocks, "target forward")}:'
    f' {trace.block_efficiency:.2f} per forward. It ended by'
    f' {trace.finish_reason}.'
  )
  # In a script element nothing but "</" could end it, or begin a comment.
  data = trace.to_json().replace('<', '\\u003c')
  body = ''.join(_block(trace, number) for number in range(blocks))
  return Html(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" content="default-src'
    " 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<title>{escape(title)}</title><style>{_asset("report.css")}</style>'
    f'</head><body><header><h1>{escape(title)}</h1><p>{escape(figures)}</p>'
    f'<p>{_INTRODUCTION}</p></header>{_controls()}<main>'
    '<section aria-labelledby="text">'
    f'<h2 id="text">Text</h2><pre>{escape(trace.prompt)}{spans(trace)}</pre>'
    f'{legend(trace)}</section>{body}{_summary(trace)}</main>'
    f'<script type="application/json" id="trace">{data}</script>'
    f'<script>{_asset("report.js")}</script></body></html>\n'
  )
