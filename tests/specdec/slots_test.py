"""Slots: every prompt gets the tokens of decoding it alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters
import tiny_heads
import tiny_recurrent

import specdec
from specdec import loop
from specdec.models.nn import table_model
from specdec.text import stop_strings

_SLOTS = 3
_CONTEXT = tiny.MAX_POSITIONS
_EOS = 3
# Neutral values, so that prompts can differ without another program.
_SAMPLING = specdec.Sampling(
  logit_bias={},
  repetition_penalty=1.2,
  temperature=0.0,
  top_k=20,
  top_p=1.0,
  min_p=0.0,
)
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


def _of_states():
  target = tiny_recurrent.hashed(tiny.VOCAB_SIZE)
  draft = tiny_recurrent.hashed(tiny.VOCAB_SIZE, 1.0)
  return target, tiny_drafters.simple('chain', draft, length=2)


def _of_head():
  scorer = specdec.HeadScorer(tiny_heads.random_head())
  return tiny_heads.target(), specdec.fixed_drafter(scorer, specdec.chain(2))


@functools.cache
def _together(kind='plain', verify='match', only=None, greedy=False):
  """One batch of all; rows are as if decoded alone: `equality_test`."""
  jobs = _JOBS if only is None else [_JOBS[only]]
  of_jobs = lambda name: [job[name] for job in jobs]
  sampling = {
    field.name: [getattr(job['sampling'], field.name) for job in jobs]
    for field in dataclasses.fields(specdec.Sampling)
  }
  return specdec.generate(
    tiny.gpt2(num_layers=1),
    jax.numpy.stack(of_jobs('rng_key')),
    of_jobs('prompt'),
    max_new_tokens=of_jobs('max_new_tokens'),
    room_for_new_tokens=24,
    drafter=_drafter(kind),
    verify=verify,
    sampling=specdec.Sampling(**{} if greedy else sampling),
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
  results, order = tiny.in_slots(_slots(kind), _JOBS)
  after = count()
  assert max(np.subtract(after, before)) <= 1
  assert _tokens(results) == expected.tokens
  assert order != sorted(order)
  assert [
    result.finish_reasons[0] for result in results
  ] == expected.finish_reasons
  assert {*expected.finish_reasons} == {'eos', 'length'}
  for result, log_probs in zip(results, expected.log_probs, strict=True):
    np.testing.assert_allclose(
      result.log_probs[0], log_probs, rtol=1e-4, atol=1e-4
    )
  # Backwards, every prompt is in another slot next to other prompts.
  again, _ = tiny.in_slots(_slots(kind), _JOBS[::-1])
  assert _tokens(again[::-1]) == expected.tokens
  assert count() == after
  if kind == 'plain':
    assert results[1].stats == _together(only=1).stats


def test_other_rules_draw_as_alone():
  """With the same drafter: these rules also use the noise of each step."""
  results, _ = tiny.in_slots(_slots('chain', verify='rejection'), _JOBS)
  expected = _together('chain', 'rejection').tokens
  assert _tokens(results) == expected != _together().tokens


def test_every_slot_has_stop_strings_and_end_tokens_of_its_own():
  """Also for the prompts that come later and may have neither."""
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


def test_prompts_bring_options_that_others_lack():
  """Greedy for all, and no bias, penalty or filter until a prompt has one."""
  slots = _slots('staged', sampling=specdec.Sampling(), log_probs=False)
  jobs, expected = [*_JOBS], _together().tokens.copy()
  for index in (0, 1, 2, 5, 7, 8, 9, 10, 11):
    jobs[index] = _JOBS[index] | {'sampling': None}
    expected[index] = _together(greedy=True).tokens[index]
  assert _tokens(tiny.in_slots(slots, jobs)[0]) == expected


def test_a_text_is_returned_while_it_grows():
  """By one step or several, it is the text of `advance`; the rest goes on."""
  slots, jobs, texts = _slots('staged'), [*_JOBS[:6]], {}
  ended, rows = {}, {}
  while jobs or rows:
    while jobs and slots.free:
      row = slots.insert(**jobs[0])
      rows[row], texts[row] = 6 - len(jobs), ([], [])
      jobs.pop(0)
    for row, growth in slots.step(len(jobs) % 3 + 1).items():
      texts[row][0].extend(growth.tokens)
      texts[row][1].extend(growth.origins)
      if growth.generation is not None:
        assert growth.generation.tokens == [texts[row][0]]
        assert growth.generation.origins == [texts[row][1]]
        ended[rows.pop(row)] = texts[row][0]
        assert row in slots.free
  assert [ended[index] for index in range(6)] == _together().tokens[:6]
  assert slots.step() == {}


def test_a_prompt_that_is_alone_is_decoded_without_the_other_rows():
  slots, texts = _slots('staged'), {}
  num_rows = lambda: slots._alone and len(slots._alone[-1].length)
  for number, job in ((1, _JOBS[1]), (2, _JOBS[2])):
    texts[slots.insert(**job)] = []
    assert num_rows() is None
    for _ in range(2 if number == 1 else 99):
      for row, growth in slots.step().items():
        texts[row] += growth.tokens
    assert num_rows() == (1 if number == 1 else None)
  assert [*texts.values()] == _together().tokens[1:3]


def test_a_cancelled_prompt_frees_its_slot_and_disturbs_no_other():
  slots = _slots('plain', reading=8)
  long, other, unread = (_JOBS[index] for index in (1, 2, 3))
  first = slots.insert([3, 2], jax.random.key(0), max_new_tokens=70)
  second = slots.insert(**other)
  slots.step(4)
  ended = slots.cancel(first)
  assert ended.finish_reasons == ['cancelled']
  assert len(ended.tokens[0]) == 4
  third = slots.insert(**unread | {'prompt': [1] * 50})
  slots.step()  # A part of it is read.
  assert slots.cancel(third) is None
  with pytest.raises(ValueError, match=f'slot {third} has no prompt'):
    slots.cancel(third)
  assert slots.free == [row for row in range(_SLOTS) if row != second]
  slots.insert(**long)
  slots.insert(**unread)
  tokens = []
  while len(slots.free) < _SLOTS:
    tokens += [generation.tokens[0] for generation in slots.advance().values()]
  expected = [_together().tokens[index] for index in (1, 2, 3)]
  assert sorted(tokens) == sorted(expected)


def _expected(target, prompt, limit):
  """Plain decoding of a whole text."""
  return specdec.generate(
    target,
    jax.random.key(0).reshape(1),
    [prompt],
    max_new_tokens=limit,
    room_for_new_tokens=_CONTEXT,
  ).tokens[0]


@pytest.mark.parametrize('make', [_of_states, _of_head])
def test_what_a_slot_has_read_is_not_read_again(make):
  """Turns of two conversations, a copy, and a text that changed."""
  target, drafter = make()
  slots = specdec.Slots(target, num_slots=2, context=_CONTEXT, drafter=drafter)

  def decode(prompt, limit=6):
    slot = slots.insert(prompt, jax.random.key(0), max_new_tokens=limit)
    (generation,) = slots.advance().values()
    assert generation.tokens[0] == _expected(target, prompt, limit)
    return slots.num_kept[slot], prompt + generation.tokens[0]

  kept, text = decode([1, 2, 3, 4, 5, 6, 7])
  assert kept == 0
  kept, other = decode([9, 8, 7])
  assert kept == 0
  for _ in range(3):
    before = len(text), len(other)
    kept, text = decode([*text, 11, 12])
    assert kept == before[0] - 1
    kept, other = decode([*other, 13])
    assert kept == before[1] - 1
  # Its answer again: a state can go back to the end of its last prompt.
  prompt = text[:-6]
  kept, again = decode(prompt)
  assert again == text
  assert kept == len(prompt) - 1
  changed = [*text[:-3], (text[-3] + 1) % 40, 5]
  kept, _ = decode(changed)
  end = len(prompt) - 1 if make is _of_states else len(text) - 3
  assert kept == end
  # Before the mark there is no state to go back to.
  kept, _ = decode([*text[:5], 30, 31])
  assert kept == 0 if make is _of_states else 5


def _slots_of_a_perfect_draft(**options):
  draft = tiny.draft('perfect', num_layers=1)
  return specdec.Slots(
    tiny.gpt2(num_layers=1),
    num_slots=2,
    context=_CONTEXT,
    drafter=tiny_drafters.simple('chain', draft, length=2),
    **options,
  )


def test_a_draft_goes_on_from_what_its_slot_has_read():
  """A perfect one then proposes nothing that the target rejects."""
  slots, text = _slots_of_a_perfect_draft(), [3, 2]
  for _ in range(3):
    slots.insert(text, jax.random.key(0), max_new_tokens=9)
    (result,) = slots.advance().values()
    assert result.stats.target_forwards == 3
    text += [*result.tokens[0], 5, 6]
  assert slots.num_kept[0] == len(text) - 9 - 2 - 2 - 1
  slots.insert(text, jax.random.key(0), max_new_tokens=3, keeps=False)
  assert slots.num_kept[1] == 0


def test_how_prompts_take_turns_changes_no_token():
  sizes = {1: 8, 3: 1}  # Full batches are decoded plainly.
  slots = _slots('staged', reading=7, tree_sizes=sizes, break_even=1.5)
  assert (
    _tokens(tiny.in_slots(slots, _JOBS, num_ended=3)[0]) == _together().tokens
  )


def test_the_draft_reads_what_full_batches_decoded_plainly():
  """A perfect one then proposes nothing that the target rejects."""
  slots = _slots_of_a_perfect_draft(tree_sizes={1: 3, 2: 1})
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
  # A slot that was never used comes first.
  slots.insert([1] * 40, key, max_new_tokens=1)
  assert list(slots.advance()) == [2]
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
    ([1], {'sampling': specdec.Sampling(top_p=2)}, 'top_p must be above 0'),
    ([1], {'sampling': specdec.Sampling(top_p=[1, 1])}, 'top_p must be one'),
    ([1], {'rng_key': 0}, 'rng_key must be a scalar key'),
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
