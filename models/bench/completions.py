"""HumanEval (Chen et al. 2021, arXiv 2107.03374): completions and their tests.

A completion is correct if the task's tests pass in a process of their own. That
process has limits of time, memory and file size, a temporary folder to itself
and no network, but it is not a sandbox: it runs what a model wrote, as the user
who started it.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import secrets
import subprocess
import sys
import tempfile
from typing import Any

from specdec import checks
from specdec import text_files

STOPS = ('\nclass ', '\ndef ', '\n#', '\nif ', '\nprint(', '\n@', '\n```')
"""What ends a completion: the function ends before it (section 2.1)."""

# Runs a program that it reads, then prints a word that the program cannot know.
# Linux has a network namespace for a process that may make one; everywhere
# else sockets cannot be made from Python.
_RUNNER = """
import ctypes, resource, socket, sys
names, word = ('RLIMIT_CPU', 'RLIMIT_AS', 'RLIMIT_FSIZE'), sys.stdin.readline()
for name, limit in zip(names, map(int, sys.argv[1:])):
  resource.setrlimit(getattr(resource, name), (limit, limit))
try:
  ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)
except (AttributeError, OSError):
  pass
def refuse(*args, **kw):
  raise OSError('there is no network here')
socket.socket = socket.create_connection = refuse
program, out = sys.stdin.read(), sys.stdout
exec(compile(program, 'completion', 'exec'), {'__name__': '__main__'})
print(word, file=out)
"""


@dataclasses.dataclass(frozen=True)
class Problem:
  """A task of the file."""

  task_id: str
  prompt: str
  entry_point: str  # The name of the function.
  test: str  # Defines `check(function)`.


def read_problems(path: pathlib.Path) -> list[Problem]:
  """Reads a file of one JSON object per line.

  Raises:
    ValueError: a line lacks a key, or two tasks have one id; names the line.
  """
  names = [field.name for field in dataclasses.fields(Problem)]
  problems: dict[str, Problem] = {}
  for number, line in text_files.lines(path):
    if not line.strip():
      continue
    try:
      found = json.loads(line)
      problem = Problem(**{name: found[name] for name in names})
      for name in names:
        checks.check_text(name, getattr(problem, name))
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f'{path}, line {number}: expected a JSON object with the keys'
        f' {", ".join(names)}: {error!r}'
      ) from error
    if problem.task_id in problems:
      raise ValueError(f'{path}, line {number}: {problem.task_id} comes twice')
    problems[problem.task_id] = problem
  if not problems:
    raise ValueError(f'{path} has no tasks')
  return list(problems.values())


def cut(completion: str) -> str:
  """A completion up to the first of `STOPS`."""
  found = [completion.find(stop) for stop in STOPS]
  return completion[: min((at for at in found if at >= 0), default=None)]


def run_tests(
  problem: Problem,
  completion: str,
  *,
  seconds: float = 10.0,
  megabytes: int = 1024,
) -> str:
  """Runs the tests of a task on a completion, which is code that a model wrote.

  Args:
    problem: the task.
    completion: what follows its prompt.
    seconds: limit of the whole process.
    megabytes: limit of its memory.

  Returns:
    `passed`, `timed out`, or the last line of the error.
  """
  program = (
    f'{problem.prompt}{completion}\n\n{problem.test}\n\n'
    f'check({problem.entry_point})\n'
  )
  word = secrets.token_hex()
  limits = [str(int(seconds) + 1), str(megabytes << 20), str(1 << 20)]
  with tempfile.TemporaryDirectory() as folder:
    # The limit of a file's size holds for what is printed, too.
    out, errors = (pathlib.Path(folder) / name for name in ('out', 'errors'))
    try:
      with out.open('wb') as stdout, errors.open('wb') as stderr:
        child = subprocess.run(
          [sys.executable, '-I', '-c', _RUNNER, *limits],
          input=f'{word}\n{program}'.encode(errors='replace'),
          cwd=folder,
          env={'HOME': folder, 'OPENBLAS_NUM_THREADS': '1'},
          stdout=stdout,
          stderr=stderr,
          timeout=seconds,
          check=False,
        )
    except subprocess.TimeoutExpired:
      return 'timed out'
    printed = out.read_text(errors='replace')
    lines = errors.read_text(errors='replace').strip().splitlines()
  if child.returncode == 0 and printed.rstrip().endswith(word):
    return 'passed'
  return lines[-1] if lines else f'ended with status {child.returncode}'


def summary(
  rows: Sequence[dict[str, Any]],
  methods: Sequence[str],
  problems: Sequence[Problem],
) -> list[dict[str, Any]]:
  """A row per method: tasks, pass@1, and tasks whose tokens differ.

  They are compared with those of the first method.
  """
  wanted = {one.task_id for one in problems}
  by_method: dict[str, dict[str, dict[str, Any]]] = {
    method: {
      row['task_id']: row
      for row in rows
      if row['method'] == method and row['task_id'] in wanted
    }
    for method in methods
  }
  first = by_method[methods[0]]
  found = []
  for method, own in by_method.items():
    passed = sum(row['result'] == 'passed' for row in own.values())
    found.append(
      {
        'method': method,
        'tasks': len(own),
        'passed': passed,
        'pass@1': passed / max(len(own), 1),
        'other tokens': sum(
          row['tokens'] != first[task]['tokens']
          for task, row in own.items()
          if task in first
        ),
        'tokens': sum(len(row['tokens']) for row in own.values()),
        'seconds': round(sum(row['seconds'] for row in own.values()), 1),
      }
    )
  return found
