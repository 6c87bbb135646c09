"""Executes notebooks, and writes their outputs into them.

pip install -e '.[notebooks,plot]'
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
  from models.lab.bench import notebooks

  folder = pathlib.Path(__file__).parents[1] / 'colab'
  files = _NOTEBOOKS.value or sorted(map(str, folder.glob('*.ipynb')))
  for file in map(pathlib.Path, files):
    notebooks.update(file, timeout=_TIMEOUT.value)
    print(f'{file}: {file.stat().st_size / 1e3:.0f} kB')


if __name__ == '__main__':
  command_line.run(main)
