r"""How the texts of GGUF files are split into words before they are merged.

A file has only a name. llama.cpp (src/llama-vocab.cpp) has a list of regular
expressions for each name. Each expression in turn cuts all pieces into its
matches and the text between them. The expressions here agree with llama.cpp's
where it differs from the published model; `(?i:...)` is spelled out, for
example, because it makes `\u017f` an `s`.
"""

import tokenizers
from tokenizers import pre_tokenizers

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
WITH_BOS = _LLAMA3_NAMES | {'tekken'}
IGNORE_MERGES = WITH_BOS | {'minicpm5'}

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


def pre_tokenizer(
  name: str | None,
) -> tuple[pre_tokenizers.PreTokenizer, bool]:
  """Splits a text into words, which it spells in the byte alphabet of GPT-2.

  Args:
    name: `tokenizer.ggml.pre` of the file.

  Returns:
    The pre-tokenizer, and whether the name is known; if it is not, it is
    llama.cpp's default.
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
