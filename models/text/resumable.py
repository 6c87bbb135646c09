"""Result files that an interrupted run goes on from."""

import json
import pathlib
from typing import Any

from specdec import text_files


class ResumableRows:
  """A file of results, one JSON object per line; a line is appended at a time.

  A run may be killed at any moment: half a line at the end of the file is cut
  off when the next run begins. The settings of the run are beside the file, in
  `NAME.run.json`.

  Attributes:
    rows: the results so far.

  Raises:
    ValueError: the file is of a run with other settings, or none of ours.
  """

  def __init__(self, path: pathlib.Path, settings: dict[str, Any]):
    self._path = path
    self.rows: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f'{path.name}.run.json')
    settings = json.loads(text_files.to_json(settings))
    if not path.exists():
      beside.write_text(text_files.to_json(settings, indent=1) + '\n', 'utf-8')
      path.touch()
      return
    _check_equal(path, beside, settings)
    content = path.read_bytes()
    lines = content.split(b'\n')[:-1]
    if content[-1:] not in (b'', b'\n'):
      with path.open('r+b') as file:
        file.truncate(sum(len(line) + 1 for line in lines))
    try:
      self.rows = [json.loads(line) for line in lines]
    except ValueError as error:
      raise ValueError(
        f'{path} has a line that is no JSON ({error}); give another --output'
      ) from error

  def add(self, row: dict[str, Any]) -> None:
    """Appends a result."""
    with self._path.open('a', encoding='utf-8') as file:
      file.write(f'{text_files.to_json(row)}\n')
    self.rows.append(row)


def _check_equal(path, beside, settings) -> None:
  try:
    found = json.loads(beside.read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path} is there, and {beside.name}, the settings of its run, cannot be'
      f' read ({error}); give another --output'
    ) from error
  keys = {*found, *settings}
  changed = sorted(key for key in keys if found.get(key) != settings.get(key))
  if changed:
    raise ValueError(
      f'{path} is of a run with other settings ({", ".join(changed)});'
      ' give another --output'
    )
