"""The API reference names every public symbol."""

import importlib
import inspect
import pathlib
import pkgutil
import re

import models
import specdec

_ROOT = pathlib.Path(__file__).parents[2]
_DIRECTIVE = re.compile(r'^\.\. auto(?:class|function|data):: (\S+)$', re.M)


def _public_symbols():
  """`package.name` of all that a package exports, itself or in `__all__`."""
  for name, symbol in vars(specdec).items():
    if not (name.startswith('_') or inspect.ismodule(symbol)):
      yield f'specdec.{name}'
  for top in (specdec, models):
    packages = pkgutil.walk_packages(top.__path__, f'{top.__name__}.')
    for name in [top.__name__, *(one.name for one in packages if one.ispkg)]:
      for symbol in getattr(importlib.import_module(name), '__all__', ()):
        yield f'{name}.{symbol}'


def _resolve(name):
  module, _, symbol = name.rpartition('.')
  return getattr(importlib.import_module(module), symbol)


def _in_reference():
  return {
    name: _resolve(name)
    for page in sorted((_ROOT / 'docs' / 'reference').glob('*.md'))
    for name in _DIRECTIVE.findall(page.read_text('utf-8'))
  }


def test_every_public_symbol_is_in_the_reference():
  symbols = {*_public_symbols()}
  assert symbols >= {
    *('specdec.generate', 'specdec.ngram.NGramTable', 'models.load')
  }
  named = {id(symbol) for symbol in _in_reference().values()}
  missing = [name for name in symbols if id(_resolve(name)) not in named]
  assert not missing, (
    'add `.. autoclass::` or `.. autofunction::` lines to docs/reference/ for'
    f' {missing}'
  )


def test_docstrings_of_properties_are_not_taken_for_types():
  # Sphinx reads `[N] int32: the nodes` as a type and a description, and, of
  # anything else before a colon, makes nonsense.
  wrong = [
    f'{name}.{attribute}'
    for name, symbol in _in_reference().items()
    if isinstance(symbol, type)
    for attribute, value in vars(symbol).items()
    if isinstance(value, property) and value.__doc__
    if ': ' in (line := value.__doc__.splitlines()[0])
    if not line.startswith('`[')
  ]
  assert not wrong, f'reword without a colon in the first line: {wrong}'
