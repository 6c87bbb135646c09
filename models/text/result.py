"""Generated text with its statistics, and how a terminal shows them."""

from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import itertools
import os
from typing import Any
from typing import TextIO

from specdec import statistics as statistics_lib
from specdec.text import text_files
from specdec.tracing import svg


@dataclasses.dataclass(frozen=True)
class TextGeneration:
  """Prompts, their continuations and the statistics of a decode.

  For the fields that are not listed see `specdec.Generation`.

  Attributes:
    prompts: B texts.
    text: B continuations; each ends before the first stop string.
    reasoning: what the model said before its answer in a conversation, by row;
      it is not in `text`. Empty if there is none.
    prompt_tokens: the ids of each prompt.
    pieces: what each new token of a row adds; joined they are the reasoning and
      the text. A character of several tokens is in the piece of the last token.
    stats: the figures of the decode; `text_decoding.timed` adds times.
  """

  prompts: list[str]
  text: list[str]
  reasoning: list[str]
  prompt_tokens: list[list[int]]
  tokens: list[list[int]]
  pieces: list[list[str]]
  origins: list[list[int]]
  labels: tuple[str, ...]
  log_probs: list[list[float]] | None
  finish_reasons: list[str]
  errors: list[str | None]
  stats: statistics_lib.Statistics

  def to_json(self) -> str:
    """One JSON object in one line."""
    record = dataclasses.asdict(self) | {'stats': self.stats.as_dict()}
    return text_files.to_json(record)

  def __str__(self) -> str:
    rows = zip(self.prompts, self.text, self.reasoning, strict=True)
    texts = [
      prompt + ''.join(labelled([(text, reasoning)]))
      for prompt, text, reasoning in rows
    ]
    return '\n\n'.join([*texts, self.table()])

  def with_origins(self, *, color: bool) -> str:
    """The texts with every token marked by its source, a legend and the table.

    Args:
      color: whether to mark by background colours; otherwise a superscript
        number precedes each run of tokens of one source, 0 for the target.
    """
    texts = [
      prompt + self.marked(row, color=color)
      for row, prompt in enumerate(self.prompts)
    ]
    return '\n\n'.join([*texts, self.legend(color=color), self.table()])

  def marked(self, row: int, *, color: bool) -> str:
    """The reasoning and the text of a row, marked as by `with_origins`.

    An empty line parts the two.
    """
    before, pieces = len(self.reasoning[row]), self.pieces[row]
    # Whether all that is said up to each token is reasoning.
    ends = itertools.accumulate(map(len, pieces))
    reasons = [0 < before >= end for end in ends]
    tokens = zip(reasons, self.origins[row], pieces, strict=True)
    marked = {True: '', False: ''}
    groups = itertools.groupby(tokens, lambda token: token[:2])
    for (is_reasoning, origin), run in groups:
      text = ''.join(piece for *_, piece in run)
      marked[is_reasoning] += _mark(text, origin, color)
    gap = '\n\n' if before else ''
    return marked[True] + gap + marked[False]

  def legend(self, *, color: bool) -> str:
    """The meaning of the marks, and the share of the tokens of each source."""
    counts = self.stats.origins or {}
    total = max(sum(counts.values()), 1)
    sources = [
      f'{_mark(f" {label} ", origin, color)} {counts[label] / total:.0%}'
      for origin, label in enumerate(self.labels)
    ]
    return '  '.join(['proposed by', *sources])

  def table(self) -> str:
    """The statistics, minus the fields that only the JSON has."""
    shown: dict[str, Any] = {
      'finish_reasons': ', '.join(dict.fromkeys(self.finish_reasons))
    }
    shown |= self.stats.as_dict()
    for name in ('reads', 'costs', 'positions', 'beyond_context'):
      shown.pop(name, None)
    beyond = self.stats.beyond_context or {}
    beyond = {name: count for name, count in beyond.items() if count}
    if beyond:
      shown['beyond_context'] = beyond
    if not self.stats.plain_steps:
      shown.pop('plain_steps', None)
    width = max(map(len, shown))
    return '\n'.join(
      f'{name.replace("_", " "):{width}}  {_formatted(value)}'
      for name, value in shown.items()
    )


def labelled(parts: Iterable[tuple[str, str]]) -> Iterator[str]:
  """Yields text with reasoning as a terminal shows it, while it grows.

  `parts` are pairs of new text and new reasoning, see `TextDecoding.said`.
  Where there is reasoning, labels say what is what.
  """
  label = ''
  for text, reasoning in parts:
    shown = ''
    for heading, new in (('reasoning', reasoning), ('answer', text)):
      if new and heading != label:
        shown += f'\n[{heading}] ' if label or reasoning else ''
        label = heading
      shown += new
    yield shown


def _formatted(value: Any) -> str:
  if isinstance(value, float):
    return f'{value:.3f}'
  if isinstance(value, dict):
    return ', '.join(f'{name} {count}' for name, count in value.items())
  return f'{value}'


# Backgrounds, so that whitespace is visible; tokens of the target have none.
_COLORS = ('', '\x1b[30;42m', '\x1b[30;43m', '\x1b[30;46m', '\x1b[30;45m')
_RESET = '\x1b[0m'


def wants_color(stream: TextIO) -> bool:
  """Whether to use colours: a terminal, or FORCE_COLOR; never with NO_COLOR."""
  if os.environ.get('NO_COLOR'):
    return False
  if os.environ.get('FORCE_COLOR'):
    return True
  return stream.isatty() and os.environ.get('TERM') != 'dumb'


def _mark(text: str, origin: int, color: bool) -> str:
  if not color:
    return svg.mark_of(origin) + text
  background = _COLORS[origin % len(_COLORS)]
  if not background:
    return text
  # Line by line, or a terminal fills the rest of the line with the background.
  lines = text.split('\n')
  return '\n'.join(line and f'{background}{line}{_RESET}' for line in lines)
