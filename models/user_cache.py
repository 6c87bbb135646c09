"""Where the library keeps what it need not make again."""

import os
import pathlib


def folder(name: str) -> pathlib.Path:
  """A folder of the user's cache, `~/.cache/specdec/NAME`.

  The variable `XDG_CACHE_HOME` takes the place of `~/.cache`. The folder is not
  made.
  """
  root = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(root) / 'specdec' / name
