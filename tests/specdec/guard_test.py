"""The adaptive fallback: its worst cost, unchanged tokens, and catching up."""

import functools
from unittest import mock

import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import cache as cache_lib
from specdec import decode_options
from specdec.draft import lookup
from specdec.tree import topology as topology_lib

_DEPTH = 4
_ROWS = 3
_LIMIT = 40


_CHAIN = tiny_drafters.Settings(topology=topology_lib.chain(_DEPTH))


def _draft(kind, config=_CHAIN, name='draft'):
  return tiny_drafters.model(tiny.draft(kind, num_layers=1), config, name)


def _run(drafter, break_even=None, run=specdec.generate):
  return run(
    tiny.gpt2(num_layers=1),
    tiny.row_keys(_ROWS),
    tiny.prompts(_ROWS),
    drafter=drafter,
    max_new_tokens=_LIMIT,
    sampling=specdec.Sampling(temperature=[0.0, 1.0, 0.7]),
    break_even=break_even,
  )


@functools.cache
def _plain():
  return _run(specdec.PLAIN)


def _after(state, emitted, break_even=2.0, active=True):
  """The state after a speculative step."""
  rows = np.broadcast_arrays(np.atleast_1d(emitted), active)
  step = specdec.fallback.after_speculative_step
  return step(state, *rows, np.float32(break_even))


def _settle(emitted, break_even):
  """Time per token where every speculative step emits as many tokens."""
  state, seconds, tokens = specdec.fallback.init_fallback(), 0.0, 0.0
  while tokens < 512:
    if state.speculating:
      state = _after(state, emitted, break_even)
      seconds, tokens = seconds + break_even, tokens + emitted
    else:
      state = specdec.fallback.after_plain_step(
        state, np.float32(break_even), stages_lag=True
      )
      seconds, tokens = seconds + 1.0, tokens + 1.0
  return seconds / tokens


@pytest.mark.parametrize('break_even', [1.2, 6.0])
def test_the_worst_of_drafts_costs_under_five_percent(break_even):
  assert 1.0 < _settle(1, break_even) < 1.05


def test_a_draft_that_pays_is_never_left_but_luck_is_no_credit():
  assert _settle(4, 2.5) == 2.5 / 4
  state = specdec.fallback.init_fallback()
  for emitted, steps in ((9, 100), (1, 16)):
    for _ in range(steps):
      assert state.speculating
      state = _after(state, emitted)
  assert not state.speculating


def test_plain_steps_that_others_chose_leave_the_account_as_it_is():
  state = specdec.fallback.init_fallback()
  after = specdec.fallback.after_plain_step(
    state, np.float32(14.0), stages_lag=True
  )
  assert (after.credit, after.speculating) == (state.credit, True)
  assert (after.plain_steps.value, after.stages_lag) == (1, True)


def test_rows_that_are_done_have_no_say():
  state = specdec.fallback.init_fallback()
  assert _after(state, [1, 5]).credit - state.credit == 1.0
  assert _after(state, [1, 0], active=[True, False]).credit - state.credit == -1


def test_a_hopeless_draft_is_left_a_perfect_one_kept_and_no_token_changes():
  result = _run(_draft('hopeless'), 3.0)
  assert result.tokens == _plain().tokens
  stats = result.stats
  steps = stats.reads['target']['forwards']
  assert steps == _LIMIT  # one token each, whatever the step
  # Credit 8 is gone in 4 steps; premiums do not allow another before 200 more.
  assert steps - stats.plain_steps == 4
  assert stats.origins['draft'] == 0
  result = _run(_draft('perfect'), 3.0)
  assert result.tokens == _plain().tokens
  assert result.stats.plain_steps == 0
  # All forwards are for drafting: nothing is missing to be caught up on.
  steps = _LIMIT // (_DEPTH + 1)
  assert result.stats.target_forwards == _ROWS * steps
  assert result.stats.stage_forwards == {'draft': _ROWS * steps * _DEPTH}


