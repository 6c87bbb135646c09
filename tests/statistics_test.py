"""The figures of a decode, recounted by a decoder in plain Python."""

import dataclasses

import jax
import numpy as np
import pytest

from models.table import table_model
from specdec import generate
from specdec import Sampling
from specdec.sampling import position_noise

VOCAB_SIZE = 12
MAX_POSITIONS = 128
LIMIT = 60
EOS_IDS = (3, 7)
TARGET_BYTES_PER_SLOT = 70
DRAFT_BYTES_PER_SLOT = 9


def _target(ends=True):
  rng = np.random.default_rng(0)
  table = rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32) * 2
  if not ends:
    table[:, EOS_IDS] = -100
  return table


def _draft():
  """Close enough to the target to be right about half of the time."""
  rng = np.random.default_rng(1)
  shape = (VOCAB_SIZE, VOCAB_SIZE)
  return _target(ends=False) + rng.normal(size=shape).astype(np.float32)


def _model(table, cache_bytes_per_slot):
  """A table that says it has a cache, so that reading it counts."""
  model = table_model(table, max_positions=MAX_POSITIONS)
  definition = dataclasses.replace(
    model.definition, cache_bytes_per_slot=cache_bytes_per_slot
  )
  return model.replace(definition=definition)


def _decode_slowly(target, draft, prompts, noise, temperature, g):
  """Speculative decoding, one token at a time, counting as it goes."""

  def choose(table, tokens, row, offset):
    scores = table[tokens[-1]]
    if temperature:
      scores = (scores - scores.max()) / temperature
      scores = scores + noise[row, len(tokens) + offset]
    return int(np.argmax(scores))

  rows = [list(prompt) for prompt in prompts]
  done = [False] * len(rows)
  counts = {
    'steps': 0,
    'target_forwards': 0,
    'draft_forwards': 0,
    'histogram': [0] * (g + 1),
    'bytes': 0,
  }
  while not all(done):
    counts['steps'] += 1
    # The rows share the weights, and one forward reads them once.
    counts['bytes'] += target.nbytes + g * draft.nbytes
    for row, tokens in enumerate(rows):
      if done[row]:
        continue
      guess = list(tokens)
      for _ in range(g):
        counts['draft_forwards'] += 1
        counts['bytes'] += len(guess) * DRAFT_BYTES_PER_SLOT
        guess.append(choose(draft, guess, row, 0))
      counts['target_forwards'] += 1
      counts['bytes'] += len(guess) * TARGET_BYTES_PER_SLOT
      emitted = 0
      while True:
        token = choose(target, tokens, row, 0)
        agreed = len(tokens) < len(guess) and guess[len(tokens)] == token
        tokens.append(token)
        emitted += 1
        done[row] = token in EOS_IDS or len(tokens) == len(prompts[row]) + LIMIT
        if done[row] or not agreed:
          break
      counts['histogram'][emitted - 1] += 1
  new = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
  return new, counts


@pytest.mark.parametrize('ends', [False, True])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('g', [0, 1, 4])
@pytest.mark.parametrize(
  'prompts', [[[1, 2, 3]], [[4], [5, 6, 8, 9], [1] * 20]]
)
def test_against_a_slow_decoder(prompts, g, temperature, ends):
  target, draft = _target(ends), _draft()
  keys = jax.random.split(jax.random.key(2), len(prompts))
  sampling = Sampling(temperature=temperature)
  everywhere = np.tile(np.arange(MAX_POSITIONS), (len(prompts), 1))
  noise = np.asarray(
    position_noise(keys, everywhere, VOCAB_SIZE, sampling.validated())
  )
  slow = lambda g: _decode_slowly(target, draft, prompts, noise, temperature, g)
  generation = generate(
    _model(target, TARGET_BYTES_PER_SLOT),
    keys,
    prompts,
    max_new_tokens=LIMIT,
    draft=_model(draft, DRAFT_BYTES_PER_SLOT) if g else None,
    num_draft_tokens=g,
    sampling=sampling,
    eos_ids=EOS_IDS,
  )
  stats = generation.stats
  tokens, counts = slow(g)
  _, plain = slow(0)
  assert generation.tokens == tokens
  assert stats['target_forwards'] == counts['target_forwards']
  assert stats['draft_forwards'] == counts['draft_forwards']
  assert stats['accepted_histogram'] == counts['histogram']
  assert stats['relative_bandwidth'] == counts['bytes'] / plain['bytes']

  # What must hold of these figures whatever the reference says.
  new_tokens = sum(len(row) for row in generation.tokens)
  histogram = np.array(stats['accepted_histogram'])
  assert stats['new_tokens'] == new_tokens
  assert histogram.sum() == stats['target_forwards']
  assert histogram @ np.arange(1, g + 2) == new_tokens
  assert stats['draft_forwards'] == g * stats['target_forwards']
  assert stats['block_efficiency'] == new_tokens / stats['target_forwards']
  if g == 0:
    assert stats['block_efficiency'] == 1.0
    assert stats['relative_bandwidth'] == 1.0
  if temperature and not ends and len(prompts) > 1:
    assert min(histogram) > 0, 'the draft should be right now and then'
  assert (new_tokens < LIMIT * len(prompts)) == ends


def test_tokens_behind_an_eos_are_not_counted():
  """The draft is right about six tokens; the second ends the row."""
  table = np.roll(np.eye(VOCAB_SIZE), 1, axis=1) * 9  # says i + 1 after i
  generation = generate(
    _model(table, 0),
    jax.random.key(0),
    [[1]],
    max_new_tokens=LIMIT,
    draft=_model(table, 0),
    num_draft_tokens=6,
    eos_ids=[3],
  )
  stats = generation.stats
  assert generation.tokens == [[2, 3]]
  assert stats['new_tokens'] == 2
  assert stats['target_forwards'] == 1
  assert stats['block_efficiency'] == 2.0
  assert stats['accepted_histogram'] == [0, 1, 0, 0, 0, 0, 0]
