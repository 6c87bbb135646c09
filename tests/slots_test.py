"""Slots: every prompt gets the tokens of decoding it alone."""

import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings

from specdec import generate
from specdec import PLAIN
from specdec import PromptLookup
from specdec import Sampling
from specdec import Slots
from specdec import staged
from specdec.loop import advance
from specdec.loop import insert
from specdec.loop import start
from specdec.tree.topology import chain

_SLOTS = 3
_CONTEXT = tiny.MAX_POSITIONS


@functools.cache
def _drafter(kind):
  similar = tiny.draft('similar', num_layers=1)
  lookup = functools.partial(tiny_drafters.candidates, PromptLookup((0.5,)))
  return {
    'plain': lambda: PLAIN,
    'chain': lambda: tiny_drafters.model(similar, Settings(topology=chain(2))),
    'staged': lambda: staged(
      tiny_drafters.model(similar, tiny_drafters.TREE),
      lookup(config=tiny_drafters.INNER),
    ),
    'lookup': lambda: lookup(config=tiny_drafters.TREE),
  }[kind]()


def _slots(kind, **options):
  return Slots(
    tiny.gpt2(num_layers=1),
    num_slots=_SLOTS,
    context=_CONTEXT,
    drafter=_drafter(kind),
    **options,
  )


def _jobs(number, seed=0):
  """Prompts with keys and limits: short and long, some of no new token."""
  rng = np.random.default_rng(seed)
  jobs = []
  for index in range(number):
    prompt = rng.integers(tiny.TABOO, size=rng.integers(1, 50)).tolist()
    limit = int(rng.integers(0, _CONTEXT - len(prompt)))
    jobs.append((prompt, jax.random.key(seed + index), min(limit, 24)))
  return jobs


def _run(slots, jobs, *, num_ended=1, samplings=None):
  """The generations, and the order in which they ended."""
  waiting, indices, found = list(range(len(jobs))), {}, {}
  while waiting or indices:
    while waiting and slots.free:
      index = waiting.pop(0)
      prompt, key, limit = jobs[index]
      slot = slots.insert(
        prompt,
        key,
        max_new_tokens=limit,
        sampling=samplings[index] if samplings else None,
      )
      indices[slot] = index
    for slot, generation in slots.advance(num_ended).items():
      found[indices.pop(slot)] = generation
  return [found[index] for index in range(len(jobs))], list(found)


def _alone(kind, job, *, sampling, **options):
  prompt, key, limit = job
  return generate(
    tiny.gpt2(num_layers=1),
    key.reshape(1),
    [prompt],
    max_new_tokens=limit,
    room_for_new_tokens=tiny.MAX_NEW_TOKENS,
    drafter=_drafter(kind),
    sampling=sampling,
    **options,
  )


_SAMPLINGS = {
  'greedy': Sampling(),
  'sampled': Sampling(temperature=1.0, top_k=20, repetition_penalty=1.2),
}


@pytest.mark.parametrize('kind', ['plain', 'chain', 'staged', 'lookup'])
@pytest.mark.parametrize('how', _SAMPLINGS)
def test_the_tokens_are_those_of_decoding_each_prompt_alone(kind, how):
  sampling, jobs = _SAMPLINGS[how], _jobs(12)
  slots = _slots(kind, sampling=sampling, eos_ids=[3], log_probs=True)
  found, _ = _run(slots, jobs)
  for job, generation in zip(jobs, found, strict=True):
    alone = _alone(kind, job, sampling=sampling, eos_ids=[3], log_probs=True)
    assert generation.tokens == alone.tokens
    assert generation.finish_reasons == alone.finish_reasons
    np.testing.assert_allclose(
      generation.log_probs, alone.log_probs, rtol=1e-4, atol=1e-4
    )
    if kind == 'plain':
      assert generation.stats == alone.stats


def _equal_tokens(jobs, found, sampling):
  expected = [_alone('plain', job, sampling=sampling).tokens for job in jobs]
  assert [generation.tokens for generation in found] == expected


