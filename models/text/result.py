"""What was generated, as text, and how it is shown."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import json
import os
from typing import Any
from typing import TextIO

from models.text import result as origins
from specdec.tracing.svg import mark_of


@dataclasses.dataclass(frozen=True)
class TextGeneration:
  """Prompts, their continuations and what they cost.

  Attributes:
    prompts: B texts.
    text: B continuations; they end before the first stop string.
    prompt_tokens: the ids of each prompt.
    tokens: the new ids of each row.
    pieces: the texts of these tokens, row by row, together the text; a token
      that ends within a character has none, and the one that completes it has
      all of it.
    origins: who proposed each of them, an index of `labels`.
    labels: see `specdec.Generation`.
    log_probs: likewise.
    finish_reasons: likewise.
    errors: likewise.
    stats: see `specdec.statistics.summarize`, and `Generator.timed`.
  """

  prompts: list[str]
  text: list[str]
  prompt_tokens: list[list[int]]
  tokens: list[list[int]]
  pieces: list[list[str]]
  origins: list[list[int]]
  labels: tuple[str, ...]
  log_probs: list[list[float]] | None
  finish_reasons: list[str]
  errors: list[str | None]
  stats: dict[str, Any]

  def to_json(self) -> str:
    """One JSON object in one line."""
    return json.dumps(dataclasses.asdict(self))

  def __str__(self):
    texts = [
      prompt + text
      for prompt, text in zip(self.prompts, self.text, strict=True)
    ]
    return '\n\n'.join([*texts, self.table()])

  def with_origins(self, *, color: bool) -> str:
    """The texts, each token marked by who proposed it, and a legend."""
    rows = zip(self.prompts, self.pieces, self.origins, strict=True)
    texts = [
      prompt + origins.mark(pieces, proposed, color=color)
      for prompt, pieces, proposed in rows
    ]
    legend = origins.legend(self.labels, self.stats['origins'], color=color)
    return '\n\n'.join([*texts, legend, self.table()])

  def table(self) -> str:
    """The statistics."""
    shown: dict[str, Any] = {
      'finish_reasons': ', '.join(dict.fromkeys(self.finish_reasons))
    }
    # What the figures follow from is in the JSON.
    shown |= {
      name: value
      for name, value in self.stats.items()
      if name not in ('reads', 'costs', 'beyond_context')
    }
    beyond = {k: n for k, n in self.stats['beyond_context'].items() if n}
    if beyond:
      shown['beyond_context'] = beyond
    width = max(map(len, shown))
    return '\n'.join(
      f'{name.replace("_", " "):{width}}  {_formatted(value)}'
      for name, value in shown.items()
    )


def _formatted(value) -> str:
  if isinstance(value, float):
    return f'{value:.3f}'
  if isinstance(value, dict):
    return ', '.join(f'{name} {count}' for name, count in value.items())
  return f'{value}'


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
