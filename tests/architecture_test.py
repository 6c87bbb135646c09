"""The map of the code, docs/architecture.md, names functions that exist."""

import functools
import importlib
import pathlib
import re

_MAP = pathlib.Path(__file__).parent.parent / 'docs' / 'architecture.md'


def _exists(name):
  """Whether `module.symbol` or `module.Class.method` of specdec is there."""
  parts = name.split('.')
  for number in range(len(parts) - 1, 0, -1):
    module = '.'.join(('specdec', *parts[:number]))
    try:
      found = importlib.import_module(module)
    except ModuleNotFoundError:
      continue
    try:
      functools.reduce(getattr, parts[number:], found)
    except AttributeError:
      return False
    return True
  return False


def test_the_functions_of_a_step_exist():
  assert _exists('step.step')
  assert not _exists('step.stride')
  assert not _exists('stride.step')
  section = _MAP.read_text('utf-8').split('\n## One step of a decode\n')[1]
  section = section.split('\n## ')[0]
  names = [
    name
    for row in re.findall(r'^\| [^|]+ \| ([^|]+) \|', section, re.MULTILINE)
    for name in re.findall(r'`([a-z_]+\.[A-Za-z_.]+)`', row)
  ]
  assert len(names) >= 18
  missing = [name for name in names if not _exists(name)]
  assert not missing, f'docs/architecture.md names {missing}, not in specdec'
