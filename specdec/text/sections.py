"""Sections of a text, such as what a model says before it answers.

A section goes on until a text that ends it, and this text says which section
follows. Neither the text nor the newlines after it are shown.
"""

import dataclasses

TEXT, REASONING, HIDDEN = 'text', 'reasoning', 'hidden'
"""Kinds: the text itself, what a model says before it, and what nobody sees."""
KINDS = TEXT, REASONING, HIDDEN


@dataclasses.dataclass(frozen=True)
class Section:
  """A section; stop strings count in sections of the text."""

  kind: str  #: One of the kinds above.
  #: The texts that end it, and the index of the section that follows each.
  ends: tuple[tuple[bytes, int], ...] = ()

  @property
  def is_text(self) -> bool:
    """Whether stop strings count."""
    return self.kind == TEXT

  @property
  def strips(self) -> bool:
    """Whether newlines that begin it are left out."""
    return bool(self.ends) and self.kind != HIDDEN


# All that a text may have.
Sections = tuple[Section, ...]

PLAIN: Sections = (Section(TEXT),)
"""A text that has no other sections."""
