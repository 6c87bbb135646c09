"""Completions are cut, tested within limits, and counted."""

import json
import pathlib
import re

import pytest

from models.bench import completions
from models.bench.completions import Problem
from models.bench.completions import run_tests

_PROBLEM = Problem(
  task_id='T/0',
  prompt='def double(x):\n  """Twice x."""\n',
  entry_point='double',
  test='def check(f):\n  assert f(2) == 4\n  assert f(-1) == -2\n',
)


@pytest.mark.parametrize(
  ('completion', 'result'),
  [
    ('  return 2 * x', 'passed'),
    ('  return x + 2', 'AssertionError'),
    ('  return y', "NameError: name 'y' is not defined"),
    ('  return 2 * x)', r'SyntaxError: unmatched'),
    ('  print("passed")\n  raise SystemExit(0)', 'ended with status 0'),
    ('  import os\n  os._exit(0)', 'ended with status 0'),
    ('  return 2 * x if bytearray(1 << 33) else 0', 'MemoryError'),
    ('  import socket\n  socket.socket()', 'OSError: there is no network'),
    ('  print("a" * (1 << 21), flush=True)', 'OSError.*File too large'),
    ('  open("f", "w").write("a" * (1 << 21))', 'OSError.*File too large'),
  ],
)
def test_what_becomes_of_a_completion(completion, result):
  found = run_tests(_PROBLEM, completion, megabytes=512)
  assert re.match(result, found), found


def test_it_is_stopped_and_its_folder_goes(tmp_path):
  loop = '  while True:\n    pass'
  assert run_tests(_PROBLEM, loop, seconds=1) == 'timed out'
  mark = tmp_path / 'mark'
  code = (
    '  import os, pathlib\n'
    f'  pathlib.Path({str(mark)!r}).write_text(os.getcwd())\n'
    '  pathlib.Path("left").write_text("x")\n  return 2 * x'
  )
  assert run_tests(_PROBLEM, code) == 'passed'
  assert not pathlib.Path(mark.read_text()).exists()


def test_a_completion_ends_where_the_function_does():
  one, branch = '  return 1', '  if x:\n    print(1)\n'
  assert completions.cut(f'{one}\n\ndef other():') == f'{one}\n'
  assert completions.cut(f'{one}\n# next\ndef f') == one
  for whole in (branch, ''):
    assert completions.cut(whole) == whole


def test_the_summary_compares_methods():
  row = {'task_id': 'T/0', 'seconds': 0.5}
  rows = [
    row | {'method': 'plain', 'tokens': [1, 2], 'result': 'passed'},
    row | {'method': 'staged', 'tokens': [1, 3], 'result': 'AssertionError'},
    # Of a run with more tasks.
    row | {'task_id': 'T/1', 'method': 'plain', 'tokens': [], 'result': 'x'},
  ]
  plain, staged = completions.summary(rows, ['plain', 'staged'], [_PROBLEM])
  assert (plain['pass@1'], plain['other tokens']) == (1.0, 0)
  assert (staged['pass@1'], staged['other tokens']) == (0.0, 1)


def test_files_of_tasks(tmp_path):
  path, task = tmp_path / 'tasks.jsonl', vars(_PROBLEM)
  for lines, message in (
    (['{"task_id": "a"}'], 'line 1: expected a JSON object .* KeyError'),
    (['3'], 'line 1: expected a JSON object'),
    ([], 'has no tasks'),
    ([json.dumps(task)] * 2, 'line 2: T/0 comes twice'),
  ):
    path.write_text('\n'.join(lines))
    with pytest.raises(ValueError, match=message):
      completions.read_problems(path)
  path.write_text(json.dumps(task | {'canonical_solution': ''}))
  assert completions.read_problems(path) == [_PROBLEM]
