"""Text with every token marked by who proposed it (figure 3 of the paper).

The paper: Spector and Re, arXiv 2308.04623.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import os
from typing import TextIO

from specdec.viz.style import mark_of

# Backgrounds, so that whitespace shows; the target's own tokens have none.
_COLORS = ('', '\x1b[30;42m', '\x1b[30;43m', '\x1b[30;46m', '\x1b[30;45m')
_RESET = '\x1b[0m'


def wants_color(stream: TextIO) -> bool:
  """Whether to colour: a terminal, or FORCE_COLOR; never with NO_COLOR."""
  if os.environ.get('NO_COLOR'):
    return False
  if os.environ.get('FORCE_COLOR'):
    return True
  return stream.isatty() and os.environ.get('TERM') != 'dumb'


def _colored(text: str, origin: int) -> str:
  color = _COLORS[origin % len(_COLORS)]
  if not color:
    return text
  # Line by line: a background would run on to the edge of the screen.
  lines = text.split('\n')
  return '\n'.join(f'{color}{line}{_RESET}' if line else '' for line in lines)


def mark(pieces: Sequence[str], origins: Sequence[int], *, color: bool) -> str:
  """One text, marked.

  Args:
    pieces: the texts of its tokens.
    origins: who proposed each; 0 is the target.
    color: background colours; else a superscript number before every token, or
      run of tokens of one origin, 0 for the target.
  """
  marked = []
  runs = itertools.groupby(
    zip(pieces, origins, strict=True), lambda one: one[1]
  )
  for origin, run in runs:
    text = ''.join(piece for piece, _ in run)
    marked.append(_colored(text, origin) if color else mark_of(origin) + text)
  return ''.join(marked)


def legend(
  labels: Sequence[str], counts: Mapping[str, int], *, color: bool
) -> str:
  """Which mark is whose, and how many of the tokens."""
  total = max(sum(counts.values()), 1)
  entries = [
    mark([f' {label} '], [origin], color=color)
    + f' {counts[label] / total:.0%}'
    for origin, label in enumerate(labels)
  ]
  return 'proposed by  ' + '  '.join(entries)
