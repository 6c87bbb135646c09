"""Figures in the tables of pages are in the files that the tables cite."""

import collections
import json
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_NUMBER = re.compile(r'(?<![\w.])\d+(?:\.\d+)?')
_LINK = re.compile(r'\]\([^)]*(results/[^)]*\.(?:md|json))\)')
# Fields of a JSON file that have no figures.
_CIRCUMSTANCES = ('machine', 'settings')
# Columns of goals, of predictions, and of a version whose files are in the
# history of git.
_OF_NO_FILE = ('wanted', 'computed', 'in 0.8.0')
# A link whose text begins with a figure and its unit.
_TEXT_LINK = re.compile(
  r'\[(\d[\d.]*(?:x| ?%| tokens/s)[^\]]*)\]'
  r'\([^)]*(results/[^)]*\.(?:md|json))\)'
)
_URL = re.compile(r'\]\([^)]*\)')
# A figure of another arm, which a cell has for comparison.
_OTHER_ARM = re.compile(r', [\d.]+x of \w+')


def _numbers(text):
  """Values, and the number of their decimal places."""
  numerals = _NUMBER.findall(text.replace('-', ' '))
  return [
    (float(numeral), len(numeral.partition('.')[2])) for numeral in numerals
  ]


def _is_rounded(value, places, exact, own_places):
  """Whether a file has a figure, or one that was rounded to it."""
  if own_places <= places:
    return value == exact
  half = 0.5 * 10.0**-places + 0.5 * 10.0**-own_places
  return abs(value - exact) <= half + 1e-9


def _leaves(value):
  """All figures of a JSON file, as fractions and in per cent, s, ms, MB."""
  if isinstance(value, dict):
    fields = {k: v for k, v in value.items() if k not in _CIRCUMSTANCES}
    return [leaf for field in fields.items() for leaf in _leaves(field)]
  if isinstance(value, list | tuple):
    return [leaf for field in value for leaf in _leaves(field)]
  if isinstance(value, str):
    return _numbers(value)
  exact = float(value or 0)
  return [(exact * unit, 12) for unit in (1, 1e2, 1e3, 1e-6)]


def _arms(files):
  """All figures of each arm in files of `scripts/benchmark.py`."""
  arms = collections.defaultdict(list)
  for file in files:
    text = (_ROOT / file).read_text('utf-8')
    if file.endswith('.json'):
      arms[file] += _leaves(json.loads(text))
      continue
    for line in text.splitlines():
      if line.startswith('| ') and not line.startswith('| arm'):
        _, name, rest = line.split('|', 2)
        arms[name.strip()] += _numbers(rest)
  return arms


def _rows(page):
  """Rows of tables, and the files that they or the text above them cite."""
  cited, in_table = [], False
  for line in page.read_text('utf-8').splitlines():
    links = _LINK.findall(line)
    was_in_table, in_table = in_table, line.startswith('|')
    if not in_table:
      # Text after a table is about another one.
      cited = links if was_in_table or line.startswith('#') else cited + links
    elif not was_in_table:
      header = line.strip('|').split('|')
      cited = cited + links
    elif not any(' the paper' in cell for cell in header) and '---' not in line:
      name, *cells = (
        cell
        for cell, of in zip(line.strip('|').split('|'), header, strict=False)
        if not of.strip().startswith(_OF_NO_FILE)
      )
      texts = [_URL.sub(']', _OTHER_ARM.sub('', cell)) for cell in cells]
      figures = _numbers('|'.join(texts))
      if links and not figures:  # A heading within the table.
        cited = links
      if any(map(_LINK.search, cells)):  # Each cell is of a file of its own.
        for cell, text in zip(cells, texts, strict=True):
          if numbers := _numbers(text):
            yield name.strip(), numbers, _LINK.findall(cell)
      elif figures:
        yield name.strip(), figures, links or cited


def _lacking(figures, exact):
  """Figures that do not round any figure of a file."""
  return [
    figure[0]
    for figure in figures
    if not any(_is_rounded(*figure, *other) for other in exact)
  ]


_OF_ONE_ARM = ('README.md', 'measured.md')  # Each row is.


@pytest.mark.parametrize(
  'page',
  [_ROOT / 'README.md', *sorted((_ROOT / 'docs').glob('*.md'))],
  ids=lambda page: page.name,
)
def test_figures_are_those_of_the_files_that_they_cite(page):
  rows, by_arm = [*_rows(page)], page.name in _OF_ONE_ARM
  assert len(rows) >= 3 or not by_arm
  linked = [
    (text, _numbers(text), [file])
    for text, file in _TEXT_LINK.findall(page.read_text('utf-8'))
  ]
  for number, (label, figures, files) in enumerate([*rows, *linked]):
    is_row = by_arm and number < len(rows)
    assert files or not is_row, f'{page.name}: {label} cites no file'
    arms = [*_arms(files).values()]
    exact = arms if is_row else [[figure for arm in arms for figure in arm]]
    lacks = min((_lacking(figures, arm) for arm in exact), key=len)
    assert not (files and lacks), (
      f'{page.name}: {label}: {lacks} are not in {files}'
    )


def test_figures_of_a_picture_are_those_of_its_file():
  text = (_ROOT / 'docs/pictures/time.svg').read_text('utf-8')
  shown = _numbers(' '.join(re.findall(r'>(\d+\.\d\d)</text>', text)))
  file = 'results/amd-epyc-zen5-2-cores/profile_0.5b.md'
  exact = [figure for arm in _arms([file]).values() for figure in arm]
  assert len(shown) == 12
  assert not _lacking(shown, exact)
