"""Tokenizers and end-of-text tokens in GGUF files."""

from collections.abc import Sequence
import json
import pathlib

from absl import logging
import tokenizers
from tokenizers import pre_tokenizers
import transformers

from models.checkpoints import gguf
from models.checkpoints.gguf_header import read_header

_SPECIAL = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
}
_UNUSED = 5  # Type of tokens that only fill the vocabulary up.
_CONTROL = 3  # Type of special tokens.
_USER_DEFINED = 4  # Type of other tokens that are never cut into pieces.
# As in llama.cpp (src/llama-vocab.cpp): special tokens that end a text or a
# turn, and pre-tokenizers of vocabularies whose texts begin with the BOS token.
_ENDS = {
  *('<|eot_id|>', '<|im_end|>', '<|end|>', '<|endoftext|>', '<|end_of_text|>'),
  *('<|eom_id|>', '<end_of_turn>', '<EOT>', '_<EOT>', '< EOT >'),
}
_WITH_BOS = {
  *('llama3', 'llama-v3', 'llama-bpe', 'falcon3', 'pixtral', 'tekken'),
}
# Pre-tokenizers that split a text into words as GPT-2 does, and those that
# also split numbers into digits.
_AS_GPT2 = {'gpt-2', 'phi-2', 'mpt', 'olmo', 'jais', 'mellum'}
_DIGITS_APART = {'smollm', 'starcoder', 'refact', 'command-r', 'codeshell'}


def _with_own_tokens(
  backend: tokenizers.Tokenizer, words: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
  """The tokenizer with the special tokens of the file, under their ids.

  transformers spells those outside the alphabet of bytes in this alphabet, and
  adds one of GPT-2 that the file may not have.
  """
  own = [
    token
    for token, kind in enumerate(kinds)
    if kind in (_CONTROL, _USER_DEFINED)
  ]
  equal = all(backend.token_to_id(words[token]) == token for token in own)
  if equal and backend.get_vocab_size() == len(words):
    return backend
  state = json.loads(backend.to_str())
  vocab = state['model']['vocab']
  spelled = {token: word for word, token in vocab.items()}
  for token in own:
    vocab.pop(spelled.get(token), None)
    vocab[words[token]] = token
  flags = ('single_word', 'lstrip', 'rstrip', 'normalized')
  state['added_tokens'] = [
    {
      'id': token,
      'content': words[token],
      'special': kinds[token] == _CONTROL,
      **dict.fromkeys(flags, False),
    }
    for token in own
  ]
  return tokenizers.Tokenizer.from_str(json.dumps(state))


def load_tokenizer(
  path: pathlib.Path,
) -> transformers.PreTrainedTokenizerBase | None:
  """The tokenizer that the metadata describes, or None if there is none.

  If it is not known how a text is split into words, it is split as for GPT-2,
  and a warning says so.

  Raises:
    ValueError: transformers cannot build it.
  """
  from transformers.integrations.gguf import convert_gguf_tokenizer
  from transformers.integrations.gguf import gguf_tokenizer_mapping

  header = read_header(path)
  prefix = 'tokenizer.ggml.'
  found = {
    key.removeprefix(prefix): value
    for key, value in header.metadata.items()
    if key.startswith(prefix)
  }
  if 'tokens' not in found:
    return None
  words = found['tokens']
  kinds = found.get('token_type') or [1] * len(words)
  stated = gguf.architecture(path, header)
  # What llama.cpp does where a file does not say.
  begins = found.get('model') == 'llama' or found.get('pre') in _WITH_BOS
  used = len(words)
  while used and kinds[used - 1] == _UNUSED:
    used -= 1
  described = found | {
    'tokenizer_type': found.get('model'),
    'pre_tokenizer_type': found.get('pre'),
    'tokens': words[:used],
    'token_type': kinds[:used],
  }
  try:
    special = {
      name: words[found[key]] for name, key in _SPECIAL.items() if key in found
    }
    backend, _ = convert_gguf_tokenizer(stated, described)
  except (LookupError, TypeError, ValueError) as error:
    raise ValueError(f'{path} has no usable tokenizer: {error}') from error
  if found.get('model') == 'gpt2':
    backend = _with_own_tokens(backend, words[:used], kinds[:used])
  elif found.get('add_space_prefix') is False:
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
      prepend_scheme='never', split=False
    )
  pre = found.get('pre')
  known = {*_AS_GPT2, *gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS}
  if pre in _DIGITS_APART:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
      [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
      ]
    )
  elif found.get('model') == 'gpt2' and pre not in known:
    logging.warning(
      '%s: the pre-tokenizer %r is not known; texts are split into words as for'
      ' GPT-2, so prompts may get other tokens than the model was trained with;'
      ' the safetensors files of the model do not have this problem',
      *(path.name, pre),
    )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    add_bos_token=found.get('add_bos_token', begins),
    add_eos_token=found.get('add_eos_token', False),
    chat_template=header.metadata.get('tokenizer.chat_template'),
    **special,
  )


def eos_ids(path: pathlib.Path) -> list[int]:
  """Tokens that end a text or a turn of a conversation.

  As for llama.cpp these are also special tokens with one of some texts, because
  many files have but one key.
  """
  metadata = read_header(path).metadata
  keys = (f'tokenizer.ggml.{kind}_token_id' for kind in ('eos', 'eot', 'eom'))
  words = metadata.get('tokenizer.ggml.tokens', ())
  kinds = metadata.get('tokenizer.ggml.token_type', ())
  ends = [
    token
    for token, (word, kind) in enumerate(zip(words, kinds, strict=False))
    if kind == _CONTROL and word in _ENDS
  ]
  stated = [metadata[key] for key in keys if key in metadata]
  return list(dict.fromkeys(stated + ends))
