"""HTML pictures of a whole decode: its text by source, and a page of blocks.

The page loads nothing. Without JavaScript it shows all blocks.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from importlib import resources
import itertools

from specdec.tracing import svg
from specdec.tracing import trace as trace_lib

_INTRODUCTION = (
  'A block is one forward of the target over a tree of draft tokens. The root'
  ' is the last token of the text so far. The number in a box is the estimated'
  ' probability that the target accepts the token, if it accepts the parent.'
)


def _css(source: int) -> str:
  fill, edge, line = svg.style_of(source)
  css = f'background:{fill};color:#111;border-bottom:3px {line} {edge}'
  return css if source else ''


def _spans(trace: trace_lib.Trace) -> str:
  """The new text, with an element `data-block` for each block."""
  log_probs = trace.log_probs or itertools.repeat(None)
  pieces = zip(trace.pieces, log_probs, strict=False)
  blocks = []
  for number, block in enumerate(trace.blocks):
    shown = []
    for offset, source in enumerate(block.emitted_origins):
      token, (piece, log_prob) = block.emitted[offset], next(pieces)
      title = (
        f'{svg.visible(trace.texts[token])}, token {token}, position'
        f' {block.start + offset}, block {number + 1}, source:'
        f' {trace.labels[source]}'
      )
      if log_prob is not None:
        title += f', log-probability {log_prob:.3f}'
      if piece:  # Empty within a character, and after a stop string.
        shown.append(
          f'<span style="{_css(source)}" title="{svg.escape(title)}">'
          f'{svg.escape(piece)}</span>'
        )
    if shown:
      blocks.append(f'<span data-block="{number}">{"".join(shown)}</span>')
  return ''.join(blocks)


def text(trace: trace_lib.Trace) -> svg.Html:
  """The prompt and the new text; its tokens are coloured by their sources.

  This is figure 3 of the staged speculative decoding paper (arXiv 2308.04623).
  Hovering over a token shows its id, position, block, source and, if the trace
  has it, log-probability.
  """
  total = max(len(trace.tokens), 1)
  entries = [
    '<li style="display:inline;margin-right:1.5em">'
    f'<span style="{_css(source)}"> {svg.mark_of(source)} {svg.escape(label)}'
    f' </span> {trace.origins.count(source) / total:.0%}'
    f' ({svg.style_of(source).line.replace("none", "no line")})</li>'
    for source, label in enumerate(trace.labels)
  ]
  return svg.Html(
    '<div><pre style="white-space:pre-wrap;line-height:1.7">'
    f'{svg.escape(trace.prompt)}{_spans(trace)}</pre><ul aria-label="Sources"'
    f' style="list-style:none;padding:0">{"".join(entries)}</ul></div>'
  )


def _scrolling(shown: str, label: str) -> str:
  attributes = f'class="scroll" tabindex="0" role="region" aria-label="{label}"'
  return f'<div {attributes}>{shown}</div>'


def _cell(value: str | float) -> str:
  if isinstance(value, svg.Html):
    return f'<td>{value}</td>'
  if isinstance(value, str):
    return f'<td>{svg.escape(value)}</td>'
  shown = f'{value:.3f}' if isinstance(value, float) else f'{value:,}'
  return f'<td class="number">{shown}</td>'


def _table(
  caption: str, head: str, rows: Iterable[Sequence[str | float]]
) -> str:
  """A table; `head` holds the names of its columns, separated by commas."""
  columns = ''.join(f'<th scope="col">{name}</th>' for name in head.split(','))
  body = ''.join(f'<tr>{"".join(map(_cell, row))}</tr>' for row in rows)
  return (
    f'<table><caption>{svg.escape(caption)}</caption><thead><tr>{columns}</tr>'
    f'</thead><tbody>{body}</tbody></table>'
  )


def _bar(share: float) -> svg.Html:
  # Hidden from screen readers, which read the number in the cell before.
  return svg.Html(
    f'<i aria-hidden="true" style="width:{10 * share:.2f}rem"></i>'
  )


def _section(trace: trace_lib.Trace, number: int) -> str:
  block = trace.blocks[number]
  title = f'Block {number + 1} of {len(trace.blocks)}'
  sentence = svg.escape(svg.sentence(trace, block))
  forwards = ', '.join(f'{name} {n}' for name, n in block.forwards.items())
  return (
    f'<section class="block" aria-labelledby="block-{number}"'
    f' data-summary="{title}. {sentence}"><h2 id="block-{number}">{title}</h2>'
    f'<p>{sentence} Forwards: {svg.escape(forwards)}.</p>'
    f'{_scrolling(svg.tree(trace, number), "Token tree")}'
    f'<details><summary>The attention mask</summary>'
    f'{_scrolling(svg.mask(trace, number), "Attention mask")}</details>'
    '</section>'
  )


def _summary(trace: trace_lib.Trace) -> str:
  shares = [
    (size, count, count / len(trace.blocks))
    for size, count in enumerate(trace.accepted_histogram, 1)
  ]
  stages, new = trace.stage_forwards.items(), max(len(trace.tokens), 1)
  emitted_table = _table(
    'Tokens that a target forward emitted',
    'tokens,forwards,share,',
    ((size, count, share, _bar(share)) for size, count, share in shares),
  )
  stage_table = _table(
    'Forwards by stage',
    'stage,forwards,per token',
    ((name, count, count / new) for name, count in stages),
  )
  return (
    '<section aria-labelledby="all"><h2 id="all">All blocks</h2>'
    f'<div class="pair">{emitted_table}{stage_table}</div>'
    '</section>'
  )


def report(
  trace: trace_lib.Trace, *, title: str = 'Decoding, block by block'
) -> svg.Html:
  """A page (UTF-8) of all blocks; its element `trace` has `Trace.to_json`."""
  figures = (
    f'{svg.plural(len(trace.tokens), "token")} in'
    f' {svg.plural(len(trace.blocks), "target forward")}:'
    f' {trace.block_efficiency:.2f} per forward. Finish reason:'
    f' {trace.finish_reason}.'
  )
  sections = ''.join(_section(trace, n) for n in range(len(trace.blocks)))
  keys = {'Home': 'First', 'ArrowLeft': 'Previous'}
  keys |= {'ArrowRight': 'Next', 'End': 'Last'}
  buttons = ' '.join(
    f'<button type="button" value="{key}">{keys[key]}</button>' for key in keys
  )
  # A script element ends at "</", and "<!--" begins a comment in it.
  data = trace.to_json().replace('<', '\\u003c')
  files = resources.files('specdec.tracing')
  css = files.joinpath('report.css').read_text('utf-8')
  script = files.joinpath('report.js').read_text('utf-8')
  return svg.Html(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta http-equiv="Content-Security-Policy" content="default-src'
    " 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<title>{svg.escape(title)}</title><style>{css}</style>'
    f'</head><body><header><h1>{svg.escape(title)}</h1><p>{svg.escape(figures)}</p>'
    f'<p>{_INTRODUCTION}</p></header><nav aria-label="Blocks" hidden>{buttons}'
    ' <span>or <kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd></span>'
    '<div id="status" role="status" aria-live="polite"></div></nav>'
    '<main><section aria-labelledby="text"><h2 id="text">Text</h2>'
    f'{text(trace)}</section>{sections}{_summary(trace)}</main><script'
    f' type="application/json" id="trace">{data}</script>'
    f'<script>{script}</script></body></html>\n'
  )
