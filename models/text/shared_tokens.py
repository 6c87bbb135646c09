"""What the vocabularies of a target and a draft share, by the tokens' bytes.

See `models.nn.other_tokens` for what is made of it.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from absl import logging
import numpy as np

from models.checkpoints import checkpoint as checkpoint_lib
from models.text import token_bytes as token_bytes_lib

# Parts of a token; of more, the last are read.
_MOST_PARTS = 2
# With a smaller share a draft would be of no use.
_LEAST_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class SharedTokens:
  """The tokens of a target in those of a draft.

  Attributes:
    same: `[V]` int, the draft token with the same bytes, or -1.
    parts: `[V, R]` int, the draft tokens that stand for each token in a text,
      the last of them in the last place; -1 before the first.
    share: of the target's tokens in a text, those that the draft has, as an
      estimate: by Zipf's law the frequency of a token falls with its rank, and
      ids are in the order of the merges.
  """

  same: np.ndarray
  parts: np.ndarray
  share: float


def _by_bytes(pieces: Sequence[bytes]) -> dict[bytes, int]:
  """The token of each text; of several the last, which the tokenizer prefers.

  Bytes that a vocabulary has for what it cannot spell come before its tokens,
  tokens that are matched before all others behind them.
  """
  return {piece: id_ for id_, piece in enumerate(pieces) if piece}


def _longest_matches(
  data: bytes, ids: dict[bytes, int], longest: int
) -> list[int]:
  """The longest tokens from the left; bytes without a token are left out."""
  found, at = list[int](), 0
  while at < len(data):
    sizes = range(min(longest, len(data) - at), 0, -1)
    size = next((one for one in sizes if data[at : at + one] in ids), 0)
    if size:
      found.append(ids[data[at : at + size]])
    at += max(size, 1)
  return found


def _spelled(
  pieces: Sequence[bytes], tokenizer: Any, theirs: Sequence[bytes]
) -> list[list[int]]:
  """The draft tokens of some texts: the tokenizer's, or the longest that fit.

  A tokenizer may add a space, and cannot read a part of a character.
  """
  ids = _by_bytes(theirs)
  longest = max(map(len, ids), default=0)
  texts = [piece.decode('utf-8', 'replace') for piece in pieces]
  encoded = tokenizer.backend_tokenizer.encode_batch(
    texts, add_special_tokens=False
  )
  spelled = []
  for piece, one in zip(pieces, encoded, strict=True):
    found = [id_ for id_ in one.ids if id_ < len(theirs) and theirs[id_]]
    if b''.join(theirs[id_] for id_ in found) != piece:
      found = _longest_matches(piece, ids, longest)
    spelled.append(found)
  return spelled


def _same_special(
  target: Any, draft: Any, sizes: tuple[int, int], ends: tuple[Any, Any]
) -> dict[int, int]:
  """Draft tokens of the target's special tokens: of the same text, or of EOS.

  A draft token stands for one of them.
  """
  ours, theirs = (
    token_bytes_lib.special_tokens(*one)
    for one in zip((target, draft), sizes, strict=True)
  )
  same = {ours[text]: id_ for text, id_ in theirs.items() if text in ours}
  left = [id_ for id_ in ends[1] if id_ not in same.values()]
  missing = [id_ for id_ in ends[0] if id_ not in same]
  return same | dict(zip(missing, left, strict=False))


def _expected_share(same: np.ndarray, pieces: Sequence[bytes]) -> float:
  """See `SharedTokens.share`.

  Single bytes are no merges: they have the first ids, and most are rare.
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
  """The tokens of a target in those of a draft.

  Args:
    target: a tokenizer.
    draft: another tokenizer.
    sizes: of the vocabularies of target and draft.
    ends: the EOS ids of target and draft.

  Raises:
    ValueError: the tokens of a tokenizer have no bytes of their own.
  """
  ours = token_bytes_lib.token_bytes(target, sizes[0])
  theirs = token_bytes_lib.token_bytes(draft, sizes[1])
  ids, same = _by_bytes(theirs), np.full(sizes[0], -1, np.int32)
  for piece, id_ in _by_bytes(ours).items():
    same[id_] = ids.get(piece, -1)
  for id_, partner in _same_special(target, draft, sizes, ends).items():
    same[id_] = partner
  # Without a text, such as padding: whatever ends a text of the draft.
  nothing = [*ends[1], 0][:1]
  spelled = [[one] if one >= 0 else nothing for one in same.tolist()]
  missing = [id_ for id_ in np.flatnonzero(same < 0).tolist() if ours[id_]]
  found = _spelled([ours[id_] for id_ in missing], draft, theirs)
  for id_, tokens in zip(missing, found, strict=True):
    spelled[id_] = tokens[-_MOST_PARTS:] or nothing
  number = max(map(len, spelled))
  parts = [[-1] * (number - len(one)) + one for one in spelled]
  share = _expected_share(same, ours)
  return SharedTokens(same, np.array(parts, np.int32), share)


def of_checkpoints(
  target: checkpoint_lib.Checkpoint, draft: checkpoint_lib.Checkpoint
) -> SharedTokens | None:
  """What two models share if they have different tokenizers, which is logged.

  None if the tokenizers are equal, or one of them is not known.

  Raises:
    ValueError: too little for the draft to be of use; or the tokens of a
      tokenizer have no bytes of their own.
  """
  if target.tokenizer is None or draft.tokenizer is None:
    return None
  if target.tokenizer.get_vocab() == draft.tokenizer.get_vocab():
    return None
  names = (
    f'the tokenizers of the target {target.path} ({len(target.tokenizer)}'
    f' tokens) and the draft {draft.path} ({len(draft.tokenizer)} tokens)'
  )
  try:
    shared = find(
      target.tokenizer,
      draft.tokenizer,
      sizes=(target.config.vocab_size, draft.config.vocab_size),
      ends=(target.eos_ids, draft.eos_ids),
    )
  except ValueError as error:
    raise ValueError(
      f'{names} differ, and what they share cannot be found, because the tokens'
      ' of one have no bytes of their own; choose a draft with the same'
      ' tokenizer'
    ) from error
  number, share = int(np.sum(shared.same >= 0)), round(100 * shared.share)
  if shared.share < _LEAST_SHARE:
    raise ValueError(
      f'{names} share {number} tokens, of which a text has about {share} %; a'
      ' draft can propose only these, so choose one with a more similar'
      ' tokenizer'
    )
  logging.warning(
    '%s differ: they share %d tokens, of which a text has about %d %%; the'
    ' draft proposes these, and reads others as up to %d of its own',
    *(names, number, share, shared.parts.shape[1]),
  )
  return shared
