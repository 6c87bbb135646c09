"""The tokens that a draft computes and proposes: the most frequent ones.

The head is a large part of what a small draft with a large vocabulary reads,
and most of its rows are of tokens that hardly occur (FR-Spec, arXiv
2502.14856). A draft may propose any tokens: what is decoded does not depend on
them, and other tokens come from the other stages and from the target.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec import arguments as arguments_lib
from specdec.text import text_files
from specdec.text import whole_files


def most_frequent(path: str, num_tokens: int) -> list[int]:
  """The tokens of the largest counts; of equal counts the lower ids.

  Args:
    path: of a `.npy` file with an array of counts, `[V]`.
    num_tokens: N, at most V.

  Raises:
    ValueError: the file cannot be read or has another shape.
  """
  with whole_files.reading(path, 'give a .npy file of counts'):
    text_files.refuse_stand_in(path)
    counts = np.load(path, allow_pickle=False)
  if counts.ndim != 1 or counts.dtype.kind not in 'iuf':
    raise ValueError(f'{path} has no array [V] of counts, but {counts.shape}')
  return sorted(np.argsort(-counts, kind='stable')[:num_tokens].tolist())


def size_of(draft_vocab: int | Sequence[int] | None) -> int | None:
  """How many tokens `tokens_of` was asked for; None: the default."""
  if draft_vocab is None or isinstance(draft_vocab, int):
    return draft_vocab
  return len(set(draft_vocab))


def tokens_of(
  draft_vocab: int | Sequence[int] | None, tokenizer: Any, vocab_size: int
) -> np.ndarray | None:
  """The tokens that a draft proposes, `[N]` ascending; None: all.

  Args:
    draft_vocab: N, for the special tokens and those that the tokenizer learned
      first (ids are in the order of its merges), or the ids.
    tokenizer: the draft's.
    vocab_size: V, of the draft.

  Raises:
    ValueError: an id is outside the draft's vocabulary, or N leaves no room for
      tokens that are not special.
  """
  if draft_vocab is None:
    return None
  if not isinstance(draft_vocab, int):
    return np.unique(
      arguments_lib.to_ids('draft_vocab', draft_vocab, vocab_size)
    )
  if draft_vocab >= vocab_size:
    return None
  special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
  special = {id_ for id_ in special if id_ < vocab_size}
  if draft_vocab <= len(special):
    raise ValueError(
      f'draft_vocab={draft_vocab} must be more than the {len(special)} special'
      f' tokens of the draft; its vocabulary has {vocab_size}'
    )
  others = (id_ for id_ in range(vocab_size) if id_ not in special)
  first = [next(others) for _ in range(draft_vocab - len(special))]
  return np.array(sorted([*special, *first]))
