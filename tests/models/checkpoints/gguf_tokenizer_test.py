"""Tokenizers of GGUF files, against the rules of llama.cpp."""

import re

import byte_level
import gguf
from gguf import TokenType
import pytest
import refusals
import tiny_blocks

from specdec.models.checkpoints import hub
from specdec.models.checkpoints.gguf_parts import gguf_tokenizer
from specdec.models.text import token_bytes as token_bytes_lib

_ALPHABET, _spelled = byte_level.ALPHABET, byte_level.spelled


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'model.gguf'


def _write(path, words, *, model='gpt2', kinds=None, **keys):
  """A file with a tokenizer only; the keys follow `tokenizer.ggml.`."""
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tokenizer_model(model)
  writer.add_token_list(words)
  if kinds:
    writer.add_token_types(kinds)
  for key, value in keys.items():
    add = {bool: writer.add_bool, int: writer.add_uint32}.get(type(value))
    add = add or {str: writer.add_string, list: writer.add_array}[type(value)]
    add(f'tokenizer.ggml.{key}', value)
  tiny_blocks.finish(writer)
  return path


# The characters of a text differ, so a whole word is merged from its left.
_TEXTS = ["we'RE a12345", 'x +=\n\n\t y', 'mixUp Éd', '=\n/z']
_DIGITS = list('12345')
_SMOLLM = [
  ['we', "'", 'RE', ' a', *_DIGITS],
  ['x', ' +=', '\n\n\t', ' y'],
  ['mixUp', ' Éd'],
  ['=', '\n', '/', 'z'],
]
_LLAMA = [
  ['we', "'RE", ' a', '123', '45'],
  ['x', ' +=\n\n', '\t', ' y'],
  ['mixUp', ' Éd'],
  ['=\n', '/z'],
]
_DEEPSEEK = [
  ['we', "'", 'RE', ' a', '12345'],
  ['x', ' +=', '\n', '\n', '\t', ' y'],
  *_SMOLLM[2:],
]
_TEKKEN = [
  ['we', "'RE", ' a', *_DIGITS],
  _LLAMA[1],
  ['mix', 'Up', ' Éd'],
  ['=\n/', 'z'],
]
_WORDS = {
  'gpt-2': [_DEEPSEEK[0], *_SMOLLM[1:]],
  'smollm': _SMOLLM,
  'llama-bpe': _LLAMA,
  'qwen2': [_TEKKEN[0], *_LLAMA[1:]],
  'tekken': _TEKKEN,
  'gpt-4o': [["we'RE", ' a', '123', '45'], *_TEKKEN[1:]],
  # Among its signs are the letters of ASCII; they are cut from other letters.
  'deepseek-llm': [*_DEEPSEEK[:2], ['mixUp', ' É', 'd'], _DEEPSEEK[3]],
  'deepseek-coder': [_SMOLLM[0], *_DEEPSEEK[1:]],
  'deepseek-v3': _LLAMA,
  'falcon': [
    ['we', "'", 'RE', ' a', '123', '45'],
    ['x', ' ', '+=', '\n\n\t', ' y'],
    *_SMOLLM[2:],
  ],
}
_WORDS['default'] = _WORDS['falcon']


@pytest.mark.parametrize('pre', [*_WORDS, 'other'])
def test_texts_are_split_as_for_llama_cpp(pre, path, caplog):
  tokens = dict.fromkeys(_ALPHABET)
  merges = {}
  for text in map(_spelled, _TEXTS):
    for start in range(len(text)):
      for end in range(start + 1, len(text)):
        merges[f'{text[start:end]} {text[end]}'] = None
        tokens[text[start : end + 1]] = None
  words = list(tokens)
  keys = {'pre': pre, 'merges': list(merges), 'add_bos_token': False}
  tokenizer = hub.locate(_write(path, words, **keys)).tokenizer
  is_known = pre in _WORDS
  expected_words = _WORDS[pre if is_known else 'default']
  for text, expected in zip(_TEXTS, expected_words, strict=True):
    ids = [words.index(_spelled(word)) for word in expected]
    assert tokenizer(text)['input_ids'] == ids, text
  assert ("pre-tokenizer 'other' is not known" in caplog.text) == (not is_known)
  # Where the file does not say whether texts begin with a token.
  del keys['add_bos_token']
  tokenizer = hub.locate(_write(path, words, bos_token_id=9, **keys)).tokenizer
  begins = tokenizer(text)['input_ids'][0] == 9
  assert begins == (pre in ('llama-bpe', 'tekken'))


