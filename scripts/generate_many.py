r"""Continues all prompts of a file, some at a time, and writes a file.

python scripts/generate_many.py --prompt_file=prompts.jsonl \
    --output=completions.jsonl --batch_size=8

A line of a file `*.jsonl`, `*.ndjson` or `*.json` and of standard input is a
JSON object with `prompt` or `messages` (a conversation), and may have an `id`,
`max_new_tokens`, `seed`, `eos_ids` (ids or texts), `temperature`, `top_k`,
`top_p`, `min_p`, `regex` and `json_schema` of its own. A line of another file
is a prompt. A line is appended to the output when a prompt ends: `index` (of
the prompt, from 0), `id`, `text`, `reasoning` (of an answer, apart from its
text), `tokens`, `finish_reason`, `error` and `stats`, or `index`, `id` and
`error` alone. A run that was stopped or killed goes on where it was, with the
same command, if its prompts are in a file. `-` is standard input or output.
"""

from collections.abc import Iterator
import itertools
import json
import math
import pathlib
import sys
import time
from typing import Any

from absl import flags
import command_line
import options
import several_hosts

from specdec.text import text_files

options.define_method()
_OUTPUT = flags.DEFINE_string('output', None, 'JSON lines, or -; needed')
_BATCH_SIZE = options.define_batch_size(8, 'prompts that are decoded at once')
_CONTEXT, _READING = options.define_slots()
options.define_stop()
options.define_constraint()
_IN_ORDER = flags.DEFINE_bool(
  'in_order', False, 'write lines in the order of the prompts'
)

_NUM_SAMPLES = 32  # Prompts, for making a plan.
_SAMPLING = {'temperature': float, 'top_k': int, 'top_p': float, 'min_p': float}
# The fields of `specdec.Job`, and all keys of a line, with the types of values.
_JOB_KEYS: dict[str, Any] = {
  'max_new_tokens': int | None,
  'seed': int | None,
  'eos_ids': str | list[int | str] | None,
  'regex': str | None,
  'json_schema': str | dict[str, Any] | None,
}
_KEYS: dict[str, Any] = {
  'prompt': str | list[int] | list[dict[str, Any]],
  'messages': list[dict[str, Any]],
  'id': Any,
  **_JOB_KEYS,
  **_SAMPLING,
}

# They change no token of a prompt, and refuse none.
_FREE = ('batch_size', 'reading', 'in_order', 'plan_seconds')


def _parse(line: str) -> tuple[dict[str, Any], Any]:
  """A line of the input, and its own `Sampling`, or None."""
  import specdec

  if not text_files.is_json_lines(str(options.PROMPT_FILE.value)):
    return {'prompt': line.rstrip('\n')}, None
  record = json.loads(line)
  if not isinstance(record, dict) or record.keys() - _KEYS.keys():
    raise ValueError(f'expected a JSON object with keys of {", ".join(_KEYS)}')
  if ('prompt' in record) == ('messages' in record):
    raise ValueError('expected one of the keys prompt and messages')
  text_files.check_types(record, _KEYS)
  if record.get('messages') == []:
    raise ValueError('messages is empty; give at least one')
  sampling = {name: record[name] for name in _SAMPLING if name in record}
  if not sampling:
    return record, None
  return record, specdec.Sampling(**vars(options.sampling()) | sampling)


def _job(
  index: int, line_number: int, line: str
) -> tuple[Any, Any, str | None]:
  """The `specdec.Job` of a prompt, its id, and what is wrong with its line."""
  from specdec.models.text import many as many_lib

  try:
    record, sampling = _parse(line)
  except (TypeError, ValueError, RecursionError) as error:
    return many_lib.Job(prompt=''), index, f'line {line_number}: {error}'
  arguments = {name: record.get(name) for name in _JOB_KEYS}
  if arguments['seed'] is None:
    arguments['seed'] = options.SEED.value + index
  prompt = record['prompt'] if 'prompt' in record else record['messages']
  job = many_lib.Job(prompt=prompt, sampling=sampling, **arguments)
  return job, record.get('id', index), None


def _lines() -> Iterator[tuple[int, int, str]]:
  """The index of each prompt, and the number and text of its line."""
  # A file is refused before anything is decoded; of a pipe, the prompt is.
  errors = 'surrogateescape' if options.PROMPT_FILE.value == '-' else 'strict'
  for index, line in enumerate(options.prompt_lines(errors)):
    yield index, *line


