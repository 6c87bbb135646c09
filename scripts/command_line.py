"""Starts every script, and reports bad input in one line."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import gc
import io
import logging as standard_logging
import os
import pathlib
import signal
import sys
from typing import Any
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging

_COMPILATION_CACHE = flags.DEFINE_string(
  'compilation_cache',
  None,
  'folder that keeps compiled programs for the next run, or none; default:'
  ' JAX_COMPILATION_CACHE_DIR, else ~/.cache/specdec/programs',
)
_CACHE_BYTES = 2 << 30  # The default folder's size; unused programs go first.

_REFUSED, _INTERRUPTED = 2, 130  # Exit statuses; for Ctrl-C as in shells.

# Bad values, files that cannot be written, integers of too many digits, and
# training that diverges.
_BAD_INPUT = (ValueError, OSError, OverflowError, FloatingPointError)


@contextlib.contextmanager
def interrupts() -> Iterator[list[bool]]:
  """Ctrl-C does not end the program, but makes the yielded list true.

  A step of decoding consumes its state, so it must not be left half done.
  """
  seen: list[bool] = []
  before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
  try:
    yield seen
  finally:
    signal.signal(signal.SIGINT, before)


def _keep_programs() -> None:
  """Lets JAX keep compiled programs on disk; processes may share the folder."""
  import jax

  from specdec.models import user_cache

  folder = _COMPILATION_CACHE.value
  if folder is None and 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    folder = str(user_cache.folder('programs'))
    jax.config.update('jax_compilation_cache_max_size', _CACHE_BYTES)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
  if folder is not None:
    folder = None if folder == 'none' else folder
    jax.config.update('jax_compilation_cache_dir', folder)


def _check_folder() -> None:
  """Refuses a file as the folder: JAX would warn about every program."""
  folder = _COMPILATION_CACHE.value
  path = pathlib.Path(folder or 'none')
  if folder not in (None, 'none') and path.exists() and not path.is_dir():
    raise ValueError(
      f'--compilation_cache={folder} is not a folder; give one, or none'
    )


_CHECKS: list[Callable[[], None]] = [_check_folder]


def checked_first(check: Callable[[], None]) -> Callable[[], None]:
  """Registers a check of flags, which `run` calls before anything else.

  It raises ValueError. Its imports must take less than a second.
  """
  _CHECKS.append(check)
  return check


_FIRST: list[Callable[[], None]] = []


def before_main(function: Callable[[], None]) -> Callable[[], None]:
  """Registers what `run` calls before `main`, with the flags parsed.

  It may raise ValueError.
  """
  _FIRST.append(function)
  return function


def _end(script: str, message: str, status: int) -> NoReturn:
  line = ' '.join(message.split())
  print(f'{pathlib.Path(script).name}: {line}', file=sys.stderr)
  sys.exit(status)


def _check_decoded(argument: str) -> None:
  """Refuses bytes that Python did not decode by the locale."""
  if any('\udc80' <= letter <= '\udcff' for letter in argument):
    raise ValueError(
      f'{argument!r:.80} has bytes that are no text in this locale; give UTF-8,'
      ' and set LC_ALL=C.UTF-8'
    )


def _parse(argv: Sequence[str]) -> list[str]:
  """Parses the flags; bad values end the script with one line."""
  try:
    for argument in argv:
      _check_decoded(argument)
    left = flags.FLAGS(argv)
    if len(left) > 1:
      raise ValueError(f'unexpected argument {left[1]!r}; see --help')
    for check in _CHECKS:
      check()
  except (flags.Error, *_BAD_INPUT) as error:
    _end(argv[0], str(error), _REFUSED)
  return left


def _no_device() -> str:
  """Why JAX has no device at all; '' if it has one."""
  import jax

  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:  # It asserts that one is.
    reason = (str(error).splitlines() or ['no such plugin is installed'])[0]
    return (
      f'JAX finds no device of JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS")}'
      f' ({reason}); unset the variable, or set it to cpu'
    )
  return ''


def define_option(
  name: str,
  option: Any,
  default: Any,
  text: str,
  least: int | None = None,
) -> flags.FlagHolder:
  """The flag of a `fields.Option`; `text` is its help, `least` of numbers."""
  if option.repeats:
    return flags.DEFINE_multi_string(name, default, text)
  if option.choices:
    return flags.DEFINE_enum(name, default, [*option.choices], text)
  if option.parser is int:
    return flags.DEFINE_integer(name, default, text, least)
  if option.parser is float:
    return flags.DEFINE_float(name, default, text, least)
  return flags.DEFINE_string(name, default, text)


def given(*names: str) -> dict[str, Any]:
  """The values of flags by their names."""
  return {name: flags.FLAGS[name].value for name in names}


def run(main: Callable[[], None]) -> None:
  """Calls `main` with the flags parsed; bad input and Ctrl-C print a line."""

  def checked(argv):
    try:
      _keep_programs()
      for function in _FIRST:
        function()
      main()
    except _BAD_INPUT as error:
      _end(argv[0], str(error), _REFUSED)
    except (AssertionError, RuntimeError):
      if reason := _no_device():
        _end(argv[0], reason, _REFUSED)
      raise
    except KeyboardInterrupt:
      _end(argv[0], 'interrupted; what is written is kept', _INTERRUPTED)

  if isinstance(sys.stdout, io.TextIOWrapper):
    # A terminal that lacks a character of a text shows a question mark.
    sys.stdout.reconfigure(errors='replace')
  # Tracing makes many objects that live on. Python would look for garbage among
  # them so often that short commands took noticeably longer.
  gc.set_threshold(50_000, 20, 20)
  logging.set_verbosity(logging.WARNING)  # JAX logs the backends it lacks.
  # A person reads the messages, so they have no time and no place of the code.
  logging.get_absl_handler().setFormatter(standard_logging.Formatter())
  app.run(checked, flags_parser=_parse)
