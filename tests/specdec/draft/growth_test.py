"""Growth of trees: what holds for every tree, whichever stages grew it."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import list_trees
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec.draft import growth
from specdec.tree import topology as topology_lib

_TREE = {'num_nodes': 10, 'width': 3, 'branching': 3, 'rounds': 3}
_TREE |= {'capacity': 40, 'cost_ratio': 0}
_SMALL = tiny_drafters.Settings(width=3, branching=2, rounds=2, cost_ratio=0)
_TINY = tiny_drafters.Settings(width=2, branching=2, rounds=1, cost_ratio=0)


def _table(seed):
  return tiny.table(list_trees.VOCAB_SIZE, seed)


_MORE_THAN_THERE_ARE = {'branching': list_trees.VOCAB_SIZE + 5, 'width': 60}
_MORE_THAN_THERE_ARE |= {'capacity': 50, 'calibration': 0.5}


def test_growth_is_a_best_first_search():
  for names, config in (
    ('model', {}),
    ('model, model, table', {}),
    # Full after a round or two: what is guessed later is dropped.
    ('model, table', {'num_nodes': 6, 'capacity': 11}),
    # Reached before the rounds are over; one node wide is two in a forward.
    ('model', {'width': 1, 'max_depth': 3, 'branching': 2, 'rounds': 9}),
    ('table', _MORE_THAN_THERE_ARE),
  ):
    check(names, config)


def check(names, config=()):
  """Checks 12 batches; the outermost stage is named first."""
  outer, sizes = tiny_drafters.Settings(**(_TREE | dict(config))), set()
  for temperature, seed in itertools.product((0.0, 1.0, 0.6), range(4)):
    stages = [
      # Two of three stages are alike now and then.
      list_trees.TableStage(
        _table(3 * seed + (place if place < 2 else seed % 2)),
        settings,
        name == 'model',
        f'model {place}',
      )
      for place, (name, settings) in enumerate(
        zip(names.split(', '), (outer, _SMALL, _TINY), strict=False)
      )
    ]
    drafter = specdec.staged(*(stage.drafter() for stage in stages))
    active = [True, True, config != () or seed > 0]
    step = list_trees.random_step(
      seed, drafter.max_depth, temperature, active=active
    )
    trees, scored, forwards = list_trees.run(drafter, step)
    # Rows that are done grow as far as the others take them.
    for row, nodes in enumerate(trees):
      by_stage = [
        set(np.flatnonzero(is_scored[row]).tolist()) for is_scored in scored
      ]
      _check_tree(stages, step, row, nodes, by_stage)
      if len(stages) == 1:
        assert by_stage[0] == _best_first(nodes, forwards[0], outer.width)
    if outer.rounds < drafter.max_depth and outer.capacity > 11:
      assert forwards[0] == outer.rounds
    times = 1  # that a stage is asked to draft
    for stage, count in zip(stages, forwards, strict=True):
      assert 0 < count <= times * stage.config.rounds
      times *= stage.config.rounds + 1
    sizes |= set(map(len, trees))
  assert max(sizes) == 11 if outer.capacity == 11 else max(sizes) > 10


def _check_tree(stages, step, row, nodes, scored):
  """All that is known of a tree; `scored` are sets of nodes by stage."""
  max_depth = step.noise.shape[1] - 1
  assert nodes[0] == list_trees.Node(step.texts[row][-1])
  assert len(nodes) <= stages[0].config.capacity
  below = {at: [] for at in range(len(nodes))}
  for at, node in enumerate(nodes[1:], 1):
    assert node.parent < at
    edge = node.token, node.cond_log_prob, node.origin
    assert node == list_trees.child(nodes, node.parent, *edge)
    assert node.depth <= max_depth
    assert node.cond_log_prob <= 0
    below[node.parent].append(node)
  for at, children in below.items():
    scoring = [stage for stage, of_it in enumerate(scored) if at in of_it]
    if not scoring:
      assert not children
      continue
    above = [*reversed(list_trees.up(nodes, at))]
    path = [nodes[node].token for node in above[1:]]
    said = [stage.log_probs(step, row, path) for stage in stages]
    best = [
      np.argsort(-log_probs, kind='stable')[: stage.config.branching].tolist()
      for log_probs, stage in zip(said, stages, strict=True)
    ]
    # The outermost stage that has scored a node has the say on its children.
    np.testing.assert_allclose(
      [child.cond_log_prob for child in children],
      [said[scoring[0]][child.token] for child in children],
      1e-4,
      1e-4,
    )
    tokens = [child.token for child in children]
    assert len({*tokens}) == len(tokens), 'a duplicate'
    if nodes[at].depth < max_depth and len(nodes) < stages[0].config.capacity:
      assert {*tokens} >= {*best[scoring[0]]}
    proposers = [child.origin - 1 for child in children]
    for token, proposer in zip(tokens, proposers, strict=True):
      assert proposer in scoring
      assert token in best[proposer]
    # Nothing is drafted below what a stage outside has scored.
    assert proposers == sorted(proposers, reverse=True)


def _best_first(nodes, rounds, width):
  """Nodes that a single stage scores: in each round the best that it knows."""
  scored = set()
  for _ in range(rounds):
    reached = [
      at for at, node in enumerate(nodes) if node.parent in {-1, *scored}
    ]
    new = [at for at in reached if at not in scored]
    scored |= {*sorted(new, key=lambda at: -nodes[at].log_prob)[:width]}
  return scored


def test_a_draft_reads_what_it_lacks_together_with_the_root():
  """As after a prefill, so that what inner stages drafted costs no round."""
  rng = np.random.default_rng(3)
  outer = tiny_drafters.Settings(
    num_nodes=12, width=2, branching=2, rounds=2, capacity=40, cost_ratio=0
  )
  inner = tiny_drafters.Settings(width=4, branching=2, rounds=4, cost_ratio=0)
  drafter = specdec.staged(
    tiny_drafters.model(tiny.draft('similar', num_layers=1), outer),
    tiny_drafters.candidates(
      tiny_drafters.exact(tiny.table(tiny.VOCAB_SIZE)), config=inner
    ),
  )
  step = list_trees.random_step(2, drafter.max_depth, 1.0, tiny.VOCAB_SIZE)
  rows = np.arange(list_trees.BATCH_SIZE)
  rest = (rows >= 0, step.noise, tiny.sampling_params(1.0, 0.0, 1.0))
  grow_again = jax.jit(list_trees.grown_from)
  most_missing = []
  for most in (outer.width, drafter.max_depth):
    tokens, length = list_trees.padded(step.texts)
    stages, tree = list_trees.grown(drafter, tokens, length, *rest)
    scored = np.asarray(stages[0].scored)
    path = np.full((len(rows), drafter.max_depth + 1), -1, np.int32)
    lacks = []
    for row, nodes in enumerate(list_trees.lists_of(tree)):
      # Towards the deepest node, past some that the model has not scored.
      deepest = max(range(len(nodes)), key=lambda at: nodes[at].depth)
      up = list_trees.up(nodes, deepest)[::-1]
      # The first row lacks nothing.
      up = up[: int(np.sum(scored[row, up])) + (most if row else 0)]
      path[row, : len(up)] = up
      lacks.append(int(np.sum(~scored[row, up])))
      new = [*(nodes[at].token for at in up[1:]), int(rng.integers(9))]
      tokens[row, length[row] : length[row] + len(new)] = new
      length[row] += len(new)
    most_missing.append(max(lacks))
    count = np.sum(path >= 0, axis=1).astype(np.int32)
    stages = list_trees.kept(drafter, stages, path, count)
    _, tree = grow_again(drafter, stages, tokens, length, *rest)
    _, expected = list_trees.grown(drafter, tokens, length, *rest)
    list_trees.assert_equal_trees(*map(list_trees.lists_of, (tree, expected)))
  assert most_missing[0] == outer.width < most_missing[1]


@pytest.mark.parametrize('is_model', [True, False])
def test_fixed_shapes_are_filled_by_rank(is_model):
  topology = topology_lib.Topology(
    [(1,), (0,), (3,), (1, 2), (1, 0), (1, 2, 4), (3, 0)]
  )
  config = tiny_drafters.Settings(topology=topology, calibration=1.5)
  stage = list_trees.TableStage(_table(5), config, is_model)
  for temperature in (0.0, 1.0):
    step = list_trees.random_step(5, topology.max_depth, temperature)
    trees, _, forwards = list_trees.run(stage.drafter(), step)
    assert forwards == [topology.max_depth]
    for row, nodes in enumerate(trees):
      expected = [list_trees.Node(step.texts[row][-1])]
      tokens, places = {(): ()}, {(): 0}
      for ranks in topology.paths:
        above = ranks[:-1]
        said = stage.log_probs(step, row, tokens[above])
        token = int(np.argsort(-said, kind='stable')[ranks[-1]])
        tokens[ranks], places[ranks] = (*tokens[above], token), len(expected)
        expected.append(
          list_trees.child(expected, places[above], token, said[token], 1)
        )
      list_trees.assert_equal_trees([nodes], [expected])


# The rule by which growth stops, by hand.

# One guess after every node, and five rounds that cost nothing.
_chain_config = functools.partial(
  tiny_drafters.Settings,
  num_nodes=8,
  width=2,
  branching=1,
  rounds=5,
  cost_ratio=0,
)


def _forwards(probs, config, active=(True,) * 3):
  """Forwards of chains; a token of row i is followed as in its table."""
  # One table holds them all, each on tokens of its own.
  size = 10
  table = np.full((3 * size, 3 * size), -30.0, np.float32)
  following = np.roll(np.eye(size, dtype=bool), 1, axis=1)
  for row, p in enumerate(probs):
    block = slice(size * row, size * (row + 1))
    table[block, block] = np.log(np.where(following, p, (1 - p) / (size - 1)))
  drafter = list_trees.TableStage(table, config).drafter()
  noise = np.zeros((3, config.rounds + 1, 3 * size), np.float32)
  step = list_trees.Step([[0], [size], [2 * size]], noise, active)
  return list_trees.run(drafter, step)[2][0]


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
