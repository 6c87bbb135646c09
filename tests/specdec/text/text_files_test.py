"""Text files of users, whatever wrote them, and JSON that has no NaN."""

import io
import json
import math
import typing

import pytest

from specdec.models.lab.training import corpus as corpus_lib
from specdec.text import text_files

_TEXT = 'čaj\none\u2028two \u00e9\n\nlast'


@pytest.mark.parametrize('codec', ['utf-8', 'utf-8-sig'])
@pytest.mark.parametrize('line_end', ['\n', '\r\n', '\r'])
def test_a_text_is_the_same_with_every_mark_and_line_end(
  tmp_path, monkeypatch, codec, line_end
):
  path = tmp_path / 'a.txt'
  path.write_bytes(_TEXT.replace('\n', line_end).encode(codec))
  expected = [*enumerate(['čaj\n', 'one\u2028two é\n', '\n', 'last'], 1)]
  assert [*text_files.lines(path)] == expected
  assert text_files.read(str(path)) == _TEXT
  # The bytes of standard input, too, whatever the locale.
  piped = io.TextIOWrapper(io.BytesIO(path.read_bytes()), 'ascii')
  monkeypatch.setattr('sys.stdin', piped)
  assert [*text_files.lines('-')] == expected


@pytest.mark.parametrize('line_end', [b'\n', b'\r\n', b'\r'])
def test_bytes_that_are_no_text_are_refused_by_line(tmp_path, line_end):
  path = tmp_path / 'a.txt'
  path.write_bytes(line_end.join([b'caf\xc3\xa9', b'', b'caf\xe9', b'']))
  with pytest.raises(text_files.NotUtf8, match=r'a\.txt .*line 3 .*byte 0xe9'):
    text_files.read(path)
  path.write_bytes('x'.encode('utf-16'))
  with pytest.raises(text_files.NotUtf8, match=r'line 1 .*save the file'):
    text_files.read(path)
  for name in (tmp_path, tmp_path / 'none'):
    with pytest.raises(ValueError, match=f'{name} cannot be read: '):
      text_files.read(name)


def test_a_corpus_has_no_marks_and_skips_what_is_no_text(tmp_path):
  for number in range(3):
    (tmp_path / f'{number}.py').write_text('x = 1\n', 'utf-8-sig')
  (tmp_path / 'latin.py').write_bytes(b'caf\xe9')
  texts = [*corpus_lib.Corpus(folder=str(tmp_path)).texts(held_out=False)]
  assert {*texts} == {'x = 1\n'}


class _Object(typing.TypedDict):
  a: int


@pytest.mark.parametrize(
  ('kind', 'words', 'right', 'wrong'),
  [
    (int, 'an integer', [3], [True, 3.0, '3', None]),
    (float, 'a finite number', [3, 1.5, 10**400], [True, math.nan, math.inf]),
    (bool | None, 'true or false or null', [False, None], [0]),
    (list[float], 'a list of numbers', [[], [1, 2.5]], [[math.nan], {}, 1]),
    (
      dict[str, list[str]],
      'an object of lists of texts',
      [{'a': ['b']}],
      [{'a': 'b'}],
    ),
    (list[typing.Any], 'a list', [[None, 3]], ['ab', (3,)]),
    (typing.Literal['a', 'b'], "'a' or 'b'", ['a'], ['c', 3]),
    (
      _Object | dict[str, int] | None,
      'an object or an object of integers or null',
      [{'b': 'c'}],
      [[]],
    ),
    (str | list[str], 'text or a list of texts', ['a', ['a']], [[3]]),
  ],
)
def test_types_of_json_are_told_apart_and_named(kind, words, right, wrong):
  for value in right:
    text_files.check_types({'key': value}, {'key': kind})
  for value in wrong:
    with pytest.raises(ValueError, match=f'^key must be {words}, got'):
      text_files.check_types({'key': value}, {'key': kind})


def test_json_has_no_nan():
  value = {'a': [math.nan, (1.5, -math.inf)], 'b': {'c': math.inf}, 'd': 'NaN'}
  text = text_files.to_json(value)
  expected = {'a': [None, [1.5, None]], 'b': {'c': None}, 'd': 'NaN'}
  assert json.loads(text, parse_constant=pytest.fail) == expected
