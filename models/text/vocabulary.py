"""The tokens of opened models, before their weights are read."""

import dataclasses

import numpy as np
import transformers

from specdec import arguments as arguments_lib
from specdec.models.text import draft_vocabulary
from specdec.models.text import ends as ends_lib
from specdec.models.text import shared_tokens
from specdec.models.text import sources as sources_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
  """The tokens of a target, and what its draft makes of them.

  Attributes:
    sources: the models.
    tokenizer: the target's.
    eos_ids: the tokens that end a text.
    shared: the tokens that target and draft share, if their tokenizers differ.
    draft_outputs: `[N]` int, the tokens whose logits the draft computes, in its
      own vocabulary; None: all.
  """

  sources: sources_lib.Sources
  tokenizer: transformers.PreTrainedTokenizerBase
  eos_ids: tuple[int, ...]
  shared: shared_tokens.SharedTokens | None = None
  draft_outputs: np.ndarray | None = None

  @property
  def proposed(self) -> np.ndarray | None:
    """`[N]` int32, ascending: the target's tokens that the draft can propose.

    None: all.
    """
    outputs, shared = self.draft_outputs, self.shared
    if outputs is None and shared is None:
      return None
    same = np.arange(self.sources.target.config.vocab_size)
    same = same if shared is None else shared.same
    has_output = same >= 0 if outputs is None else np.isin(same, outputs)
    return np.flatnonzero(has_output).astype(np.int32)


def read_vocabulary(sources: sources_lib.Sources) -> Vocabulary:
  """Reads the tokenizers of a target and a draft, and compares them.

  Raises:
    ValueError: the target has no tokenizer, a tokenizer or a token that ends a
      text cannot be used, the tokenizers share too little, or the vocabularies
      of one tokenizer differ by more than padding.
  """
  tokenizer, draft = sources.tokenizer, sources.draft
  target, choice = sources.target, sources.choice
  if choice.eos_ids is None:
    eos_ids = target.eos_ids
  else:
    ids = ends_lib.eos_ids_of(choice.eos_ids, tokenizer, len(tokenizer))
    eos_ids = tuple(
      arguments_lib.to_ids('eos_ids', ids, target.config.vocab_size)
    )
  vocabulary = Vocabulary(sources=sources, tokenizer=tokenizer, eos_ids=eos_ids)
  if draft is None and sources.head is None:
    return vocabulary
  if draft is None:  # A head has the target's tokens.
    outputs = draft_vocabulary.tokens_of(
      choice.draft_vocab, tokenizer, target.config.vocab_size
    )
    return dataclasses.replace(vocabulary, draft_outputs=outputs)
  shared = shared_tokens.of_checkpoints(target, draft)
  return dataclasses.replace(
    vocabulary,
    shared=shared,
    draft_outputs=draft_vocabulary.tokens_of(
      choice.draft_vocab,
      draft.tokenizer if shared else tokenizer,
      draft.config.vocab_size,
    ),
  )
