"""The figures of a decode, recounted from the origins of its tokens."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import generate
from specdec import PLAIN
from specdec import Sampling
from specdec import staged
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


_ROWS = [[4], [5, 6, 8, 9], [1] * 20]


def _steps(origins):
  """How many tokens each step emitted: the target's own is its last."""
  ends = [end for end, origin in enumerate(origins, 1) if origin == 0]
  return np.diff(sorted({0, *ends, len(origins)}))


# One test for all cases of a program.
@pytest.mark.parametrize(('prompts', 'g'), [(_ROWS, 0), (_ROWS, 1), ([[1]], 4)])
def test_figures_follow_from_origins(prompts, g):
  for temperature, ends in itertools.product((0.0, 1.0), (False, True)):
    draft = _model(_draft(), DRAFT_BYTES_PER_SLOT)
    chained = Settings(topology=chain(max(g, 1)))
    generation = generate(
      _model(_target(ends), TARGET_BYTES_PER_SLOT),
      jax.random.key(2),
      prompts,
      max_new_tokens=LIMIT,
      drafter=tiny_drafters.model(draft, chained) if g else PLAIN,
      sampling=Sampling(temperature=temperature),
      eos_ids=EOS_IDS,
    )
    histogram, forwards = [0] * (g + 1), []
    target_slots = draft_slots = plain_slots = 0
    for prompt, origins in zip(prompts, generation.origins, strict=True):
      length, steps = len(prompt), _steps(origins)
      forwards.append(len(steps))
      plain_slots += sum(range(length, length + len(origins)))
      for emitted in steps:
        histogram[emitted - 1] += 1
        target_slots += length + g
        draft_slots += sum(range(length, length + g))
        length += emitted
    stats, reads = generation.stats, generation.stats['reads']
    lengths = [len(row) for row in generation.origins]
    drafts = {'draft': g * sum(forwards)} if g else {}
    from_target = sum(row.count(0) for row in generation.origins)
    from_draft = {'draft': sum(lengths) - from_target} if g else {}
    expected = {
      'target_forwards': sum(forwards),
      'accepted_histogram': histogram,
      'stage_forwards': drafts,
      'nodes_per_forward': g + 1,
      'origins': {'target': from_target} | from_draft,
      # One in each forward of the draft.
      'positions': {'target': (g + 1) * sum(forwards)} | drafts,
      'new_tokens': sum(lengths),
      'block_efficiency': sum(lengths) / sum(forwards),
    }
    assert {name: stats[name] for name in expected} == expected
    assert lengths == [len(row) for row in generation.tokens]
    assert (sum(lengths) < LIMIT * len(prompts)) == ends
    if temperature and not ends:
      assert min(histogram) > 0, 'the draft should be right now and then'
    of = lambda forwards, slots: {'forwards': forwards, 'slots': slots}
    assert reads['plain'] == of(max(lengths), plain_slots)
    assert reads['target'] == of(max(forwards), target_slots)
    if g == 0:
      assert stats['block_efficiency'] == stats['relative_bandwidth'] == 1.0
      continue
    assert reads['draft']['forwards'] == g * max(forwards)
    if len(prompts) == 1:
      # Of the caches the slots that are visible.
      assert reads['draft']['slots'] == draft_slots
      costs = stats['costs']
      assert [cost['per_slot'] for cost in costs.values()] == [
        TARGET_BYTES_PER_SLOT,
        DRAFT_BYTES_PER_SLOT,
      ]
      assert stats['relative_bandwidth'] == relative_bandwidth(reads, costs)


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


def _chain_table(p):
  """After every token the next one follows with probability p."""
  following = np.roll(np.eye(VOCAB_SIZE), 1, axis=1)
  probs = np.where(following, p, (1 - p) / (VOCAB_SIZE - 1))
  return np.log(probs).astype(np.float32)


def test_stages_are_counted_by_stage():
  """A step has 12 tokens: of each draft forward one, of the table nine.

  The table guesses three levels before the first forward of the draft and after
  each of the two; the target adds the last token. A forward of the draft has
  room for four nodes and for the four that it had no time to look at before.
  """
  table = _chain_table(0.9)
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
