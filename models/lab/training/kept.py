"""Files and folders that a run keeps for the next one; damage is noticed.

Each is written completely or not at all. The file `NAME.blake2b` beside it has
the digest of its bytes, so that nothing is read that was cut, emptied or
changed since.
"""

from collections.abc import Callable
import hashlib
import pathlib
import shutil
from typing import Any

from models.lab.training import run_record


def _digest(path: pathlib.Path) -> bytes:
  """The digest of a file, or of the names and bytes of a folder's files."""
  total = hashlib.blake2b(digest_size=16)
  for file in sorted([path, *path.rglob('*')]):
    if file.is_file():
      total.update(f'{file.relative_to(path).as_posix()}\n'.encode())
      with file.open('rb') as opened:
        total.update(hashlib.file_digest(opened, 'blake2b').digest())
  return total.hexdigest().encode()


def _digest_file(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f'{path.name}.blake2b')


def remove(path: pathlib.Path) -> None:
  """Removes a file, or a folder with all that it contains, and its digest."""
  _digest_file(path).unlink(missing_ok=True)
  if path.is_dir():
    shutil.rmtree(path)
  path.unlink(missing_ok=True)


def save(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
  """Writes a file or folder, and its digest.

  Args:
    path: the file or folder. A damaged one is replaced.
    write: is called with a path beside it, with the same suffix, to write to.

  Raises:
    OSError: it cannot be written, for example because the disk is full.
  """

  def write_with_digest(partial: pathlib.Path) -> None:
    remove(partial)  # A run that was killed has left it.
    try:
      write(partial)
      found = _digest(partial)
      remove(path)
      # A digest without its file counts as nothing; a file without its digest
      # would count as damaged.
      _digest_file(path).write_bytes(found)
    except Exception as error:  # Every library has its own for a full disk.
      remove(partial)
      raise OSError(
        f'{path} cannot be written: {error}; if the disk is full, make room and'
        ' run again: what was written before is kept'
      ) from error

  run_record.save_whole(path, write_with_digest)


def is_whole(
  path: pathlib.Path,
  report: Callable[[str], None] = print,
  *,
  otherwise: str = 'it is made again',
) -> bool:
  """Whether a file or folder is there as it was written.

  Args:
    path: the file or folder.
    report: is called with a line if it is damaged.
    otherwise: what happens in that case, for the line.
  """
  if not path.exists():
    return False
  digest = _digest_file(path)
  if digest.exists() and digest.read_bytes() == _digest(path):
    return True
  report(f'{path} is damaged; {otherwise}')
  return False
