"""The prompts of a benchmark in batches: texts, and turns of conversations."""

from collections.abc import Sequence
import itertools
import sys

import tqdm

from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import questions as questions_lib
from specdec.models.lab.bench import timing
from specdec.models.text import chat_template
from specdec.models.text import pair as pair_lib

Turn = tuple[str | None, list[int]]
"""The category of a prompt and its token ids."""

Batch = tuple[str | None, list[list[int]]]
"""The category of several prompts and the token ids of each."""


def check_context(
  rows: Sequence[Sequence[int]], max_new_tokens: int, context: int
) -> None:
  """ValueError if a prompt and its new tokens exceed the target's context."""
  longest = max(map(len, rows))
  if longest + max_new_tokens > context:
    raise ValueError(
      f'--max_new_tokens={max_new_tokens} and the longest prompt,'
      f' {longest} tokens, exceed the context of the target, {context} tokens;'
      ' --prompt_bucket leaves out longer prompts'
    )


def turns_of(
  questions: Sequence[questions_lib.Question],
  pair: pair_lib.Pair,
  answer: timing.Arm,
  task: task_lib.Task,
  *,
  bucket: int | None,
  context: int,
) -> list[Turn]:
  """Every turn of the questions as a prompt, with the conversation before it.

  `answer` gives the answers in the conversations; it decodes batches. The last
  turns are not decoded here. A conversation of more than `bucket` tokens does
  not go on.

  Raises:
    ValueError: there is no chat template, or a conversation exceeds the
      context.
  """
  first = pair.ids_of([question.first for question in questions])
  prompts = [[ids] for ids in first]
  answers: list[list[dict[str, str]]] = [[] for _ in questions]
  while going_on := [
    index
    for index, question in enumerate(questions)
    if len(prompts[index]) < len(question.turns)
    and (bucket is None or len(prompts[index][-1]) <= bucket)
  ]:
    starts = range(0, len(going_on), task.batch_size)
    for start in tqdm.tqdm(starts, unit='batch of answers', file=sys.stderr):
      chunk = going_on[start : start + task.batch_size]
      rows = [prompts[index][-1] for index in chunk]
      check_context(rows, task.max_new_tokens, context)
      # A full batch shares its programs with those that are timed.
      rows += rows[-1:] * (task.batch_size - len(rows))
      tokens = answer(rows, task.max_new_tokens).tokens[: len(chunk)]
      for index, answer_ids in zip(chunk, tokens, strict=True):
        messages = questions[index].messages(answers[index])
        said = pair.said(answer_ids, section=pair.section_after(messages))
        answers[index].append(chat_template.answer(*said))
        messages = questions[index].messages(answers[index])
        prompts[index] += pair.ids_of([messages])
  return [
    (question.category, ids)
    for question, turns in zip(questions, prompts, strict=True)
    for ids in turns
  ]


def make_batches(
  turns: Sequence[Turn], *, batch_size: int, bucket: int | None
) -> list[Batch]:
  """Full batches of one category each, from each category in turn.

  Prompts that do not fill a batch are left out. Only prompts of bucket / 2 <
  length <= bucket tokens are kept, which share their programs; all if `bucket`
  is None.

  Raises:
    ValueError: a category has fewer prompts than `batch_size`.
  """
  if bucket is not None:
    turns = [turn for turn in turns if bucket // 2 < len(turn[1]) <= bucket]
    if not turns:
      raise ValueError(
        f'no prompt has {bucket // 2 + 1} to {bucket} tokens; choose another'
        ' --prompt_bucket'
      )
  groups: dict[str | None, list[list[int]]] = {}
  for category, ids in turns:
    groups.setdefault(category, []).append(ids)
  by_category: list[list[Batch]] = []
  for category, rows in groups.items():
    if not 1 <= batch_size <= len(rows):
      of = '' if category is None else f' of the category {category!r}'
      raise ValueError(
        f'--batch_size must be between 1 and the number of prompts{of},'
        f' {len(rows)}; got {batch_size}'
      )
    starts = range(0, len(rows) - batch_size + 1, batch_size)
    by_category.append(
      [(category, rows[start : start + batch_size]) for start in starts]
    )
  in_turn = itertools.zip_longest(*by_category)
  return [batch for batches in in_turn for batch in batches if batch]
