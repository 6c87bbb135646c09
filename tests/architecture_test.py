"""The map of the code, docs/architecture.md, names functions that exist."""

import pathlib
import pkgutil
import re

_MAP = pathlib.Path(__file__).parent.parent / 'docs' / 'architecture.md'


def _exists(name):
  """Whether `module.symbol` or `module.Class.method` of specdec is there."""
  try:
    pkgutil.resolve_name(f'specdec.{name}')
  except (AttributeError, ImportError):
    return False
  return True


def test_the_functions_of_a_step_exist():
  existing = [_exists(name) for name in ('step.step', 'step.no', 'no.step')]
  assert existing == [True, False, False]
  section = _MAP.read_text('utf-8').split('\n## One step of a decode\n')[1]
  section = section.split('\n## ')[0]
  cells = re.findall(r'^\| [^|]+ \| ([^|]+) \|', section, re.MULTILINE)
  names = re.findall(r'`([a-z_]+\.[A-Za-z_.]+)`', ' '.join(cells))
  assert len(names) >= 18
  missing = [name for name in names if not _exists(name)]
  assert not missing, f'docs/architecture.md names {missing}, not in specdec'
