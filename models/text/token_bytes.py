"""The bytes of each token, and text that is built from them.

`Pair.decode` converts all tokens of a text at once. Here each token has bytes
that do not depend on its neighbours, so that text can be cut at stop strings
and shown while it grows.
"""

import codecs
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import re
import types
from typing import Any
from typing import NamedTuple
import weakref

import tokenizers
import transformers

from specdec.text import sections as sections_lib
from specdec.text import stop_strings

_BYTE_TOKEN = re.compile('<0x([0-9A-Fa-f]{2})>')

# By tokenizer, then by its size and its special tokens, which can change.
_cache: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = (
  weakref.WeakKeyDictionary()
)


def _byte_alphabet() -> dict[str, int]:
  """The byte of each character of a byte-level vocabulary (GPT-2).

  Printable bytes of Latin-1 are written as themselves, the others as the
  characters from 256 on, in order.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {
    chr(256 + index): byte for index, byte in enumerate(others)
  }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
  # As in the tokenizers library, a token with other characters is its own text.
  try:
    return bytes(_BYTE_ALPHABET[character] for character in token)
  except KeyError:
    return token.encode()


def _byte_fallback(token: str) -> bytes:
  match = _BYTE_TOKEN.fullmatch(token)
  return bytes.fromhex(match[1]) if match else token.encode()


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
  if part['type'] != 'Sequence':
    return [part]
  (inner,) = (value for value in part.values() if isinstance(value, list))
  return [step for entry in inner for step in _flat(entry)]


def _steps(
  tokenizer: transformers.PreTrainedTokenizerBase, part: str
) -> list[Any]:
  """The steps of a part, as entries of tokenizer.json; [] without it."""
  backend = getattr(tokenizer, 'backend_tokenizer', None)
  component = getattr(backend, part, None)
  if component is None:
    return []
  return _flat(json.loads(component.__getstate__()))


def is_byte_level(tokenizer: transformers.PreTrainedTokenizerBase) -> bool:
  """Whether the vocabulary is written in the byte alphabet, such as GPT-2's.

  The part that writes a text in this alphabet decides. A converter may have put
  the decoder of SentencePiece next to it, which does not change the letters.
  """
  types = lambda part: [step['type'] for step in _steps(tokenizer, part)]
  writes = [*types('normalizer'), *types('pre_tokenizer')]
  return 'ByteLevel' in writes or types('decoder') == ['ByteLevel']


def _sentencepiece(
  steps: list[dict[str, Any]],
) -> Callable[[str], bytes] | None:
  """A function from a token to its bytes; None for steps that are not known."""
  replaced: list[tuple[str, str]] = []
  to_bytes: Callable[[str], bytes] = str.encode
  done: set[str] = set()
  for step in steps:
    match step:
      # After other steps, text of several tokens could be replaced.
      case {'type': 'Replace', 'pattern': {'String': old}, 'content': new} if (
        not done
      ):
        replaced.append((old, new))
      case {'type': 'Metaspace', 'replacement': old} if not done:
        replaced.append((old, ' '))
      case {'type': 'ByteFallback'} if not done:
        to_bytes = _byte_fallback
        done.add('ByteFallback')
      case {'type': 'Fuse'}:
        done.add('Fuse')
      # After `Fuse` this removes the first space of the text, not of a token.
      case {'type': 'Strip', 'content': ' ', 'stop': 0} if 'Fuse' in done:
        pass
      case _:
        return None

  def read(token: str) -> bytes:
    for old, new in replaced:
      token = token.replace(old, new)
    return to_bytes(token)

  return read if steps else None


def added_tokens(
  tokenizer: transformers.PreTrainedTokenizerBase,
) -> dict[int, tokenizers.AddedToken]:
  """The tokens that are matched in texts before all others, by their ids."""
  backend = getattr(tokenizer, 'backend_tokenizer', None)
  return {} if backend is None else backend.get_added_tokens_decoder()


def token_bytes(
  tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int
) -> tuple[bytes, ...]:
  """The bytes that each token adds to a text.

  `Pair.decode` with a tokenizer such as SentencePiece removes the space that
  begins a text. Here it is kept, because new text follows a prompt.

  Special tokens, and ids below `vocab_size` that the tokenizer lacks, have no
  bytes. The result is cached as long as the tokenizer exists.

  Raises:
    ValueError: the tokens of this tokenizer have no bytes of their own.
  """
  backend = getattr(tokenizer, 'backend_tokenizer', None)
  if backend is None or not hasattr(backend, 'to_str'):
    raise ValueError(
      'stop strings and streaming need a tokenizer of the tokenizers library;'
      f' {type(tokenizer).__name__} has no decoder to read'
    )
  added = added_tokens(tokenizer).values()
  special = frozenset(token.content for token in added if token.special)
  tables = _cache.setdefault(tokenizer, {})
  key = (vocab_size, len(tokenizer), special)
  if key not in tables:
    byte_level = is_byte_level(tokenizer)
    decoding = _steps(tokenizer, 'decoder')
    read = _byte_level if byte_level else _sentencepiece(decoding)
    if read is None:
      decoder = backend.decoder
      stated = b'null' if decoder is None else decoder.__getstate__()
      raise ValueError(
        'stop strings and streaming need a tokenizer whose tokens have bytes of'
        " their own: one with the decoder ByteLevel, as GPT-2's, or Metaspace"
        " or a sequence of Replace, ByteFallback, Fuse and Strip, as Llama's;"
        f' this one has the decoder {stated.decode()}'
      )
    # They are searched for in texts before these are spelled in the alphabet.
    plain = {token.content for token in added} if byte_level else set()
    tokens = map(backend.id_to_token, range(vocab_size))
    tables[key] = tuple(
      b''
      if token is None or token in special
      else token.encode()
      if token in plain
      else read(token)
      for token in tokens
    )
  return tables[key]


def special_tokens(
  tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int
) -> dict[bytes, int]:
  """The ids of the special tokens, which have no bytes, by their texts."""
  return {
    token.content.encode(): id_
    for id_, token in added_tokens(tokenizer).items()
    if token.special and token.content and id_ < vocab_size
  }


class Said(NamedTuple):
  """The text and the reasoning of a row, or the new part of both."""

  text: str
  reasoning: str = ''  #: The model says this before its answer.


class _Part:
  """The text of all sections of a kind.

  The newlines that end a section of reasoning are left out. An empty line parts
  two sections of a kind.
  """

  def __init__(self, kind: str):
    self._is_reasoning = kind == sections_lib.REASONING
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
    self._said = False
    self._gap = ''  # Shown if something follows.

  def add(self, data: bytes, *, ends: bool) -> str:
    """The text that can be shown after more bytes; `ends`: the section ends."""
    text, shown = self._decoder.decode(data, ends), ''
    if text:
      text = self._gap + text
      shown = text.rstrip('\n') if self._is_reasoning else text
      self._said, self._gap = bool(self._said or shown), text[len(shown) :]
    if ends:
      self._gap = '\n\n' if self._said else ''
    return shown


class TextStream:
  """The text of one row while its tokens arrive.

  The results of `feed` and `flush` are together the text up to the first stop
  string, however the tokens are grouped. They end with whole characters: bytes
  are held back until they complete a character, or become U+FFFD. Ids beyond
  `token_bytes` have no bytes. `special` has the ids of the special tokens that
  stop strings and ends of sections may name, see `special_tokens`. The text
  begins in the section `first` of `sections`, see `models/text/chat_template`.

  Raises:
    ValueError: a stop string is empty or is not Unicode.
  """

  def __init__(
    self,
    token_bytes: Sequence[bytes],
    stops: Sequence[str] = (),
    special: Mapping[bytes, int] = types.MappingProxyType({}),
    sections: sections_lib.Sections = sections_lib.PLAIN,
    first: int = 0,
  ):
    self._token_bytes = token_bytes
    self._kinds = [section.kind for section in sections]
    self._matcher = stop_strings.StopMatcher(
      [stop.encode() for stop in stops], special, sections, first
    )
    self._parts = {kind: _Part(kind) for kind in sections_lib.KINDS}

  @property
  def section(self) -> int:
    """The index of the current section."""
    return self._matcher.section

  @property
  def stopped(self) -> bool:
    """Whether a stop string was found, which ends the text."""
    return self._matcher.stopped

  def feed(self, ids: Iterable[int]) -> Said:
    """Adds tokens; returns what can no longer change."""
    num_known, symbols = len(self._token_bytes), self._matcher.symbols
    new = ''
    for token in ids:
      if token in symbols:
        new += symbols[token]
      elif token < num_known:
        new += self._token_bytes[token].decode('latin-1')
    # The end of a section begins with a character, so the text before it is
    # complete.
    *ended, last = self._matcher.feed(new)
    runs = [(run, True) for run in ended] + [(last, self.stopped)]
    return self._said(runs)

  def flush(self) -> Said:
    """Ends the row; returns the rest of what it says."""
    rest = self._matcher.section, self._matcher.flush()
    return self._said([(rest, True)])

  def finish(self, ids: Iterable[int]) -> Said:
    """Adds the last tokens, and ends the row; returns the rest."""
    new, rest = self.feed(ids), self.flush()
    return Said(new.text + rest.text, new.reasoning + rest.reasoning)

  def _said(self, runs: Iterable[tuple[tuple[int, bytes], bool]]) -> Said:
    """The new text of runs: a section, its bytes, and whether they end it."""
    shown = dict.fromkeys(self._parts, '')
    for (section, data), ends in runs:
      kind = self._kinds[section]
      shown[kind] += self._parts[kind].add(data, ends=ends)
    return Said(shown[sections_lib.TEXT], shown[sections_lib.REASONING])
