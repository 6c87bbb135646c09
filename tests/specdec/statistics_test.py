"""The figures of a decode, recounted from the origins of its tokens."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import table_model

VOCAB_SIZE = 12
LIMIT = 60
EOS_IDS = (3, 7)
_ROWS = [[4], [5, 6, 8, 9], [1] * 20]


def _model(table, cache_bytes_per_slot):
  """A table that says it has a cache, so that reading it counts."""
  model = table_model.table_model(table, max_positions=128)
  spec = dataclasses.replace(
    model.spec, cache_bytes_per_slot=cache_bytes_per_slot
  )
  return model.replace(spec=spec)


def _steps(origins):
  """The number of tokens of each step: the target's own is its last."""
  ends = [end for end, origin in enumerate(origins, 1) if origin == 0]
  return np.diff(sorted({0, *ends, len(origins)}))


@pytest.mark.parametrize('ends', [False, True])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_figures_follow_from_origins(temperature, ends):
  table, g = tiny.table(VOCAB_SIZE), 2
  if not ends:
    table[:, EOS_IDS] = -100
  # Close enough to the target to be right about half of the time.
  draft = _model(table + tiny.table(VOCAB_SIZE, 1) / 2, 9)
  generation = specdec.generate(
    _model(table, 70),
    jax.random.key(2),
    _ROWS,
    max_new_tokens=LIMIT,
    eos_ids=EOS_IDS,
    drafter=tiny_drafters.simple('chain', draft, length=g),
    sampling=specdec.Sampling(temperature=temperature),
  )
  histogram, forwards = [0] * (g + 1), []
  target_slots = plain_slots = 0
  for prompt, origins in zip(_ROWS, generation.origins, strict=True):
    length, steps = len(prompt), _steps(origins)
    forwards.append(len(steps))
    plain_slots += sum(range(length, length + len(origins)))
    for emitted in steps:
      histogram[emitted - 1] += 1
      target_slots += length + g
      length += emitted
  stats, reads = generation.stats, generation.stats.reads
  lengths = [*map(len, generation.origins)]
  drafts = {'draft': g * sum(forwards)}
  expected = {
    'target_forwards': sum(forwards),
    'accepted_histogram': histogram,
    'stage_forwards': drafts,
    'nodes_per_forward': g + 1,
    # One in each forward of the draft.
    'positions': {'target': (g + 1) * sum(forwards)} | drafts,
    'new_tokens': sum(lengths),
    'block_efficiency': sum(lengths) / sum(forwards),
  }
  assert stats.as_dict().items() >= expected.items()
  assert lengths == [*map(len, generation.tokens)]
  assert (sum(lengths) < LIMIT * len(_ROWS)) == ends
  if temperature and not ends:
    assert min(histogram) > 0, 'the draft should be right now and then'
  of = lambda counts, slots: {
    'forwards': max(counts),
    'rows': sum(counts),
    'slots': slots,
  }
  assert reads['plain'] == of(lengths, plain_slots)
  assert reads['target'] == of(forwards, target_slots)
  assert reads['draft']['forwards'] == g * max(forwards)


def test_stages_are_counted_by_stage():
  """A step has 12 tokens: of each draft forward one, of the table nine.

  The table guesses three levels before the first forward of the draft and after
  each of the two; the target adds the last token. A forward of the draft has
  room for four nodes and for the four that it had no time to look at before.
  """
  # After every token the next one follows with probability 0.9.
  following = np.roll(np.eye(VOCAB_SIZE), 1, axis=1)
  probs = np.where(following, 0.9, 0.1 / (VOCAB_SIZE - 1))
  table = np.log(probs).astype(np.float32)
  sizes = {'num_nodes': 12, 'capacity': 20, 'branching': 1, 'cost_ratio': 0}
  outer = tiny_drafters.Settings(**sizes, width=8, rounds=2)
  inner = tiny_drafters.Settings(**sizes, width=2, rounds=3)
  by_heart = tiny_drafters.exact(table, 'by heart')
  drafter = specdec.staged(
    tiny_drafters.model(_model(table, 9), outer),
    tiny_drafters.candidates(by_heart, config=inner),
  )
  target, key, prompts = _model(table, 70), jax.random.key(0), [[4], [5, 6]]
  options = {'drafter': drafter, 'max_new_tokens': LIMIT}
  generation = specdec.generate(target, key, prompts, **options)
  labels = ('target', 'draft', 'by heart')
  assert generation.labels == labels
  # From left to right, as deep as each of them could see.
  step = [2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2, 0]
  steps = LIMIT // len(step)
  assert generation.origins == [step * steps] * 2
  stats = generation.stats
  assert stats.accepted_histogram == [0] * 11 + [2 * steps]
  assert stats.nodes_per_forward == stats.block_efficiency == 12
  of = lambda *counts: {
    name: count * steps for name, count in zip(labels, counts, strict=True)
  }
  assert stats.origins == of(2, 2 * 2, 2 * 9)
  assert {'target': 2 * steps} | stats.stage_forwards == stats.origins
  # Rows share their forwards.
  forwards = {name: reads['forwards'] for name, reads in stats.reads.items()}
  assert forwards == {'plain': LIMIT} | of(1, 2, 9)
  assert stats.reads['target']['slots'] == sum(
    len(prompt) + 12 * step + 11 for prompt in prompts for step in range(steps)
  )
  assert stats.reads['by heart']['slots'] == 0
  assert stats.costs == {
    name: {'per_forward': table.nbytes * bool(slot), 'per_slot': slot}
    for name, slot in zip(labels, (70, 9, 0), strict=True)
  }


def test_figures_of_long_texts_do_not_overflow():
  """A step sees millions of slots; the sum over few steps exceeds 32 bits."""
  length, limit, g = 2**22, 1650, 2
  model = table_model.table_model(
    tiny.table(VOCAB_SIZE), max_positions=length + limit
  )
  stats = specdec.generate(
    model,
    jax.random.key(0),
    [[4] * length],
    max_new_tokens=limit,
    drafter=tiny_drafters.simple('chain', model, length=g),
  ).stats
  slots = {name: reads['slots'] for name, reads in stats.reads.items()}
  steps = range(length, length + limit, g + 1)
  assert slots == {
    'plain': sum(range(length, length + limit)),
    'target': sum(at + g for at in steps),
    'draft': sum(2 * at + 1 for at in steps),
  }
  assert min(slots.values()) > 2**31
