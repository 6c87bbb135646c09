"""Runs notebooks, and keeps of them what does not change from run to run."""

import os
import pathlib
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
_METADATA = {
  'kernelspec': {
    'display_name': 'Python 3',
    'language': 'python',
    'name': 'python3',
  },
  'language_info': {'name': 'python'},
}


def execute(path: pathlib.Path, *, timeout: int) -> Any:
  """Runs a notebook from top to bottom, in a kernel and a folder of its own.

  Args:
    path: of the notebook; runs in the folder that it is in.
    timeout: of each cell, in seconds.

  Returns:
    The notebook with its outputs, see `stripped`.

  Raises:
    ValueError: nbclient is not there, or the file is no notebook.
    nbclient.exceptions.CellExecutionError: a cell fails; has its traceback.
  """
  try:
    import nbclient
    import nbformat
  except ImportError as error:
    raise ValueError(
      'notebooks need two extras of the library; in its folder:'
      " pip install -e '.[notebooks,plot]'"
    ) from error
  try:
    notebook = nbformat.read(path, as_version=4)
  except (OSError, nbformat.reader.NotJSONError) as error:
    raise ValueError(f'{path} is no notebook: {error}') from error
  notebook.metadata = _METADATA
  # The library is the one beside this file, whatever else is installed.
  paths = [str(_ROOT), os.environ.get('PYTHONPATH', '')]
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join(filter(None, paths))
  }
  client = nbclient.NotebookClient(
    notebook,
    timeout=timeout,
    resources={'metadata': {'path': str(path.parent)}},
  )
  client.execute(env=environment)
  return stripped(notebook)


def update(path: pathlib.Path, *, timeout: int) -> None:
  """Runs a notebook, and keeps its outputs in the file; see `execute`."""
  notebook = execute(path, timeout=timeout)
  import nbformat

  nbformat.write(notebook, path)


def stripped(notebook: Any) -> Any:
  """Without what changes with every run.

  That is times, versions, warnings, and how a text happened to arrive in parts.
  """
  notebook.metadata = _METADATA
  for number, cell in enumerate(notebook.cells):
    cell.id = f'cell-{number:02}'
    cell.metadata = {}
    if cell.cell_type == 'code':
      cell.outputs = _joined(cell.outputs)
  return notebook


def _joined(outputs: list[Any]) -> list[Any]:
  """Without stderr, and what was printed without a break as one output."""
  kept: list[Any] = []
  for one in outputs:
    if one.get('name') == 'stderr':
      continue
    if kept and one.get('name') == kept[-1].get('name') == 'stdout':
      kept[-1].text += one.text
    else:
      kept.append(one)
  return kept
