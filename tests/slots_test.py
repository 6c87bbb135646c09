"""Slots: every prompt gets the tokens of decoding it alone."""

import dataclasses
import functools
from typing import NamedTuple

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
_EOS = 3
# Neutral values, so that prompts can differ without another program.
_SAMPLING = Sampling(temperature=0.0, top_k=20, repetition_penalty=1.2)
_SAMPLED = dataclasses.replace(_SAMPLING, temperature=1.0, top_k=17)


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
  }[kind]()


def _slots(kind, **options):
  return Slots(
    tiny.gpt2(num_layers=1),
    num_slots=_SLOTS,
    context=_CONTEXT,
    drafter=_drafter(kind),
    **{'sampling': _SAMPLING, 'eos_ids': [_EOS], 'log_probs': True} | options,
  )


class _Job(NamedTuple):
  prompt: list[int]
  key: jax.Array
  limit: int
  sampling: Sampling


@functools.cache
def _jobs(number, seed=0):
  """Short and long prompts, greedy and sampled, some of no new token."""
  rng = np.random.default_rng(seed)
  jobs = []
  for index in range(number):
    prompt = rng.integers(tiny.TABOO, size=rng.integers(1, 50)).tolist()
    limit = min(int(rng.integers(0, _CONTEXT - len(prompt))), 24)
    key = jax.random.key(seed + index)
    jobs.append(_Job(prompt, key, limit, (_SAMPLING, _SAMPLED)[index % 2]))
  return tuple(jobs)


def _run(slots, jobs, num_ended=1):
  """The generations, and the order in which they ended."""
  waiting, indices, found = list(range(len(jobs))), {}, {}
  while waiting or indices:
    while waiting and slots.free:
      job = jobs[waiting[0]]
      slot = slots.insert(
        job.prompt, job.key, max_new_tokens=job.limit, sampling=job.sampling
      )
      indices[slot] = waiting.pop(0)
    for slot, generation in slots.advance(num_ended).items():
      found[indices.pop(slot)] = generation
  return [found[index] for index in range(len(jobs))], list(found)


@functools.cache
def _alone(kind='plain', verify='match'):
  return [
    generate(
      tiny.gpt2(num_layers=1),
      job.key.reshape(1),
      [job.prompt],
      max_new_tokens=job.limit,
      room_for_new_tokens=tiny.MAX_NEW_TOKENS,
      drafter=_drafter(kind),
      verify=verify,
      sampling=job.sampling,
      eos_ids=[_EOS],
      log_probs=True,
    )
    for job in _jobs(12)
  ]


def _tokens(generations):
  return [generation.tokens for generation in generations]


@pytest.mark.parametrize('kind', ['plain', 'chain', 'staged'])
def test_the_tokens_are_those_of_decoding_each_prompt_alone(kind):
  jobs = _jobs(12)
  found, order = _run(_slots(kind), jobs)
  alone = _alone()
  assert _tokens(found) == _tokens(alone)
  assert order != sorted(order)
  for one, other in zip(found, alone, strict=True):
    assert one.finish_reasons == other.finish_reasons
    np.testing.assert_allclose(
      one.log_probs, other.log_probs, rtol=1e-4, atol=1e-4
    )
    if kind == 'plain':
      assert one.stats == other.stats
  assert {one.finish_reasons[0] for one in found} == {'eos', 'length'}
  # Backwards, every prompt is in another slot beside other prompts.
  assert _tokens(_run(_slots(kind), jobs[::-1])[0][::-1]) == _tokens(alone)


@pytest.mark.parametrize('verify', ['rejection', 'block'])
def test_other_rules_draw_as_alone(verify):
  """With the same drafter: these rules also use the noise of each step."""
  found, _ = _run(_slots('chain', verify=verify), _jobs(12))
  alone = _alone('chain', verify)
  assert _tokens(found) == _tokens(alone) != _tokens(_alone())


@pytest.mark.parametrize(
  ('reading', 'num_ended', 'tree_sizes'), [(7, 1, {}), (512, 3, {1: 8, 3: 1})]
)
def test_how_prompts_take_turns_changes_no_token(
  reading, num_ended, tree_sizes
):
  jobs = _jobs(12)
  slots = _slots('staged', reading=reading, tree_sizes=tree_sizes)
  assert _tokens(_run(slots, jobs, num_ended)[0]) == _tokens(_alone())


def test_a_long_prompt_is_read_between_the_steps_of_others():
  """One step after each part of it; the others do not wait for the rest."""
  slots = _slots('plain', reading=8, eos_ids=[tiny.TABOO])
  short, key = [1, 2], jax.random.key(0)
  slots.insert(short, key, max_new_tokens=2)
  slots.insert(short, key, max_new_tokens=30)
  assert list(slots.advance()) == [0]  # Two steps.
  slots.insert([1] * 40, key, max_new_tokens=1)
  assert list(slots.advance()) == [0]
  # After each of five parts there is a step; the last is the first of its own.
  assert slots.num_steps == 2 + 5
  assert slots.free == [0, 2]


def test_one_program_reads_all_prompts_and_one_decodes_per_size():
  count = lambda: [made._cache_size() for made in (start, insert, advance)]
  before = count()
  # Another end of the text than elsewhere, so that all is compiled here.
  slots = _slots('plain', eos_ids=[1, 2])
  _run(slots, _jobs(6))
  after = count()
  assert np.subtract(after, before).tolist() == [1, 1, 1]
  _run(slots, _jobs(12, seed=1))
  assert count() == after


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
    ([], {}, 'the prompt is empty'),
    ([99], {}, 'the prompt has token 99'),
    ([1] * 79, {}, '79 tokens .* exceed the context of 80'),
    (
      [1],
      {'max_new_tokens': -1},
      'max_new_tokens must be an integer of at least 0',
    ),
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
