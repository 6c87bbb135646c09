"""What a run in a workdir is made of, so that no other run resumes it.

A module of its own: building an n-gram table keeps such records too, and should
not import the whole of training for it.
"""

import json
import pathlib
from typing import Any


def write_once(path: pathlib.Path, record: dict[str, Any]) -> None:
  """Saves what a run is made of; refuses to resume a different one.

  Args:
    path: of the JSON, in the workdir.
    record: the settings and the data, as JSON.

  Raises:
    ValueError: another record is there already; says what differs.
  """
  record = json.loads(json.dumps(record))
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix('.partial.json')
    partial.write_text(json.dumps(record, indent=2) + '\n')
    partial.rename(path)
    return
  saved = json.loads(path.read_text())
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
