"""Strings of HTML and SVG that notebooks show, and text safe in them."""

from collections.abc import Sequence
import html
import unicodedata

COLUMN = 7.3  # width in pixels, of the pictures' font of 12
_LINE, _MARGIN = 16, 12
_VISIBLE = {' ': '␣', '\n': '⏎', '\t': '⇥', '\r': '␍'}
_UNKNOWN = '\ufffd'


class _Markup(str):
  """Shown by what it is for, not by its many letters."""

  def __repr__(self):
    return f'<{type(self).__name__} of {len(self):,} characters>'


class Html(_Markup):
  """HTML; a notebook shows it."""

  def _repr_html_(self) -> str:
    return str(self)


class Svg(_Markup):
  """A picture; a notebook shows it, and so does a browser as a file."""

  def _repr_svg_(self) -> str:
    return str(self)


def _is_harmless(character: str) -> bool:
  # Control characters are no XML; marks of direction would move other text.
  return character.isprintable() or character in ' \u00a0\u2009\u3000'


def escape(text: str) -> str:
  """Running text, for HTML, SVG and attributes of both."""
  return html.escape(
    ''.join(
      one if _is_harmless(one) or one in '\n\t' else _UNKNOWN for one in text
    )
  )


def visible(text: str, limit: int = 16) -> str:
  """A token as a label: white space shows; not escaped.

  Args:
    text: of the token.
    limit: characters; of longer ones the middle is left out.
  """
  text = ''.join(
    _VISIBLE.get(one, one if _is_harmless(one) else _UNKNOWN) for one in text
  )
  if len(text) > limit:
    half = (limit - 1) // 2
    text = f'{text[: limit - 1 - half]}…{text[len(text) - half :]}'
  return text or '∅'


def columns(text: str) -> int:
  """How many columns of a font of fixed width it takes."""
  wide = sum(unicodedata.east_asian_width(one) in 'WF' for one in text)
  return len(text) + wide


def picture(
  width: float,
  height: float,
  label: str,
  body: str,
  css: str,
  legend: Sequence[str] = (),
) -> Svg:
  """A picture of its own, on its own paper.

  Args:
    width: in pixels.
    height: likewise.
    label: what it shows, in words, for those who do not see it.
    body: SVG.
    css: for it. `--ink` and `--paper` may be set by the page around it.
    legend: lines of text, set above it.
  """
  lines = ''.join(
    f'<text x="{_MARGIN}" y="{_LINE * number + 6}">{escape(line)}</text>'
    for number, line in enumerate(legend, 1)
  )
  if legend:
    above = _LINE * len(legend) + 6
    body = f'{lines}<g transform="translate(0 {above})">{body}</g>'
    height += above
    longest = max(columns(line) for line in legend)
    width = max(width, COLUMN * longest + 2 * _MARGIN)
  return Svg(
    f'<svg xmlns="http://www.w3.org/2000/svg" role="img"'
    f' aria-label="{escape(label)}" width="{width:.0f}" height="{height:.0f}"'
    f' viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace"'
    f' font-size="12"><style>.paper{{fill:var(--paper,#fff)}}'
    f' text{{fill:var(--ink,#111)}} {css}</style>'
    f'<rect class="paper" width="100%" height="100%"/>{body}</svg>'
  )
