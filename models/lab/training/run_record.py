"""Files in the workdir of a run that can be killed and resumed.

This module has no heavy imports: `build_ngram` uses it without the rest of
training.
"""

from collections.abc import Callable
import json
import pathlib
from typing import Any

from specdec import text_files


def save_whole(path: pathlib.Path, save: Callable[[pathlib.Path], Any]) -> None:
  """Writes a file or folder completely or not at all.

  `save` is called with a path beside it, with the same suffix, to write to.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f'partial_{path.name}')
  save(partial)
  partial.replace(path)


def save_json(path: pathlib.Path, record: Any) -> None:
  """Writes a record as JSON, completely or not at all."""
  text = text_files.to_json(record, indent=1) + '\n'
  save_whole(path, lambda partial: partial.write_text(text, 'utf-8'))


def write_once(path: pathlib.Path, record: dict[str, Any]) -> None:
  """Saves the settings and data of a run; refuses to resume a different run.

  Raises:
    ValueError: the file holds another record; the message lists the changes.
  """
  record = json.loads(text_files.to_json(record))
  if not path.exists():
    save_json(path, record)
    return
  saved = json.loads(path.read_text('utf-8'))
  changed = [
    f'{key}: {saved.get(key)} then, {record.get(key)} now'
    for key in sorted(saved.keys() | record.keys())
    if saved.get(key) != record.get(key)
  ]
  if changed:
    raise ValueError(
      f'{path.parent} holds another run ({"; ".join(changed)}); give the same'
      ' flags to resume it, or another --workdir'
    )
