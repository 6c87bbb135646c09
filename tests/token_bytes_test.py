"""The bytes of tokens and growing text, against what tokenizers decode."""

import json
import pathlib
import random
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers import decoders
from tokenizers import models
import transformers

from models.text.pair import load_pair
from models.text.pair import Pair
from models.text.token_bytes import text_of
from models.text.token_bytes import TextStream
from models.text.token_bytes import token_bytes
from models.training.tokenizer import train_tokenizer
from specdec.verify.stop_strings import build_stop_table
from specdec.verify.stop_strings import STOPPED


@pytest.fixture(scope='module')
def pair():
  return load_pair('demo', None)


@pytest.fixture(scope='module')
def table(pair):
  return token_bytes(pair.tokenizer, pair.target.spec.vocab_size)


def _pair_of(tokenizer):
  spec = types.SimpleNamespace(vocab_size=len(tokenizer))
  target = types.SimpleNamespace(spec=spec)
  return Pair(target=target, draft=None, tokenizer=tokenizer, eos_ids=())


def _random_ids(rng, table, size):
  """Tokens of all kinds; single bytes in many rows, so that much is malformed.

  Bytes from 128 on are few among the tokens, hence drawn for themselves.
  """
  single = [one for one, data in enumerate(table) if len(data) == 1]
  upper = [one for one in single if table[one][0] >= 128]
  some = rng.choice([range(len(table)), single, upper])
  return [rng.choice(rng.choice([some, upper])) for _ in range(size)]


def _ids_of(table, data):
  """The tokens of single bytes that spell some bytes."""
  return [table.index(bytes([byte])) for byte in data]


def test_every_token_of_the_embedded_pair_and_malformed_ends(pair, table):
  assert len(table) == pair.target.spec.vocab_size
  for one, data in enumerate(table):
    assert data.decode(errors='replace') == pair.decode([one])
  assert {bytes([byte]) for byte in range(256)} <= set(table)
  for ends in ('e282', 'f09f98', 'eda080', 'f4908080'):
    ids = _ids_of(table, b'a' + bytes.fromhex(ends))
    for some in (ids, [*ids, *ids]):
      assert text_of(table, some) == pair.decode(some)


def _deal(rng, ids):
  """The ids in portions, some of them empty."""
  while ids:
    count = rng.randint(0, 3)
    yield ids[:count]
    ids = ids[count:]


def _cut(text, stops):
  found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops]
  found = [(end, at) for end, at in found if at >= 0]
  return text[: min(found)[1]] if found else text


def test_text_and_streams_are_what_the_pair_decodes(pair, table):
  rng = random.Random(0)
  cuts = malformed = 0
  for _ in range(4000):
    ids = _random_ids(rng, table, rng.randint(0, 12))
    text = pair.decode(ids)
    assert text_of(table, ids) == text, ids
    # Pieces of the text itself, and characters that are begun but not there.
    places = [rng.randrange(len(text)) for _ in range(3)] if text else []
    stops = [text[at : at + rng.randint(1, 3)] for at in places]
    stops = [stop for stop in stops if '\ufffd' not in stop] + ['\u20ac', 'é!']
    stream = TextStream(table, stops)
    streamed = ''.join(stream.feed(portion) for portion in _deal(rng, ids))
    assert _cut(text, stops).startswith(streamed)
    stopped = stream.stopped
    assert stopped == any(stop in text for stop in stops)
    assert streamed + stream.flush() == _cut(text, stops)
    assert text_of(table, ids, stops) == _cut(text, stops)
    cuts += stopped
    malformed += '\ufffd' in text
  assert 1000 < cuts < 4000
  assert 1000 < malformed < 4000


def test_table_stops_at_the_token_where_the_stream_does(pair, table):
  rng = random.Random(0)
  stops = ['\n\n', 'e', 'self.', '\u20ac', 'ret', 'return x', '):\n']
  rows = [rng.sample(stops, rng.randint(0, 3)) for _ in range(6)]
  automaton = build_stop_table(
    [[stop.encode() for stop in row] for row in rows], table, len(table)
  )
  next_state = np.asarray(automaton.next_state)
  source = pair.encode(pathlib.Path(__file__).read_text('utf-8'))
  stopped = 0
  for case in range(600):
    row = case % len(rows)
    place = rng.randrange(len(source))
    ids = source[place : place + 8] + _random_ids(rng, table, 4)
    stream, state = TextStream(table, rows[row]), int(automaton.start[row])
    for one in ids:
      stream.feed([one])
      state = next_state[state, one]
      assert (state == STOPPED) == stream.stopped
      if stream.stopped:
        stopped += 1
        break
  assert 50 < stopped < 550


