"""The accept and stop rules against loops that read like their definitions."""

import jax
import numpy as np
import pytest

from specdec.verification import count_accepted
from specdec.verification import count_emitted

_count_accepted = jax.jit(count_accepted)
_count_emitted = jax.jit(count_emitted, static_argnums=3)


def _slow_step(drafted, chosen, room, eos_ids):
  """One row: accepted, emitted, done."""
  accepted = 0
  while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
    accepted += 1
  emitted, ended = [], False
  for token in chosen[: accepted + 1]:
    if ended or len(emitted) == room:
      break
    emitted.append(token)
    ended = token in eos_ids
  return accepted, len(emitted), ended or len(emitted) == room


@pytest.mark.parametrize('eos_ids', [(), (2,), (0, 3)])
@pytest.mark.parametrize('g', [0, 1, 2, 5])
def test_against_a_slow_reference(g, eos_ids):
  rng = np.random.default_rng(g)
  num_rows = 400
  # So few tokens that drafts are often right, and an EOS is often met.
  chosen = rng.integers(5, size=(num_rows, g + 1)).astype(np.int32)
  drafted = np.where(
    rng.random((num_rows, g)) < 0.7,
    chosen[:, :g],
    rng.integers(5, size=(num_rows, g)),
  ).astype(np.int32)
  room = rng.integers(g + 4, size=num_rows).astype(np.int32)

  accepted = _count_accepted(drafted, chosen)
  emitted, done = _count_emitted(accepted, chosen, room, eos_ids)
  expected = [
    _slow_step(*row, eos_ids)
    for row in zip(
      drafted.tolist(), chosen.tolist(), room.tolist(), strict=True
    )
  ]
  actual = list(
    zip(accepted.tolist(), emitted.tolist(), done.tolist(), strict=True)
  )
  assert actual == expected
  # The cases that matter were among them.
  assert {case[0] for case in expected} == set(range(g + 1))
  assert {case[1] for case in expected} == set(range(g + 2))
  assert {case[2] for case in expected} == {True, False}


def test_by_hand():
  drafted = np.array(
    [
      [7, 8, 9],
      [7, 8, 0],
      [0, 8, 9],
      [7, 8, 9],
      [7, 8, 9],
      [7, 8, 9],
      [7, 8, 9],
    ],
    np.int32,
  )
  chosen = np.array(
    [
      [7, 8, 9, 4],
      [7, 8, 9, 4],  # right again after a wrong token does not count
      [7, 8, 9, 4],
      [7, 1, 9, 4],  # an EOS as the bonus token
      [7, 8, 9, 4],  # a limit within the block
      [7, 8, 9, 4],  # a row that is done
      [7, 8, 9, 1],  # the EOS is the last token of a full block
    ],
    np.int32,
  )
  room = np.array([9, 9, 9, 9, 2, 0, 9], np.int32)
  accepted = _count_accepted(drafted, chosen)
  assert accepted.tolist() == [3, 2, 0, 1, 3, 3, 3]
  emitted, done = _count_emitted(accepted, chosen, room, (1,))
  assert emitted.tolist() == [4, 3, 1, 2, 2, 0, 4]
  assert done.tolist() == [False, False, False, True, True, True, True]


def test_an_eos_behind_the_bonus_token_was_never_said():
  emitted, done = _count_emitted(
    np.array([1], np.int32),
    np.array([[5, 6, 1, 1]], np.int32),
    np.array([10], np.int32),
    (1,),
  )
  assert emitted.tolist() == [2]
  assert done.tolist() == [False]
