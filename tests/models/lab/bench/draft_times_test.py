"""Times of the draft side, and what is computed from them."""

import functools
import json

import block_folders
import pytest

from models.lab.bench import draft_times
from models.text import choice as choice_lib
from models.text import pair as pair_lib
from models.text import settings as settings_lib


def test_expected_tokens_by_hand():
  tokens = functools.partial(draft_times.tree_tokens, [0.5, 0.2])
  # The third position goes on with the last ratio, 0.4.
  assert tokens([], 4) == pytest.approx(1 + 0.5 + 0.2 + 0.08)
  # At the root 0.5 and 0.3, as the sibling has 0.6 of misses; below the former
  # 0.2 and 0.18, then 0.08.
  assert tokens([0.6], 4) == pytest.approx(1 + 0.5 + 0.3 + 0.2)
  assert tokens([0.6], 6) == pytest.approx(2 + 0.18 + 0.08)


def test_a_pair_with_random_weights_is_timed(tmp_path):
  target = tmp_path / 'target'
  target.mkdir()
  (target / 'config.json').write_text(json.dumps(block_folders.TARGET))
  head = block_folders.write(tmp_path / 'head', 'deepspec')
  (head / 'model.safetensors').unlink()
  models = choice_lib.ModelChoice(
    str(target), None, head=str(head), dtype='float32', draft_vocab=10
  )
  drafting = settings_lib.with_options(
    settings_lib.DraftSettings(),
    {'num_draft_tokens': '3', 'num_nodes': '6', 'width': '4'},
  )
  chain, tree = draft_times.with_speeds(
    draft_times.measure(
      *(pair_lib.drawn_pair(models), drafting, ('chain', 'tree')),
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
  per_plain = tree['draft_ms'] / tree['plain_ms']
  assert tree['draft_per_plain'] == pytest.approx(per_plain)
