"""The flags that all decoding scripts share, and their values.

This module imports what takes no time, so that a wrong flag is refused before
`loading` imports what reads models.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import sys
from typing import Any

from absl import flags
import command_line
import several_hosts

import specdec
from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec import sampling as sampling_lib
from specdec.models.lab.bench import questions as questions_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import fields
from specdec.models.text import settings as settings_lib
from specdec.text import text_files

_DEFAULTS = settings_lib.DraftSettings()

LARGEST_BATCH = 1024
"""Rows of a batch, at most: writes to caches are unrolled by row."""

DEFAULT_PROMPT = '''def copy_file(source, destination):
    """Copy a file, and its permissions."""
    if'''

PLAN = flags.DEFINE_string(
  'plan',
  None,
  'how to decode: a file made by tune.py, or auto: the plan of this machine and'
  ' these flags, made first if there is none',
)
PLAN_SECONDS = flags.DEFINE_float(
  'plan_seconds', 300.0, 'time budget for making a plan', lower_bound=1.0
)
PROMPT_FILE = flags.DEFINE_string(
  'prompt_file',
  None,
  'prompts: one JSON object per line with the key prompt (*.jsonl, *.ndjson,'
  ' *.json, and -, standard input), else one prompt per line; in UTF-8;'
  ' benchmark.py also reads questions: lines with the keys category and turns',
)
MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', 128, 'tokens to generate at most', 0, 1 << 20
)
SEED = flags.DEFINE_integer('seed', 0, 'of the sampling', -(2**31), 2**32 - 1)
VERIFY = flags.DEFINE_enum(
  'verify',
  'match',
  list(decode_options.RULES),
  'match: the tokens of plain decoding with the same seed; rejection, traversal'
  ' (block: the same on chains): other tokens of the same distribution',
)
CHILDREN = flags.DEFINE_enum(
  'children',
  None,
  sampling_lib.CHILDREN,
  'the candidates of --verify=rejection and traversal; default: drawn without'
  ' replacement where the topology is fixed and the drafter is a model',
)
BREAK_EVEN = flags.DEFINE_float(
  'break_even',
  None,
  'how many plain steps take as long as a speculative step on this machine:'
  ' while a speculative step emits fewer tokens, decoding is plain; default: as'
  ' the plan; without one, by the processor for look-ups alone, else never',
)


_SAMPLING: dict[str, flags.FlagHolder] = {
  flag.name: flag
  for flag in (
    flags.DEFINE_list(
      'logit_bias', [], 'token:number, added to the logits; token:-inf bans it'
    ),
    flags.DEFINE_float(
      'repetition_penalty', None, 'above 1, repeating a token is less likely'
    ),
    flags.DEFINE_float('temperature', 0.0, '0 is greedy'),
    flags.DEFINE_integer('top_k', None, 'keep the k most likely tokens', 1),
    flags.DEFINE_float(
      'top_p', None, 'keep the most likely tokens up to this probability'
    ),
    flags.DEFINE_float(
      'min_p', None, 'keep tokens this likely relative to the most likely one'
    ),
  )
}


def _define(
  name: str, option: fields.Option, defaults: Any
) -> flags.FlagHolder:
  """The flag of a described field."""
  text = option.field.metadata['help']
  if option.record == 'inner_stage':
    text = f'of --inner: {text}'
  if name in settings_lib.ON_CPU:
    text += f'; on CPU {settings_lib.ON_CPU[name]}'
  default = option.text_of(option.read(defaults))
  return command_line.define_option(name, option, default, text)


MODELS = {
  name: _define(name, option, choice_lib.ModelChoice)
  for name, option in choice_lib.OPTIONS.items()
}
DRAFTING = {
  name: _define(name, option, _DEFAULTS)
  for name, option in settings_lib.OPTIONS.items()
}

# Listed by --help of the script, and kept in its results.
flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(several_hosts)
for _flag in flags.FLAGS.get_key_flags_for_module(__name__):
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], _flag)

# Flags that some scripts have. Each belongs to the script that defines it.
_IN_SCRIPT: dict[str, Any] = {'module_name': sys.argv[0]}


METHODS = ('plain', 'chain', 'tree', 'staged')
"""Methods that most scripts know."""


def define_method(methods: Sequence[str] = METHODS) -> None:
  """Defines `--method`, which `loading` reads."""
  text = 'how to decode; the text is the same; --plan chooses'
  flags.DEFINE_enum('method', 'staged', methods, text, **_IN_SCRIPT)


def define_batch_size(default: int, text: str) -> flags.FlagHolder:
  """Defines `--batch_size`."""
  bounds = 1, LARGEST_BATCH
  return flags.DEFINE_integer(
    'batch_size', default, text, *bounds, **_IN_SCRIPT
  )


def define_slots() -> tuple[flags.FlagHolder, flags.FlagHolder]:
  """Defines `--context` and `--reading`, of prompts that share slots."""
  context = flags.DEFINE_integer(
    'context',
    None,
    'the most tokens of a prompt and its continuation; default: the context of'
    ' the target, and at most 2048',
    lower_bound=1,
    **_IN_SCRIPT,
  )
  reading = flags.DEFINE_integer(
    'reading',
    512,
    'the most tokens of new prompts that are read between two steps of others',
    lower_bound=1,
    **_IN_SCRIPT,
  )
  return context, reading


def define_num_prompts(text: str = 'default: all') -> None:
  """Defines `--num_prompts`, which `file_prompts` reads."""
  flags.DEFINE_integer('num_prompts', None, text, 1, **_IN_SCRIPT)


def define_stop() -> None:
  """Defines `--stop`, which `stop` reads."""
  text = r'the text ends before this; \n is a line end; may be repeated'
  flags.DEFINE_multi_string('stop', [], text, **_IN_SCRIPT)


def stop() -> list[str]:
  """The `stop` argument of decoding."""
  return fields.unescaped(flags.FLAGS.stop)


def define_constraint() -> None:
  """Defines `--regex` and `--json_schema`, which `constraint` reads."""
  flags.DEFINE_string(
    'regex',
    None,
    "an expression that the text matches, in the syntax of Python's re",
    **_IN_SCRIPT,
  )
  text = 'a JSON schema that the text matches, or the file of one'
  flags.DEFINE_string('json_schema', None, text, **_IN_SCRIPT)
  command_line.checked_first(_check_constraint)


def _check_constraint() -> None:
  """Refuses a schema that is not JSON; reads the schema if a file is named."""
  schema = flags.FLAGS.json_schema
  if MODELS['eos'].value == ['none'] and constraint():
    raise ValueError(
      f'--eos=none: --{next(iter(constraint()))} needs a token that ends the'
      ' text; leave out one of the two'
    )
  if schema is None:
    return
  if flags.FLAGS.regex is not None:
    raise ValueError('give --regex or --json_schema, not both')
  if not schema.lstrip().startswith('{'):
    with named_as_flag('json_schema='):
      schema = text_files.to_json(text_files.read_object(schema))
  try:
    json.loads(schema)
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'--json_schema is neither a file nor JSON: {error}'
    ) from error
  flags.FLAGS.json_schema = schema


def constraint() -> dict[str, Any]:
  """The arguments `regex` and `json_schema` of decoding."""
  given = command_line.given('regex', 'json_schema')
  return {name: value for name, value in given.items() if value is not None}


@contextlib.contextmanager
def named_as_flag(name: str = '') -> Iterator[None]:
  """An error names its flag: `name`, or the argument that it begins with."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'--{name}{error}') from error


