"""The texts that the slots of `specdec.slots.Slots` hold, on the host.

A slot keeps its text when its prompt has ended. A prompt that begins like the
text of a slot need not be read there from its beginning.
"""

from collections.abc import Sequence
import dataclasses
import itertools


@dataclasses.dataclass
class _Text:
  tokens: list[int] = dataclasses.field(default_factory=list)
  marked: int = 0  # Tokens at which recurrent states are marked.
  used: int = 0  # The larger, the later it was read.

  def kept(self, prompt: Sequence[int], is_recurrent: bool) -> int:
    """How many tokens of a prompt need not be read; see `cache.usable`."""
    pairs = zip(self.tokens, prompt, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    # The caches lack the last token, and the prompt needs one to go on from.
    cached = max(len(self.tokens) - 1, 0)
    kept = min(sum(1 for _ in same), cached, max(len(prompt) - 1, 0))
    if is_recurrent and kept < cached:
      return self.marked if self.marked <= kept else 0
    return kept


class SlotTexts:
  """The texts of all slots.

  Args:
    num_slots: B.
    is_recurrent: whether the target has states, which cannot be cut.
  """

  def __init__(self, num_slots: int, is_recurrent: bool):
    self._is_recurrent, self._num_readings = is_recurrent, 0
    self._texts = [_Text() for _ in range(num_slots)]

  def best(self, free: Sequence[int], prompt: Sequence[int]) -> tuple[int, int]:
    """The free slot for a prompt, and how much of the prompt it has read.

    It is the slot that has most of the prompt, if that is most of what it has.
    Otherwise it is the slot that was not used for the longest time, so that a
    text which others may go on from stays.
    """
    texts = {row: self._texts[row] for row in free}
    kept = {
      row: text.kept(prompt, self._is_recurrent) for row, text in texts.items()
    }
    most = max(kept, key=lambda row: kept[row])
    if not 2 * kept[most] >= len(texts[most].tokens) > 0:
      most = min(texts, key=lambda row: texts[row].used)
    return most, kept[most]

  def read(self, row: int, tokens: list[int]) -> None:
    """A slot has read the first tokens of its prompt."""
    self._num_readings += 1
    self._texts[row] = _Text(tokens, len(tokens) - 1, self._num_readings)

  def end(self, row: int, tokens: list[int]) -> None:
    """The text of a slot has ended; without tokens nothing of it is used."""
    self._texts[row].tokens = tokens