def _stream(table, stops, portions):
  """What a stream returns for each portion and at the end, and if it stops."""
  stream = TextStream(table, stops)
  pieces = [stream.feed(portion) for portion in portions]
  return [*pieces, stream.flush()], stream.stopped


def test_when_streams_return_what(pair, table):
  spell = lambda data: [[one] for one in _ids_of(table, data)]
  # No half characters.
  portions = spell('a€😀'.encode() + b'\xe2\x82')
  pieces = ['a', '', '', '€', '', '', '', '😀', '', '', '\ufffd']
  assert _stream(table, [], portions) == (pieces, False)
  # A stop may begin within a broken character.
  portions = spell(b'a\xe2\x82' + '€z'.encode())
  pieces, stopped = _stream(table, ['€'], portions)
  assert (''.join(pieces), pieces[-1], stopped) == ('a\ufffd', '', True)
  # It is held back until it is none, and nothing comes after it.
  portions = map(pair.encode, ['one\n', '\ntwo', '\n\n'])
  pieces = ['one', '\n\ntwo', '', '\n\n']
  assert _stream(table, ['\n\nQ'], portions) == (pieces, False)
  portions = map(pair.encode, ['one. two', 'three'])
  assert _stream(table, ['.'], portions) == (['one', '', ''], True)


def test_unusable_stops_are_refused(table):
  for stop, message in (('', 'empty'), ('\ud800', 'surrogates')):
    with pytest.raises(ValueError, match=message):
      TextStream(table, ['a', stop])


def test_ids_beyond_the_tokenizer_have_no_text(pair):
  size = len(pair.tokenizer)
  table = token_bytes(pair.tokenizer, size + 5)
  assert len(table) == size + 5
  assert set(table[size:]) == {b''}
  for ids in ([size + 1], [size + 5, 70, size + 2, size + 9, 71]):
    assert text_of(table, ids) == pair.decode(ids)
  assert token_bytes(pair.tokenizer, 100) == table[:100]


def test_added_tokens_of_a_byte_level_tokenizer():
  tokenizer = train_tokenizer(['a b c'], vocab_size=260, context=64)
  size = len(tokenizer)
  before = token_bytes(tokenizer, size + 2)
  assert token_bytes(tokenizer, size + 2) is before  # they are remembered
  assert before[size:] == (b'', b'')
  tokenizer.add_tokens([AddedToken('<tool> Ġ'), AddedToken('né')])
  assert token_bytes(tokenizer, size + 2)[size] == '<tool> Ġ'.encode()
  tokenizer.add_special_tokens({'pad_token': '<pad>'})
  table = token_bytes(tokenizer, len(tokenizer))
  # Spelt in the byte alphabet, hence read as bytes; decoding does likewise.
  assert table[size:] == ('<tool> Ġ'.encode(), b'n\xe9', b'')
  ids = [*range(size, size + 3)]
  for some in (ids, [0, *ids, 0, *ids[:2]]):
    assert text_of(table, some) == _pair_of(tokenizer).decode(some)
  tokenizer.add_special_tokens({'eos_token': '<tool> Ġ'})
  assert token_bytes(tokenizer, size + 3)[size] == b''


_PIECES = ['▁the', '▁', '▁▁▁', 'cat', 's▁t', 'é', '▁né', '.']
_PIECES += ['<0x', '<0x0g>', 'x<0x41>', '<0x41>y']
_SPACES = decoders.Replace('▁', ' ')
_REST = [decoders.ByteFallback(), decoders.Fuse()]
LLAMA = decoders.Sequence([_SPACES, *_REST, decoders.Strip(' ', 1, 0)])
GEMMA = decoders.Sequence([_SPACES, *_REST])
SIGLIP = decoders.Sequence([decoders.Metaspace(), *_REST])
NESTED = decoders.Sequence([GEMMA])


