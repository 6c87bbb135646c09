"""Draws results of benchmark.py anew, where matplotlib is installed.

python scripts/plot_benchmark.py --results=result.json,other.json
"""

import json
import pathlib

from absl import flags
import command_line

_RESULTS = flags.DEFINE_list(
  'results', None, 'JSON files of benchmark.py', required=True
)
_PLOTS = flags.DEFINE_string(
  'plots', None, 'folder for pictures; default: beside each JSON'
)


def main() -> None:
  from models import plots

  for file in _RESULTS.value:
    path = pathlib.Path(file)
    try:
      record = json.loads(path.read_text('utf-8'))
      record['limits'], record['arms']
    except (KeyError, TypeError, json.JSONDecodeError) as error:
      raise ValueError(f'{file} is no result of benchmark.py') from error
    folder = plots.choose_folder(_PLOTS.value or str(path.parent), file)
    assert folder is not None
    for picture in plots.draw(record, folder, file):
      print(picture)


if __name__ == '__main__':
  command_line.run(main)