@pytest.mark.parametrize(
  ('pre', 'expected'),
  [
    *((pre, ['a', 'ĠViet']) for pre in ('llama-bpe', 'tekken', 'falcon3')),
    ('minicpm5', ['a', 'ĠViet']),
    *((pre, ['a', 'ĠV', 'ie', 't']) for pre in ('qwen2', 'gpt-2')),
  ],
)
def test_words_of_the_vocabulary_that_merges_do_not_reach(pre, expected, path):
  words = [*_ALPHABET, 'ie', 'ĠV', 'ĠViet']
  keys = {'pre': pre, 'merges': ['i e', 'Ġ V'], 'add_bos_token': False}
  tokenizer = hub.locate(_write(path, words, **keys)).tokenizer
  ids = tokenizer('a Viet')['input_ids']
  assert tokenizer.convert_ids_to_tokens(ids) == expected


_GPT2 = {'pre': 'gpt-2', 'merges': ['e r']}
_BYTES = [f'<0x{byte:02X}>' for byte in range(256)]
_PIECES = {'▁': -6, 'h': -7, 'i': -8, '▁▁': -5, '▁h': -3, 'hi': -2, '▁hi': -1}

# Such as a Gemma has, for HTML and for runs of lines.
_WHOLE = ['\n', '\n\n', 'i\n']


def _write_pieces(path, **keys):
  """SentencePiece; unknown, begin and end tokens have names of their own."""
  words = ['<none>', '<begin>', '<end>', *_BYTES, *_PIECES, *_WHOLE]
  kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
  kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(_PIECES)
  kinds += [TokenType.USER_DEFINED] * len(_WHOLE)
  scores = [0.0] * 259 + [float(score) for score in _PIECES.values()]
  scores += [-1000.0] * len(_WHOLE)
  keys = {'scores': scores} | keys
  return _write(path, words, model='llama', kinds=kinds, **keys), words


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    # Merges know no words, but end where lines do.
    (' b\nb a', ['▁b', '\n', 'b▁', 'a']),
    ('b\n\nb\n\n\n', ['b', '\n\n', 'b', '\n', '\n', '\n']),
    ('b<end>b č', ['b', '<end>', 'b▁', '<0xC4>', '<0x8D>']),
  ],
)
def test_lines_are_merged_as_for_llama_cpp(text, expected, path):
  words = ['<pad>', '<end>', '<begin>', *_BYTES]
  kinds = [TokenType.CONTROL] * 3 + [TokenType.BYTE] * 256
  pieces = ['a', 'b', '▁', '\n', '▁a', '▁b', 'b▁', '\n\n', '\nb']
  # A space is a letter of some words, though no text that is read has one.
  pieces += [' ', ' a']
  kinds += [TokenType.NORMAL] * len(pieces)
  merges = ['\n b', '▁ b', 'b ▁', '▁ a', '  a']
  _write(
    path,
    [*words, *pieces],
    model='gemma4',
    kinds=kinds,
    merges=merges,
    bos_token_id=2,
    eos_token_id=1,
  )
  tokenizer = hub.locate(path).tokenizer
  ids = tokenizer(text)['input_ids']
  assert ids == [2, *map([*words, *pieces].index, expected)]
  assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize(
  ('text', 'prefix', 'expected'),
  [
    ('hi', True, ['▁hi']),
    ('hi', False, ['hi']),
    # The space that a text begins with is not the one before each text.
    (' hi', True, ['▁', '▁hi']),
    (' hi', False, ['▁hi']),
    ('hi<end>hi', True, ['▁hi', '<end>', '▁hi']),
    ('hi<end>hi', False, ['hi', '<end>', 'hi']),
    # Tags that other files have are text.
    ('<s>', False, ['<0x3C>', '<0x73>', '<0x3E>']),
    ('č', True, ['▁', '<0xC4>', '<0x8D>']),
    # Whole ones are cut off before others are merged, the longest first.
    ('hi\n\n\nhi', False, ['h', 'i\n', '\n\n', 'hi']),
  ],
)
def test_sentencepiece_is_as_for_llama_cpp(text, prefix, expected, path):
  _, words = _write_pieces(path, add_space_prefix=prefix)
  tokenizer = hub.locate(path).tokenizer
  assert len(tokenizer) == len(words)
  # Without keys these are the tokens 1 and 2, and a text begins with the first.
  ids = tokenizer(text)['input_ids']
  assert ids == [1, *map(words.index, expected)]
  assert tokenizer.decode(ids[1:]).replace('> ', '>') == text
  assert (tokenizer.bos_token, tokenizer.eos_token) == ('<begin>', '<end>')
  assert gguf_tokenizer.eos_ids(path) == [2]