@pytest.mark.parametrize(
  ('reading', 'num_ended', 'tree_sizes'),
  [(7, 1, {}), (512, 3, {1: 8, 2: 4, 3: 1}), (5, 2, {2: 1})],
)
def test_how_prompts_take_turns_changes_no_token(
  reading, num_ended, tree_sizes
):
  sampling, jobs = _SAMPLINGS['sampled'], _jobs(12)
  slots = _slots(
    'staged', sampling=sampling, reading=reading, tree_sizes=tree_sizes
  )
  found, order = _run(slots, jobs, num_ended=num_ended)
  _equal_tokens(jobs, found, sampling)
  assert order != sorted(order)
  # Backwards, every prompt is in another slot beside other prompts.
  found, _ = _run(slots, jobs[::-1])
  _equal_tokens(jobs, found[::-1], sampling)


def test_a_prompt_may_have_its_own_sampling():
  jobs = _jobs(6)
  samplings = [
    Sampling(temperature=float(index % 3), logit_bias={index: -np.inf})
    for index in range(6)
  ]
  slots = _slots('lookup', sampling=Sampling(temperature=1.0, logit_bias={}))
  found, _ = _run(slots, jobs, samplings=samplings)
  for job, sampling, generation in zip(jobs, samplings, found, strict=True):
    assert generation.tokens == _alone('plain', job, sampling=sampling).tokens


def test_a_long_prompt_is_read_between_the_steps_of_others():
  """One step after each part of it; the others do not wait for the rest."""
  slots = _slots('plain', reading=8)
  (short, key, _), steps = _jobs(1)[0], []
  slots.insert(short, key, max_new_tokens=2)
  slots.insert(short, key, max_new_tokens=30)
  assert list(slots.advance()) == [0]  # Two steps.
  slots.insert([1] * 40, key, max_new_tokens=1)
  assert list(slots.advance()) == [0]
  steps.append(slots.num_steps)
  # After each of five parts there is a step, and the last is the first of its.
  assert steps == [2 + 5]
  assert slots.free == [0, 2]


def test_one_program_reads_all_prompts_and_one_decodes_per_size():
  programs = start._cache_size(), insert._cache_size(), advance._cache_size()
  slots = _slots('chain', tree_sizes={1: 3, 3: 1}, log_probs=True)
  _run(slots, _jobs(4))
  first = start._cache_size(), insert._cache_size(), advance._cache_size()
  assert np.subtract(first, programs).tolist() == [1, 1, 2]
  _run(slots, _jobs(12, seed=1))
  after = start._cache_size(), insert._cache_size(), advance._cache_size()
  assert after == first


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'num_slots': 0}, 'num_slots must be an integer of at least 1, got 0'),
    ({'context': 81}, 'context must be .* at most 80, got 81'),
    ({'reading': 0.5}, 'reading must be an integer of at least 1, got 0.5'),
    ({'tree_sizes': {2: 9}}, 'tree_sizes must be .* at most 3, got 9'),
    ({'tree_sizes': {2: 2}}, 'has 2 nodes, but .* topology of 3; give these'),
  ],
)
def test_bad_slots_are_refused(options, words):
  options = {'num_slots': _SLOTS, 'context': _CONTEXT} | options
  with pytest.raises(ValueError, match=words):
    Slots(tiny.gpt2(num_layers=1), drafter=_drafter('chain'), **options)


@pytest.mark.parametrize(
  ('prompt', 'options', 'words'),
  [
    ([], {}, 'prompt 0 is empty'),
    ([99], {}, 'prompt 0 has token 99'),
    ([1] * 79, {}, 'exceed the context, 80 tokens'),
    ([1], {'max_new_tokens': -1}, 'max_new_tokens must be at least 0'),
    ([1], {'sampling': Sampling(top_p=0.5)}, 'sets other options'),
  ],
)
def test_bad_prompts_are_refused_and_take_no_slot(prompt, options, words):
  slots, key = _slots('plain'), jax.random.key(0)
  with pytest.raises(ValueError, match=words):
    slots.insert(prompt, key, **{'max_new_tokens': 2} | options)
  assert slots.free == [0, 1, 2]
  for _ in range(_SLOTS):
    slots.insert([1], key, max_new_tokens=1)
  with pytest.raises(ValueError, match='no slot is free'):
    slots.insert([1], key, max_new_tokens=1)
  assert len(slots.advance(num_ended=3)) == 3
  assert slots.advance() == {}
