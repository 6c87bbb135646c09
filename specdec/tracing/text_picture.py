"""The text, every token coloured by who proposed it; details when hovering.

Figure 3 of the staged speculative decoding paper (arXiv 2308.04623).
"""

from specdec.tracing import words
from specdec.tracing.markup import escape
from specdec.tracing.markup import Html
from specdec.tracing.markup import visible
from specdec.tracing.style import mark_of
from specdec.tracing.style import style_of
from specdec.tracing.trace import Trace


def _css(origin: int) -> str:
  style = style_of(origin)
  if origin == 0:
    return ''
  return (
    f'background:{style.fill};color:#111;'
    f'border-bottom:3px {style.line} {style.edge}'
  )


def spans(trace: Trace) -> str:
  """The new text, its blocks in elements with `data-block`."""
  blocks: dict[int, list[str]] = {}
  for piece, (number, token, origin, position, log_prob) in zip(
    trace.pieces, words.tokens(trace), strict=True
  ):
    if not piece:
      continue  # within a character, or behind a stop string
    details = [
      visible(trace.texts[token]),
      f'token {token}',
      f'position {position}',
      f'block {number + 1}',
      f'proposed by {trace.labels[origin]}',
    ]
    if log_prob is not None:
      details.append(f'log-probability {log_prob:.3f}')
    blocks.setdefault(number, []).append(
      f'<span style="{_css(origin)}"'
      f' title="{escape(", ".join(details))}">{escape(piece)}</span>'
    )
  return ''.join(
    f'<span data-block="{number}">{"".join(shown)}</span>'
    for number, shown in blocks.items()
  )


def legend(trace: Trace) -> str:
  """Who proposed how much, the lines below the text told apart in words."""
  total = max(len(trace.tokens), 1)
  entries = []
  for origin, label in enumerate(trace.labels):
    share = trace.origins.count(origin) / total
    line = style_of(origin).line.replace('none', 'no line')
    entries.append(
      f'<li style="display:inline;margin-right:1.5em"><span'
      f' style="{_css(origin)}"> {mark_of(origin)} {escape(label)} </span>'
      f' {share:.0%} ({line})</li>'
    )
  return (
    '<ul style="list-style:none;padding:0" aria-label="Proposed by">'
    f'{"".join(entries)}</ul>'
  )


def text(trace: Trace) -> Html:
  """The prompt and the new text, coloured by origin.

  Args:
    trace: of a decode.

  Returns:
    HTML, all text escaped. Every token tells its id, position, block, proposer
    and, if the decode had them, log-probability. The line below a token says
    who proposed it where there is no colour.
  """
  return Html(
    '<div><pre style="white-space:pre-wrap;line-height:1.7">'
    f'{escape(trace.prompt)}{spans(trace)}</pre>{legend(trace)}</div>'
  )