def _samples() -> list[str]:
  """Prompts to make a plan with."""
  if options.PROMPT_FILE.value == '-':
    return [options.DEFAULT_PROMPT]
  first = itertools.islice(_lines(), _NUM_SAMPLES)
  prompts = [_job(*line)[0].prompt for line in first]
  texts = [prompt for prompt in prompts if prompt and isinstance(prompt, str)]
  return texts or [options.DEFAULT_PROMPT]


class _Printed:
  """Results that go to standard output, if this process prints."""

  rows = ()

  def add(self, row: dict[str, Any]) -> None:
    print(text_files.to_json(row), flush=True)


def _output(name: str, num_prompts: float) -> Any:
  """The results so far, at most `num_prompts`; others are added to them."""
  import loading

  from specdec.models.lab.training import kept
  from specdec.models.text import plan as plan_lib
  from specdec.models.text import sources as sources_lib

  if name == '-' or not several_hosts.writes():
    return _Printed()
  sources = sources_lib.open_sources(loading.models())
  settings = options.as_dict() | {
    'dtype': sources.placement.form.name,
    'models': plan_lib.model_digests(sources),
  }
  settings = {name: settings[name] for name in settings if name not in _FREE}
  return kept.ResumableRows(pathlib.Path(name), settings, num_prompts)


def _row(
  index: int, name: Any, error: str | None, result: Any = None
) -> dict[str, Any]:
  row = {'index': index, 'id': name, 'error': error}
  if result is None:
    return row
  stats = ('new_tokens', 'target_forwards', 'block_efficiency')
  return row | {
    'text': result.text[0],
    'reasoning': result.reasoning[0],
    'tokens': result.tokens[0],
    'finish_reason': result.finish_reasons[0],
    'stats': {
      'prompt_tokens': len(result.prompt_tokens[0]),
      **{key: getattr(result.stats, key) for key in stats},
    },
  }


def main() -> None:
  import tqdm

  if options.PROMPT_FILE.value is None or _OUTPUT.value is None:
    raise ValueError(
      '--prompt_file and --output are needed, each a file or -; see --help'
    )
  import loading

  is_pipe = options.PROMPT_FILE.value == '-'
  total = None if is_pipe else sum(1 for _ in _lines())
  output = _output(_OUTPUT.value, math.inf if total is None else total)
  if is_pipe and output.rows:
    raise ValueError(
      f'--output={_OUTPUT.value} has the results of an earlier run; its prompts'
      ' may differ from those of standard input; give another --output, or the'
      ' prompts as a file'
    )
  indices = lambda: [row['index'] for row in output.rows]
  done = {*several_hosts.of_first_host(indices)}
  generator, tree_sizes = loading.many(_samples, _BATCH_SIZE.value)
  taken: list[tuple[int, Any, str | None]] = []  # Index, id, error.

  def jobs():
    for index, number, line in _lines():
      if index not in done:
        job, name, error = _job(index, number, line)
        taken.append((index, name, error))
        yield job

  many = generator.generate_many(
    jobs(),
    batch_size=_BATCH_SIZE.value,
    context=_CONTEXT.value,
    reading=_READING.value,
    in_order=_IN_ORDER.value,
    tree_sizes=tree_sizes,
    stop=options.stop(),
    **options.decoding(),
    **options.constraint(),
  )
  begin, tokens, forwards = time.perf_counter(), 0, 0
  with tqdm.tqdm(
    desc='prompts', total=total, initial=len(done), unit='', file=sys.stderr
  ) as progress:
    for completion in many:
      index, name, error = taken[completion.index]
      output.add(
        _row(index, name, error or completion.error, completion.result)
      )
      if completion.result is not None:
        tokens += completion.result.stats.new_tokens
        forwards += completion.result.stats.target_forwards
        rate = tokens / (time.perf_counter() - begin)
        progress.set_postfix(
          {
            'tokens/s': f'{rate:.1f}',
            'block efficiency': f'{tokens / max(forwards, 1):.2f}',
          }
        )
      progress.update()


if __name__ == '__main__':
  command_line.run(main)
