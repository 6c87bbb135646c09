"""Imports point one way, and a file name says where a thing is."""

import ast
import collections
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = ('specdec', 'models', 'scripts')
# A command and what it calls, or a model family and its checkpoints.
_PAIRS = {
  'benchmark.py': {'models/bench', 'scripts'},
  'build_ngram.py': {'models/training', 'scripts'},
  'chat.py': {'models/text', 'scripts'},
  'gpt2.py': {'models/nn', 'models/checkpoints'},
  'llama.py': {'models/nn', 'models/checkpoints'},
  'measure.py': {'models/bench', 'scripts'},
}


def _files(folder):
  return [
    path.relative_to(_ROOT)
    for path in sorted((_ROOT / folder).rglob('*.py'))
    if 'demo' not in path.parts
  ]


def _module(path):
  return '.'.join(path.with_suffix('').parts).removesuffix('.__init__')


_MODULES = {_module(path): path for one in _FOLDERS for path in _files(one)}


def _ours(node):
  """The modules of this project that an import statement names."""
  if isinstance(node, ast.Import):
    names = [alias.name for alias in node.names]
  else:
    inside = [f'{node.module}.{alias.name}' for alias in node.names]
    names = [name if name in _MODULES else node.module for name in inside]
  return {name for name in names if name in _MODULES}


def _imports(path):
  """What a file imports when it is imported, and what its functions import."""
  tree = ast.parse((_ROOT / path).read_text('utf-8'))
  kinds = (ast.Import, ast.ImportFrom)
  find = lambda nodes: {
    name for node in nodes if isinstance(node, kinds) for name in _ours(node)
  }
  within = [
    node
    for function in ast.walk(tree)
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    for node in ast.walk(function)
  ]
  return find(tree.body), find(within)


_GRAPH = {name: _imports(path)[0] for name, path in _MODULES.items()}


def _circle(graph):
  """Some circle of a graph, as a list of names; empty if there is none."""
  done, path = set(), []

  def visit(name):
    if name in path:
      return path[path.index(name) :] + [name]
    if name in done:
      return []
    path.append(name)
    for other in sorted(graph.get(name, ())):
      if found := visit(other):
        return found
    done.add(path.pop())
    return []

  for name in graph:
    if found := visit(name):
      return found
  return []


def _rooms(graph):
  """The graph of folders."""
  room = lambda name: _MODULES[name].parent.as_posix()
  rooms = collections.defaultdict(set)
  for name, others in graph.items():
    if _MODULES[name].name != '__init__.py':  # which collects what it exports
      rooms[room(name)] |= {
        room(other) for other in others if _MODULES[other].name != '__init__.py'
      }
  return {name: others - {name} for name, others in rooms.items()}


def test_a_circle_would_be_found():
  assert _circle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c', 'b']
  assert _circle({'a': {'b', 'c'}, 'b': {'c'}, 'c': set()}) == []


def test_no_module_imports_itself_through_others():
  assert len(_GRAPH) > 80
  assert _circle(_GRAPH) == []


@pytest.mark.parametrize('package', ['models'])
def test_no_room_imports_itself_through_others(package):
  rooms = _rooms({k: v for k, v in _GRAPH.items() if k.startswith(package)})
  assert _circle(rooms) == []


def test_folders_are_imported_one_way():
  order = {name: place for place, name in enumerate(_FOLDERS)}
  folder = lambda name: order[name.split('.')[0]]
  for name, others in _GRAPH.items():
    for other in others:
      assert folder(other) <= folder(name), f'{name} imports {other}'


def test_no_function_of_the_packages_imports_them():
  """Which would hide a circle. Scripts do, so that --help is quick."""
  for name, path in _MODULES.items():
    if not name.startswith('scripts'):
      assert not _imports(path)[1], f'{name} imports within a function'


def test_nothing_imports_the_tests():
  tests = {path.stem for path in _files('tests')}
  sources = [*_MODULES.values(), *sorted((_ROOT / 'colab').glob('*.ipynb'))]
  for path in sources:
    text = (_ROOT / path).read_text('utf-8')
    for name in tests:
      assert f'import {name}\n' not in text, f'{path} imports {name}'
      assert f'from {name} import' not in text, f'{path} imports {name}'


def test_a_file_name_occurs_once():
  folders = collections.defaultdict(set)
  for path in _MODULES.values():
    if path.name != '__init__.py':
      folders[path.name].add(path.parent.as_posix())
  twice = {name: found for name, found in folders.items() if len(found) > 1}
  assert {
    name: found for name, found in twice.items() if found != _PAIRS.get(name)
  } == {}


def test_no_kernel_is_written_in_triton():
  for path in _MODULES.values():
    assert 'triton' not in (_ROOT / path).read_text('utf-8').lower(), path
