"""Starts every script, and reports bad input in one line."""

from collections.abc import Callable
import os
import pathlib
import sys

from absl import app
from absl import logging

# Without it transformers advises to install torch when it is imported; only its
# configs and tokenizers are used here.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

# Bad values, files that cannot be written, integers of too many digits, and
# training that diverges.
_BAD_INPUT = (ValueError, OSError, OverflowError, FloatingPointError)


def run(main: Callable[[], None]) -> None:
  """`app.run` that reports bad input in one line instead of a traceback.

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

  logging.set_verbosity(logging.WARNING)  # JAX logs the backends it lacks.
  app.run(checked)
