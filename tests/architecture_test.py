"""The map of the code, docs/architecture.md, is complete and up to date."""

import ast
import importlib
import pathlib
import re

_ROOT = pathlib.Path(__file__).parent.parent
_MAP = _ROOT / 'docs' / 'architecture.md'
_FOLDERS = ('specdec', 'models', 'scripts')
_SUFFIXES = ('.py', '.sh', '.js', '.css')
_ROW = re.compile(r'^\| \[`[^`]+`\]\(\.\./([^)]+)\) \| (.+) \|$', re.MULTILINE)


def _section(heading):
  text = _MAP.read_text('utf-8')
  return text.split(f'\n## {heading}\n')[1].split('\n## ')[0]


def _suggestion(file):
  """A line to begin with: what the file says of itself."""
  says = 'what it does'
  if file.endswith('.py'):
    tree = ast.parse((_ROOT / file).read_text('utf-8'))
    says = (ast.get_docstring(tree) or says).splitlines()[0].rstrip('.')
  return f'| [`{pathlib.Path(file).name}`](../{file}) | {says} |'


def test_every_source_file_has_a_line():
  files = {
    path.relative_to(_ROOT).as_posix()
    for folder in _FOLDERS
    for path in (_ROOT / folder).rglob('*')
    if path.suffix in _SUFFIXES
  }
  named = [file for file, _ in _ROW.findall(_section('Files'))]
  missing, gone = sorted(files - set(named)), sorted(set(named) - files)
  assert not missing, (
    'docs/architecture.md lacks source files. Add these lines, in your own'
    ' words, to the tables of their folders:\n'
    + '\n'.join(map(_suggestion, missing))
  )
  assert not gone, f'remove from docs/architecture.md: {gone}'
  assert len(named) == len(set(named)), 'a file has two lines'


def test_the_functions_of_a_step_exist():
  section = _section('One step of a decode')
  names = re.findall(r'`([a-z_.]+\.[A-Za-z_]+)`', section)
  names = [name for name in names if name != 'lax.while_loop']
  assert len(names) >= 10
  for name in names:
    module, _, symbol = f'specdec.{name}'.rpartition('.')
    try:
      found = hasattr(importlib.import_module(module), symbol)
      found = found or importlib.import_module(f'{module}.{symbol}')
    except ModuleNotFoundError:
      found = False
    assert found, f'docs/architecture.md names {name}, which is not there'
