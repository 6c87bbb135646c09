"""Training of byte-level BPE tokenizers that `AutoTokenizer` can load."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders
from tokenizers import pre_tokenizers
from tokenizers import trainers
import transformers

END_OF_TEXT = '<|endoftext|>'


def train_tokenizer(
  texts: Iterable[str], *, vocab_size: int, context: int
) -> transformers.PreTrainedTokenizerFast:
  """Trains byte-level BPE as GPT-2 has it: every text round-trips.

  `context` is its `model_max_length`, in tokens.

  Raises:
    ValueError: `vocab_size` is below 257 (all bytes and `<|endoftext|>`).
  """
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  if vocab_size <= len(alphabet):
    raise ValueError(
      f'--vocab_size={vocab_size} must exceed {len(alphabet)} (all bytes)'
    )
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_OF_TEXT],
    initial_alphabet=alphabet,
    show_progress=False,
  )
  bpe.train_from_iterator(texts, trainer)
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe,
    eos_token=END_OF_TEXT,
    bos_token=END_OF_TEXT,
    model_max_length=context,
    clean_up_tokenization_spaces=False,
  )
