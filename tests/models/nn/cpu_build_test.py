"""How the kernels for CPU are compiled and kept, and run under sanitizers."""

import functools
import os
import pathlib
import platform
import shutil
import subprocess
import sys

import jaxlib
import pytest

from specdec.models.nn.cpu import build

pytestmark = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)


def test_without_a_compiler_xla_computes(monkeypatch, capsys):
  monkeypatch.setattr(build.shutil, 'which', lambda name: None)
  monkeypatch.delenv('CXX', raising=False)
  assert build.loaded.__wrapped__() is None
  assert 'there is no C++ compiler' in capsys.readouterr().err
  for compiler in ('/nowhere/g++', 'nocache g++ -m64', 'g++ "-m64'):
    monkeypatch.setenv('CXX', compiler)
    assert build.loaded.__wrapped__() is None
    assert f'{compiler}: ' in capsys.readouterr().err


def test_a_compiler_may_have_arguments(monkeypatch, tmp_path):
  """As `ccache g++`, and the compiler of conda; it may lie anywhere."""
  spaced = tmp_path / 'my tools' / 'g++'
  spaced.parent.mkdir()
  spaced.symlink_to(shutil.which('g++'))
  commands = []

  def run(command, **kw):
    commands.append([str(word) for word in command])
    if '-o' in command:
      command[-1].write_bytes(bytes(64))
    return subprocess.CompletedProcess(command, 0, stdout=b'g++ 1')

  monkeypatch.setattr(build.subprocess, 'run', run)
  libraries = []
  for compiler, words in (
    ('g++', ['g++']),
    ('env A=b g++', ['env', 'A=b', 'g++']),
    ("g++ '--sysroot=/a b'", ['g++', '--sysroot=/a b']),
    (str(spaced), [str(spaced)]),
  ):
    monkeypatch.setenv('CXX', f' {compiler} ')
    assert build.find_compiler() == compiler
    libraries.append(build.compile_library(compiler, tmp_path))
    assert commands
    assert all(command[: len(words)] == words for command in commands)
    commands.clear()
  assert libraries[0] == libraries[3]  # Other arguments make another library.
  assert len({*libraries}) == 3


@pytest.mark.parametrize(
  'damage', [lambda content: content[:40], lambda content: b'x' + content[1:]]
)
def test_a_library_is_compiled_once_for_its_flags(
  damage, monkeypatch, tmp_path
):
  """And again where the file is not what was written."""
  linked = []

  def run(command, **kw):
    if '-o' in command:
      assert not command[-1].exists()
      command[-1].write_bytes(bytes(64))
      linked.extend({'-shared'} & {*command})
    return subprocess.CompletedProcess(command, 0, stdout=b'g++ 1')

  monkeypatch.setattr(build.subprocess, 'run', run)
  make = functools.partial(build.compile_library, 'g++', tmp_path)
  library = make()
  assert make() == library != make(flags=('-O2',))
  assert len(linked) == 2
  whole = library.read_bytes()
  library.write_bytes(damage(whole))
  assert make() == make() == library
  assert len(linked) == 3
  assert library.read_bytes() == whole == bytes(64)


@pytest.mark.long
def test_random_calls_read_and_write_in_bounds(tmp_path):
  """In a process of its own, under the sanitizers of g++."""
  libraries = [
    subprocess.check_output(
      ['g++', f'-print-file-name=lib{name}.so'], text=True
    )
    for name in ('asan', 'ubsan')
  ]
  preload = ' '.join(path.strip() for path in libraries)
  command = [sys.executable, 'tests/cpu_calls.py', tmp_path, '2000']
  options = {'ASAN_OPTIONS': 'detect_leaks=0', 'LD_PRELOAD': preload}
  done = subprocess.run(
    command, env=os.environ | options, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert 'all 2000 calls' in done.stdout
  assert 'runtime error' not in done.stderr


@pytest.mark.long
def test_threads_wait_for_what_others_write(tmp_path):
  """A program of its own, under the sanitizer of g++ for threads."""
  program = tmp_path / 'threads'
  sources = f'-I{pathlib.Path(build.__file__).parent}', 'tests/threads.cc'
  flags = *build.FLAGS, '-O1', '-fsanitize=thread', '-pthread'
  subprocess.run(['g++', *flags, *sources, '-o', program], check=True)
  done = subprocess.run([program], capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr


def _digests(command, program, emulator=()):
  """Compiles the program that prints digests of all results, and runs it."""
  source = pathlib.Path('tests/kernels.cc')
  include = pathlib.Path(jaxlib.__file__).with_name('include')
  folders = f'-I{pathlib.Path(build.__file__).parent}', '-isystem', include
  subprocess.run([*command, *folders, source, '-o', program], check=True)
  done = subprocess.run(
    [*emulator, program], capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stdout + done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) > 200
  return lines


@pytest.mark.long
def test_on_arm_the_bits_are_those_of_the_plain_loop(tmp_path):
  """With both of its products of bytes, compiled for ARM and emulated."""
  tools = 'aarch64-linux-gnu-g++', 'qemu-aarch64'
  if not all(map(shutil.which, tools)):
    pytest.skip(f'{" and ".join(tools)} must be installed')
  compiler, emulator = tools
  plain, *others = (
    _digests(
      [compiler, f'-march={arch}', '-static', *build.COMMON_FLAGS],
      tmp_path / arch,
      [emulator],
    )
    for arch in ('armv8-a', 'armv8.2-a+dotprod', 'armv8.6-a')
  )
  for other in others:
    assert other == plain


# A feature that a processor of x86 must have, and flags that choose it alone.
_INSTRUCTIONS = {
  'avx2': ('-mno-avx512f', '-mno-avxvnni'),
  'avx_vnni': ('-mno-avx512f', '-mavxvnni'),
  'avx512bw': ('-mno-avx512vnni', '-mno-avxvnni'),
  'avx512_vnni': (),
}


@pytest.mark.long
def test_the_bits_are_those_of_the_plain_loop(tmp_path):
  """With the instructions that the processor has."""
  if platform.machine() != 'x86_64':
    pytest.skip('instructions of x86')
  features = pathlib.Path('/proc/cpuinfo').read_text().split()
  compiler = [build.find_compiler(), *build.FLAGS]
  plain = _digests([*compiler, '-mno-avx2', '-mfma'], tmp_path / 'plain')
  for name, flags in _INSTRUCTIONS.items():
    if name in features:
      assert _digests([*compiler, *flags], tmp_path / name) == plain, name
