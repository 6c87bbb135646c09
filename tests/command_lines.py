"""Runs scripts in this process, because importing takes longer than running."""

import contextlib
import io
import pathlib
import runpy
import sys
from typing import NamedTuple
from unittest import mock

from absl import app
from absl import flags

_FOLDER = pathlib.Path(__file__).parents[1] / 'scripts'

app.define_help_flags()  # Once; the flags belong to no script.


class Ended(NamedTuple):
  """A script that has ended: its status, and what it printed."""

  code: int
  output: str
  errors: str


def run(script: str, *arguments) -> Ended:
  """Runs a script as a command line would; each run defines the flags again."""
  path = _FOLDER / script
  argv = [str(path), *map(str, arguments)]
  output, errors, code = io.StringIO(), io.StringIO(), 0
  try:
    with (
      mock.patch.object(sys, 'argv', argv),
      mock.patch.object(sys, 'path', [str(_FOLDER), *sys.path]),
      contextlib.redirect_stdout(output),
      contextlib.redirect_stderr(errors),
    ):
      runpy.run_path(str(path), run_name='__main__')
  except SystemExit as end:
    code = end.code or 0
  finally:
    # Modules of libraries stay, which are imported once.
    ours = [file.stem for file in _FOLDER.glob('*.py')]
    for module in (argv[0], *ours):
      for flag in [*flags.FLAGS.flags_by_module_dict().get(module, ())]:
        delattr(flags.FLAGS, flag.name)
    for module in ours:
      sys.modules.pop(module, None)
  return Ended(code, output.getvalue(), errors.getvalue())


def refusal(script: str, *arguments) -> str:
  """The one line in which a script refuses its arguments."""
  ended = run(script, *arguments)
  assert (ended.code, ended.output) == (2, ''), ended
  assert 'Traceback' not in ended.errors
  last = ended.errors.strip().splitlines()[-1]
  assert last.startswith(f'{script}: ')
  return last
