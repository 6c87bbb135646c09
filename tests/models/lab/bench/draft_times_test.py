"""Times of the draft side, and what is computed from them."""

import dataclasses

import pytest

from models.lab.bench import draft_times
from models.text import choice as choice_lib
from models.text import settings as settings_lib


def test_expected_tokens_by_hand():
  tokens = lambda num_nodes, misses, go_on: draft_times.tree_tokens(
    *([0.5, 0.2], misses, num_nodes), siblings_go_on=go_on
  )
  # The third position goes on with the last ratio, 0.4.
  assert tokens(4, [], True) == pytest.approx(1 + 0.5 + 0.2 + 0.08)
  # At the root 0.5 and 0.3, as the sibling has 0.6 of misses; below the former
  # 0.2 and 0.18, then 0.08; below the sibling 0.12.
  assert tokens(4, [0.6], False) == pytest.approx(1 + 0.5 + 0.3 + 0.2)
  assert tokens(6, [0.6], False) == pytest.approx(2 + 0.18 + 0.08)
  assert tokens(6, [0.6], True) == pytest.approx(2 + 0.18 + 0.12)
  assert tokens(9, [], False) == tokens(9, [], True)


def test_a_pair_with_random_weights_is_timed(monkeypatch):
  target, drafter = draft_times.SHAPES['qwen3-1.7b-dspark']
  small = {'vocab_size': 40, 'num_positions': 64, 'width': 16, 'num_heads': 2}
  small |= {'num_kv_heads': 1, 'head_width': 8, 'inner_width': 24}
  own = {'num_layers': 1, 'target_width': 16, 'reads': (1,), 'window': None}
  own |= {'block_size': 3, 'markov_rank': 4, 'causal': False}
  shapes = (
    dataclasses.replace(target, **small, num_layers=2),
    dataclasses.replace(drafter, **small, **own),
  )
  monkeypatch.setattr(draft_times, 'SHAPES', {'tiny': shapes})
  models = choice_lib.ModelChoice(dtype='float32', draft_vocab=30)
  drafting = settings_lib.with_options(
    settings_lib.DraftSettings(),
    {'num_draft_tokens': '3', 'num_nodes': '6', 'width': '4'},
  )
  chain, tree = draft_times.with_speeds(
    draft_times.measure(
      *(draft_times.drawn_pair('tiny', models), drafting, ('chain', 'tree')),
      context=20,
      repeats=2,
    ),
    *([0.5, 0.2], [0.6]),
  )
  assert (chain['N'], tree['N']) == (4, 6)
  assert chain['computed_tokens'] == pytest.approx(1.78)
  step = tree['draft_ms'] + tree['verify_ms']
  speed = tree['computed_tokens'] * tree['plain_ms'] / step
  assert tree['computed_speed'] == pytest.approx(speed)
  assert tree['draft_per_plain'] == tree['draft_ms'] / tree['plain_ms']
