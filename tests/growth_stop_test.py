"""The rule by which growth stops, by hand.

After every token there is one that follows with probability p; a chain of
guesses has 1, p, p^2, p^3 and so on.
"""

import functools
import types

import jax
import jax.numpy as jnp
import list_growth
import list_trees
import numpy as np
import pytest
import tiny_drafters

from specdec import sampling as sampling_lib
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
  return list_growth.run(drafter, list_growth.Step(texts, noise, active))[2][0]


def _forwards(probs, config, *active):
  """Forwards of chains; a token of row i is followed as in its table."""
  # One table holds them all, each on tokens of its own.
  size = 10
  table = np.full((3 * size, 3 * size), -30.0, np.float32)
  following = np.roll(np.eye(size, dtype=bool), 1, axis=1)
  for row, p in enumerate(probs):
    own = slice(size * row, size * (row + 1))
    table[own, own] = np.log(np.where(following, p, (1 - p) / (size - 1)))
  drafter = list_growth.TableStage(table, config).drafter()
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
    # Of two nodes that are verified no more than 1.5 tokens are expected.
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


def test_rows_that_are_done_have_no_say_without_a_cost_either():
  """Only the second row has something to score after the root."""
  size = 7
  log_probs = jnp.where(
    jnp.arange(size)[:, None] < 3, sampling_lib.EXCLUDED, -0.1
  )
  proposer = tiny_drafters.BigramTable(jnp.full((size, 1), 3), log_probs)
  drafter = tiny_drafters.candidates(proposer, config=_chain_config(rounds=4))
  forwards = lambda *active: _run(drafter, [[0], [3], [1]], size, active, 4)
  assert forwards(True, True, False) == 4
  assert forwards(True, False, True) == 1


# A tree by hand: 0 has the children 1 (0.5) and 2 (0.3), 1 has 3 (0.2), and
# 3 has 4 and 5, which a stage inside thought likelier together than 3 itself.
_EDGES = [(0, 0.5), (0, 0.3), (1, 0.4), (3, 1.0), (3, 0.5)]
_PROBS = [1.0, 0.5, 0.3, 0.2, 0.2, 0.1]


_UNSEEN = {'width': 2, 'expanded': [2], 'needs_ancestors': False}
_frontier = jax.jit(
  growth._frontier,
  static_argnames=('max_depth', 'width', 'num_nodes', 'needs_ancestors'),
)


@pytest.mark.parametrize(
  ('kw', 'nodes', 'can_grow', 'gain'),
  [
    # Of the probability of 0 and 1 their children have 0.8 + 0.2 of 1.5. So of
    # 2 and 4 two thirds are new; of 3 nothing, as its children have it all.
    ({'width': 3}, [2, 3, 4], True, (0.3 + 0.2) * 2 / 3),
    ({'width': 5}, [2, 3, 4, 5, -1], True, (0.3 + 0.2 + 0.1) * 2 / 3),
    # Nothing is known of the share: all of it.
    ({'width': 2, 'scored': []}, [0, 1], True, 0.2 + 0.3),
    # Too deep for children, but their keys and values may be needed.
    ({'width': 2, 'max_depth': 1}, [2, 3], False, 0.0),
    # Beyond the context of the stage.
    ({'width': 3, 'depth_limit': 1}, [2, -1, -1], True, 0.3 * 2 / 3),
    # Scored outside: only to be seen by those below, or not at all.
    ({'width': 2, 'expanded': [2]}, [2, 3], True, 0.2 * 2 / 3),
    (_UNSEEN, [3, 4], True, 0.2 * 2 / 3),
    ({'width': 2, 'active': False}, [2, 3], False, 0.0),
    # A node counts as much as its children have, but not more than itself.
    ({'width': 1, 'scored': [0, 1, 3]}, [2], True, 0.3 * 1.2 / 1.7),
    # Only the likeliest are verified.
    ({'width': 2, 'num_nodes': 3}, [2, 3], True, 0.3 * 2 / 3),
  ],
)
def test_what_a_round_would_bring(kw, nodes, can_grow, gain):
  tree = [list_trees.Node(9)]
  for token, (parent, p) in enumerate(_EDGES):
    tree.append(list_trees.child(tree, parent, token, np.log(p), 1))
  kw = {
    **{'scored': [0, 1], 'expanded': [], 'depth_limit': 9, 'active': True},
    **{'max_depth': 9, 'num_nodes': 5, 'needs_ancestors': True},
  } | kw
  mask = lambda name: np.isin(np.arange(list_trees.CAPACITY), kw.pop(name))
  frontier = _frontier(
    *(list_trees.to_arrays(tree), mask('scored'), mask('expanded')),
    *(kw.pop('depth_limit'), kw.pop('active')),
    **kw,
  )
  assert frontier.nodes.tolist() == nodes
  assert bool(frontier.can_grow) == can_grow
  np.testing.assert_allclose(frontier.gain, gain, atol=1e-6)
  expected = sum(sorted(_PROBS, reverse=True)[: kw['num_nodes']])
  np.testing.assert_allclose(frontier.expected, expected, rtol=1e-6)


def test_no_node_is_scored_beyond_the_context():
  """The root is at position length - 1; of 10 the last is 9."""
  stage = types.SimpleNamespace(scorer=types.SimpleNamespace(max_positions=10))
  ctx = types.SimpleNamespace(length=jnp.array([1, 9, 10, 11, 12]), max_depth=4)
  assert growth._depth_limit(stage, ctx).tolist() == [4, 1, 0, -1, -1]
  stage.scorer.max_positions = None
  assert growth._depth_limit(stage, ctx).tolist() == [4] * 5
