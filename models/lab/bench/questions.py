"""Questions of a benchmark: texts, and conversations of several categories.

The files are as of Spec-Bench (arXiv 2401.07851) and SPEED-Bench: a JSON
object per line, with the keys `category` and `turns`. This module imports what
takes no time, as `scripts/options.py` does.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from specdec import arguments as arguments_lib


@dataclasses.dataclass(frozen=True)
class Question:
  """The messages of a user in the turns of a conversation.

  Without a category it is a text to continue, in its only turn.
  """

  turns: tuple[str, ...]
  category: str | None = None

  @property
  def first(self) -> str | list[dict[str, str]]:
    """The text, or the messages of the first turn."""
    return self.turns[0] if self.category is None else self.messages([])

  def messages(self, answers: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation up to the turn that follows these messages."""
    said = [{'role': 'user', 'content': turn} for turn in self.turns]
    pairs = zip(said, answers, strict=False)
    return [*sum(pairs, ()), said[len(answers)]]


def to_object(line: str) -> dict[str, Any]:
  """The JSON object of a line; empty for all other lines."""
  try:
    value = json.loads(line)
  except (ValueError, RecursionError):
    return {}
  return value if isinstance(value, dict) else {}


def parse(name: str, lines: Iterable[tuple[int, str]]) -> list[Question]:
  """The questions of a file; ValueError names the file and a wrong line.

  `lines` are numbered, see `text_files.lines`.
  """
  questions = []
  is_text = lambda value: isinstance(value, str) and bool(value.strip())
  for number, line in lines:
    record, place = to_object(line), f'{name}, line {number}'
    category, turns = record.get('category'), record.get('turns')
    if not is_text(category):
      raise ValueError(f'{place}: expected an object with a text as category')
    if not isinstance(turns, list) or not turns or not all(map(is_text, turns)):
      raise ValueError(f'{place}: expected turns, a list of at least one text')
    for text in (category, *turns):
      arguments_lib.check_text(place, text)
    questions.append(Question(tuple(turns), category))
  return questions


def choose(
  questions: Sequence[Question], most: int | None, categories: Sequence[str]
) -> list[Question]:
  """At most the first `most` questions of each of the categories.

  `most=None` takes all questions, and no categories take all of them.
  ValueError if a category has no questions.
  """
  groups: dict[str | None, list[Question]] = {}
  for question in questions:
    groups.setdefault(question.category, []).append(question)
  if unknown := {*categories} - groups.keys():
    raise ValueError(
      f'categories={",".join(categories)}: there is no {min(unknown)!r};'
      f' the categories are {", ".join(map(str, groups))}'
    )
  names = [name for name in groups if name in categories or not categories]
  return [question for name in names for question in groups[name][:most]]
