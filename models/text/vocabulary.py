"""The tokens of models: which end a text, and which a draft proposes.

The head is a large part of what a small draft with a large vocabulary reads,
and most of its rows are of tokens that hardly occur (FR-Spec, arXiv
2502.14856). A draft may propose any tokens: what is decoded does not depend on
them, and other tokens come from the other stages and from the target.

If the tokenizers of target and draft differ, the draft proposes the tokens that
have the same bytes in both (`SharedTokens`). See `models/nn/other_tokens` for
what is made of them.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from absl import logging
import numpy as np
import transformers

from specdec import arguments as arguments_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.text import token_bytes as token_bytes_lib

EosIds = str | Sequence[int | str]
"""Ids of tokens, or their texts; a single text is one token."""

# The most draft tokens in place of one token; of more, only the last are read.
_MOST_PARTS = 2
# With a smaller share a draft would be of no use.
_LEAST_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class SharedTokens:
  """The tokens of a target, expressed in tokens of a draft.

  Attributes:
    same: `[V]` int, the draft token with the same bytes, or -1.
    parts: `[V, R]` int, the draft tokens that the draft reads in place of each
      token, aligned at the end; -1 before the first.
    share: how many of the target's tokens in a text the draft has, from 0 to 1.
      It is an estimate: by Zipf's law the frequency of a token falls with its
      rank, and ids are in the order of the merges.
  """

  same: np.ndarray
  parts: np.ndarray
  share: float


def _by_bytes(pieces: Sequence[bytes]) -> dict[bytes, int]:
  """The token of each text; the last if there are several.

  That is the one that the tokenizer prefers: single bytes, for what it cannot
  spell, have the first ids, and tokens that are matched before all others have
  the last.
  """
  return {piece: id_ for id_, piece in enumerate(pieces) if piece}


def _longest_matches(
  data: bytes, ids: dict[bytes, int], longest: int
) -> list[int]:
  """The longest tokens from the left; bytes without a token are left out."""
  matches, start = list[int](), 0
  while start < len(data):
    ends = range(min(start + longest, len(data)), start, -1)
    end = next((end for end in ends if data[start:end] in ids), None)
    if end is not None:
      matches.append(ids[data[start:end]])
    start = end or start + 1
  return matches


def _spelled(
  texts: Sequence[bytes], tokenizer: Any, pieces: Sequence[bytes]
) -> list[list[int]]:
  """The draft tokens of some texts: the tokenizer's, or the longest that fit.

  A tokenizer may add a space, and cannot read a part of a character. `pieces`
  are the bytes of its tokens.
  """
  ids = _by_bytes(pieces)
  longest = max(map(len, ids), default=0)
  encoded = tokenizer.backend_tokenizer.encode_batch(
    [text.decode('utf-8', 'replace') for text in texts],
    add_special_tokens=False,
  )
  spelled = []
  for text, encoding in zip(texts, encoded, strict=True):
    tokens = [id_ for id_ in encoding.ids if id_ < len(pieces) and pieces[id_]]
    if b''.join(pieces[id_] for id_ in tokens) != text:
      tokens = _longest_matches(text, ids, longest)
    spelled.append(tokens)
  return spelled


def _same_special(
  target: Any, draft: Any, sizes: tuple[int, int], ends: tuple[Any, Any]
) -> dict[int, int]:
  """The draft tokens for special tokens: with the same text, or EOS for EOS.

  Each draft token is used once.
  """
  of_target = token_bytes_lib.special_tokens(target, sizes[0])
  of_draft = token_bytes_lib.special_tokens(draft, sizes[1])
  same = {
    of_target[text]: id_ for text, id_ in of_draft.items() if text in of_target
  }
  unused = [id_ for id_ in ends[1] if id_ not in same.values()]
  missing = [id_ for id_ in ends[0] if id_ not in same]
  return same | dict(zip(missing, unused, strict=False))


def _expected_share(same: np.ndarray, pieces: Sequence[bytes]) -> float:
  """See `SharedTokens.share`.

  Single bytes are left out: they have the first ids without being merges, and
  most are rare.
  """
  size = np.array([len(piece) for piece in pieces])
  merged = size > min(1, size.max() - 1)
  weight = 1.0 / np.arange(1, 1 + np.sum(merged))
  return float(np.sum(weight * (same[merged] >= 0)) / np.sum(weight))


def find(
  target: Any,
  draft: Any,
  *,
  sizes: tuple[int, int],
  ends: tuple[Sequence[int], Sequence[int]],
) -> SharedTokens:
  """The tokens that two tokenizers share.

  `sizes` are the sizes of the two vocabularies, and `ends` the EOS ids.

  Raises:
    ValueError: the tokens of a tokenizer have no bytes of their own.
  """
  pieces = token_bytes_lib.token_bytes(target, sizes[0])
  draft_pieces = token_bytes_lib.token_bytes(draft, sizes[1])
  ids, same = _by_bytes(draft_pieces), np.full(sizes[0], -1, np.int32)
  for piece, id_ in _by_bytes(pieces).items():
    same[id_] = ids.get(piece, -1)
  for id_, partner in _same_special(target, draft, sizes, ends).items():
    same[id_] = partner
  # A token without a text, such as padding, is read as an end of the draft's.
  end = [*ends[1], 0][:1]
  spelled = [[id_] if id_ >= 0 else end for id_ in same.tolist()]
  missing = [id_ for id_ in np.flatnonzero(same < 0).tolist() if pieces[id_]]
  spellings = _spelled([pieces[id_] for id_ in missing], draft, draft_pieces)
  for id_, tokens in zip(missing, spellings, strict=True):
    spelled[id_] = tokens[-_MOST_PARTS:] or end
  num_parts = max(map(len, spelled))
  parts = [[-1] * (num_parts - len(tokens)) + tokens for tokens in spelled]
  share = _expected_share(same, pieces)
  return SharedTokens(same, np.array(parts, np.int32), share)


def of_checkpoints(
  target: checkpoint_lib.Checkpoint, draft: checkpoint_lib.Checkpoint
) -> SharedTokens | None:
  """The tokens that two models share if their tokenizers differ; logs them.

  None if the tokenizers are equal, or the draft has none.

  Raises:
    ValueError: they share too little for the draft to be of use; the tokens of
      a tokenizer have no bytes of their own; or the vocabularies of one
      tokenizer differ by more than padding.
  """
  sizes = target.config.vocab_size, draft.config.vocab_size
  if (
    target.tokenizer is None
    or draft.tokenizer is None
    or target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
  ):
    num_tokens = len(target.tokenizer or ())
    padded = draft.tokenizer is not None and num_tokens <= min(sizes)
    if sizes[0] != sizes[1] and not padded:
      raise ValueError(
        f'the target has a vocabulary of {sizes[0]} tokens, the draft'
        f' {draft.path} of {sizes[1]}, and nothing shows that the difference is'
        f' padding (the tokenizer of the target has {num_tokens} tokens);'
        ' choose a draft with the same tokenizer, and its tokenizer in the'
        ' folder'
      )
    return None
  names = (
    f'the tokenizers of the target {target.path} ({len(target.tokenizer)}'
    f' tokens) and the draft {draft.path} ({len(draft.tokenizer)} tokens)'
  )
  try:
    shared = find(
      target.tokenizer,
      draft.tokenizer,
      sizes=sizes,
      ends=(target.eos_ids, draft.eos_ids),
    )
  except ValueError as error:
    raise ValueError(
      f'{names} differ, and what they share cannot be found, because the tokens'
      ' of one have no bytes of their own; choose a draft with the same'
      ' tokenizer'
    ) from error
  num_shared, share = int(np.sum(shared.same >= 0)), round(100 * shared.share)
  if shared.share < _LEAST_SHARE:
    raise ValueError(
      f'{names} share {num_shared} tokens, about {share} % of a text; a draft'
      ' can propose only these, so choose one with a more similar tokenizer'
    )
  logging.warning(
    '%s differ: they share %d tokens, about %d %% of a text; the draft proposes'
    ' these, and reads others as up to %d of its own. A draft of the same'
    ' family would share all',
    names,
    num_shared,
    share,
    shared.parts.shape[1],
  )
  return shared


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
  special = token_bytes_lib.special_tokens(tokenizer, vocab_size)
  for token in eos_ids:
    if not isinstance(token, str):
      ids.append(token)
      continue
    arguments_lib.check_text('eos_ids', token)
    text = token.encode()
    if text in special:
      ids.append(special[text])
      continue
    pieces = token_bytes_lib.token_bytes(tokenizer, vocab_size) if text else ()
    same = [id_ for id_, piece in enumerate(pieces) if piece == text]
    if not same:
      raise ValueError(
        f'eos_ids={token!r}: no token of the target has this text; give the'
        ' text of one token, or its id; a text of several tokens can be a stop'
        ' string'
      )
    ids += same
  return ids
