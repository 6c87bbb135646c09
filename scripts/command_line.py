"""How every script here starts, and how it reports bad input."""

from collections.abc import Callable
import contextlib
import os
import pathlib
import sys
from typing import Any

from absl import app
from absl import logging

# Read when transformers is imported, which would else advise installing torch;
# only its configs and tokenizers are used here.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# Besides bad values: a file that cannot be written, a seed of too many digits,
# a training run that diverged.
_BAD_INPUT = (ValueError, OSError, OverflowError, FloatingPointError)


def run(main: Callable[[], None]) -> None:
  """`app.run`, with bad input reported in one line instead of a traceback.

  Args:
    main: called once the flags are parsed.
  """

  def checked(argv):
    if len(argv) > 1:
      raise app.UsageError(f'unexpected argument {argv[1]!r}')
    try:
      main()
    except _BAD_INPUT as error:
      message = ' '.join(str(error).split())
      print(f'{pathlib.Path(argv[0]).name}: {message}', file=sys.stderr)
      sys.exit(2)

  logging.set_verbosity(logging.WARNING)  # JAX lists the backends it lacks.
  app.run(checked)


def show(prompt: str, decoding: Any) -> Any:
  """Prints a text while it grows, until its end or Ctrl-C; its result."""
  print(prompt, end='', flush=True)
  with contextlib.suppress(KeyboardInterrupt):
    for new in decoding:
      print(new[0], end='', flush=True)
  return decoding.result()
