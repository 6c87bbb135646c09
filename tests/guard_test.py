"""The adaptive fallback: its worst cost, unchanged tokens, and catching up.

Counts only: a speculative step is taken to last `break_even` plain ones.
"""

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
from specdec.tree.topology import chain

_DEPTH = 4


def _chain(kind):
  config = Settings(topology=chain(_DEPTH))
  return tiny_drafters.model(tiny.draft(kind), config)


def _run(drafter, break_even=None, *, rows=1, limit=128, temperature=0.0):
  return generate(
    tiny.gpt2(),
    tiny.row_keys(rows),
    tiny.prompts(rows),
    drafter=drafter,
    max_new_tokens=limit,
    sampling=Sampling(temperature=temperature),
    break_even=break_even,
  )


def _settle(emitted, break_even):
  """Time per token where every speculative step emits as many tokens."""
  state = fallback.init_fallback()
  seconds = tokens = 0.0
  while tokens < 512:
    if state.speculating:
      state = fallback.after_speculative_step(
        state, np.array([emitted]), np.array([True]), np.float32(break_even)
      )
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
      state = fallback.after_speculative_step(
        state, np.array([emitted]), np.array([True]), np.float32(2.0)
      )
  assert not state.speculating


def test_rows_that_are_done_have_no_say():
  state = fallback.init_fallback()
  settle = lambda emitted, active: fallback.after_speculative_step(
    state, np.array(emitted), np.array(active), np.float32(2.0)
  )
  both = settle([1, 5], [True, True])
  assert float(both.credit) == float(state.credit) + 1.0
  one = settle([1, 0], [True, False])
  assert float(one.credit) == float(state.credit) - 1.0


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_hopeless_draft_is_left_and_no_token_changes(temperature):
  plain = _run(PLAIN, rows=3, temperature=temperature)
  result = _run(_chain('hopeless'), 3.0, rows=3, temperature=temperature)
  assert result.tokens == plain.tokens
  stats = result.stats
  steps = stats['reads']['target']['forwards']
  speculative = steps - stats['plain_steps']
  assert steps == 128  # one token each, whatever the step
  # Credit 8 is gone in 4 steps; premiums do not allow another before 200 more.
  assert speculative == 4
  assert stats['origins']['draft'] == 0


def test_a_perfect_draft_is_kept():
  with_guard = _run(_chain('perfect'), 3.0, rows=3)
  without = _run(_chain('perfect'), rows=3)
  assert with_guard.tokens == without.tokens
  assert with_guard.stats['plain_steps'] == 0
  # The guard's catching up changes nothing where nothing is missing.
  assert with_guard.stats['stage_forwards'] == without.stats['stage_forwards']


@pytest.fixture
def many_trials(monkeypatch):
  """Premiums so high that a draft at rest is soon tried again."""
  monkeypatch.setattr(fallback, '_PREMIUM', 0.9)
  monkeypatch.setattr(fallback, '_INITIAL_CREDIT', 0.5)
  jax.clear_caches()  # of programs with other premiums
  yield
  jax.clear_caches()


@pytest.mark.usefixtures('many_trials')
@pytest.mark.parametrize('stages', [1, 2])
def test_after_a_rest_the_draft_knows_the_text(stages):
  """A perfect draft that is sent to rest again and again misses nothing."""
  drafter = _chain('perfect')
  if stages == 2:
    config = Settings(
      num_nodes=_DEPTH + 1,
      width=3,
      branching=1,
      rounds=4,
      max_depth=_DEPTH,
      cost_ratio=0,
    )
    drafter = staged(
      *(
        tiny_drafters.model(tiny.draft('perfect'), config, name)
        for name in ('draft', 'inner')
      )
    )
  result = _run(drafter, 10.0, rows=2, limit=100)
  assert result.tokens == _run(PLAIN, rows=2, limit=100).tokens
  stats = result.stats
  speculative = stats['reads']['target']['forwards'] - stats['plain_steps']
  assert speculative > 3
  assert stats['plain_steps'] > 3 * 2 * _DEPTH  # more than a window each time
  histogram = np.array(stats['accepted_histogram'])
  # All of each guess was accepted, but for the rows' last steps.
  assert histogram[_DEPTH] >= 2 * (speculative - 1)
  assert histogram[1:_DEPTH].sum() <= 2


def test_rests_are_the_same_in_pieces():
  """Streaming makes one step at a time; the account goes on."""
  whole = _run(_chain('random'), 2.5, rows=2)
  decoding = Decoding(
    tiny.gpt2(),
    tiny.row_keys(2),
    tiny.prompts(2),
    drafter=_chain('random'),
    max_new_tokens=128,
    sampling=Sampling(temperature=0.0),
    break_even=2.5,
  )
  for _ in decoding:
    pass
  pieces = decoding.result()
  assert pieces.tokens == whole.tokens
  assert pieces.stats['plain_steps'] == whole.stats['plain_steps'] > 0


def test_tables_need_no_catching_up():
  texts = [
    prompt + new
    for prompt, new in zip(
      tiny.prompts(2), _run(PLAIN, rows=2).tokens, strict=True
    )
  ]
  drafter = tiny_drafters.candidates(
    tiny_drafters.table_of(texts, 'perfect'), config=tiny_drafters.TREE
  )
  result = _run(drafter, 30.0, rows=2)
  assert result.tokens == _run(PLAIN, rows=2).tokens
  assert result.stats['plain_steps'] > 0


@pytest.mark.parametrize(
  'bad', [0, -1.0, float('nan'), float('inf'), 'no', True]
)
def test_what_is_no_ratio_is_refused(bad):
  with pytest.raises(ValueError, match='break_even must be a positive number'):
    _run(_chain('perfect'), bad)
