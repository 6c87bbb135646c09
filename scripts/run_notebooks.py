"""Runs the notebooks again, and keeps their outputs.

python scripts/run_notebooks.py
python scripts/run_notebooks.py --notebooks=colab/01_quickstart.ipynb
"""

import pathlib

from absl import flags
import command_line

_NOTEBOOKS = flags.DEFINE_list(
  'notebooks', None, 'files; default: all of colab/'
)
_TIMEOUT = flags.DEFINE_integer(
  'timeout', 600, 'of each cell, in seconds', lower_bound=1
)


def main() -> None:
  import nbformat

  from models import notebooks

  folder = pathlib.Path(__file__).parents[1] / 'colab'
  files = _NOTEBOOKS.value or sorted(folder.glob('*.ipynb'))
  for file in map(pathlib.Path, files):
    notebook = notebooks.execute(file, timeout=_TIMEOUT.value)
    nbformat.write(notebook, file)
    print(f'{file}: {file.stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
  command_line.run(main)