def _sentencepiece(decoder):
  """A tokenizer as Llama's: pieces, and tokens for all bytes."""
  bytes_ = [f'<0x{byte:02X}>' for byte in range(256)]
  vocab = ['<unk>', '<s>', '</s>', *bytes_, *_PIECES]
  ids = {token: index for index, token in enumerate(vocab)}
  backend = tokenizers.Tokenizer(
    models.BPE(ids, [], unk_token='<unk>', byte_fallback=True)
  )
  backend.decoder = decoder
  backend.add_special_tokens(['<unk>', '<s>', '</s>'])
  backend.add_tokens(['<|tool|>', AddedToken('a▁b', normalized=False)])
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='</s>', unk_token='<unk>'
  )


def _spell(text):
  """The byte tokens of a text; the first has id 3."""
  return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize(
  'decoder',
  [LLAMA, GEMMA, SIGLIP, NESTED, decoders.Metaspace(), decoders.Fuse()],
)
def test_sentencepiece_text_is_what_the_pair_decodes(decoder):
  tokenizer = _sentencepiece(decoder)
  table = token_bytes(tokenizer, len(tokenizer) + 1)
  whole = [[one] for one in range(len(tokenizer) + 1) if not 131 <= one < 259]
  spelt = [_spell(character) for character in 'aé€😀▁\n ']
  rng = random.Random(0)
  cat = tokenizer.convert_tokens_to_ids('cat')
  for _ in range(1000):
    # A word goes first: the space that begins a text is left out of it.
    chosen = [rng.choice(rng.choice([whole, spelt])) for _ in range(8)]
    ids = [cat, *(one for part in chosen for one in part)]
    assert text_of(table, ids) == _pair_of(tokenizer).decode(ids), ids
    stream = TextStream(table)
    streamed = ''.join(stream.feed(portion) for portion in _deal(rng, ids))
    assert streamed + stream.flush() == text_of(table, ids)


def test_the_space_that_begins_what_is_decoded_is_kept():
  """What is generated goes on after a prompt."""
  tokenizer = _sentencepiece(LLAMA)
  table = token_bytes(tokenizer, len(tokenizer))
  ids = tokenizer.convert_tokens_to_ids(['▁the', 'cat'])
  assert text_of(table, ids) == ' thecat'
  pair = _pair_of(tokenizer)
  assert pair.decode(ids) == 'thecat'
  pieces = pair.pieces([*ids, *_spell('é'), ids[0], _spell('é')[0]])
  assert pieces == [' the', 'cat', '', 'é', ' the', '\ufffd']
  assert pair.pieces([]) == []


_OTHERS = [
  decoders.WordPiece(),
  decoders.CTC(),
  *(
    decoders.Sequence(parts)
    for parts in (
      [decoders.ByteLevel(), decoders.Strip(' ', 1, 0)],
      [decoders.Strip(' ', 1, 0), decoders.Fuse()],
      [decoders.Fuse(), decoders.Strip(' ', 0, 1)],
      [decoders.Fuse(), decoders.Strip('_', 1, 0)],
      [decoders.Fuse(), decoders.Replace('▁', ' ')],
      [decoders.Fuse(), decoders.ByteFallback()],
      [decoders.ByteFallback(), decoders.Metaspace()],
      [decoders.Replace(tokenizers.Regex('▁+'), ' ')],
      [],
    )
  ),
]


def test_other_decoders_are_refused():
  tokenizer = _sentencepiece(LLAMA)
  for decoder in _OTHERS:
    tokenizer.backend_tokenizer.decoder = decoder
    name = json.loads(tokenizer.backend_tokenizer.to_str())['decoder']['type']
    with pytest.raises(ValueError, match=f'streaming need .*{name}"'):
      token_bytes(tokenizer, 300)
  # Their texts have pieces nevertheless.
  tokenizer = _sentencepiece(decoders.WordPiece())
  cat = tokenizer.convert_tokens_to_ids('cat')
  assert _pair_of(tokenizer).pieces([cat, cat]) == ['cat', 'cat']
  backend = tokenizers.Tokenizer(models.WordLevel({'a': 0}, unk_token='a'))
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
  with pytest.raises(ValueError, match='this one has the decoder null'):
    token_bytes(tokenizer, 1)
  other = type('Other', (), {})()
  with pytest.raises(ValueError, match='Other has no decoder'):
    token_bytes(other, 1)
