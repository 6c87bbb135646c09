"""Executes notebooks, and removes what changes from run to run."""

import os
import pathlib
from typing import Any

_ROOT = pathlib.Path(__file__).parents[3]
_KERNEL = {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}
_METADATA = {'kernelspec': _KERNEL, 'language_info': {'name': 'python'}}


def execute(path: pathlib.Path, *, timeout: int) -> Any:
  """Runs a notebook in its folder and a new kernel; returns it `stripped`.

  The timeout is that of each cell, in seconds.

  Raises:
    ValueError: nbclient is not installed, or the file is not a notebook.
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
    raise ValueError(f'{path} is not a notebook: {error}') from error
  notebook.metadata = _METADATA
  # The kernel imports this library, even if another version is installed.
  paths = filter(None, [str(_ROOT), os.environ.get('PYTHONPATH')])
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(paths)}
  resources = {'metadata': {'path': str(path.parent)}}
  client = nbclient.NotebookClient(
    notebook, timeout=timeout, resources=resources
  )
  client.execute(env=environment)
  return stripped(notebook)


def update(path: pathlib.Path, *, timeout: int) -> None:
  """Runs a notebook, and writes its outputs into the file; see `execute`."""
  notebook = execute(path, timeout=timeout)
  import nbformat

  nbformat.write(notebook, path)


def stripped(notebook: Any) -> Any:
  """Removes times, versions and stderr, and joins consecutive printing."""
  notebook.metadata = _METADATA
  for number, cell in enumerate(notebook.cells):
    cell.id, cell.metadata = f'cell-{number:02}', {}
    outputs: list[Any] = []
    for output in cell.get('outputs', ()):
      name = output.get('name')
      if name == 'stdout' and outputs and outputs[-1].get('name') == 'stdout':
        outputs[-1].text += output.text
      elif name != 'stderr':
        outputs.append(output)
    if cell.cell_type == 'code':
      cell.outputs = outputs
  return notebook
