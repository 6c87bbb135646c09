"""Several hosts: processes on this machine, each with two devices."""

import contextlib
import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import command_lines
import pytest
import quick
import tiny

from specdec.models.checkpoints import hub

_SCRIPTS = pathlib.Path(__file__).parents[2] / 'scripts'
_DEVICES = 2  # Devices of each host.
_PROMPTS = ('def f(x):', 'import os', 'a', 'if x is None', 'return [')


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """The flags of a tiny target and its draft, and a file of prompts."""
  folder = tmp_path_factory.mktemp('pair')
  shape = {'vocab_size': 4096, 'num_positions': 256, 'num_heads': 4}
  for name, width in (('target', 32), ('draft', 16)):
    module = tiny.module(width=width, seed=width, **shape)
    hub.save_pretrained(module, folder / name)
    for file in hub.locate('demo').path.glob('tokenizer*'):
      shutil.copy(file, folder / name)
  lines = [json.dumps({'prompt': prompt}) for prompt in _PROMPTS]
  (folder / 'prompts.jsonl').write_text('\n'.join(lines) + '\n')
  flags = [f'--target={folder}/target', f'--draft={folder}/draft']
  flags += [f'--prompt_file={folder}/prompts.jsonl', '--temperature=0.7']
  return [*flags, '--dtype=float32', '--method=chain', '--num_draft_tokens=2']


# Lines, also empty ones, of nothing but parts of what Gloo says of its peers:
# its threads write at the same time, and cut each other's lines.
_GLOO = re.compile(
  r'^(?:\[Gloo\] Rank|is connected to|peer ranks\.'
  r'|Expected number of connected peer ranks is :|[\d ])*\n',
  re.MULTILINE,
)


def _begin(script, arguments, *, devices=_DEVICES):
  environment = quick.environment(
    JAX_NUM_CPU_DEVICES=str(devices), JAX_CPU_COLLECTIVES_IMPLEMENTATION='gloo'
  )
  return subprocess.Popen(
    [sys.executable, _SCRIPTS / script, *arguments],
    **dict.fromkeys(('stdout', 'stderr'), subprocess.PIPE),
    text=True,
    env=environment,
  )


@contextlib.contextmanager
def _hosts(script, arguments):
  """Two processes; they are ended at the end."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  together = [f'--coordinator=localhost:{port}', '--num_processes=2']
  processes = [
    _begin(script, [*arguments, *together, f'--process_id={index}'])
    for index in range(2)
  ]
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.communicate()


def _together(script, arguments):
  """The output of the first host; the other prints nothing."""
  with _hosts(script, arguments) as processes:
    ended = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended[0][1]
  first, second = (_GLOO.sub('', output) for output, _ in ended)
  assert second == ''
  return first


def _alone(script, arguments):
  process = _begin(script, arguments, devices=2 * _DEVICES)
  output, errors = process.communicate()
  assert process.returncode == 0, errors
  return _GLOO.sub('', output)


def test_two_hosts_give_the_tokens_of_one(pair):
  arguments = [*pair, '--json', '--mesh=model:4', '--batch_size=2']
  arguments.append('--max_new_tokens=12')
  script = 'generate.py'
  tokens, expected = (
    json.loads(run(script, arguments))['tokens'] for run in (_together, _alone)
  )
  assert tokens == expected
  assert [*map(len, tokens)] == [12, 12]


@pytest.mark.long
def test_rows_of_two_hosts_and_one_output(pair, tmp_path):
  """Each host has half of the rows, and one of them writes."""
  rows = []
  for name, run in (('hosts', _together), ('host', _alone)):
    arguments = [*pair, '--mesh=data:2,model:2', '--batch_size=4']
    arguments += ['--max_new_tokens=9', '--context=64']
    file = tmp_path / name
    assert run('generate_many.py', [*arguments, f'--output={file}']) == ''
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    rows.append({row['index']: row['tokens'] for row in lines})
    assert len(lines) == len(_PROMPTS)
  assert rows[0] == rows[1]


@pytest.mark.long
@pytest.mark.parametrize('killed', [0, 1])
def test_a_host_that_dies_ends_the_other(pair, killed):
  seconds = 10
  arguments = [*pair, '--stream', '--mesh=model:4', '--max_new_tokens=190']
  arguments.append(f'--host_timeout={seconds}')
  with _hosts('generate.py', arguments) as processes:
    shown = ''
    while _PROMPTS[0] not in shown:  # Prompts have been read by then.
      shown += processes[0].stdout.read(1)
    processes[killed].send_signal(signal.SIGKILL)
    start = time.monotonic()
    _, errors = processes[1 - killed].communicate(timeout=120)
    assert time.monotonic() - start < 2 * seconds + 10
    assert processes[1 - killed].returncode != 0
  # Our message, or JAX's message where the first host was the coordinator.
  messages = ('this host or another one has failed', 'another task died')
  assert any(message in errors for message in messages), errors


_TWO = '--coordinator=a:1 --mesh=model:4 --num_processes=2'
_AUTO = '--coordinator=auto --mesh=model:4'


def test_flags_that_do_not_fit_together():
  for flags, message in (
    ('generate.py --process_id=1', '--process_id needs --coordinator'),
    ('generate.py --coordinator=a:1', '--coordinator needs --mesh'),
    ('generate.py --coordinator=a --mesh=model:4', 'expected host:port'),
    (f'generate.py {_TWO}', 'a --process_id less than that, got 2 and None'),
    (f'generate.py {_AUTO} --process_id=0', '--coordinator=auto finds --proc'),
    (f'generate.py {_AUTO} --plan=auto', '--plan=auto measures'),
    (f'chat.py --target=demo {_AUTO}', 'needs one host'),
  ):
    assert message in command_lines.refusal(*flags.split())
