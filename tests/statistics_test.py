"""The figures of a decode, recounted by a decoder in plain Python."""

import dataclasses
import itertools

import jax
from list_growth import chain_table
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import generate
from specdec import PLAIN
from specdec import Sampling
from specdec import staged
from specdec.checks import check_sampling
from specdec.sampling import position_noise
from specdec.statistics import relative_bandwidth
from specdec.tree.topology import chain

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
    model.spec, cache_bytes_per_slot=cache_bytes_per_slot
  )
  return model.replace(spec=definition)


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
    'target_slots': 0,
    'draft_slots': 0,
    'from_draft': 0,
  }
  while not all(done):
    counts['steps'] += 1
    for row, tokens in enumerate(rows):
      if done[row]:
        continue
      guess = list(tokens)
      for _ in range(g):
        counts['draft_forwards'] += 1
        counts['draft_slots'] += len(guess)
        guess.append(choose(draft, guess, row, 0))
      counts['target_forwards'] += 1
      counts['target_slots'] += len(guess)
      emitted = 0
      while True:
        token = choose(target, tokens, row, 0)
        agreed = len(tokens) < len(guess) and guess[len(tokens)] == token
        counts['from_draft'] += agreed
        tokens.append(token)
        emitted += 1
        done[row] = token in EOS_IDS or len(tokens) == len(prompts[row]) + LIMIT
        if done[row] or not agreed:
          break
      counts['histogram'][emitted - 1] += 1
  new = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
  return new, counts


_ROWS = [[4], [5, 6, 8, 9], [1] * 20]


def _both(prompts, g, temperature, ends):
  """A generation, and the counts of the slow decoder, plain ones last."""
  target, draft = _target(ends), _draft()
  keys = jax.random.split(jax.random.key(2), len(prompts))
  sampling = Sampling(temperature=temperature)
  everywhere = np.tile(np.arange(MAX_POSITIONS), (len(prompts), 1))
  checked = check_sampling(sampling, len(prompts), VOCAB_SIZE)
  noise = np.asarray(position_noise(keys, everywhere, VOCAB_SIZE, checked))
  slow = lambda g: _decode_slowly(target, draft, prompts, noise, temperature, g)
  drafter = PLAIN
  if g:
    drafter = tiny_drafters.model(
      _model(draft, DRAFT_BYTES_PER_SLOT), Settings(topology=chain(g))
    )
  generation = generate(
    _model(target, TARGET_BYTES_PER_SLOT),
    keys,
    prompts,
    max_new_tokens=LIMIT,
    drafter=drafter,
    sampling=sampling,
    eos_ids=EOS_IDS,
  )
  tokens, counts = slow(g)
  assert generation.tokens == tokens
  return generation, counts, slow(0)[1]


# One test for all cases of a program.
@pytest.mark.parametrize(('prompts', 'g'), [(_ROWS, 0), (_ROWS, 1), ([[1]], 4)])
def test_against_a_slow_decoder(prompts, g):
  cases = itertools.product((0.0, 1.0), (False, True))
  for temperature, ends in cases:
    generation, counts, plain = _both(prompts, g, temperature, ends)
    stats, reads = generation.stats, generation.stats['reads']
    new_tokens = sum(len(row) for row in generation.tokens)
    drafts = {'draft': counts['draft_forwards']} if g else {}
    from_draft = {'draft': counts['from_draft']} if g else {}
    forwards = counts['target_forwards']
    expected = {
      'target_forwards': forwards,
      'accepted_histogram': counts['histogram'],
      'stage_forwards': drafts,
      'nodes_per_forward': g + 1,
      'origins': from_draft | {'target': new_tokens - counts['from_draft']},
      # One in each forward of the draft.
      'positions': {'target': (g + 1) * forwards} | drafts,
      'new_tokens': new_tokens,
      'block_efficiency': new_tokens / forwards,
    }
    assert {name: stats[name] for name in expected} == expected
    of = lambda forwards, slots: {'forwards': forwards, 'slots': slots}
    assert reads['plain'] == of(plain['steps'], plain['target_slots'])
    assert reads['target'] == of(counts['steps'], counts['target_slots'])
    if g:
      assert reads['draft']['forwards'] == g * counts['steps']

    # What must hold of these figures whatever the reference says.
    histogram = np.array(stats['accepted_histogram'])
    assert histogram.sum() == forwards
    assert histogram @ np.arange(1, g + 2) == new_tokens
    if temperature and not ends:
      assert min(histogram) > 0, 'the draft should be right now and then'
    assert (new_tokens < LIMIT * len(prompts)) == ends
    if g == 0:
      assert stats['block_efficiency'] == stats['relative_bandwidth'] == 1.0
    elif len(prompts) == 1:
      # Weights once per forward, of the caches the slots that are visible.
      assert reads['draft']['slots'] == counts['draft_slots']
      read = (1 + g) * counts['steps'] * _target().nbytes
      read += counts['target_slots'] * TARGET_BYTES_PER_SLOT
      read += counts['draft_slots'] * DRAFT_BYTES_PER_SLOT
      without = plain['steps'] * _target().nbytes
      without += plain['target_slots'] * TARGET_BYTES_PER_SLOT
      np.testing.assert_allclose(stats['relative_bandwidth'], read / without)


