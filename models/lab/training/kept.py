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

from specdec.text import whole_files

Writer = Callable[[pathlib.Path], Any]


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


def _write(path: pathlib.Path, partial: pathlib.Path, write: Writer) -> None:
  """Writes `partial`, which becomes a part of `path` when it is complete."""
  try:
    write(partial)
  except Exception as error:  # Every library has its own for a full disk.
    remove(partial)
    raise OSError(
      f'{path} cannot be written: {error}; if the disk is full, make room and'
      ' run again: what was written before is kept'
    ) from error


def save(path: pathlib.Path, write: Writer) -> None:
  """Writes a file or folder and its digest; replaces a damaged one.

  `write` is called with a path beside it, with the same suffix. What killed
  runs have left there is removed, so no other run may write in that folder.

  Raises:
    OSError: it cannot be written, for example because the disk is full.
  """

  def write_with_digest(partial: pathlib.Path) -> None:
    write(partial)
    digest = _digest(partial)
    remove(path)
    # A digest without its file counts as nothing, a file without its digest
    # would count as damaged.
    _digest_file(path).write_bytes(digest)

  for left in path.parent.glob('partial_*'):
    remove(left)
  whole_files.write(
    path, lambda partial: _write(path, partial, write_with_digest)
  )


def fill(folder: pathlib.Path, write: Writer) -> None:
  """Writes files into a folder, which may have others: all of them or none.

  `write` is called with an empty folder. Raises OSError as `save` does.
  """
  partial = folder / 'partial'
  remove(partial)  # A run that was killed has left it.

  def write_folder(partial: pathlib.Path) -> None:
    partial.mkdir(parents=True)
    write(partial)

  _write(folder, partial, write_folder)
  for file in sorted(partial.iterdir()):
    file.replace(folder / file.name)
  partial.rmdir()


def is_whole(
  path: pathlib.Path,
  report: Callable[[str], None] = print,
  otherwise: str = 'it is made again',
) -> bool:
  """Whether a file or folder is there as it was written.

  If it is damaged, `report` is called with a line that ends with `otherwise`.
  """
  if not path.exists():
    return False
  digest = _digest_file(path)
  if digest.exists() and digest.read_bytes() == _digest(path):
    return True
  report(f'{path} is damaged; {otherwise}')
  return False
