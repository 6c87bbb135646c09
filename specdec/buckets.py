"""Shapes that few prompts differ in, so that few programs are compiled.

Prompts are padded to powers of two, the room for new tokens to multiples of 64.
"""

from collections.abc import Sequence

import numpy as np

_SMALLEST_PROMPT_BUCKET = 32
_NEW_TOKENS_BUCKET = 64


def _prompt_bucket(length: int) -> int:
  return max(_SMALLEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def padded_room(room: int) -> int:
  """Slots for so many new tokens."""
  return -(-max(room, 1) // _NEW_TOKENS_BUCKET) * _NEW_TOKENS_BUCKET


def padded_shape(
  prompts: Sequence[Sequence[int]], room: int
) -> tuple[int, int]:
  """The slots of a decode: of its prompts, P, and of new tokens.

  Args:
    prompts: of a batch.
    room: for new tokens, see `Options`.
  """
  return _prompt_bucket(max(map(len, prompts))), padded_room(room)


def pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
  """`[B, P]` int32, padded with zeros at the end, and the lengths, `[B]`."""
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  bucket = _prompt_bucket(int(lengths.max()))
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  return padded, lengths
