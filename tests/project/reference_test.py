"""The API reference names every public symbol."""

import importlib
import inspect
import pathlib
import pkgutil
import re

import specdec

_ROOT = pathlib.Path(__file__).parents[2]
_DIRECTIVE = re.compile(r'^\.\. auto(?:class|function|data):: (\S+)$', re.M)


def _public_symbols():
  """`package.name` of all that a package exports, itself or in `__all__`."""
  for name in dir(specdec):
    symbol = getattr(specdec, name)
    if not (name.startswith('_') or inspect.ismodule(symbol)):
      yield f'specdec.{name}'
  for module in pkgutil.walk_packages(specdec.__path__, 'specdec.'):
    if module.ispkg:
      package = importlib.import_module(module.name)
      for symbol in getattr(package, '__all__', ()):
        yield f'{module.name}.{symbol}'


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
  assert {'specdec.generate', 'specdec.load'} <= symbols
  assert 'specdec.ngram.NGramTable' in symbols
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
