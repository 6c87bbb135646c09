"""The guard: what it costs at worst, that it changes no token, and catching up.

Counts only: a speculative step is taken to last `break_even` plain ones.
"""

import jax
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import Settings
import tiny_models

from specdec import Drafter
from specdec import fallback as guarding
from specdec import generate
from specdec import LanguageModelScorer
from specdec import Sampling
from specdec import staged
from specdec.tree.topology import chain

_DEPTH = 4


def _chain(kind):
  scorer = LanguageModelScorer(tiny_models.draft(kind))
  return Drafter(scorer, Settings(topology=chain(_DEPTH)))


def _run(drafter, break_even=None, *, rows=1, limit=128, temperature=0.0):
  return generate(
    tiny_models.gpt2(),
    tiny_models.row_keys(rows),
    tiny_models.prompts(rows),
    drafter=drafter,
    max_new_tokens=limit,
    sampling=Sampling(temperature=temperature),
    break_even=break_even,
  )


def _settle(emitted, break_even):
  """The guard's account, for a draft that always has so many tokens."""
  guard = guarding.init_guard()
  seconds = tokens = 0.0
  while tokens < 512:
    if guard.speculating:
      guard = guarding.after_speculative_step(
        guard, np.array([emitted]), np.array([True]), np.float32(break_even)
      )
      seconds, tokens = seconds + break_even, tokens + emitted
    else:
      guard = guarding.after_plain_step(guard, np.float32(break_even))
      seconds, tokens = seconds + 1.0, tokens + 1.0
  return seconds / tokens


@pytest.mark.parametrize('break_even', [1.2, 2.0, 3.5, 6.0])
def test_the_worst_of_drafts_costs_under_five_percent(break_even):
  assert 1.0 < _settle(1, break_even) < 1.05


def test_a_draft_that_pays_is_never_left():
  assert _settle(4, 2.5) == 2.5 / 4


def test_a_lucky_draft_has_no_more_credit_than_any():
  guard = guarding.init_guard()
  for emitted, steps in ((9, 100), (1, 16)):
    for _ in range(steps):
      assert guard.speculating
      guard = guarding.after_speculative_step(
        guard, np.array([emitted]), np.array([True]), np.float32(2.0)
      )
  assert not guard.speculating


def test_rows_that_are_done_have_no_say():
  guard = guarding.init_guard()
  settle = lambda emitted, active: guarding.after_speculative_step(
    guard, np.array(emitted), np.array(active), np.float32(2.0)
  )
  both = settle([1, 5], [True, True])
  assert float(both.credit) == float(guard.credit) + 1.0
  one = settle([1, 0], [True, False])
  assert float(one.credit) == float(guard.credit) - 1.0


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_hopeless_draft_is_left_and_no_token_changes(temperature):
  plain = _run(None, rows=3, temperature=temperature)
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
  monkeypatch.setattr(guarding, '_PREMIUM', 0.9)
  monkeypatch.setattr(guarding, '_INITIAL_CREDIT', 0.5)
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
    scorer = LanguageModelScorer(tiny_models.draft('perfect'))
    inner = LanguageModelScorer(tiny_models.draft('perfect'), name='inner')
    drafter = staged(Drafter(scorer, config), Drafter(inner, config))
  result = _run(drafter, 10.0, rows=2, limit=100)
  assert result.tokens == _run(None, rows=2, limit=100).tokens
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
  from specdec import Decoding

  whole = _run(_chain('random'), 2.5, rows=2)
  decoding = Decoding(
    tiny_models.gpt2(),
    tiny_models.row_keys(2),
    tiny_models.prompts(2),
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
      tiny_models.prompts(2), _run(None, rows=2).tokens, strict=True
    )
  ]
  drafter = tiny_drafters.candidates(
    tiny_drafters.table_of(texts, 'perfect'), config=tiny_drafters.TREE
  )
  result = _run(drafter, 30.0, rows=2)
  assert result.tokens == _run(None, rows=2).tokens
  assert result.stats['plain_steps'] > 0


@pytest.mark.parametrize(
  'bad', [0, -1.0, float('nan'), float('inf'), 'no', True]
)
def test_what_is_no_ratio_is_refused(bad):
  with pytest.raises(ValueError, match='break_even must be a positive number'):
    _run(_chain('perfect'), bad)