def test_a_tree_of_look_ups_is_verified_only_if_it_pays():
  """Rows share the decision; the steps of a stream decide alike."""
  learner = lookup.Recycling(2, size=64)
  drafter = tiny_drafters.candidates(
    specdec.PromptLookup((0.5,)), learner, config=tiny_drafters.TREE
  )
  break_even, whole = 1.6, _run(drafter, 1.6)
  assert whole.tokens == _plain().tokens
  decoding = _run(drafter, break_even, specdec.Decoding)
  decided = []
  while not decoding.done:
    record = decoding.step_recorded().record
    active = np.asarray(record.emitted) > 0
    chosen = np.asarray(drafter.shape.select(record.tree))
    log_probs = np.asarray(record.tree.log_prob)
    of_rows = [
      np.exp(log_probs[row, chosen[row][chosen[row] >= 0]]).sum()
      for row in np.flatnonzero(active)
    ]
    verified = (np.asarray(record.nodes) >= 0).sum(1)[active].max() > 1
    assert verified == (np.mean(of_rows) >= break_even)
    decided.append(verified)
  assert decoding.result().tokens == whole.tokens
  assert whole.stats.plain_steps == decided.count(False) > 0
  assert any(decided)


@pytest.mark.parametrize('break_even', [None, 1.5])
@pytest.mark.parametrize('kind', ['a draft', 'look-ups'])
def test_programs_have_plain_steps_only_if_a_break_even_asks_for_them(
  monkeypatch, kind, break_even
):
  """Not if the caller alone takes plain steps, as `Slots` do."""
  drafter = _draft('perfect')
  if kind == 'look-ups':
    lookups = specdec.PromptLookup((0.5,))
    drafter = tiny_drafters.candidates(lookups, config=tiny_drafters.TREE)
  plain = mock.Mock(wraps=specdec.fallback.after_plain_step)
  monkeypatch.setattr(specdec.fallback, 'after_plain_step', plain)
  tokens, ones = np.zeros((2, 16), np.int32), np.ones(2, np.int32)
  request, config = decode_options.prepare(
    tiny.gpt2(num_layers=1),
    drafter,
    tiny.row_keys(2),
    decode_options.Prompts(tokens, ones, ones, 16),
    {'break_even': break_even},
    takes_plain_steps=True,
  )
  traced = tiny.gpt2(num_layers=1), drafter, request
  state = specdec.loop.start.eval_shape(*traced, config=config)
  in_place = mock.Mock(wraps=cache_lib.advance)
  monkeypatch.setattr(cache_lib, 'advance', in_place)
  specdec.loop.advance.eval_shape(*traced, state, 1, 1, config=config)
  assert plain.called == (break_even is not None)
  if kind == 'look-ups':  # A root alone is where it belongs, nothing is moved.
    assert in_place.called == plain.called


@pytest.mark.parametrize('bad', [0, -1.0, np.nan, np.inf, 'no', True])
def test_what_is_no_ratio_is_refused(bad):
  with pytest.raises(ValueError, match='break_even must be a positive number'):
    _run(_draft('perfect'), bad)


# Premiums so high that a draft at rest is soon tried again.
_RESTLESS = {'_PREMIUM': 0.9, '_INITIAL_CREDIT': 0.5, '_STEPS_PER_TRIAL': 0.5}


@pytest.mark.parametrize('is_fixed', [True, False])
def test_after_a_rest_all_stages_know_the_text(monkeypatch, is_fixed):
  """Perfect drafts that are sent to rest again and again miss nothing.

  A fixed chain reads no missing text of its own, unlike stages that grow trees;
  a table has nothing to catch up on.
  """
  # The name of the draft is of no other test, so programs with these premiums
  # are not, either.
  for name, value in _RESTLESS.items():
    monkeypatch.setattr(specdec.fallback, name, value)
  drafter = _draft('perfect', name='restless')
  if not is_fixed:
    sizes = {'num_nodes': _DEPTH + 1, 'width': 3, 'branching': 1, 'rounds': 4}
    config = tiny_drafters.Settings(**sizes, max_depth=_DEPTH, cost_ratio=0)
    outer, inner = (
      _draft('perfect', config, name) for name in ('restless', 'inner')
    )
    # It has nothing to say, so that it does not make up for what models miss.
    nothing = tiny_drafters.table_of(tiny.prompts(_ROWS), 'empty')
    tables = tiny_drafters.candidates(nothing, config=config)
    drafter = specdec.staged(outer, specdec.staged(inner, tables))
  result = _run(drafter, 14.0)
  assert result.tokens == _plain().tokens
  stats = result.stats
  speculative = stats.reads['target']['forwards'] - stats.plain_steps
  assert speculative >= 3
  # More than a window each time.
  assert stats.plain_steps > (speculative - 1) * 2 * _DEPTH
  histogram = np.array(stats.accepted_histogram)
  # All of each guess was accepted, but for the rows' last steps.
  assert histogram[_DEPTH] >= _ROWS * (speculative - 1)
  assert histogram[1:_DEPTH].sum() <= _ROWS
