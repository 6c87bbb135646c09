r"""Completes HumanEval tasks, runs their tests and prints pass@1 by method.

python scripts/humaneval.py --tasks=HumanEval.jsonl --methods=plain,staged \
    --output=humaneval.jsonl --allow_generated_code

An interrupted run goes on where it was, with the same command.
"""

import hashlib
import pathlib
import time

from absl import flags
import command_line
import options

flags.adopt_module_key_flags(options)  # Listed by --help.

_TASKS = flags.DEFINE_string(
  'tasks', None, 'JSON lines with task_id, prompt, entry_point and test'
)
_NUM_TASKS = flags.DEFINE_integer(
  'num_tasks', None, 'the first of them; default: all', lower_bound=1
)
_METHODS = flags.DEFINE_list(
  'methods', ['plain', 'staged'], 'of plain, chain, tree, staged'
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'file of the results, one JSON object per line'
)
_ALLOW = flags.DEFINE_bool(
  'allow_generated_code',
  False,
  'run what the model wrote, in a process with limits of time and memory, but'
  ' with your rights',
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size',
  1,
  'tasks that are decoded at once',
  lower_bound=1,
  upper_bound=options.LARGEST_BATCH,
)
_TEST_SECONDS = flags.DEFINE_float(
  'test_seconds', 10.0, 'time limit of the tests of a task', lower_bound=0.1
)


def _settings(tasks: bytes) -> dict:
  settings = options.as_dict() | {
    'tasks': hashlib.blake2b(tasks, digest_size=16).hexdigest(),
    'dtype': options.dtype(),
    'models': options.model_digests(),
  }
  # A run may be given more methods and more tasks.
  return {
    name: value
    for name, value in settings.items()
    if name
    not in ('methods', 'num_tasks', 'batch_size', 'allow_generated_code')
  }


def main() -> None:
  import tqdm

  from models.bench import completions
  from models.bench import resumable
  from models.bench.record import rows_to_table
  from models.text.generator import load
  from models.text.many import Job

  if not _ALLOW.value:
    raise ValueError(
      '--allow_generated_code is needed: tests run code that the model wrote'
    )
  if _TASKS.value is None or _OUTPUT.value is None:
    raise ValueError('--tasks and --output are needed, see --help')
  if options.PLAN.value is not None:
    raise ValueError(
      f'--plan={options.PLAN.value} is not for this script; leave it out'
    )
  known = ('plain', 'chain', 'tree', 'staged')
  methods = list(dict.fromkeys(_METHODS.value))
  if not methods or {*methods} - {*known}:
    raise ValueError(
      f'--methods={",".join(_METHODS.value)}: choose from {", ".join(known)}'
    )
  path = pathlib.Path(_TASKS.value)
  problems = completions.read_problems(path)[: _NUM_TASKS.value]
  results = resumable.ResumableRows(
    pathlib.Path(_OUTPUT.value), _settings(path.read_bytes())
  )
  done = {(row['task_id'], row['method']) for row in results.rows}
  for method in methods:
    todo = [one for one in problems if (one.task_id, method) not in done]
    if not todo:
      continue
    generator = load(
      **options.models(), method=method, drafting=options.draft_settings()
    )
    jobs = [Job(prompt=one.prompt, seed=options.SEED.value) for one in todo]
    start = time.perf_counter()
    many = generator.generate_many(
      jobs,
      batch_size=_BATCH_SIZE.value,
      stop=completions.STOPS,
      **options.decoding(),
    )
    for found in tqdm.tqdm(many, desc=method, total=len(todo)):
      # Since the one before ended; their sum is that of all tasks.
      seconds, problem = time.perf_counter() - start, todo[found.index]
      row = {'task_id': problem.task_id, 'method': method}
      row |= {'seconds': round(seconds, 3)}
      if found.result is None or found.error:
        row |= {'tokens': [], 'completion': '', 'result': found.error}
      else:
        completion = completions.cut(found.result.text[0])
        row |= {
          'tokens': found.result.tokens[0],
          'completion': completion,
          'result': completions.run_tests(
            problem, completion, seconds=_TEST_SECONDS.value
          ),
        }
      results.add(row)
      start = time.perf_counter()
  print(rows_to_table(completions.summary(results.rows, methods, problems)))


if __name__ == '__main__':
  command_line.run(main)
