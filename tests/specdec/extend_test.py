"""A decode that goes on from another text: the turns of a conversation.

What is read is counted by the models of a chain themselves. No cache keeps
programs that count from run to run, so plain decoding does not count.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import loop

_ROWS = 2
_TURNS = 5
_LIMIT = 6

_read = []


@functools.cache
def _counting(spec, name):
  """The model; it notes the number of positions that each forward computes."""

  def apply(params, tokens, positions, mask, cache):
    jax.debug.callback(lambda: _read.append((name, tokens.shape[1])))
    return spec.apply(params, tokens, positions, mask, cache)

  return dataclasses.replace(spec, apply=apply)


def _model(name):
  model = tiny.gpt2(num_layers=1)
  return model.replace(spec=_counting(model.spec, name))


def _decoding(kind, prompts):
  counts = kind == 'chain'
  return specdec.Decoding(
    _model('target') if counts else tiny.gpt2(num_layers=1),
    tiny.row_keys(_ROWS),
    prompts,
    drafter=tiny_drafters.simple(kind, _model('draft'), length=2),
    sampling=specdec.Sampling(temperature=[0.0, 1.0], repetition_penalty=1.1),
    room_for_new_tokens=tiny.MAX_NEW_TOKENS,
    log_probs=True,
    max_new_tokens=_LIMIT,
  )


def _started(kind, prompts):
  """A first turn, and its result."""
  decoding = _decoding(kind, prompts)
  decoding.run()
  return decoding, decoding.result()


def _decoded_again(prompts):
  return _started('plain', prompts)[1]


def _said(turn):
  """The words of the users of both rows."""
  rng = np.random.default_rng(turn)
  lengths = ([5, 4, 3, 1, 2], [3, 1, 4, 4, 6])
  return [rng.integers(tiny.TABOO, size=row[turn]).tolist() for row in lengths]


def _extend(decoding, prompts):
  """The positions that reading takes, by model."""
  jax.effects_barrier()
  _read.clear()
  decoding.extend(prompts, max_new_tokens=_LIMIT)
  jax.effects_barrier()
  return dict.fromkeys(('target', 'draft'), 0) | {
    name: sum(size for of, size in _read if of == name) for name, _ in _read
  }


def _longer(prompts, result, turn):
  rows = zip(prompts, result.tokens, _said(turn), strict=True)
  return [prompt + answer + said for prompt, answer, said in rows]


def test_every_turn_is_that_of_decoding_the_whole_text_anew():
  """Greedy in one row and sampled in the other, to the last log-probability."""
  prompts = _said(0)
  decoding, result = _started('chain', prompts)
  assert decoding.num_kept == [0, 0]
  for turn in range(1, _TURNS):
    programs = loop.extend._cache_size(), loop.advance._cache_size()
    ends = [len(prompt) + _LIMIT for prompt in prompts]
    prompts = _longer(prompts, result, turn)
    read = _extend(decoding, prompts)
    # All but the last token, which is read with the first tree.
    assert decoding.num_kept == [end - 1 for end in ends]
    assert read == {'target': 32, 'draft': 32}
    decoding.run()
    now = loop.extend._cache_size(), loop.advance._cache_size()
    assert turn == 1 or now == programs
    result = decoding.result()
    whole = _decoded_again(prompts)
    assert result.tokens == whole.tokens
    np.testing.assert_allclose(
      result.log_probs, whole.log_probs, rtol=1e-4, atol=1e-4
    )
    # The draft is perfect where it knows all of the text.
    assert result.stats.block_efficiency == 3
    assert result.stats.stage_forwards['draft'] == _ROWS * 4
    assert result.stats.new_tokens == _ROWS * _LIMIT


def test_text_that_changed_is_read_again_from_there_on():
  prompts = _said(0)
  decoding, result = _started('chain', prompts)
  rows = _longer(prompts, result, 1)
  # Another token in the answer, and another one in the prompt.
  for row, place in ((0, len(prompts[0]) + 2), (1, 1)):
    rows[row][place] = (rows[row][place] + 1) % 40
  _extend(decoding, rows)
  assert decoding.num_kept == [len(prompts[0]) + 2, 1]
  decoding.run()
  assert decoding.result().tokens == _decoded_again(rows).tokens
  # Shorter than what was read, and equal so far: an answer is given again.
  read = _extend(decoding, prompts)
  assert read['target'] == 32  # of row 1 all but a token
  assert decoding.num_kept == [len(prompts[0]) - 1, 1]
  decoding.run()
  assert decoding.result().tokens == _decoded_again(prompts).tokens
  assert _extend(decoding, prompts) == {'target': 0, 'draft': 0}


def test_bad_turns_are_refused_and_change_nothing():
  decoding = _decoding('plain', _said(0))
  for prompts, limit, words in (
    ([[1]], 1, r'one per row \(2\), got 1'),
    ([[1], []], 1, 'prompt 1 is empty'),
    ([[1], [2]], -1, 'max_new_tokens must be at least 0'),
    ([[1], [2] * 80], 1, 'exceed the context of the target, 80 tokens'),
  ):
    with pytest.raises(ValueError, match=words):
      decoding.extend(prompts, max_new_tokens=limit)
  decoding.run()
  assert decoding.result().tokens == _decoded_again(_said(0)).tokens
