r"""Tokenizers and end-of-text tokens in GGUF files.

A file has no `tokenizer.json`; what it lacks follows from the names of its
tokenizer and pre-tokenizer, as in llama.cpp (src/llama-vocab.cpp).

Texts are split into words before they are merged. A file names its
pre-tokenizer, and llama.cpp has a list of regular expressions for each name.
Each expression in turn cuts all pieces into its matches and the text between
them. The expressions here agree with llama.cpp's where it differs from the
published model; `(?i:...)` is spelled out, for example, because it makes
`\u017f` an `s`.
"""

import dataclasses
import pathlib
from typing import Any

from absl import logging
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
import transformers

from specdec.models.checkpoints.gguf_parts import gguf_file
from specdec.text import text_files

_PREFIX = 'tokenizer.ggml.'
_SPECIAL = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
}
# Ids of SentencePiece vocabularies, if a file does not state them.
_DEFAULTS = {'bos_token_id': 1, 'eos_token_id': 2, 'unknown_token_id': 0}
# Types of tokens: the unknown one, special ones, others that are never cut into
# pieces, and fillers of the vocabulary.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# Tokens that end a text or a turn, of whatever type: many files have only one
# key, or tokens of a wrong type.
_ENDS = {
  '<|eot_id|>',
  '<|im_end|>',
  '<|end|>',
  '<|return|>',
  '<|call|>',
  '<|flush|>',
  '<|calls|>',
  '<end_of_turn>',
  '<|endoftext|>',
  '</s>',
  '<|eom_id|>',
  '<EOT>',
  '_<EOT>',
  '[EOT]',
  '[EOS]',
  '<|end_of_text|>',
  '<end_of_utterance>',
  '<eos>',
  '<turn|>',
  '<|tool_response>',
  '[e~[',
  '<\uff5cend▁of▁sentence\uff5c>',
  # Between files of a repository, and after code that was filled in.
  '<|fim_pad|>',
  '<fim-pad>',
  '<fim_pad>',
  '<PAD>',
  '[PAD]',
  '<|fim_repo|>',
  '<|repo_name|>',
  '<fim-repo>',
  '<REPO>',
  '<reponame>',
  '<|file_sep|>',
}
_END_KEYS = ('eos', 'eot', 'eom', 'fim_pad', 'fim_rep', 'fim_sep')


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
  words: list[str]
  kinds: list[int]  # Types.
  keys: dict[str, Any]  # The file's keys of its tokenizer.
  file: str  # The name of the file.

  def token_id(self, key: str) -> int | None:
    """The id of a token with a role; None without a usable id."""
    default = _DEFAULTS.get(key) if self.keys.get('model') == 'llama' else None
    token = self.keys.get(key, default)
    usable = isinstance(token, int) and 0 <= token < len(self.words)
    return token if usable else None


def _array(keys: dict[str, Any], name: str, length: int) -> list[Any]:
  """An array of at least some length; ValueError if it is shorter."""
  array = keys.get(name)
  if not isinstance(array, list) or len(array) < length:
    size = len(array) if isinstance(array, list) else 'no'
    raise ValueError(
      f'{_PREFIX}{name} has {size} entries, expected {length};'
      ' convert the model again'
    )
  return array


def _read(path: pathlib.Path) -> _Vocabulary | None:
  """The vocabulary of a file; None if it has none, ValueError if it is bad."""
  metadata = gguf_file.read_header(path).metadata
  keys = {
    key.removeprefix(_PREFIX): value
    for key, value in metadata.items()
    if key.startswith(_PREFIX)
  }
  if keys.get('model') in ('none', 'no_vocab') or 'tokens' not in keys:
    return None
  template = 'tokenizer.chat_template'
  keys['chat_template'] = metadata.get(template)
  texts = f'{_PREFIX}model', f'{_PREFIX}pre', template
  text_files.check_types(metadata, dict.fromkeys(texts, str))
  words = [
    word or f'[EMPTY_{token}]'
    for token, word in enumerate(_array(keys, 'tokens', 1))
  ]
  kinds = [_NORMAL] * len(words)
  if 'token_type' in keys:
    kinds = _array(keys, 'token_type', len(words))
  used = len(words)
  while used and (
    kinds[used - 1] == _UNUSED or words[used - 1] == f'[PAD{used - 1}]'
  ):
    used -= 1
  words = words[:used]
  kinds = [
    _CONTROL if word in _ENDS else kind
    for word, kind in zip(words, kinds, strict=False)
  ]
  seen: dict[str, int] = {}
  for token, word in enumerate(words):
    if seen.setdefault(word, token) != token:
      raise ValueError(f'tokens {seen[word]} and {token} are both {word!r}')
  return _Vocabulary(words, kinds, keys, path.name)