# Flags by their arguments in Python.
_FLAGS = {
  'method': 'method',
  'plan': 'plan',
  **{name: name for name in DRAFTING},
  **{option.field.name: name for name, option in choice_lib.OPTIONS.items()},
}


@contextlib.contextmanager
def named_as_flags() -> Iterator[None]:
  """An error names flags in place of arguments: `--eos=` for `eos_ids=`."""
  try:
    yield
  except ValueError as error:
    named = lambda match: f'--{_FLAGS[match[1]]}='
    arguments = rf'(?<!\S)({"|".join(_FLAGS)})='
    raise ValueError(re.sub(arguments, named, str(error))) from error


def _logit_bias(given: list[str]) -> dict[int, float] | None:
  try:
    pairs = [text.split(':') for text in given]
    return {int(token): float(bias) for token, bias in pairs} or None
  except ValueError as error:
    raise ValueError(
      f'--logit_bias={",".join(given)}: expected token:number, separated by'
      ' commas'
    ) from error


def sampling() -> specdec.Sampling:
  """The sampling options of the flags."""
  given = {name: flag.value for name, flag in _SAMPLING.items()}
  bias = _logit_bias(given['logit_bias'])
  return specdec.Sampling(**given | {'logit_bias': bias})


def models() -> choice_lib.ModelChoice:
  """The models of the flags; a mesh has sizes alone, so no device starts."""
  with named_as_flag():
    choice = choice_lib.ModelChoice(
      **{
        option.field.name: option.parse(MODELS[name].value)
        for name, option in choice_lib.OPTIONS.items()
      }
    )
  if choice.head is not None and choice.draft is not None:
    raise ValueError(
      f'--head={choice.head} takes the place of --draft={choice.draft}; give'
      ' one of the two'
    )
  return choice


