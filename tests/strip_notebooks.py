"""Removes from notebooks what changes with every run.

pip install -e '.[notebooks,plot]'
jupyter execute --inplace colab/*.ipynb
python tests/strip_notebooks.py colab/*.ipynb
"""

import sys

import nbformat

_KERNEL = {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}


def stripped(notebook):
  """Without times, versions and stderr; consecutive printing is joined."""
  notebook.metadata = {
    'kernelspec': _KERNEL,
    'language_info': {'name': 'python'},
  }
  for number, cell in enumerate(notebook.cells):
    cell.id, cell.metadata = f'cell-{number:02}', {}
    outputs = []
    for output in cell.get('outputs', ()):
      name = output.get('name')
      if name == 'stdout' and outputs and outputs[-1].get('name') == 'stdout':
        outputs[-1].text += output.text
      elif name != 'stderr':
        outputs.append(output)
    if cell.cell_type == 'code':
      cell.outputs = outputs
  return notebook


if __name__ == '__main__':
  for name in sys.argv[1:]:
    nbformat.write(stripped(nbformat.read(name, as_version=4)), name)
