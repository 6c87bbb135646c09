"""The bytes of tokens and growing text, against what tokenizers decode."""

import json
import types

import byte_level
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
import transformers

from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import constraints as constraints_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import text_options
from specdec.models.text import token_bytes as token_bytes_lib
from specdec.text import stop_strings


def _text_of(table, ids, stops=()):
  return token_bytes_lib.TextStream(table, stops).finish(ids).text


@pytest.fixture(scope='module')
def pair():
  return pair_lib.load_pair(choice_lib.ModelChoice('demo', None))


@pytest.fixture(scope='module')
def table(pair):
  return token_bytes_lib.token_bytes(
    pair.tokenizer, pair.target.spec.vocab_size
  )


@pytest.fixture(scope='module')
def spelt(table):
  """The tokens of single bytes that spell some bytes."""
  return lambda data: [table.index(bytes([byte])) for byte in data]


def _pair_of(tokenizer):
  spec = types.SimpleNamespace(vocab_size=len(tokenizer))
  target = types.SimpleNamespace(spec=spec)
  return pair_lib.Pair(
    target=target, draft=None, tokenizer=tokenizer, eos_ids=()
  )


def test_every_token_of_the_embedded_pair(pair, table):
  texts = [data.decode(errors='replace') for data in table]
  assert texts == [pair.decode([token]) for token in range(len(texts))]
  assert len(table) == pair.target.spec.vocab_size
  assert {bytes([byte]) for byte in range(256)} <= set(table)


def _cut(text, stops):
  matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops]
  matches = [(end, at) for end, at in matches if at >= 0]
  return text[: min(matches)[1]] if matches else text


def _streamed(stream, ids, sizes):
  """The text until `flush`, of portions of some sizes, and then of the rest."""
  pieces = []
  for size in (*sizes, len(ids)):
    pieces.append(stream.feed(ids[:size]).text)
    ids = ids[size:]
  return ''.join(pieces)


_SIZES = st.lists(st.integers(0, 3), max_size=6)
_BYTES = st.binary(max_size=4) | st.text(max_size=2).map(str.encode)


@hypothesis.settings(max_examples=250)
@hypothesis.given(
  # Any tokens, and malformed bytes and characters that are spelt.
  parts=st.lists(st.integers(0, 1 << 12) | _BYTES, max_size=8),
  cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), max_size=3),
  sizes=_SIZES,
)
@hypothesis.example(parts=[b'a\xe2\x82a\xf0\x9f\x98'] * 2, cuts=[], sizes=[])
@hypothesis.example(parts=[b'a\xed\xa0\x80'] * 2, cuts=[], sizes=[])
@hypothesis.example(parts=[b'a\xf4\x90\x80\x80'] * 2, cuts=[], sizes=[])
def test_text_and_streams_are_what_the_pair_decodes(
  pair, table, spelt, parts, cuts, sizes
):
  ids = []
  for part in parts:
    ids += [part % len(table)] if isinstance(part, int) else spelt(part)
  text = pair.decode(ids)
  assert _text_of(table, ids) == text
  # Pieces of the text itself, and characters that are begun but not there.
  stops = [text[at : at + size] for at, size in cuts if at < len(text)]
  stops = [stop for stop in stops if '\ufffd' not in stop] + ['\u20ac', 'é!']
  stream = token_bytes_lib.TextStream(table, stops)
  streamed = _streamed(stream, ids, sizes)
  assert _cut(text, stops).startswith(streamed)
  assert stream.stopped == any(stop in text for stop in stops)
  assert streamed + stream.flush().text == _cut(text, stops)
  assert _text_of(table, ids, stops) == _cut(text, stops)
  # Without stop strings all is shown at once but half a character.
  shown = _streamed(token_bytes_lib.TextStream(table), ids, sizes)
  assert shown.rstrip('\ufffd') == text.rstrip('\ufffd')


