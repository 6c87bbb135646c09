"""Absurd input ends in one clear line, most of it before a model is loaded."""

import io
import itertools
import pathlib
import re
import subprocess
import sys
import time
from unittest import mock

import command_lines
import jax
import numpy as np
import pytest
import refusals
import tiny_drafters

import specdec
from specdec import memory
from specdec.models import waiting
from specdec.models.nn import table_model
from specdec.models.text import generator as generator_lib

_TESTS = pathlib.Path(__file__).parents[2]
_SCRIPTS = sorted(
  path.name
  for path in (_TESTS.parent / 'scripts').glob('*.py')
  if 'command_line.run' in path.read_text('utf-8')
)


def test_flags():
  """The line has the flag, too."""
  for flag, message in refusals.of('models/text', 'flag'):
    line = command_lines.refusal('generate.py', flag)
    assert flag.partition('=')[0].lstrip('-') in line
    assert re.search(message, line)


def test_nothing_heavy_is_imported_before_flags_are_checked():
  """transformers and torch take seconds, and a user would wait.

  The flags of `train.py` are fields of what trains.
  """
  quick = [script for script in _SCRIPTS if script != 'train.py']
  program = (
    f'import sys; sys.path.insert(0, {str(_TESTS)!r}); import command_lines\n'
    f'runs = [(one, "--no_such_flag") for one in {quick!r}]\n'
    "for script, flag in [*runs, ('generate.py', '--width=999999')]:\n"
    '  ended = command_lines.run(script, flag)\n'
    '  assert ended.code == 2, (script, ended)\n'
    "  for name in ('transformers', 'torch', 'flax.nnx'):\n"
    '    assert name not in sys.modules, (script, name)\n'
  )
  ended = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=False
  )
  assert ended.returncode == 0, ended.stderr


def test_a_missing_device_is_one_line(monkeypatch):
  fail = mock.Mock(side_effect=RuntimeError('initialize\nbackend'))
  monkeypatch.setattr(generator_lib, 'load', fail)
  flags = '--method=plain', '--draft=none', '--prompt=x', '--dtype=float32'
  # Another error stays one.
  with pytest.raises(RuntimeError, match='initialize'):
    command_lines.run('generate.py', *flags)
  monkeypatch.setattr(jax, 'devices', fail)
  line = command_lines.refusal('generate.py', *flags)
  assert 'JAX finds no device of JAX_PLATFORMS=cpu (initialize); unset' in line
  monkeypatch.setattr(jax, 'devices', mock.Mock(side_effect=AssertionError))
  line = command_lines.refusal('generate.py', *flags)
  assert 'JAX_PLATFORMS=cpu (no such plugin is installed); unset' in line


def _refused_file(path, content, *flags):
  path.write_bytes(content)
  flag = f'--prompt_file={path}'
  line = command_lines.refusal('generate.py', flag, *flags)
  assert flag in line
  return line


def test_files_of_prompts(tmp_path):
  for name, content, message in (
    ('a.jsonl', b'', 'has 0 prompts'),
    ('a.jsonl', b'{"prompt": "a"\n', 'line 1'),
    ('a.jsonl', b'\n{"prompt": "ab\\ud800"}\n', 'line 2'),
    ('a.jsonl', b'[' * 100_000, 'line 1'),
    ('a.txt', b'\xff\xfe', 'cannot be read'),
    ('a.txt', b'caf\xc3\xa9\n\r\ncaf\xe9', 'line 3 has the byte 0xe9'),
    ('a.JSONL', b'\xef\xbb\xbf\n5', 'line 2'),
    ('a.ndjson', b'a', 'line 1'),
  ):
    assert message in _refused_file(tmp_path / name, content)


def test_files_of_questions(tmp_path):
  file, good = tmp_path / 'a.jsonl', '{"category": "b", "turns": ["a"]}'
  for line, message in (
    ('{"turns": ["a"]}', 'line 2: expected an object with a'),
    ('{"category": 5, "turns": ["a"]}', 'line 2: expected an object with a'),
    ('{"prompt": "a", "category": "b"}', 'line 2: expected turns'),
    (good.replace('["a"]', '["a", ""]'), 'line 2: expected turns, a list'),
    (good.replace('"a"', r'"\ud800"'), 'line 2'),
    (good, "--categories=b,c: there is no 'c'; the categories are b"),
  ):
    file.write_text(f'{good}\n{line}\n')
    flags = f'--prompt_file={file}', '--categories=b,c'
    refused = command_lines.refusal('benchmark.py', *flags)
    assert message in refused
    assert str(file) in refused or line == good
  file.write_text('{"prompt": "a"}')
  refused = command_lines.refusal('benchmark.py', *flags)
  assert '--categories=b,c: --prompt_file=' in refused


def test_a_call_that_does_not_fit_is_refused_before_it_is_traced(monkeypatch):
  model = table_model.table_model(
    np.zeros((8, 8), np.float32), max_positions=64
  )
  tree = tiny_drafters.Settings(num_nodes=8, width=3, rounds=2, capacity=24)
  drafter = tiny_drafters.model(model, tree)
  # A table of 8 x 8 numbers, which both have; 3 rows, 8 nodes, 8 tokens; all of
  # 4 bytes.
  needed = 8 * 8 * 4 + 3 * 8 * 8 * 4
  start = mock.Mock(side_effect=RuntimeError('traced'))
  monkeypatch.setattr(specdec.loop, 'start', start)
  refused = r'has 0\.0 GB.*the logits.*num_nodes'
  for available, error in (
    (needed - 1, pytest.raises(ValueError, match=refused)),
    (needed, pytest.raises(RuntimeError, match='traced')),
  ):
    monkeypatch.setattr(memory, 'device_bytes', lambda size=available: size)
    key, prompts = jax.random.key(0), [[1, 2]] * 3
    with error:
      specdec.Decoding(model, key, prompts, drafter=drafter, max_new_tokens=8)


def test_waiting_is_announced_once_it_takes_long(capsys, monkeypatch):
  """Large checkpoints have a bar on a terminal."""
  for patience, seconds, said in ((10.0, 0.0, ''), (0.01, 0.2, 'a ...\n')):
    with waiting.announced('a', patience=patience):
      time.sleep(seconds)
    assert capsys.readouterr().err == said
  for is_terminal, size in itertools.product((False, True), (10**8, 10**10)):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda is_=is_terminal: is_)
    assert [*waiting.progress(iter('abc'), 'reading', 3, size)] == [*'abc']
    has_bar = is_terminal and size == 10**10
    assert ('reading' in capsys.readouterr().err) == has_bar


def test_a_terminal_without_a_character_shows_a_question_mark(
  tmp_path, monkeypatch
):
  stream = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  redirect = lambda _: mock.patch.object(sys, 'stdout', stream)
  monkeypatch.setattr(command_lines.contextlib, 'redirect_stdout', redirect)
  command_lines.run('generate.py', f'--prompt_file={tmp_path / "missing"}')
  stream.write('\U0001f600')
  stream.flush()
  assert stream.buffer.getvalue() == b'?'