def _merging(vocabulary: _Vocabulary, **options: Any) -> tokenizers.Tokenizer:
  # The first letter of a merge may be a space.
  cut = [
    (merge, merge.find(' ', 1))
    for merge in _array(vocabulary.keys, 'merges', 0)
  ]
  ids = {word: token for token, word in enumerate(vocabulary.words)}
  pairs = [(merge[:at], merge[at + 1 :]) for merge, at in cut]
  return tokenizers.Tokenizer(models.BPE(ids, pairs, **options))


def _lines(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
  """BPE of whole lines, and of the newlines between them, as Gemma 4's."""
  backend = _merging(vocabulary, byte_fallback=True, ignore_merges=True)
  backend.normalizer = normalizers.Replace(' ', '▁')
  backend.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex(r'\n+'), 'isolated'
  )
  backend.decoder = _spaced()
  return backend


def _spaced(*last: Any) -> Any:
  """A decoder of tokens with spaces as signs, and of tokens of bytes."""
  steps = (decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse())
  return decoders.Sequence([*steps, *last])


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
  """Byte-level BPE, as GPT-2's."""
  pre = vocabulary.keys.get('pre')
  ignores = pre in _IGNORE_MERGES
  backend = _merging(vocabulary, ignore_merges=ignores)
  backend.pre_tokenizer, is_known = _pre_tokenizer(pre)
  if not is_known:
    logging.warning(
      '%s: the pre-tokenizer %r is not known; texts are split into words as'
      ' llama.cpp does by default, so prompts may get other tokens than the'
      ' model was trained with; the safetensors files of the model do not have'
      ' this problem',
      vocabulary.file,
      pre,
    )
  backend.decoder = decoders.ByteLevel()
  return backend


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
  """SentencePiece: joins the pair that makes the token of the highest score."""
  words = vocabulary.words
  scores = _array(vocabulary.keys, 'scores', len(words))
  ids = {word: token for token, word in enumerate(words)}
  pairs = [
    (score, word[:cut], word[cut:])
    for word, score in zip(words, scores, strict=False)
    for cut in range(len(word) - 1, 0, -1)
    if word[:cut] in ids and word[cut:] in ids
  ]
  pairs.sort(key=lambda pair: -pair[0])
  unknown = vocabulary.token_id('unknown_token_id')
  backend = tokenizers.Tokenizer(
    models.BPE(
      ids,
      [(left, right) for _, left, right in pairs],
      unk_token=None if unknown is None else words[unknown],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  last: tuple[Any, ...] = ()
  spaces = normalizers.Replace(' ', '▁')
  if vocabulary.keys.get('add_space_prefix', True):
    # Before a space as well, and after each special token.
    backend.normalizer = normalizers.Sequence(
      [normalizers.Prepend('▁'), spaces]
    )
    last = (decoders.Strip(' ', 1, 0),)
  else:
    backend.normalizer = spaces
  backend.decoder = _spaced(*last)
  return backend


_BUILDERS = {'gpt2': _byte_level, 'llama': _sentencepiece, 'gemma4': _lines}


def load_tokenizer(
  path: pathlib.Path,
) -> transformers.PreTrainedTokenizerBase | None:
  """The tokenizer that the metadata describes, or None if there is none.

  If it is not known how a text is split into words, it is split as llama.cpp
  does by default, and a warning says so.

  Raises:
    ValueError: its kind is not known, or a part is missing.
  """
  vocabulary = _read(path)
  if vocabulary is None:
    return None
  words, keys = vocabulary.words, vocabulary.keys
  build = _BUILDERS.get(keys.get('model', ''))
  if build is None:
    raise ValueError(
      f'{_PREFIX}model {keys.get("model")!r} is not supported; choose'
      f' from {sorted(_BUILDERS)}'
    )
  try:
    backend = build(vocabulary)
  except ValueError:
    raise
  except Exception as error:  # The tokenizers package raises no narrower type.
    raise ValueError(f'there is no usable tokenizer: {error}') from error
  whole = lambda *kinds: [
    tokenizers.AddedToken(word, normalized=False)
    for word, kind in zip(words, vocabulary.kinds, strict=True)
    if kind in kinds
  ]
  backend.add_special_tokens(whole(_UNKNOWN, _CONTROL))
  backend.add_tokens(whole(_USER_DEFINED))
  roles = {name: vocabulary.token_id(key) for name, key in _SPECIAL.items()}
  begins = keys['model'] in ('llama', 'gemma4') or keys.get('pre') in _WITH_BOS
  adds = {'bos': keys.get('add_bos_token', begins)}
  adds['eos'] = keys.get('add_eos_token', False)
  for name in adds:
    if keys.get(f'add_{name}_token') and roles[f'{name}_token'] is None:
      raise ValueError(
        f'{_PREFIX}add_{name}_token is true, but there is no token'
        f' {_PREFIX}{name}_token_id={keys.get(f"{name}_token_id")}'
      )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    add_bos_token=adds['bos'],
    add_eos_token=adds['eos'],
    chat_template=keys['chat_template'],
    **{
      name: words[token] for name, token in roles.items() if token is not None
    },
  )


def eos_ids(path: pathlib.Path) -> list[int]:
  """Tokens that end a text or a turn of a conversation: by keys, and by names.

  Raises:
    ValueError: the vocabulary is bad.
  """
  vocabulary = _read(path)
  if vocabulary is None:
    return []
  stated = [vocabulary.token_id(f'{role}_token_id') for role in _END_KEYS]
  words = {*vocabulary.words}
  # As in llama.cpp: between messages of one answer of gpt-oss.
  within = {'<|end|>'} if {'<|return|>', '<|call|>'} <= words else set()
  ends = [
    token
    for token, word in enumerate(vocabulary.words)
    if word in _ENDS - within
  ]
  return list(
    dict.fromkeys(token for token in (*stated, *ends) if token is not None)
  )


_SPACES = r'\s*[\r\n]+|\s+(?!\S)|\s+'
_SUFFIXES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTERS = r'[^\r\n\p{L}\p{N}]?\p{L}+'
_SIGNS = r' ?[^\s\p{L}\p{N}]+[\r\n]*'
_SIGNS_OR_SLASHES = r' ?[^\s\p{L}\p{N}]+[\r\n/]*'
# Words with lower-case letters at their end, then those without.
_UPPER, _LOWER = r'[\p{L}&&[^a-z]]', r'[\p{L}&&[^A-Z]]'
_CASES = [
  rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+',
  rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*',
]

_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_LLAMA3 = '|'.join([_SUFFIXES, _LETTERS, r'\p{N}{1,3}', _SIGNS, _SPACES])
_QWEN2 = '|'.join([_SUFFIXES, _LETTERS, r'\p{N}', _SIGNS, _SPACES])
_QWEN35 = '|'.join(
  [
    _SUFFIXES,
    r'[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+',
    r'\p{N}',
    r' ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*',
    _SPACES,
  ]
)
_TEKKEN = '|'.join([*_CASES, r'\p{N}', _SIGNS_OR_SLASHES, _SPACES])
_GPT4O = '|'.join(
  [
    *(f'{case}{_SUFFIXES}?' for case in _CASES),
    r'\p{N}{1,3}',
    _SIGNS_OR_SLASHES,
    _SPACES,
  ]
)
_SEED = '|'.join(
  [_SUFFIXES, _LETTERS, r'\p{N}', r' ?[^\s\p{L}\p{N}\r\n]+', _SPACES]
)
_CHINESE = '[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+'
_DEEPSEEK3 = (
  r'[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+'
  r'| ?[\p{P}\p{S}]+[\r\n]*|' + _SPACES
)
_BLOOM = ' ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+'

_LLAMA3_NAMES = {
  'llama3',
  'llama-v3',
  'llama-bpe',
  'falcon3',
  'falcon-h1',
  'pixtral',
  'midm-2.0',
  'lfm2',
  'jina-v5-nano',
}
# Texts begin with the BOS token unless the file says otherwise, and a word of
# the vocabulary is one token, whatever the merges make.
_WITH_BOS = _LLAMA3_NAMES | {'tekken'}
_IGNORE_MERGES = _WITH_BOS | {'minicpm5'}

_EXPRESSIONS: list[tuple[set[str], list[str]]] = [
  (_LLAMA3_NAMES, [_LLAMA3]),
  ({'dbrx', 'smaug-bpe', 'glm4', 'chatglm-bpe'}, [_LLAMA3]),
  (
    {
      'qwen2',
      'deepseek-r1-qwen',
      'kormo',
      'f2llmv2',
      'megrez',
      'stablelm2',
      'hunyuan',
      'solar-open',
      'grok-2',
    },
    [_QWEN2],
  ),
  (
    {'minicpm5'},
    [
      r'\p{N}{1,3}',
      '|'.join([_SUFFIXES, _LETTERS, r'\p{N}+', _SIGNS, _SPACES]),
    ],
  ),
  ({'qwen35'}, [_QWEN35]),
  ({'tekken'}, [_TEKKEN]),
  ({'gpt-4o', 'llama4', 'kanana2', 'talkie', 'minimax-m2'}, [_GPT4O]),
  ({'seed-coder'}, [_SEED]),
  (
    {
      'gpt-2',
      'phi-2',
      'mpt',
      'olmo',
      'jais',
      'mellum',
      'trillion',
      'exaone4',
      'gigachat',
      'a.x-4.0',
      'granite-docling',
      'modern-bert',
    },
    [_GPT2],
  ),
  (
    {
      'smollm',
      'starcoder',
      'refact',
      'command-r',
      'codeshell',
      'exaone',
      'minerva-7b',
      'mellum2',
    },
    [r'\p{N}', _GPT2],
  ),
  (
    {'deepseek-llm'},
    [
      r'[\r\n]',
      r'\s?[\p{Lu}\p{Ll}\p{Lt}]+',
      '\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+',
      r'\s+$',
      _CHINESE,
      r'\p{N}+',
    ],
  ),
  (
    {'deepseek-coder'},
    [r'[\r\n]', r'\s?\p{L}+', r'\s?\p{P}+', _CHINESE, r'\p{N}'],
  ),
  (
    {'deepseek-v3', 'hunyuan-dense', 'joyai-llm', 'hy_v4'},
    [r'\p{N}{1,3}', '[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+', _DEEPSEEK3],
  ),
  ({'falcon'}, [r'[\p{P}$+<=>^~|`]+', _GPT2, '[0-9][0-9][0-9]']),
  ({'default'}, [r'[\p{P}$+<=>^~|]+', _GPT2, r'\p{N}+', '[0-9][0-9][0-9]']),
  ({'poro-chat', 'bloom', 'gpt3-finnish'}, [_BLOOM]),
  ({'viking'}, [_BLOOM, r'\p{N}']),
]


def _pre_tokenizer(
  name: str | None,
) -> tuple[pre_tokenizers.PreTokenizer, bool]:
  """The pre-tokenizer of a name, and whether the name is known.

  It splits a text into words, and spells them in the byte alphabet of GPT-2. An
  unknown name has llama.cpp's default.
  """
  by_name = {
    alias: expressions
    for aliases, expressions in _EXPRESSIONS
    for alias in aliases
  }
  cuts = [
    pre_tokenizers.Split(tokenizers.Regex(expression), 'isolated')
    for expression in by_name.get(name or 'default', by_name['default'])
  ]
  spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return pre_tokenizers.Sequence([*cuts, spell]), name in by_name
