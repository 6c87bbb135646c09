"""Imports point one way, and a file name says where a thing is."""

import ast
import collections
import functools
import graphlib
import itertools
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = ('specdec', 'models', 'scripts')
# Lower floors first; a module may import from its own and from lower ones.
_FLOORS = (
  'specdec',
  'specdec.tracing',
  'specdec.models',
  'specdec.models.lab',
  'scripts',
)
# Pairs of a command and what it calls.
_TWICE = {'benchmark', 'build_ngram'}


def _files(folder):
  return [
    path.relative_to(_ROOT)
    for path in sorted((_ROOT / folder).rglob('*.py'))
    if 'demo' not in path.parts
  ]


def _module(path):
  name = '.'.join(path.with_suffix('').parts).removesuffix('.__init__')
  # specdec/models is a link to models/.
  return f'specdec.{name}' if path.parts[0] == 'models' else name


_MODULES = {
  _module(path): path for folder in _FOLDERS for path in _files(folder)
}


def _named(node):
  """The modules that an import statement names."""
  if isinstance(node, ast.Import):
    return {alias.name for alias in node.names}
  if not isinstance(node, ast.ImportFrom):
    return set()
  inside = [f'{node.module}.{alias.name}' for alias in node.names]
  return {name if name in _MODULES else node.module for name in inside}


@functools.cache
def _nodes(path):
  """The nodes of the syntax tree of a file, the tree itself first."""
  return [*ast.walk(ast.parse((_ROOT / path).read_text('utf-8')))]


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def _imports(path):
  """Modules that a file imports, and modules that its functions import."""
  tree, *nodes = _nodes(path)
  functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
  within = itertools.chain(*map(ast.walk, functions))
  return tuple(
    set().union(*map(_named, nodes)) for nodes in (tree.body, within)
  )


_ALL = {name: _imports(path) for name, path in _MODULES.items()}
_GRAPH = {name: here & _MODULES.keys() for name, (here, _) in _ALL.items()}


def test_nothing_imports_itself_through_others():
  """No module, and no folder of `models`; the error names the circle."""
  assert len(_GRAPH) > 80
  graphlib.TopologicalSorter(_GRAPH).prepare()
  # Files that collect what a folder exports are in no folder.
  rooms = {
    name: path.parent
    for name, path in _MODULES.items()
    if path.parts[0] == 'models' and path.name != '__init__.py'
  }
  folders = collections.defaultdict(set)
  for name, room in rooms.items():
    others = {rooms[other] for other in _GRAPH[name] & rooms.keys()}
    folders[room] |= others - {room}
  graphlib.TopologicalSorter(folders).prepare()


def test_imports_point_one_way():
  """No function imports the packages: that would hide a circle.

  Functions of scripts may import them, so that --help is quick.
  """
  floor = lambda name: max(
    place
    for place, floor in enumerate(_FLOORS)
    if name == floor or name.startswith(f'{floor}.')
  )
  for name, others in _GRAPH.items():
    # `specdec` itself collects what users need from all its floors.
    for other in others if name != 'specdec' else ():
      assert floor(other) <= floor(name), f'{name} imports {other}'
    within = _ALL[name][1] & _MODULES.keys()
    assert not within or name.startswith('scripts'), (name, within)


def test_modules_are_imported_not_names():
  """So that a call names the file of what it calls: `accept.count_emitted`."""
  for name, path in _MODULES.items():
    # A package exports the names of its files.
    for node in () if path.name == '__init__.py' else _nodes(path):
      if isinstance(node, ast.ImportFrom) and node.module in _MODULES:
        names = {f'{node.module}.{alias.name}' for alias in node.names}
        assert names <= _MODULES.keys(), f'{name} imports {names}'


def test_what_only_training_needs_is_imported_by_training_alone():
  """The package is installed without it; flax itself needs optax."""
  names = ('loss', 'tokenizer', 'trainer')
  names += ('block_trainer', 'head_trainer', 'model_trainer', 'target_trainer')
  training = {f'specdec.models.lab.training.{name}' for name in names}
  assert training < _MODULES.keys()
  users = {
    name
    for name, (here, _) in _ALL.items()
    if here & training or {'optax', 'orbax.checkpoint'} & here
  }
  assert users
  assert users <= {*training, 'scripts.train'}


def test_functions_and_classes_are_short():
  """A longer one has several jobs."""
  long = {
    f'{name}.{node.name}'
    for name, path in _MODULES.items()
    for node in _nodes(path)
    if isinstance(node, _FUNCTIONS | ast.ClassDef)
    if node.end_lineno - node.lineno
    >= (400 if isinstance(node, ast.ClassDef) else 80)
  }
  assert not long, f'split {sorted(long)}'


