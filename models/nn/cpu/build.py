"""Compiles the kernels on first use, and makes XLA know their functions."""

from collections.abc import Sequence
from concurrent import futures
import ctypes
import functools
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import jax
import jaxlib

from specdec.models import user_cache
from specdec.text import whole_files

_FOLDER = pathlib.Path(__file__).parent
_UNITS = sorted(_FOLDER.glob('*.cc'))
_SOURCES = *_UNITS, *sorted(_FOLDER.glob('*.h'))
_NATIVE = (
  ('-mcpu=native',)
  if platform.machine() in ('aarch64', 'arm64')
  else (
    '-march=native',
    # For AMD's processors GCC would fuse the products and sums of some loops
    # and not of others, so that the same sum had other bits there.
    '--param=avoid-fma-max-bits=0',
    # Products of blocks compile in half the time, to the same code.
    '--param=max-combine-insns=2',
  )
)
# Those for any processor.
COMMON_FLAGS = (
  '-std=c++17',
  '-O2',  # The same speed; -O3 compiles five times as long with AVX2.
  '-ffp-contract=fast',
  '-fno-math-errno',
  '-fno-trapping-math',
  '-Wno-psabi',
  '-fPIC',
)
FLAGS = (*_NATIVE, *COMMON_FLAGS)
# The names of what XLA calls, as the sources define them.
_FUNCTIONS = tuple(
  name
  for unit in _UNITS
  for name in re.findall(r'HANDLER_SYMBOL\(\s*(\w+)', unit.read_text())
)


def _processor() -> str:
  """The processor's name and features, which the flag `native` looks at."""
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if not cpuinfo.exists():
    return platform.version()  # The name of macOS's kernel has the chip.
  kinds = ('model name', 'flags', 'Features', 'CPU part')
  lines = cpuinfo.read_text().splitlines()
  return '\n'.join(sorted({line for line in lines if line.startswith(kinds)}))


def _compile(command: Sequence[str], scratch: pathlib.Path) -> pathlib.Path:
  """Compiles all units at the same time, and links them."""
  run = functools.partial(subprocess.run, check=True, capture_output=True)
  objects = [scratch / f'{unit.stem}.o' for unit in _UNITS]

  def compile_unit(unit: pathlib.Path, made: pathlib.Path) -> None:
    run([*command, '-c', unit, '-o', made])

  with futures.ThreadPoolExecutor() as pool:
    tuple(pool.map(compile_unit, _UNITS, objects))  # Raises their errors.
  library = scratch / 'kernels.so'
  run([*command, '-shared', *objects, '-o', library])
  return library


def _command(compiler: str) -> list[str]:
  """The words of a compiler; the name of a program may have spaces."""
  return [compiler] if shutil.which(compiler) else shlex.split(compiler)


def _digest(*contents: bytes) -> str:
  return whole_files.digest(b'\0'.join(contents)).hex()


def compile_library(
  compiler: str, folder: pathlib.Path, flags: tuple[str, ...] = FLAGS
) -> pathlib.Path:
  """Compiles the kernels unless the folder has them, whole.

  The name of the file has a digest of all that it depends on and one of its
  content. The content is what the linker has written: macOS does not load what
  was changed after it was signed. The file is put in place in one step, so
  several processes may compile at once.

  Args:
    compiler: a C++ compiler, and arguments if need be, such as `ccache g++`.
    folder: where the library is kept.
    flags: of the compiler.

  Raises:
    OSError: the compiler cannot be run or the folder not written.
    ValueError: a quote in its arguments is not closed.
    subprocess.CalledProcessError: it does not compile.
  """
  include = pathlib.Path(jaxlib.__file__).with_name('include')
  program, *arguments = _command(compiler)
  flags = (*arguments, *flags)
  version = subprocess.run(
    [program, *arguments, '--version'], capture_output=True, check=True
  ).stdout
  contents = (
    *(source.read_bytes() for source in _SOURCES),
    version,
    ' '.join(flags).encode(),
    _processor().encode(),
    jaxlib.__version__.encode(),
  )
  name = f'kernels-{_digest(*contents)}'
  # Loading a file that was cut would end the process with a bus error.
  for library in folder.glob(f'{name}-*.so'):
    if library.stem == f'{name}-{_digest(library.read_bytes())}':
      return library
  print(
    f'Compiling the CPU kernels with {compiler}, once, for some 20 seconds.',
    file=sys.stderr,
  )
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder) as scratch:
    command = [program, *flags, '-isystem', str(include)]
    made = _compile(command, pathlib.Path(scratch))
    return made.replace(folder / f'{name}-{_digest(made.read_bytes())}.so')


def register(library: pathlib.Path, suffix: str = '') -> ctypes.CDLL:
  """Loads a compiled library, and makes its functions known to XLA.

  Args:
    library: of `compile_library`.
    suffix: appended to their names, which a process may register only once.
  """
  loaded = ctypes.CDLL(str(library))
  for name in _FUNCTIONS:
    function = jax.ffi.pycapsule(getattr(loaded, name))
    jax.ffi.register_ffi_target(name + suffix, function, platform='cpu')
  return loaded


def find_compiler() -> str | None:
  """The C++ compiler to use: the variable `CXX`, or one on the path."""
  stated = os.environ.get('CXX', '').strip()
  return stated or shutil.which('g++') or shutil.which('c++')


@functools.cache
def loaded() -> ctypes.CDLL | None:
  """The kernels, compiled and registered; None, with a line, if that fails.

  The variable `SPECDEC_CXXFLAGS` has further flags, say for another processor.
  """
  if jax.default_backend() != 'cpu':
    return None
  compiler = find_compiler()
  reason = 'there is no C++ compiler (g++)'
  try:
    if compiler is not None:
      flags = *FLAGS, *shlex.split(os.environ.get('SPECDEC_CXXFLAGS', ''))
      folder = user_cache.folder('kernels')
      return register(compile_library(compiler, folder, flags))
  except (OSError, ValueError, AttributeError) as error:
    reason = f'{compiler}: {error}'
  except subprocess.CalledProcessError as error:
    lines = error.stderr.decode(errors='replace').strip().splitlines()
    reason = f'{compiler} failed: {lines[0] if lines else error}'
  print(
    f'CPU kernels are off, which is about half as fast: {reason}.',
    file=sys.stderr,
  )
  return None


def is_available() -> bool:
  """Whether there are kernels, see `loaded`."""
  return loaded() is not None


def row_cost() -> float:
  """The time that each row after the first adds to a forward, over the first's.

  It was measured for the instructions that the kernels have (docs/cpu.md). 0:
  there are no kernels.
  """
  kernels = loaded()
  return 0.0 if kernels is None else kernels.specdec_row_cost() / 1000
