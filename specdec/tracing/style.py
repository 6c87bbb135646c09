"""How the proposers of tokens are told apart, in colour and without."""

import dataclasses

_MARKS = '⁰¹²³⁴⁵⁶⁷⁸⁹'


@dataclasses.dataclass(frozen=True)
class Style:
  """Of one proposer.

  Attributes:
    fill: background; black text on it has a contrast of at least 10 to 1.
    edge: of the line below a text, at least 4 to 1 on white.
    line: of the same, a CSS border style: what tells them apart in black and
      white.
  """

  fill: str
  edge: str
  line: str


_TARGET = Style('#ffffff', '#ffffff', 'none')
_PROPOSERS = (
  Style('#b5e3b5', '#1b6e2a', 'solid'),
  Style('#ffe08a', '#7a5b00', 'dotted'),
  Style('#a9def2', '#0b5c7a', 'dashed'),
  Style('#f3c3ea', '#8a1f78', 'double'),
)


def style_of(origin: int) -> Style:
  """That of an origin; 0 is the target."""
  if origin == 0:
    return _TARGET
  return _PROPOSERS[(origin - 1) % len(_PROPOSERS)]


def mark_of(origin: int) -> str:
  """A superscript number; from 10 on they begin anew."""
  return _MARKS[origin % len(_MARKS)]
