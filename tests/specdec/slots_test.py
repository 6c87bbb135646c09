"""Slots: every prompt gets the tokens of decoding it alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import loop
from specdec.models.nn import table_model
from specdec.text import stop_strings

_SLOTS = 3
_CONTEXT = tiny.MAX_POSITIONS
_EOS = 3
# Neutral values, so that prompts can differ without another program.
_SAMPLING = specdec.Sampling(
  **{'logit_bias': {}, 'repetition_penalty': 1.2, 'temperature': 0.0},
  **{'top_k': 20, 'top_p': 1.0, 'min_p': 0.0},
)
_LARGER_K = dataclasses.replace(_SAMPLING, top_k=40)
_SAMPLED = dataclasses.replace(_SAMPLING, temperature=1.5, top_k=9)
_OF_JOBS = (
  _SAMPLING,
  _SAMPLED,
  dataclasses.replace(_SAMPLED, logit_bias={7: 9.0, 5: -np.inf}),
  dataclasses.replace(_SAMPLED, repetition_penalty=0.3),
  dataclasses.replace(_SAMPLED, top_p=0.5),
  dataclasses.replace(_SAMPLED, min_p=0.3),
)


@functools.cache
def _drafter(kind):
  draft = tiny.draft('similar', num_layers=1)
  return tiny_drafters.simple(kind, draft, length=2)


def _slots(kind, **options):
  return specdec.Slots(
    tiny.gpt2(num_layers=1),
    num_slots=_SLOTS,
    context=_CONTEXT,
    drafter=_drafter(kind),
    **{'sampling': _SAMPLING, 'eos_ids': [_EOS], 'log_probs': True} | options,
  )


def _jobs():
  """Short and long prompts, each with options of its own, some of no token."""
  rng = np.random.default_rng(0)
  for index in range(12):
    prompt = rng.integers(tiny.TABOO, size=rng.integers(1, 50)).tolist()
    yield {
      'prompt': prompt,
      'rng_key': jax.random.key(index),
      'max_new_tokens': min(rng.integers(_CONTEXT - len(prompt)).item(), 24),
      'sampling': _OF_JOBS[index % len(_OF_JOBS)],
    }


_JOBS = (*_jobs(),)
_SAMPLED_BY = [field.name for field in dataclasses.fields(specdec.Sampling)]


@functools.cache
def _together(kind='plain', verify='match', only=None):
  """One batch of all, whose rows are as alone: `decode_test`."""
  jobs = _JOBS if only is None else [_JOBS[only]]
  own = lambda name: [job[name] for job in jobs]
  sampled = lambda name: [getattr(job['sampling'], name) for job in jobs]
  return specdec.generate(
    tiny.gpt2(num_layers=1),
    jax.numpy.stack(own('rng_key')),
    own('prompt'),
    max_new_tokens=own('max_new_tokens'),
    room_for_new_tokens=24,
    drafter=_drafter(kind),
    verify=verify,
    sampling=specdec.Sampling(**{name: sampled(name) for name in _SAMPLED_BY}),
    eos_ids=[_EOS],
    log_probs=True,
  )


def _tokens(generations):
  return [generation.tokens[0] for generation in generations]


@pytest.mark.parametrize('kind', ['plain', 'staged'])
def test_the_tokens_are_those_of_decoding_each_prompt_alone(kind):
  """Three programs do it: for the buffers, for reading and for steps."""
  count = lambda: [
    made._cache_size() for made in (loop.start, loop.insert, loop.advance)
  ]
  expected, before = _together(), count()
  found, order = tiny.in_slots(_slots(kind), _JOBS)
  after = count()
  assert max(np.subtract(after, before)) <= 1
  assert _tokens(found) == expected.tokens
  assert order != sorted(order)
  assert [one.finish_reasons[0] for one in found] == expected.finish_reasons
  assert {*expected.finish_reasons} == {'eos', 'length'}
  for one, log_probs in zip(found, expected.log_probs, strict=True):
    np.testing.assert_allclose(
      one.log_probs[0], log_probs, rtol=1e-4, atol=1e-4
    )
  # Backwards, every prompt is in another slot beside other prompts.
  again, _ = tiny.in_slots(_slots(kind), _JOBS[::-1])
  assert _tokens(again[::-1]) == expected.tokens
  assert count() == after
  if kind == 'plain':
    assert found[1].stats == _together(only=1).stats


def test_other_rules_draw_as_alone():
  """With the same drafter: these rules also use the noise of each step."""
  found, _ = tiny.in_slots(_slots('chain', verify='rejection'), _JOBS)
  expected = _together('chain', 'rejection').tokens
  assert _tokens(found) == expected != _together().tokens


def test_every_slot_has_stop_strings_and_end_tokens_of_its_own():
  """Also for the prompts that come later, which may have none of them."""
  vocab_size = 12
  names = [bytes([97 + token]) for token in range(vocab_size)]
  following = np.roll(9 * np.eye(vocab_size, dtype=np.float32), 1, axis=1)
  # It counts from 0 to 11 again.
  target = table_model.table_model(following, max_positions=64)
  stops = [[b'ef'], [], [b'gh', b'zz']]
  table = stop_strings.build_stop_table(stops, names, vocab_size)
  slots = specdec.Slots(target, num_slots=_SLOTS, context=64, stop=table)
  job = {'rng_key': jax.random.key(0), 'max_new_tokens': 20}
  for start_token, ends, reason, length in (
    (0, [3], 'eos', 3),
    (2, None, 'length', 20),
  ):
    for eos_ids in (None, ends, None):
      slots.insert([start_token], eos_ids=eos_ids, **job)
    ended = slots.advance(_SLOTS)
    reasons = [ended[slot].finish_reasons[0] for slot in range(_SLOTS)]
    assert reasons == ['stop', reason, 'stop']
    lengths = [len(ended[slot].tokens[0]) for slot in range(_SLOTS)]
    assert lengths == [5 - start_token, length, 7 - start_token]


@pytest.mark.parametrize('break_even', [1.5, None])
def test_how_prompts_take_turns_changes_no_token(break_even):
  sizes = {1: 8, 3: 1}  # Full batches are decoded plainly.
  slots = _slots('staged', reading=7, tree_sizes=sizes, break_even=break_even)
  assert (
    _tokens(tiny.in_slots(slots, _JOBS, num_ended=3)[0]) == _together().tokens
  )


def test_the_draft_reads_what_full_batches_decoded_plainly():
  """A perfect one then proposes nothing that the target rejects."""
  draft = tiny.draft('perfect', num_layers=1)
  slots = specdec.Slots(
    tiny.gpt2(num_layers=1),
    num_slots=2,
    context=_CONTEXT,
    drafter=tiny_drafters.simple('chain', draft, length=2),
    tree_sizes={1: 3, 2: 1},
  )
  for limit in (20, 50):
    slots.insert([3, 2], jax.random.key(0), max_new_tokens=limit)
  assert list(slots.advance()) == [0]
  [last] = slots.advance().values()
  assert last.stats.target_forwards == 20 + 30 / 3


def test_a_long_prompt_is_read_between_the_steps_of_others():
  """One step after each part of it; the others do not wait for the rest."""
  slots = _slots('plain', reading=8)
  short, key = [3, 2], jax.random.key(0)
  slots.insert(short, key, max_new_tokens=2)
  slots.insert(short, key, max_new_tokens=30)
  assert list(slots.advance()) == [0]  # Two steps.
  slots.insert([1] * 40, key, max_new_tokens=1)
  assert list(slots.advance()) == [0]
  # After each of five parts there is a step; the last is the first of its own.
  assert slots.num_steps == 2 + 5
  assert slots.free == [0, 2]


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'num_slots': 0}, 'num_slots must be an integer of at least 1, got 0'),
    ({'context': 81}, 'context must be .* at most 80, got 81'),
    ({'reading': 0.5}, 'reading must be an integer of at least 1, got 0.5'),
    ({'tree_sizes': {2: 9}}, 'tree_sizes must be .* at most 3, got 9'),
    ({'tree_sizes': {2: 2}}, 'has 2 nodes, but .* topology of 3; give these'),
    # A slot has many prompts, which bring values of their own.
    ({'sampling': specdec.Sampling(temperature=[0, 1, 1])}, 'temperature must'),
  ],
)
def test_bad_slots_are_refused(options, words):
  options = {'num_slots': _SLOTS, 'context': _CONTEXT} | options
  with pytest.raises(ValueError, match=words):
    specdec.Slots(tiny.gpt2(num_layers=1), drafter=_drafter('chain'), **options)


def test_bad_prompts_are_refused_and_take_no_slot():
  slots, key = _slots('plain'), jax.random.key(0)
  for prompt, options, words in (
    ([], {}, 'the prompt is empty'),
    ([99], {}, 'the prompt has token 99'),
    ([1] * 79, {}, '79 tokens .* exceed the context of 80'),
    ([1], {'max_new_tokens': -1}, 'an integer of at least 0'),
    ([1], {'sampling': specdec.Sampling(top_p=0.5)}, 'sets other options'),
    ([1], {'sampling': _LARGER_K}, 'no larger top_k'),
    ([1], {'rng_key': 0}, 'rng_key must be made by jax.random.key'),
    ([1], {'eos_ids': range(9)}, 'eos_ids of a prompt has 9 tokens, but'),
  ):
    with pytest.raises(ValueError, match=words):
      slots.insert(prompt, **{'rng_key': key, 'max_new_tokens': 2} | options)
    assert slots.free == [0, 1, 2]
  for _ in range(_SLOTS):
    slots.insert([1], key, max_new_tokens=1)
  with pytest.raises(ValueError, match='no slot is free'):
    slots.insert([1], key, max_new_tokens=1)
  assert len(slots.advance(num_ended=3)) == 3
  assert slots.advance() == {}
