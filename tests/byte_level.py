"""Tokenizers of a few tokens; bytes are written in GPT-2's alphabet."""

from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers
import transformers

_WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def spelled(text: str) -> str:
  """A text in the alphabet."""
  return _WHOLE.pre_tokenize_str(text)[0][0]


def tokenizer(
  words: Iterable[str],
  *special: str,
  merges: Iterable[tuple[str, str]] = (),
  **options: Any,
) -> transformers.PreTrainedTokenizerFast:
  """A tokenizer of some words, in the alphabet, and of special tokens."""
  ids = {word: index for index, word in enumerate(words)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [*merges]))
  backend.pre_tokenizer = _WHOLE
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([*special])
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, **options
  )