def names_a_drafter() -> bool:
  """Whether there is a draft or a head, or `--draft=none` was chosen."""
  choice = models()
  named = choice.draft is not None or choice.head not in (None, 'auto')
  return MODELS['draft'].present or MODELS['head'].present or named


def decoding() -> dict[str, Any]:
  """The arguments of `specdec.Generator.generate` that the flags set."""
  return {
    'max_new_tokens': MAX_NEW_TOKENS.value,
    'sampling': sampling(),
    'seed': SEED.value,
    'verify': VERIFY.value,
    'children': CHILDREN.value,
    'break_even': BREAK_EVEN.value,
  }


def draft_settings(plan: Any = None) -> settings_lib.DraftSettings:
  """The drafting settings of the flags, with the plan of the method `plan`."""
  with named_as_flag():
    changed = settings_lib.with_options(
      _DEFAULTS, {name: flag.value for name, flag in DRAFTING.items()}
    )
  return dataclasses.replace(changed, plan=plan)


@command_line.checked_first
def _check() -> None:
  """Refuses values of the shared flags that no model could take."""
  with named_as_flag():
    for name, flag in _SAMPLING.items():
      if isinstance(flag.value, float):
        arguments_lib.sampling_value(name, flag.value)
    decode_options.to_break_even(BREAK_EVEN.value)
  sampling()
  models()
  draft_settings()


def prompt_lines(errors: str = 'strict') -> Iterator[tuple[int, str]]:
  """Yields the lines of `--prompt_file` that are not blank, and their numbers.

  For arguments and errors see `text_files.lines`.
  """
  if PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  with named_as_flag('prompt_file='):
    for line_number, line in text_files.lines(PROMPT_FILE.value, errors=errors):
      if line.strip():
        yield line_number, line


def batch_sizes(
  given: Sequence[str], num_prompts: int | None = None
) -> list[int]:
  """The sizes in `--batch_sizes`, each at most the number of prompts."""
  sizes = [int(size) if size.isdecimal() else 0 for size in given]
  largest = min(num_prompts or LARGEST_BATCH, LARGEST_BATCH)
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
  name = PROMPT_FILE.value
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
  return _read_prompts(flags.FLAGS.num_prompts, [*prompt_lines()])


def file_questions(categories: Sequence[str]) -> list[questions_lib.Question]:
  """The questions of `--prompt_file`, or its prompts as questions.

  It has questions if its first line is one. `--num_prompts` is for each of the
  `categories`; if there are none, all categories are taken.

  Raises:
    ValueError: see `_read_prompts`, `questions.parse` and `questions.choose`.
  """
  name, lines = str(PROMPT_FILE.value), [*prompt_lines()]
  limit = flags.FLAGS.num_prompts
  first = lines[0][1] if lines and text_files.is_json_lines(name) else ''
  if 'turns' not in questions_lib.to_object(first):
    if categories:
      raise ValueError(
        f'--categories={",".join(categories)}: --prompt_file={name} has prompts'
        ' without categories'
      )
    texts = _read_prompts(limit, lines)
    return [questions_lib.Question((text,)) for text in texts]
  with named_as_flag('prompt_file='):
    questions = questions_lib.parse(name, lines)
  with named_as_flag():
    return questions_lib.choose(questions, limit, categories)


def given_prompts(prompt: flags.FlagHolder, num_prompts: int) -> list[str]:
  """The first `num_prompts` prompts of the file, or copies of `--prompt`."""
  if PROMPT_FILE.value is None:
    arguments_lib.check_text(f'--{prompt.name}', prompt.value)
    return [prompt.value] * num_prompts
  if prompt.present:
    raise ValueError('give --prompt or --prompt_file, not both')
  return _read_prompts(num_prompts, [*prompt_lines()])


def as_dict() -> dict[str, Any]:
  """All flags of the running script, for result files."""
  # These do not change results.
  left_out = {'output', 'plots', *(flag.name for flag in several_hosts.FLAGS)}
  record = {
    flag.name: flag.value
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    if flag.name not in left_out
  }
  # Folders may be private.
  for name in ('target', 'draft', 'head', 'plan', 'ngram'):
    path = pathlib.Path(str(record.get(name)))
    record |= {name: path.name} if path.exists() else {}
  prompts = record.pop('prompt_file')
  if prompts not in (None, '-'):
    path = pathlib.Path(prompts)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record |= {'prompts': path.name, 'prompts_sha256': digest}
  return record


def keeps_tokens() -> bool:
  """Whether `--verify` gives the tokens of plain decoding."""
  return decode_options.RULES[VERIFY.value](sampling_lib.BEST).keeps_tokens
