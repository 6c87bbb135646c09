"""Where a text ends: the stop strings and end-of-text tokens of users."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import transformers

from specdec import arguments as arguments_lib
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import sections as sections_lib
from specdec.text import stop_strings

# One stop string, several, or a list of them per row.
Stops = str | Sequence[str] | Sequence[Sequence[str]]
StopsOfRows = tuple[tuple[str, ...], ...]
# Ids of tokens, or their texts; a single text is one token.
EosIds = str | Sequence[int | str]


def stops_of_rows(stop: Any, batch_size: int) -> StopsOfRows:
  """`Stops` as the stop strings of each row.

  Raises:
    ValueError: the number of lists is not B, or a stop string is empty or not
      Unicode.
  """
  are_texts = lambda values: (
    isinstance(values, Sequence)
    and not isinstance(values, str)
    and all(isinstance(text, str) for text in values)
  )
  if isinstance(stop, str):
    stop = [stop]
  if are_texts(stop):
    stop = [stop] * batch_size
  is_list = isinstance(stop, Sequence) and all(map(are_texts, stop))
  if not is_list or len(stop) != batch_size:
    raise ValueError(
      'stop must be a string, a list of strings, or one list of strings per row'
      f' ({batch_size}), got {stop!r}'
    )
  for row, strings in enumerate(stop):
    for text in strings:
      arguments_lib.check_text(f'a stop string of row {row}', text)
      if not text:
        raise ValueError(f'row {row} has the stop string {text!r}; give text')
  return tuple(map(tuple, stop))


# Building a table takes a moment where the vocabulary is large.
@functools.lru_cache(maxsize=16)
def _stop_table(
  stops: StopsOfRows,
  pieces: tuple[bytes, ...],
  special: tuple[tuple[bytes, int], ...],
  sections: sections_lib.Sections,
) -> stop_strings.StopTable:
  encoded = [[stop.encode() for stop in row] for row in stops]
  return stop_strings.build_stop_table(
    encoded, pieces, len(pieces), dict(special), sections
  )


def stop_table(
  stops: StopsOfRows,
  tokenizer: transformers.PreTrainedTokenizerBase,
  vocab_size: int,
  sections: sections_lib.Sections,
) -> stop_strings.StopTable | None:
  """The table of the stop strings of each row; None if there are none.

  All texts begin in section 0 of `sections`.

  Raises:
    ValueError: a stop string is empty, or the tokens of the tokenizer have no
      bytes of their own.
  """
  if not any(stops):
    return None
  pieces = token_bytes_lib.token_bytes(tokenizer, vocab_size)
  special = token_bytes_lib.special_tokens(tokenizer, vocab_size)
  return _stop_table(stops, pieces, tuple(special.items()), sections)


def _ids_of_text(
  text: str, tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int
) -> list[int]:
  """The ids of all tokens with a text."""
  arguments_lib.check_text('eos_ids', text)
  special = token_bytes_lib.special_tokens(tokenizer, vocab_size).get(
    text.encode()
  )
  if special is not None:
    return [special]
  pieces = token_bytes_lib.token_bytes(tokenizer, vocab_size) if text else ()
  ids = [id_ for id_, piece in enumerate(pieces) if piece == text.encode()]
  if not ids:
    raise ValueError(
      f'eos_ids={text!r}: no token of the target has this text; give the text'
      ' of one token, or its id; a text of several tokens can be a stop string'
    )
  return ids


def eos_ids_of(
  given: Any, tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int
) -> Any:
  """`EosIds` as ids; they are checked where they are used.

  Raises:
    ValueError: no token has one of the texts, or the tokens of the tokenizer
      have no bytes of their own.
  """
  if isinstance(given, str):
    given = [given]
  if isinstance(given, Mapping) or not isinstance(given, Iterable):
    return given
  ids: list[Any] = []
  for token in given:
    is_text = isinstance(token, str)
    ids += _ids_of_text(token, tokenizer, vocab_size) if is_text else [token]
  return ids
