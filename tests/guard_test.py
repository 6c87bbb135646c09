"""The adaptive fallback: its worst cost, unchanged tokens, and catching up.

Counts only: a speculative step is taken to last `break_even` plain ones.
"""

import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings

from specdec import Decoding
from specdec import fallback
from specdec import generate
from specdec import PLAIN
from specdec import Sampling
from specdec import staged
from specdec.loop import advance
from specdec.tree.topology import chain

_DEPTH = 4
_ROWS = 3
_LIMIT = 40


def _draft(kind):
  return tiny.draft(kind, num_layers=1)


def _chain(kind):
  return tiny_drafters.model(_draft(kind), Settings(topology=chain(_DEPTH)))


def _run(drafter, break_even=None, run=generate):
  return run(
    tiny.gpt2(num_layers=1),
    tiny.row_keys(_ROWS),
    tiny.prompts(_ROWS),
    drafter=drafter,
    max_new_tokens=_LIMIT,
    sampling=Sampling(temperature=[0.0, 1.0, 0.7]),
    break_even=break_even,
  )


@functools.cache
def _plain():
  return _run(PLAIN)


def _after(state, emitted, break_even=2.0, active=True):
  """What a speculative step makes of the state."""
  emitted = np.atleast_1d(emitted)
  active = np.broadcast_to(active, emitted.shape)
  return fallback.after_speculative_step(
    state, emitted, active, np.float32(break_even)
  )


def _settle(emitted, break_even):
  """Time per token where every speculative step emits as many tokens."""
  state = fallback.init_fallback()
  seconds = tokens = 0.0
  while tokens < 512:
    if state.speculating:
      state = _after(state, emitted, break_even)
      seconds, tokens = seconds + break_even, tokens + emitted
    else:
      state = fallback.after_plain_step(state, np.float32(break_even))
      seconds, tokens = seconds + 1.0, tokens + 1.0
  return seconds / tokens


@pytest.mark.parametrize('break_even', [1.2, 2.0, 3.5, 6.0])
def test_the_worst_of_drafts_costs_under_five_percent(break_even):
  assert 1.0 < _settle(1, break_even) < 1.05


def test_a_draft_that_pays_is_never_left():
  assert _settle(4, 2.5) == 2.5 / 4


def test_a_lucky_draft_has_no_more_credit_than_any():
  state = fallback.init_fallback()
  for emitted, steps in ((9, 100), (1, 16)):
    for _ in range(steps):
      assert state.speculating
      state = _after(state, emitted)
  assert not state.speculating


def test_rows_that_are_done_have_no_say():
  state = fallback.init_fallback()
  assert _after(state, [1, 5]).credit - state.credit == 1.0
  assert _after(state, [1, 0], active=[True, False]).credit - state.credit == -1


def test_a_hopeless_draft_is_left_and_no_token_changes():
  result = _run(_chain('hopeless'), 3.0)
  assert result.tokens == _plain().tokens
  stats = result.stats
  steps = stats['reads']['target']['forwards']
  assert steps == _LIMIT  # one token each, whatever the step
  # Credit 8 is gone in 4 steps; premiums do not allow another before 200 more.
  assert steps - stats['plain_steps'] == 4
  assert stats['origins']['draft'] == 0


def test_a_perfect_draft_is_kept():
  result = _run(_chain('perfect'), 3.0)
  assert result.tokens == _plain().tokens
  assert result.stats['plain_steps'] == 0
  # All forwards are for drafting: nothing is missing to be caught up on.
  steps = _LIMIT // (_DEPTH + 1)
  assert result.stats['target_forwards'] == _ROWS * steps
  assert result.stats['stage_forwards'] == {'draft': _ROWS * steps * _DEPTH}


def test_rests_are_the_same_in_pieces():
  """Streaming makes one step at a time; the account goes on."""
  whole = _run(_chain('random'), 2.5)
  decoding = _run(_chain('random'), 2.5, Decoding)
  assert list(decoding)
  pieces = decoding.result()
  assert pieces.tokens == whole.tokens
  assert pieces.stats['plain_steps'] == whole.stats['plain_steps'] > 0


@pytest.mark.parametrize(
  'bad', [0, -1.0, float('nan'), float('inf'), 'no', True]
)
def test_what_is_no_ratio_is_refused(bad):
  with pytest.raises(ValueError, match='break_even must be a positive number'):
    _run(_chain('perfect'), bad)


# At the end, as it forgets all programs.


def _check_rests(drafter, monkeypatch):
  """All of each guess is accepted, however often there is a rest."""
  # Premiums so high that a draft at rest is soon tried again.
  monkeypatch.setattr(fallback, '_PREMIUM', 0.9)
  monkeypatch.setattr(fallback, '_INITIAL_CREDIT', 0.5)
  monkeypatch.setattr(fallback, '_STEPS_PER_TRIAL', 0.5)
  plain = _plain()
  jax.clear_caches()  # of programs with other premiums
  result = _run(drafter, 14.0)
  jax.clear_caches()
  assert result.tokens == plain.tokens
  stats = result.stats
  speculative = stats['reads']['target']['forwards'] - stats['plain_steps']
  assert speculative >= 3
  # More than a window each time.
  assert stats['plain_steps'] > (speculative - 1) * 2 * _DEPTH
  histogram = np.array(stats['accepted_histogram'])
  # All of each guess was accepted, but for the rows' last steps.
  assert histogram[_DEPTH] >= _ROWS * (speculative - 1)
  assert histogram[1:_DEPTH].sum() <= _ROWS


def test_after_a_rest_a_fixed_chain_knows_the_text(monkeypatch):
  """Unlike stages that grow trees, it reads no missing text of its own."""
  _check_rests(_chain('perfect'), monkeypatch)


def test_after_a_rest_all_stages_know_the_text(monkeypatch):
  """Perfect drafts that are sent to rest again and again miss nothing.

  A table has nothing to catch up on.
  """
  config = Settings(
    num_nodes=_DEPTH + 1,
    width=3,
    branching=1,
    rounds=4,
    max_depth=_DEPTH,
    cost_ratio=0,
  )
  # It has nothing to say, so that it does not make up for what models miss.
  table = tiny_drafters.table_of(tiny.prompts(_ROWS), 'empty')
  models = (
    tiny_drafters.model(_draft('perfect'), config, name)
    for name in ('draft', 'inner')
  )
  tables = tiny_drafters.candidates(table, config=config)
  drafter = functools.reduce(staged, [*models, tables])
  assert drafter.labels == ('draft', 'inner', 'ngram')
  _check_rests(drafter, monkeypatch)


def test_streaming_compiles_once():
  """Also where the first state has what the program makes in later ones."""
  before = advance._cache_size()
  for steps in (2, 1):
    decoding = _run(_chain('similar'), 2.0, Decoding)
    for _ in range(steps):
      decoding.step()
  assert advance._cache_size() <= before + 1
