"""Files that users hand in as text, and JSON that is written.

A text file is UTF-8 whatever the locale says, with or without a byte order
mark, and with line ends of any system.
"""

import codecs
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import io
import json
import math
import os
import pathlib
import sys
import types
from typing import Any
from typing import get_args
from typing import get_origin
from typing import is_typeddict
from typing import Literal
from typing import Union

_JSON_LINES = ('.jsonl', '.ndjson', '.json')


class NotUtf8(ValueError):
  """A file has bytes that are not UTF-8."""


def is_json_lines(name: str | os.PathLike[str]) -> bool:
  """Whether lines are JSON objects: by the suffix, or standard input, `-`."""
  return str(name) == '-' or pathlib.Path(name).suffix.lower() in _JSON_LINES


def lines(
  name: str | os.PathLike[str], *, errors: str = 'strict'
) -> Iterator[tuple[int, str]]:
  r"""Yields the lines of a file with their numbers, from 1; `-`: of stdin.

  Args:
    name: of the file.
    errors: what becomes of bytes that are not UTF-8, see `bytes.decode`.

  Yields:
    The number of a line, and its text, which ends with \n if the line does.

  Raises:
    NotUtf8: names the file and the line.
    ValueError: the file cannot be read.
  """
  line_number = 0
  with contextlib.ExitStack() as stack:
    try:
      standard = str(name) == '-'
      file = (
        sys.stdin.buffer if standard else stack.enter_context(open(name, 'rb'))
      )
      for data in file:
        codec = 'utf-8' if line_number else 'utf-8-sig'
        text = data.decode(codec, errors)
        for line in io.StringIO(text, newline=None):
          line_number += 1
          yield line_number, line
    except UnicodeDecodeError as error:
      line_number += 1 + error.object[: error.start].count(b'\r')
      raise NotUtf8(
        f'{name} cannot be read: line {line_number} has the byte'
        f' {error.object[error.start]:#04x}, which is not UTF-8'
        f' ({error.reason}); save the file as UTF-8'
      ) from error
    except OSError as error:
      raise ValueError(f'{name} cannot be read: {error.strerror}') from error


def read(name: str | os.PathLike[str]) -> str:
  """The text of a file; raises the errors of `lines`."""
  return ''.join(line for _, line in lines(name))


def refuse_stand_in(name: str | os.PathLike[str]) -> None:
  """Refuses what is often stored in place of a downloaded file.

  Readers call it where a file is not what it should be.

  Raises:
    ValueError: it is a folder, a pointer of Git LFS or a web page.
  """
  if os.path.isdir(name):
    raise ValueError(f'{name} is a folder, not a file')
  try:
    with open(name, 'rb') as file:
      start = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().lower()
  except OSError:
    return
  if start.startswith(b'version https://git-lfs.github.com/'):
    raise ValueError(
      f'{name} is a pointer of Git LFS, not the file itself; run git lfs pull'
      ' in its folder'
    )
  if start.startswith((b'<!doctype html', b'<html')):
    raise ValueError(
      f'{name} is a web page; download the file that the page is about'
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """The object of JSON pairs; ValueError if a key is there twice."""
  record: dict[str, Any] = {}
  for key, value in pairs:
    if key in record:
      raise ValueError(f'key {key!r} is there twice')
    record[key] = value
  return record


def read_object(name: str | os.PathLike[str]) -> dict[str, Any]:
  """The JSON object of a file.

  Raises:
    ValueError: see `lines`; or the text is not valid JSON, or its value is not
      an object. The message names the file.
  """
  text = read(name)
  try:
    value = json.loads(text, object_pairs_hook=_unique)
  except (ValueError, RecursionError) as error:
    refuse_stand_in(name)
    raise ValueError(f'{name} is not valid JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{name} must hold a JSON object, got {value!r:.40}')
  return value


# Types of JSON in words: one value, and several.
_WORDS = {
  str: ('text', 'texts'),
  int: ('an integer', 'integers'),
  float: ('a finite number', 'numbers'),
  bool: ('true or false', 'true or false'),
  dict: ('an object', 'objects'),
  list: ('a list', 'lists'),
  types.NoneType: ('null', 'null'),
}
_UNIONS = types.UnionType, Union


def described(type_: Any, several: bool = False) -> str:
  """A type of `check_types` in words."""
  arguments, outer = get_args(type_), get_origin(type_)
  if outer in (list, dict):
    word = _WORDS[outer][several]
    if arguments[-1] is Any:
      return word
    return f'{word} of {described(arguments[-1], True)}'
  if outer is Literal:
    return ' or '.join(map(repr, arguments))
  if outer in _UNIONS:
    words = [described(member, several) for member in arguments]
    return ' or '.join(dict.fromkeys(words))
  return _WORDS.get(type_, _WORDS[dict])[several]


def fits(value: Any, type_: Any) -> bool:
  """Whether a value has a type of `check_types`."""
  arguments, outer = get_args(type_), get_origin(type_)
  if type_ is Any:
    return True
  if outer in _UNIONS:
    return any(fits(value, member) for member in arguments)
  if outer is Literal:
    return value in arguments
  if outer in (list, dict):
    within = value.values() if isinstance(value, dict) else value
    return isinstance(value, outer) and all(
      fits(entry, arguments[-1]) for entry in within
    )
  if type_ is float:
    return type(value) is int or (
      isinstance(value, float) and math.isfinite(value)
    )
  return type(value) is (dict if is_typeddict(type_) else type_)


def check_types(
  record: Mapping[str, Any], types_: Mapping[str, Any], place: str = ''
) -> None:
  """Refuses values of a JSON object that have the wrong type.

  Args:
    record: the object.
    types_: types by key: `str`, `int`, `float` (any finite number), `bool`,
      `Any`, and lists, objects, unions and literals of them, such as
      `dict[str, int] | None`. Other keys are not checked.
    place: precedes the names of keys in messages.

  Raises:
    ValueError: names the key and its value.
  """
  for key, type_ in types_.items():
    if key in record and not fits(record[key], type_):
      raise ValueError(
        f'{place}{key} must be {described(type_)}, got {record[key]!r:.60}'
      )


def to_json(value: Any, *, indent: int | None = None) -> str:
  """A value as JSON; NaN and infinities become null."""
  return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _finite(entry) for key, entry in value.items()}
  if isinstance(value, (list, tuple)):
    return [*map(_finite, value)]
  is_number = not isinstance(value, float) or math.isfinite(value)
  return value if is_number else None