def test_files_are_read_in_one_sitting():
  lines = {
    path: len((_ROOT / path).read_text('utf-8').splitlines())
    for folder in (*_FOLDERS, 'tests')
    for path in _files(folder)
  }
  long = {str(path): count for path, count in lines.items() if count > 700}
  assert not long, f'more than 700 lines: {long}'


def _is_display(node):
  return isinstance(node, ast.Tuple | ast.List | ast.Set)


def _is_spelled_for_a_formatter(node):
  """Whether it unpacks what it displays, as in `f(*(a, b), c)`."""
  if isinstance(node, ast.Dict):
    return any(
      key is None and isinstance(value, ast.Dict)
      for key, value in zip(node.keys, node.values, strict=True)
    )
  if isinstance(node, ast.Call):
    parts, keywords = node.args, node.keywords
  else:
    parts, keywords = node.elts if _is_display(node) else (), ()
  return any(
    isinstance(part, ast.Starred) and _is_display(part.value) for part in parts
  ) or any(
    str(getattr(key, 'value', '')).isidentifier()
    for keyword in keywords
    if keyword.arg is None and isinstance(keyword.value, ast.Dict)
    for key in keyword.value.keys
  )


def test_no_expression_is_spelled_for_a_formatter():
  """Whatever has several entries has each on a line, as everybody writes it."""
  bad = ('f(*(a, b), c=d)', '[*(a, b), c]', '{**{a: b}, c: d}', "f(**{'a': b})")
  good = 'f(a, *b, [*a, b], {**a, b: c}, (*f(a), b), **{a: b})'
  trees = [ast.walk(ast.parse(text)) for text in (*bad, good)]
  spliced = [any(map(_is_spelled_for_a_formatter, tree)) for tree in trees]
  assert spliced == [True] * 4 + [False]
  places = [
    f'{path}:{node.lineno}'
    for folder in (*_FOLDERS, 'tests', 'docs')
    for path in _files(folder)
    for node in _nodes(path)
    if _is_spelled_for_a_formatter(node)
  ]
  assert not places, f'write the entries without a star: {places}'


def test_a_file_name_occurs_once():
  names = [path.stem for path in _MODULES.values() if path.stem != '__init__']
  counts = collections.Counter(names)
  twice = {name: count for name, count in counts.items() if count > 1}
  assert twice == dict.fromkeys(_TWICE, 2)


def _exists(name):
  """Whether `module.symbol` or `module.Class.method` of specdec is there."""
  try:
    pkgutil.resolve_name(f'specdec.{name}')
  except (AttributeError, ImportError):
    return False
  return True


def test_the_map_of_the_code_names_functions_that_exist():
  existing = [_exists(name) for name in ('step.step', 'step.no', 'no.step')]
  assert existing == [True, False, False]
  text = (_ROOT / 'docs' / 'architecture.md').read_text('utf-8')
  section = text.split('\n## One step of a decode\n')[1]
  section = section.split('\n## ')[0]
  cells = re.findall(r'^\| [^|]+ \| ([^|]+) \|', section, re.MULTILINE)
  names = re.findall(r'`([a-z_]+\.[A-Za-z_.]+)`', ' '.join(cells))
  assert len(names) >= 18
  missing = [name for name in names if not _exists(name)]
  assert not missing, f'docs/architecture.md names {missing}, not in specdec'


def test_tests_lie_where_the_source_does():
  """A test of one folder is in its mirror; `project` has all other tests."""
  tests = _ROOT / 'tests'
  folders = {
    path.parent.relative_to(tests) for path in tests.rglob('*_test.py')
  }
  assert folders
  for folder in folders:
    assert (_ROOT / folder).is_dir() or str(folder) == 'project', folder


def test_folders_and_packages_of_the_user_hide_nothing(tmp_path):
  """One import name: a user's package `models` keeps its own name.

  A plain folder `specdec` is what the parent folder of a clone has.
  """
  (tmp_path / 'models').mkdir()
  (tmp_path / 'models' / '__init__.py').write_text('mine = 1')
  (tmp_path / 'specdec').mkdir()
  (tmp_path / 'script.py').write_text(
    'import models\n'
    'import specdec\n'
    'print(models.mine, specdec.load.__module__, specdec.Sampling.__name__)\n'
  )
  # As installed by `pip install -e .`, whose entry follows the script's folder.
  environment = os.environ | {'PYTHONPATH': str(_ROOT)}
  command = [sys.executable, 'script.py']
  printed = subprocess.check_output(
    command, cwd=tmp_path, env=environment, text=True
  )
  assert printed == '1 specdec.models.text.generator Sampling\n'
