"""The rule by which growth stops, by hand."""

import functools
import types

import jax.numpy as jnp
import list_trees
import numpy as np
import pytest
import tiny_drafters

from specdec.draft import growth

# One guess after every node, and five rounds that cost nothing.
_chain_config = functools.partial(
  tiny_drafters.Settings,
  num_nodes=8,
  width=2,
  branching=1,
  rounds=5,
  cost_ratio=0,
)


def _run(drafter, texts, vocab_size, active=(True,) * 3, rounds=5):
  """Forwards of the outermost stage."""
  noise = np.zeros((3, rounds + 1, vocab_size), np.float32)
  return list_trees.run(drafter, list_trees.Step(texts, noise, active))[2][0]


def _forwards(probs, config, *active):
  """Forwards of chains; a token of row i is followed as in its table."""
  # One table holds them all, each on tokens of its own.
  size = 10
  table = np.full((3 * size, 3 * size), -30.0, np.float32)
  following = np.roll(np.eye(size, dtype=bool), 1, axis=1)
  for row, p in enumerate(probs):
    block = slice(size * row, size * (row + 1))
    table[block, block] = np.log(np.where(following, p, (1 - p) / (size - 1)))
  drafter = list_trees.TableStage(table, config).drafter()
  return _run(drafter, [[0], [size], [2 * size]], 3 * size, *active)


@pytest.mark.parametrize(
  ('cost_ratio', 'num_nodes', 'expected'),
  [
    # p = 0.5. The gains after 1, 2, 3 rounds are 0.25, 0.125, 0.0625. The price
    # is the 1.5, 1.75, 1.875 tokens expected so far, times c / (1 + rounds c).
    (0.25, 8, 1),  # 0.300
    (0.19, 8, 2),  # 0.239, 0.241
    (0.095, 8, 2),  # 0.130, 0.140
    (0.08, 8, 3),  # 0.111, 0.121, 0.121
    # From bytes: 30 x 30 x 4 for a target of 40,000, which is 0.09.
    (None, 8, 2),
    # Two verified nodes are expected to give no more than 1.5 tokens.
    (0.095, 2, 3),  # 0.130, 0.120, 0.111
  ],
)
def test_the_price_of_a_round(cost_ratio, num_nodes, expected):
  config = _chain_config(cost_ratio=cost_ratio, num_nodes=num_nodes)
  assert _forwards((0.5, 0.5, 0.5), config) == expected


def test_rows_that_are_done_have_no_say():
  # At p = 0.9 the gains exceed the prices in all five rounds; at 0.1 never.
  # Together: 0.83 and 0.65, then 0.73 and 0.68, then 0.66 and 0.69.
  config = _chain_config(cost_ratio=0.19)
  assert _forwards((0.9, 0.1, 0.1), config) == 3
  assert _forwards((0.9, 0.1, 0.1), config, (True, False, False)) == 5
  assert _forwards((0.9, 0.1, 0.1), config, (False, True, True)) == 1
  assert _forwards((0.9, 0.9, 0.1), config) == 5


def test_no_node_is_scored_beyond_the_context():
  """The root is at position length - 1; of 10 the last is 9."""
  facts = types.SimpleNamespace(max_positions=10)
  stage = types.SimpleNamespace(scorer=types.SimpleNamespace(facts=facts))
  ctx = types.SimpleNamespace(length=jnp.array([1, 9, 10, 11, 12]), max_depth=4)
  assert growth._depth_limit(stage, ctx).tolist() == [4, 1, 0, -1, -1]
  facts.max_positions = None
  assert growth._depth_limit(stage, ctx).tolist() == [4] * 5