@pytest.mark.parametrize('kind', [None, *TokenType])
def test_tokens_that_end_a_text_by_their_names(kind, path):
  """The 22 names of llama.cpp, and the names for code that is filled in."""
  ends = '<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|>'
  ends += ' <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT]'
  ends += ' [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> [e~['
  ends += ' <|tool_response> <｜end▁of▁sentence｜>'  # noqa: RUF001
  ends = ends.split()
  assert len(set(ends)) == 22
  words = [*_ALPHABET, 'er', *ends, '<|fim_pad|>', 'a<eos>']
  kinds = kind and [*[TokenType.NORMAL] * 257, *[kind] * 23, TokenType.NORMAL]
  keys = {'eos_token_id': 5, 'eot_token_id': 999}
  _write(path, words, kinds=kinds, **_GPT2 | keys)
  # Where all are there, `<|end|>` is within an answer, as in gpt-oss.
  assert gguf_tokenizer.eos_ids(path) == [5, 257, 258, *range(260, 280)]
  # They are read whole, and have no text.
  tokenizer = hub.locate(path).tokenizer
  assert tokenizer('a<|im_end|>')['input_ids'][1:] == [258]
  table = token_bytes_lib.token_bytes(tokenizer, len(words))
  assert set(table[257:280]) == {b''}


@pytest.mark.parametrize('name', ['[PAD{}]', 'filling {}'])
def test_tokens_that_only_fill_the_vocabulary_up(name, path):
  """The converter once gave them another type."""
  words = [*_ALPHABET, 'er', *(name.format(index) for index in (257, 258))]
  is_user_defined = name.startswith('[')
  kind = TokenType.USER_DEFINED if is_user_defined else TokenType.UNUSED
  kinds = [1] * 257 + [kind] * 2
  tokenizer = hub.locate(_write(path, words, kinds=kinds, **_GPT2)).tokenizer
  expected = {word: token for token, word in enumerate(words[:257])}
  assert tokenizer.get_vocab() == expected


_TWICE = {'words': ['er', *_ALPHABET[:-1], 'er']}


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (_TWICE, "0 and 256 are both 'er'"),
    *refusals.of('models/checkpoints', 'gguf tokenizer'),
  ],
)
def test_metadata_that_does_not_fit(change, message, path):
  words = change.pop('words', [*_ALPHABET, 'er'])
  if words:
    _write(path, words, **_GPT2 | change)
  else:  # The writer would refuse it.
    _write(path, ['e'], **_GPT2 | change)
    array = b'\x08\0\0\0\x01' + bytes(7) + b'\x01' + bytes(7) + b'e'
    none = b'\x08\0\0\0' + bytes(8)
    path.write_bytes(path.read_bytes().replace(array, none))
  with pytest.raises(ValueError, match=f'{re.escape(str(path))}.*{message}'):
    _ = hub.locate(path).tokenizer


def test_types_beyond_the_tokens_and_ids_that_are_none(path):
  words = [*_ALPHABET, 'er']
  keys = _GPT2 | {'bos_token_id': 257, 'padding_token_id': 2**32 - 1}
  tokenizer = hub.locate(_write(path, words, kinds=[1] * 300, **keys)).tokenizer
  assert tokenizer('er')['input_ids'] == [256]
  assert tokenizer.bos_token is tokenizer.pad_token is None


def test_roles_of_tokens(path):
  """The first token has one, too, and texts end as a file says."""
  words = [*_ALPHABET, 'er']
  keys = _GPT2 | {'bos_token_id': 0, 'eos_token_id': 9}
  keys |= {'add_bos_token': True, 'add_eos_token': True}
  tokenizer = hub.locate(_write(path, words, **keys)).tokenizer
  assert tokenizer('er')['input_ids'] == [0, 256, 9]
  assert (tokenizer.bos_token, tokenizer.eos_token) == (words[0], words[9])
