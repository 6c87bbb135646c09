"""Files that are written whole or not at all, and errors that name a file."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import struct
import tokenize
from typing import Any
from typing import TypeVar

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

_Read = TypeVar('_Read')

_SIZE = 16  # Bytes of a digest.

# Errors of code that reads damaged files: ours, NumPy's, safetensors'.
_MALFORMED = (
  ArithmeticError,
  AttributeError,
  BufferError,
  EOFError,
  LookupError,
  MemoryError,
  OSError,
  RecursionError,
  SyntaxError,
  TypeError,
  ValueError,
  safetensors.SafetensorError,
  struct.error,
  tokenize.TokenError,
)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], remedy: str = '') -> Iterator[None]:
  """Turns what readers of a file raise into a ValueError that names the file.

  Args:
    path: of the file or folder.
    remedy: what to do, added to errors that do not name the file themselves.

  Raises:
    ValueError: the file cannot be read; its cause is what was raised.
  """
  try:
    yield
  except _MALFORMED as error:
    is_plain = isinstance(error, ValueError)
    # The name of the file may be a part of a word.
    name = rf'(?<![\w.]){re.escape(str(path))}(?!\w)'
    if is_plain and re.search(name, str(error)):
      raise
    reason = f'{error}' if is_plain else f'{type(error).__name__}: {error}'
    raise ValueError(
      f'{path} cannot be read: {reason}{remedy and "; "}{remedy}'
    ) from error


def reading_each(
  path: str | os.PathLike[str], read: Iterator[_Read]
) -> Iterator[_Read]:
  """Yields what an iterator reads from a file, with the errors of `reading`."""
  with reading(path):
    yield from read


def write(
  path: str | os.PathLike[str], save: Callable[[pathlib.Path], Any]
) -> None:
  """Writes a file or folder completely or not at all; folders are made.

  Args:
    path: of the file, or of a folder that does not exist. A device or a pipe is
      written directly.
    save: called with a path next to it, with the same suffix, to write to.

  Raises:
    OSError: it cannot be written; what was there before is kept.
  """
  path = pathlib.Path(path).resolve()  # A link stays one.
  if path.exists() and not path.is_file() and not path.is_dir():
    save(path)
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  # Processes may write the same file at once.
  partial = path.with_name(f'partial_{os.getpid()}_{path.name}')
  try:
    save(partial)
    partial.replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
  """Writes a file of UTF-8, see `write`."""
  write(path, lambda partial: partial.write_text(text, 'utf-8'))


def write_tensors(
  path: str | os.PathLike[str],
  tensors: Mapping[str, np.ndarray],
  metadata: Mapping[str, str],
) -> None:
  """Writes a safetensors file, see `write`."""

  def save(partial: pathlib.Path) -> None:
    try:
      safetensors_numpy.save_file(
        dict(tensors), partial, metadata=dict(metadata)
      )
    except safetensors.SafetensorError as error:
      raise OSError(f'{path} cannot be written: {error}') from error
    partial.chmod(0o644)  # safetensors makes it readable by its owner only.

  write(path, save)


def digest(content: bytes) -> bytes:
  """A digest of bytes, 16 bytes."""
  return hashlib.blake2b(content, digest_size=_SIZE).digest()
