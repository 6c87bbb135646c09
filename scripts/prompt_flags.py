"""The prompts and questions that flags name."""

from collections.abc import Sequence
import sys

from absl import flags
import options

from specdec import arguments as arguments_lib
from specdec.models.lab.bench import questions as questions_lib
from specdec.text import text_files


def define_num_prompts(text: str = 'default: all') -> None:
  """Defines `--num_prompts`, which `file_prompts` reads."""
  flags.DEFINE_integer(
    'num_prompts', None, text, lower_bound=1, module_name=sys.argv[0]
  )


def batch_sizes(
  given: Sequence[str], num_prompts: int | None = None
) -> list[int]:
  """The sizes in `--batch_sizes`, each at most the number of prompts."""
  sizes = [int(size) if size.isdecimal() else 0 for size in given]
  largest = min(num_prompts or options.LARGEST_BATCH, options.LARGEST_BATCH)
  if not sizes or not all(1 <= size <= largest for size in sizes):
    there = f'; there are {num_prompts} prompts' if num_prompts else ''
    raise ValueError(
      f'--batch_sizes={",".join(given)}: expected integers from 1 to'
      f' {largest}{there}'
    )
  return sizes


def _read_prompts(
  limit: int | None, lines: Sequence[tuple[int, str]]
) -> list[str]:
  """The first prompts of the lines of `--prompt_file`; None: all.

  Raises:
    ValueError: the file cannot be read, or has fewer; names file and line.
  """
  name = options.PROMPT_FILE.value
  if not lines or (limit and len(lines) < limit):
    raise ValueError(
      f'--prompt_file={name} has {len(lines)} prompts, {limit or 1} needed;'
      ' see --batch_size and --num_prompts'
    )
  if not text_files.is_json_lines(str(name)):
    return [line.rstrip('\n') for _, line in lines[:limit]]
  prompts = []
  for number, line in lines[:limit]:
    place = f'--prompt_file={name}, line {number}'
    prompt = questions_lib.to_object(line).get('prompt')
    if not isinstance(prompt, str):
      raise ValueError(
        f'{place}: expected a JSON object with the key prompt and a string'
      )
    arguments_lib.check_text(place, prompt)
    prompts.append(prompt)
  return prompts


def file_prompts() -> list[str]:
  """The prompts of `--prompt_file` that `--num_prompts` asks for."""
  return _read_prompts(flags.FLAGS.num_prompts, [*options.prompt_lines()])


def file_questions(categories: Sequence[str]) -> list[questions_lib.Question]:
  """The questions of `--prompt_file`, or its prompts as questions.

  It has questions if its first line is one. `--num_prompts` is for each of the
  `categories`; if there are none, all categories are taken.

  Raises:
    ValueError: see `_read_prompts`, `questions.parse` and `questions.choose`.
  """
  name, lines = str(options.PROMPT_FILE.value), [*options.prompt_lines()]
  limit = flags.FLAGS.num_prompts
  is_json = text_files.is_json_lines(name)
  if not (is_json and lines and questions_lib.has_turns(lines[0][1])):
    if categories:
      raise ValueError(
        f'--categories={",".join(categories)}: --prompt_file={name} has prompts'
        ' without categories'
      )
    texts = _read_prompts(limit, lines)
    return [questions_lib.Question((text,)) for text in texts]
  with options.named_as_flag('prompt_file='):
    questions = questions_lib.parse(name, lines)
  with options.named_as_flag():
    return questions_lib.choose(questions, limit, categories)


def given(prompt: flags.FlagHolder, num_prompts: int) -> list[str]:
  """The first `num_prompts` prompts of the file, or copies of `--prompt`."""
  if options.PROMPT_FILE.value is None:
    arguments_lib.check_text(f'--{prompt.name}', prompt.value)
    return [prompt.value] * num_prompts
  if prompt.present:
    raise ValueError('give --prompt or --prompt_file, not both')
  return _read_prompts(num_prompts, [*options.prompt_lines()])
