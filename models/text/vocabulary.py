"""The tokens of opened models, before their weights are read."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np
import transformers

from specdec import arguments as arguments_lib
from specdec.models.text import draft_vocabulary
from specdec.models.text import shared_tokens
from specdec.models.text import sources as sources_lib
from specdec.models.text import token_bytes as token_bytes_lib

# Ids of tokens, or their texts; a single text is one token.
EosIds = str | Sequence[int | str]


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
    ids = ids_of_eos(choice.eos_ids, tokenizer, len(tokenizer))
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


def ids_of_eos(
  eos_ids: Any,
  tokenizer: transformers.PreTrainedTokenizerBase,
  vocab_size: int,
) -> Any:
  """`EosIds` as ids; they are checked where they are used.

  Raises:
    ValueError: no token has one of the texts, or the tokens of the tokenizer
      have no bytes of their own.
  """
  if isinstance(eos_ids, str):
    eos_ids = [eos_ids]
  if isinstance(eos_ids, Mapping) or not isinstance(eos_ids, Iterable):
    return eos_ids
  ids: list[Any] = []
  for token in eos_ids:
    is_text = isinstance(token, str)
    ids += _ids_of_text(token, tokenizer, vocab_size) if is_text else [token]
  return ids


def _ids_of_text(
  text: str, tokenizer: transformers.PreTrainedTokenizerBase, vocab_size: int
) -> list[int]:
  """The ids of all tokens with a text."""
  arguments_lib.check_text('eos_ids', text)
  special = token_bytes_lib.special_tokens(tokenizer, vocab_size)
  if text.encode() in special:
    return [special[text.encode()]]
  pieces = token_bytes_lib.token_bytes(tokenizer, vocab_size) if text else ()
  ids = [id_ for id_, piece in enumerate(pieces) if piece == text.encode()]
  if not ids:
    raise ValueError(
      f'eos_ids={text!r}: no token of the target has this text; give the text'
      ' of one token, or its id; a text of several tokens can be a stop string'
    )
  return ids
