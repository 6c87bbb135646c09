"""The folder of files that the library need not make again."""

import functools
import os
import pathlib
import stat
import tempfile

from absl import logging


def folder(name: str) -> pathlib.Path:
  """A folder of the user's cache, `~/.cache/specdec/NAME`.

  The variable `XDG_CACHE_HOME` takes the place of `~/.cache`. Without it, and
  where `~/.cache` cannot be written, as without a home directory, it is a
  folder of the user's own beside temporary files, and a warning says so. The
  folder NAME is not made.
  """
  stated = os.environ.get('XDG_CACHE_HOME')
  return (pathlib.Path(stated, 'specdec') if stated else _root()) / name


@functools.cache
def _root() -> pathlib.Path:
  try:
    root = pathlib.Path('~/.cache/specdec').expanduser()
    root.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=root).close()
    return root
  except (OSError, RuntimeError) as error:  # `expanduser` found no home.
    reason = error
  root = pathlib.Path(tempfile.gettempdir()) / f'specdec-{os.getuid()}'
  root.mkdir(mode=0o700, exist_ok=True)
  found = root.lstat()
  # Files here are run, so nobody else may have made the folder.
  if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
    root = pathlib.Path(tempfile.mkdtemp(prefix='specdec-'))
  logging.warning(
    'the cache folder ~/.cache/specdec cannot be used (%s); %s is used.'
    ' XDG_CACHE_HOME names another one',
    reason,
    root,
  )
  return root
