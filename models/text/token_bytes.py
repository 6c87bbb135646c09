"""From tokens to text, one token at a time.

`Pair.decode` gives the text of tokens that are all known. Here each token has
its bytes, whatever comes before and after it, so that text can be cut at stop
strings and shown while it grows.
"""

import codecs
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import json
import re
from typing import Any
import weakref

import transformers

from specdec.verify.stop_strings import StopMatcher

_BYTE_TOKEN = re.compile('<0x([0-9A-Fa-f]{2})>')

# By tokenizer, then by what could have changed since.
_cache: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _byte_alphabet() -> dict[str, int]:
  """The byte that each character of a byte-level vocabulary stands for.

  Printable bytes of Latin-1 stand for themselves, the others for the characters
  from 256 on, in order (GPT-2).
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {
    chr(256 + index): byte for index, byte in enumerate(others)
  }


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
  # One character outside the alphabet, and the token is text as it stands; so
  # do `tokenizers` tell added tokens from others.
  try:
    return bytes(_BYTE_ALPHABET[character] for character in token)
  except KeyError:
    return token.encode()


def _byte_fallback(token: str) -> bytes:
  match = _BYTE_TOKEN.fullmatch(token)
  return bytes.fromhex(match[1]) if match else token.encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
  """A decoder as a flat list."""
  if decoder is None or decoder['type'] != 'Sequence':
    return [] if decoder is None else [decoder]
  return [step for inner in decoder['decoders'] for step in _steps(inner)]


def _sentencepiece(
  steps: list[dict[str, Any]],
) -> Callable[[str], bytes] | None:
  """What one token becomes in steps such as SentencePiece needs; else None."""
  replaced: list[tuple[str, str]] = []
  to_bytes: Callable[[str], bytes] = str.encode
  done: set[str] = set()
  for step in steps:
    match step:
      # Later than this, text would be replaced that no one token has.
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
      # The space that begins a text; of the text, as it is in one piece by now.
      case {'type': 'Strip', 'content': ' ', 'stop': 0} if 'Fuse' in done:
        pass
      case _:
        return None

  def read(token: str) -> bytes:
    for old, new in replaced:
      token = token.replace(old, new)
    return to_bytes(token)

  return read if steps else None


def _token_reader(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
  """What a tokenizer's decoder makes of a single token.

  Args:
    decoder: as in tokenizer.json.

  Raises:
    ValueError: it is not of a kind that is known to give each token bytes of
      its own.
  """
  steps = _steps(decoder)
  if [step['type'] for step in steps] == ['ByteLevel']:
    return _byte_level
  read = _sentencepiece(steps)
  if read is None:
    raise ValueError(
      'stop strings and streaming need a tokenizer whose tokens have bytes of'
      " their own: one with the decoder ByteLevel, as GPT-2's, or Metaspace or"
      " a sequence of Replace, ByteFallback, Fuse and Strip, as Llama's; this"
      f' one has the decoder {json.dumps(decoder, ensure_ascii=False)}'
    )
  return read


def token_bytes(
  tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int
) -> tuple[bytes, ...]:
  """What each token adds to the text that `Pair.decode` gives.

  Tokenizers in the manner of SentencePiece leave out the space that begins a
  text, but what is decoded goes on after a prompt: here it is not left out.

  Args:
    tokenizer: of the Hugging Face `tokenizers` library.
    vocab_size: V, of the model.

  Returns:
    The bytes of each of V tokens. Special tokens and those that the tokenizer
    lacks have none. Remembered as long as the tokenizer lives.

  Raises:
    ValueError: the text of this tokenizer is not made of the bytes of its
      tokens.
  """
  backend = getattr(tokenizer, 'backend_tokenizer', None)
  if backend is None or not hasattr(backend, 'to_str'):
    raise ValueError(
      'stop strings and streaming need a tokenizer of the tokenizers library;'
      f' {type(tokenizer).__name__} is none and has no decoder to look at'
    )
  added = backend.get_added_tokens_decoder().values()
  special = frozenset(token.content for token in added if token.special)
  known = _cache.setdefault(tokenizer, {})
  key = (vocab_size, len(tokenizer), special)
  if key not in known:
    read = _token_reader(json.loads(backend.to_str())['decoder'])
    tokens = map(backend.id_to_token, range(vocab_size))
    known[key] = tuple(
      b'' if token is None or token in special else read(token)
      for token in tokens
    )
  return known[key]


class TextStream:
  """The text of one row while its tokens come in.

  What `feed` and `flush` return is together the text up to the first stop
  string, however the tokens were dealt out. It never has half a character:
  bytes wait until they are one, and become U+FFFD only when they cannot.
  """

  def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str] = ()):
    """Before the first token.

    Args:
      token_bytes: of each token; ids beyond are as if empty.
      stops: the stop strings, perhaps none.

    Raises:
      ValueError: a stop string is empty or is not Unicode.
    """
    self._token_bytes = token_bytes
    self._matcher = StopMatcher([stop.encode() for stop in stops])
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

  @property
  def stopped(self) -> bool:
    """Whether a stop string was found; there is no more text then."""
    return self._matcher.stopped

  def feed(self, ids: Iterable[int]) -> str:
    """More tokens; returns the text that is now certain."""
    known = len(self._token_bytes)
    data = b''.join(self._token_bytes[one] for one in ids if one < known)
    # A stop string begins a character, so what comes before it is complete.
    return self._decoder.decode(self._matcher.feed(data), self.stopped)

  def flush(self) -> str:
    """The row ends here: returns the rest of its text."""
    return self._decoder.decode(self._matcher.flush(), final=True)


def text_of(
  token_bytes: Sequence[bytes], ids: Iterable[int], stops: Sequence[str] = ()
) -> str:
  """The text of a finished row, up to the first stop string.

  Args:
    token_bytes: of each token; ids beyond are as if empty.
    ids: new tokens.
    stops: the stop strings, perhaps none.

  Returns:
    What a `TextStream` returns in all. Without stop strings and with a
    byte-level tokenizer that is `Pair.decode`.

  Raises:
    ValueError: a stop string is empty or is not Unicode.
  """
  stream = TextStream(token_bytes, stops)
  return stream.feed(ids) + stream.flush()