def test_added_tokens_of_a_byte_level_tokenizer():
  """The bytes are remembered until tokens are added."""
  tokenizer = tokenizer_lib.train_tokenizer(
    ['a b c'], vocab_size=260, context=64
  )
  size = len(tokenizer) + 2
  table = token_bytes_lib.token_bytes(tokenizer, size)
  assert token_bytes_lib.token_bytes(tokenizer, size) is table
  assert token_bytes_lib.token_bytes(tokenizer, size + 1) is not table
  assert table[-2] == b''
  tokenizer.add_tokens(['more'])
  assert token_bytes_lib.token_bytes(tokenizer, size)[-2:] == (b'more', b'')
  tokenizer.add_special_tokens({'pad_token': 'more'})
  assert token_bytes_lib.token_bytes(tokenizer, size)[-2:] == (b'', b'')
  tokenizer.add_tokens([AddedToken('<tool> Ġ'), 'né', 'čaj'])
  tokenizer.add_special_tokens({'pad_token': '<pad>'})
  table = token_bytes_lib.token_bytes(tokenizer, len(tokenizer))
  ids = tokenizer.convert_tokens_to_ids(['<tool> Ġ', 'né', 'čaj', '<pad>'])
  # Texts are searched for them literally: no letter is a byte.
  plain = ['<tool> Ġ'.encode(), 'né'.encode(), 'čaj'.encode(), b'']
  assert [table[token] for token in ids] == plain
  pair = _pair_of(tokenizer)
  for text_ids in (ids, [0, *ids, 0, *ids[:2]]):
    assert _text_of(table, text_ids) == pair.decode(text_ids)
  text = 'a b čaj né c'
  assert pair.decode(pair.encode(text)) == text
  assert _text_of(table, pair.encode(text), ['čaj']) == 'a b '


_PIECES = ['▁the', '▁', '▁▁▁', 'cat', 's▁t', 'é', '▁né', '.']
_PIECES += ['<0x', '<0x0g>', 'x<0x41>', '<0x41>y']
_SPACES, _METASPACE = decoders.Replace('▁', ' '), decoders.Metaspace()
_BYTES, _FUSE = decoders.ByteFallback(), decoders.Fuse()
_STRIP = decoders.Strip(' ', 1, 0)
_in_turn = lambda *parts: decoders.Sequence(list(parts))
_LLAMA = _in_turn(_SPACES, _BYTES, _FUSE, _STRIP)
_GEMMA = _in_turn(_SPACES, _BYTES, _FUSE)
_SIGLIP = _in_turn(_METASPACE, _BYTES, _FUSE)


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
  'decoder', [_LLAMA, _GEMMA, _SIGLIP, _in_turn(_GEMMA), _METASPACE, _FUSE]
)
def test_sentencepiece_text_is_what_the_pair_decodes(decoder):
  tokenizer = _sentencepiece(decoder)
  pair, size = _pair_of(tokenizer), len(tokenizer) + 1
  table = token_bytes_lib.token_bytes(tokenizer, size)
  # Malformed bytes are left out: `tokenizers` writes U+FFFD for each of them.
  single = [[token] for token in range(131)]
  pieces = [[token] for token in range(259, size)]
  parts_of_text = st.sampled_from(pieces) | st.sampled_from(single)
  parts_of_text |= st.sampled_from('aé€😀▁\n ').map(_spell)

  @hypothesis.given(st.lists(parts_of_text, max_size=8), _SIZES)
  @hypothesis.example(pieces * 2, [1, 2])
  @hypothesis.example(single, [3])
  def check(parts, sizes):
    # A word goes first: the space that begins a text is left out of it.
    ids = sum(parts, start=tokenizer.convert_tokens_to_ids(['cat']))
    assert _text_of(table, ids) == pair.decode(ids)
    stream = token_bytes_lib.TextStream(table)
    shown = _streamed(stream, ids, sizes) + stream.flush().text
    assert shown == pair.decode(ids)

  check()


def test_the_space_that_begins_what_is_decoded_is_kept():
  """Generated text goes on after a prompt."""
  tokenizer = _sentencepiece(_LLAMA)
  table = token_bytes_lib.token_bytes(tokenizer, len(tokenizer))
  ids = tokenizer.convert_tokens_to_ids(['▁the', 'cat'])
  assert _text_of(table, ids) == ' thecat'
  pair = _pair_of(tokenizer)
  assert pair.decode(ids) == 'thecat'
  pieces = pair.pieces([*ids, *_spell('é'), ids[0], _spell('é')[0]])
  assert pieces == [' the', 'cat', '', 'é', ' the', '\ufffd']
  assert pair.pieces([]) == []


