"""What tells one tokenizer's ids from another's."""

import hashlib
import json

import transformers


def vocabulary_digest(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
  """Equal for tokenizers whose ids mean the same tokens, 32 hex digits."""
  vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
  return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()