def test_relative_bandwidth_by_hand():
  """Other costs may be put in the place of those of the models that ran."""
  reads = {
    'plain': {'forwards': 10, 'slots': 100},
    'target': {'forwards': 4, 'slots': 60},
    'draft': {'forwards': 8, 'slots': 30},
    'ngram': {'forwards': 20, 'slots': 0},
  }
  costs = {
    'target': {'per_forward': 50, 'per_slot': 5},
    'draft': {'per_forward': 5, 'per_slot': 1},
    'ngram': {'per_forward': 0.5, 'per_slot': 7},
  }
  # (200 + 300 + 40 + 30 + 10) / (500 + 500)
  assert relative_bandwidth(reads, costs) == 0.58
  nothing = {name: {'forwards': 0, 'slots': 0} for name in reads}
  assert relative_bandwidth(nothing, costs) == 1.0


def test_tokens_behind_an_eos_are_not_counted():
  """The draft is right about six tokens; the second ends the row."""
  table = chain_table(0.9, VOCAB_SIZE)
  generation = generate(
    _model(table, 0),
    jax.random.key(0),
    [[1]],
    max_new_tokens=LIMIT,
    drafter=tiny_drafters.model(_model(table, 0), Settings(topology=chain(6))),
    eos_ids=[3],
  )
  stats = generation.stats
  assert generation.tokens == [[2, 3]]
  assert generation.origins == [[1, 1]]
  assert stats['new_tokens'] == 2
  assert stats['target_forwards'] == 1
  assert stats['block_efficiency'] == 2.0
  assert stats['accepted_histogram'] == [0, 1, 0, 0, 0, 0, 0]
  assert stats['origins'] == {'target': 0, 'draft': 2}


def test_stages_are_counted_by_stage():
  """A step has 12 tokens: of each draft forward one, of the table nine.

  The table guesses three levels before the first forward of the draft and after
  each of the two; the target adds the last token. A forward of the draft has
  room for four nodes and for the four that it had no time to look at before.
  """
  table = chain_table(0.9, VOCAB_SIZE)
  config = Settings(
    num_nodes=12, width=8, branching=1, rounds=2, capacity=20, cost_ratio=0
  )
  inner = tiny_drafters.candidates(
    dataclasses.replace(tiny_drafters.exact(table), name='by heart'),
    config=dataclasses.replace(config, width=2, rounds=3),
  )
  drafter = staged(tiny_drafters.model(_model(table, 9), config), inner)
  prompts = [[4], [5, 6]]
  generation = generate(
    _model(table, 70),
    jax.random.key(0),
    prompts,
    max_new_tokens=LIMIT,
    drafter=drafter,
  )
  assert generation.labels == ('target', 'draft', 'by heart')
  # From left to right, as deep as each of them could see.
  step = [2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2, 0]
  num_steps = LIMIT // len(step)
  assert generation.origins == [step * num_steps] * 2
  stats = generation.stats
  assert stats['accepted_histogram'] == [0] * 11 + [2 * num_steps]
  assert stats['nodes_per_forward'] == stats['block_efficiency'] == 12
  assert stats['stage_forwards'] == {
    'draft': 2 * 2 * num_steps,
    'by heart': 2 * 9 * num_steps,
  }
  assert stats['origins'] == {
    'target': 2 * num_steps,
    'draft': 2 * 2 * num_steps,
    'by heart': 2 * 9 * num_steps,
  }
  # Rows share their forwards.
  forwards = {name: one['forwards'] for name, one in stats['reads'].items()}
  assert forwards == {
    'plain': LIMIT,
    'target': num_steps,
    'draft': 2 * num_steps,
    'by heart': 9 * num_steps,
  }
  assert stats['reads']['target']['slots'] == sum(
    len(prompt) + 12 * step + 11
    for prompt in prompts
    for step in range(num_steps)
  )
  assert stats['reads']['by heart']['slots'] == 0
  assert stats['costs'] == {
    'target': {'per_forward': table.nbytes, 'per_slot': 70},
    'draft': {'per_forward': table.nbytes, 'per_slot': 9},
    'by heart': {'per_forward': 0, 'per_slot': 0},
  }