def test_other_decoders_are_refused():
  for decoder in (
    decoders.WordPiece(),
    decoders.CTC(),
    _in_turn(),
    _in_turn(decoders.ByteLevel(), _STRIP),
    _in_turn(_STRIP, _FUSE),
    _in_turn(_FUSE, decoders.Strip(' ', 0, 1)),
    _in_turn(_FUSE, decoders.Strip('_', 1, 0)),
    _in_turn(_FUSE, _SPACES),
    _in_turn(_FUSE, _BYTES),
    _in_turn(_BYTES, _METASPACE),
    _in_turn(decoders.Replace(tokenizers.Regex('▁+'), ' ')),
  ):
    tokenizer = _sentencepiece(decoder)
    name = json.loads(tokenizer.backend_tokenizer.to_str())['decoder']['type']
    with pytest.raises(ValueError, match=f'streaming need .*{name}"'):
      token_bytes_lib.token_bytes(tokenizer, 300)
    # Pieces are then decoded one by one.
    cat = tokenizer.convert_tokens_to_ids('cat')
    pair = _pair_of(tokenizer)
    assert pair.pieces([cat, cat]) == [pair.decode([cat])] * 2


@pytest.mark.parametrize('decoder', [_LLAMA, _GEMMA, _METASPACE, None])
@pytest.mark.parametrize('writes', ['pre_tokenizer', 'normalizer'])
def test_a_byte_level_vocabulary_is_read_as_bytes(decoder, writes):
  """Converters of Mistral's models write the decoder of SentencePiece there."""
  word, text = byte_level.spelled(' é'), 'a é\n€'
  letters = [*byte_level.ALPHABET, word]
  merges = [(word[:1], word[1:2]), (word[:2], word[2:])]
  letters.insert(-1, word[:2])
  tokenizer = byte_level.tokenizer(letters, '<s>', merges=merges)
  tokenizer.add_tokens(['▁čaj'])
  expected = token_bytes_lib.token_bytes(tokenizer, len(tokenizer))
  backend = tokenizer.backend_tokenizer
  backend.decoder = decoder
  if writes == 'normalizer':
    backend.pre_tokenizer, backend.normalizer = None, normalizers.ByteLevel()
  token_bytes_lib._cache.clear()
  pair, ids = _pair_of(tokenizer), tokenizer(f'{text}▁čaj<s>')['input_ids']
  assert pair.token_bytes() == expected
  assert ' é'.encode() in expected
  assert pair.decode(ids) == f'{text}▁čaj'
  assert ''.join(pair.pieces(ids)) == f'{text}▁čaj'
  assert pair.said(ids, ['\n']).text == 'a é'
  size = len(tokenizer)
  table = text_options.with_ids(pair, {}, ((' é',),))['stop']
  stopped = np.asarray(table.next_state)[0] == stop_strings.STOPPED
  assert stopped.nonzero()[0].tolist() == [expected.index(' é'.encode())]
  automaton = constraints_lib.automaton_of(
    ('regex', ' é'), tokenizer, size, [size - 2]
  )
  first = [automaton.after[1, automaton.kinds[id_]] >= 0 for id_ in range(size)]
  spelled = [data for data, can in zip(expected, first, strict=True) if can]
  assert sorted(spelled) == sorted([b' ', ' é'.encode()[:2], ' é'.encode()])


def test_tokenizers_without_a_decoder_are_refused():
  backend = tokenizers.Tokenizer(models.WordLevel({'a': 0}, unk_token='a'))
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
  with pytest.raises(ValueError, match='this one has the decoder null'):
    token_bytes_lib.token_bytes(tokenizer, 1)
  with pytest.raises(ValueError, match='Other has no decoder'):
    token_bytes_lib.token_bytes(type('Other', (), {})(), 1)
