"""Files and folders that a run keeps for the next one.

Each is written completely or not at all. This module has no heavy imports:
`build_ngram` and `generate_many.py` use it without the rest of training.
"""

from collections.abc import Callable
import json
import pathlib
import shutil
from typing import Any

import numpy as np

from specdec.models import locks
from specdec.text import text_files
from specdec.text import whole_files


def save(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
  """Writes a file or folder.

  `write` is called with a path next to it, with the same suffix. What killed
  runs have left there is removed, so no other run may write in that folder.

  Raises:
    OSError: it cannot be written, for example because the disk is full.
  """
  for left in path.parent.glob('partial_*'):
    shutil.rmtree(left) if left.is_dir() else left.unlink()
  try:
    whole_files.write(path, write)
  except Exception as error:  # Every library has its own for a full disk.
    raise OSError(
      f'{path} cannot be written: {error}; if the disk is full, make room and'
      ' run again: what was written before is kept'
    ) from error


def array(path: pathlib.Path, make: Callable[[], np.ndarray]) -> np.ndarray:
  """The array of a `.npy` file, mapped into memory; made if it is missing."""
  if not path.exists():
    made = make()
    save(path, lambda partial: np.save(partial, made))
  return np.load(path, mmap_mode='r')


def save_json(path: pathlib.Path, record: Any) -> None:
  """Writes a record as JSON, completely or not at all."""
  whole_files.write_text(path, text_files.to_json(record, indent=1) + '\n')


def write_once(path: pathlib.Path, record: dict[str, Any]) -> None:
  """Saves the settings and data of a run; refuses to resume a different run.

  No other process can use the folder of the file until this one ends.

  Raises:
    ValueError: the file holds another record (the message lists the changes) or
      cannot be read; or another process has the folder.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  locks.hold(path.parent, 'give another --workdir')
  _keep(path, record, '--workdir')


def _keep(path: pathlib.Path, record: dict[str, Any], flag: str) -> None:
  """Saves a record, or raises ValueError if the file holds another one."""
  record = json.loads(text_files.to_json(record))
  if not path.exists():
    save_json(path, record)
    return
  try:
    saved = text_files.read_object(path)
  except ValueError as error:
    raise ValueError(
      f'{error}; put the file back as it was, or give another {flag}'
    ) from error
  changed = [
    f'{key}: {saved.get(key)} then, {record.get(key)} now'
    for key in sorted(saved.keys() | record.keys())
    if saved.get(key) != record.get(key)
  ]
  if changed:
    raise ValueError(
      f'{path} holds another run ({"; ".join(changed)}); give the same flags to'
      f' the same version to resume it, or another {flag}'
    )


class ResumableRows:
  """A file of results, one JSON object per line; a line is appended at a time.

  A run may be killed at any moment: half a line at the end of the file is cut
  off when the next run begins. The settings of the run are next to the file, in
  `NAME.run.json`. No other process can write the file until this one ends.

  Attributes:
    rows: the results so far.

  Args:
    path: of the file.
    settings: what the run depends on.
    num_rows: of results that there can be; each has another `index` below it.

  Raises:
    ValueError: the file is of a run with other settings, or of a run that has
      not ended, or it is damaged or not a file of results; gives the reason.
  """

  def __init__(
    self, path: pathlib.Path, settings: dict[str, Any], num_rows: float
  ):
    self._path = path
    self.rows: list[dict[str, Any]] = []
    if path.exists() and not path.is_file():
      raise ValueError(f'{path} is no regular file; give another --output')
    locks.hold(path, 'give another --output')
    settings_file = path.with_name(f'{path.name}.run.json')
    if path.stat().st_size == 0:
      save_json(settings_file, settings)
      return
    if not settings_file.exists():
      raise ValueError(
        f'{path} is there, but not {settings_file.name}, the settings of its'
        ' run; give another --output'
      )
    _keep(settings_file, settings, '--output')
    self._read(num_rows)

  def _read(self, num_rows: float) -> None:
    content = self._path.read_bytes()
    lines = content.split(b'\n')[:-1]
    indices = set[int]()
    for place, line in enumerate(lines, 1):
      with whole_files.reading(
        self._path,
        f'remove line {place}, whose prompt is decoded again then, or give'
        ' another --output',
      ):
        row = json.loads(line)
        index: Any = row.get('index') if isinstance(row, dict) else None
        if type(index) is not int or not 0 <= index < num_rows:
          raise ValueError(f'line {place} is not the result of a prompt')
        if index in indices:
          raise ValueError(f'line {place} has the index of an earlier line')
      indices.add(index)
      self.rows.append(row)
    if content[-1:] != b'\n':
      with self._path.open('r+b') as file:
        file.truncate(sum(len(line) + 1 for line in lines))

  def add(self, row: dict[str, Any]) -> None:
    """Appends a result."""
    with self._path.open('a', encoding='utf-8') as file:
      file.write(f'{text_files.to_json(row)}\n')
    self.rows.append(row)
