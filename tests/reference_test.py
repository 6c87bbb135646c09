"""The API reference names every public symbol, and each has a docstring."""

import importlib
import pathlib
import pkgutil
import re

from sphinx.pycode import ModuleAnalyzer

import models
import specdec

_ROOT = pathlib.Path(__file__).parent.parent
_DIRECTIVE = re.compile(r'^\.\. auto(?:class|function|data):: (\S+)$', re.M)


def _public_symbols():
  """`package.name` of all that the `__all__` of a package lists."""
  for top in (specdec, models):
    names = [top.__name__] + [
      one.name
      for one in pkgutil.walk_packages(top.__path__, f'{top.__name__}.')
      if one.ispkg
    ]
    for name in names:
      for symbol in getattr(importlib.import_module(name), '__all__', ()):
        yield f'{name}.{symbol}'


def _in_reference():
  return [
    name
    for page in sorted((_ROOT / 'docs' / 'reference').glob('*.md'))
    for name in _DIRECTIVE.findall(page.read_text('utf-8'))
  ]


def _resolve(name):
  module, _, symbol = name.rpartition('.')
  return getattr(importlib.import_module(module), symbol)


def test_every_public_symbol_is_in_the_reference():
  symbols = list(_public_symbols())
  assert {'specdec.generate', 'specdec.ngram.NGramTable', 'models.load'} <= set(
    symbols
  )
  named = {id(_resolve(name)) for name in _in_reference()}
  missing = [name for name in symbols if id(_resolve(name)) not in named]
  assert not missing, (
    'add `.. autoclass::` or `.. autofunction::` lines to docs/reference/ for'
    f' {missing}'
  )


def test_nothing_is_in_the_reference_twice():
  names = _in_reference()
  twice = sorted({name for name in names if names.count(name) > 1})
  assert not twice, f'docs/reference/ has these more than once: {twice}'


def _own_docstring(name):
  symbol = _resolve(name)
  if not callable(symbol):  # data; its docstring is the string below it
    module, _, attribute = name.rpartition('.')
    found = ModuleAnalyzer.for_module(module).find_attr_docs()
    return ' '.join(found.get(('', attribute), ()))
  doc = symbol.__dict__.get('__doc__') if isinstance(symbol, type) else None
  doc = doc or getattr(symbol, '__doc__', None) or ''
  # What dataclasses write by themselves: `Name(field: type, ...)`.
  return '' if doc.startswith(f'{symbol.__name__}(') else doc


def test_all_of_it_has_docstrings():
  names = _in_reference()  # all that is public is there
  bare = [name for name in names if not _own_docstring(name).strip()]
  assert not bare, f'write docstrings for {bare}'


def test_docstrings_of_properties_are_not_taken_for_types():
  # Sphinx reads `[N] int32: the nodes` as a type and a description, and, of
  # anything else before a colon, makes nonsense.
  wrong = [
    f'{name}.{attribute}'
    for name in _in_reference()
    if isinstance(_resolve(name), type)
    for attribute, value in vars(_resolve(name)).items()
    if isinstance(value, property) and value.__doc__
    if ': ' in (line := value.__doc__.splitlines()[0])
    if not line.startswith('`[')
  ]
  assert not wrong, f'reword without a colon in the first line: {wrong}'
