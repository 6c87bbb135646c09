"""Refused input, one row a line, in the file `refusals.jsonl` of a folder.

A row says who refuses it, what is given, and a part of the message as a regular
expression.
"""

import json
import pathlib
from typing import Any

_TESTS = pathlib.Path(__file__).parent


def of(folder: str, who: str) -> list[list[Any]]:
  """The rows of a folder of tests, without the name of who refuses them."""
  file = _TESTS / folder / 'refusals.jsonl'
  rows = map(json.loads, file.read_text('utf-8').splitlines())
  return [row for name, *row in rows if name == who]
