"""Padded sizes of prompts and new tokens, so that few programs are compiled."""

from collections.abc import Sequence

import numpy as np

# Few shapes, so that few programs are compiled.
_SMALLEST_PROMPT_BUCKET = 32


_NEW_TOKENS_BUCKET = 64


def padded_length(length: int) -> int:
  """The number of slots for a prompt of `length` tokens."""
  return max(_SMALLEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def padded_room(room: int) -> int:
  """The number of slots for `room` new tokens."""
  return -(-max(room, 1) // _NEW_TOKENS_BUCKET) * _NEW_TOKENS_BUCKET


def padded_shape(
  prompts: Sequence[Sequence[int]], room: int
) -> tuple[int, int]:
  """The slots of the prompts of a batch, P, and those of its new tokens."""
  return padded_length(max(map(len, prompts))), padded_room(room)


def pad(
  prompts: Sequence[Sequence[int]], num_slots: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """`[B, P]` int32, padded with zeros at the end, and the lengths, `[B]`.

  P is `num_slots`; None: as the prompts need, a power of two.
  """
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  bucket = num_slots or padded_length(int(lengths.max()))
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  return padded, lengths
