"""Files and folders that only one process may write at a time."""

import functools
import pathlib
from typing import Any

from absl import logging

_OF_FOLDER = '.lock'  # An empty file, which is locked in place of its folder.


@functools.cache  # It keeps the file open, and so the lock.
def _lock(path: pathlib.Path) -> Any:
  """The open file; raises BlockingIOError if another process has locked it."""
  file = path.open('ab')
  try:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.close()
    raise
  except (ImportError, OSError) as error:  # Not all systems have such locks.
    logging.warning('%s is not locked against other runs: %s', path, error)
  return file


def hold(path: pathlib.Path, remedy: str) -> None:
  """Locks a file or folder until this process ends.

  However the process ends, the system removes the lock. A process may lock the
  same file again. Devices and pipes are not locked.

  Args:
    path: of a folder that exists, or of a file, which is made if need be.
    remedy: what to do if another process has the lock.

  Raises:
    OSError: the file cannot be made.
    ValueError: another process has the lock; names the file.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  file = path / _OF_FOLDER if path.is_dir() else path
  if file.exists() and not file.is_file():
    return
  try:
    _lock(file.resolve())
  except BlockingIOError as error:
    raise ValueError(
      f'{path} is being written by another run; wait until it ends, or {remedy}'
    ) from error
