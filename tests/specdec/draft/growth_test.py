"""Growth of trees: what holds for every tree, whichever stages grew it."""

import itertools

import jax
import list_trees
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
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
    ('model, table', {}),
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


def test_growth_after_a_step_is_growth_after_a_prefill():
  """Also where the draft has yet to read what it did not guess itself."""
  rng = np.random.default_rng(2)
  settings = tiny_drafters.Settings(topology=topology_lib.k_ary(2, 2))
  drafter = tiny_drafters.model(tiny.draft('similar', num_layers=1), settings)
  step = list_trees.random_step(2, 2, 1.0, tiny.VOCAB_SIZE)
  rows = np.arange(list_trees.BATCH_SIZE)
  tokens, length = list_trees.padded(step.texts)
  rest = (rows >= 0, step.noise, tiny.sampling_params(1.0, 0.0, 1.0))
  grow_again = jax.jit(list_trees.grown_from)
  stages, tree = list_trees.grown(drafter, tokens, length, *rest)
  for leaf in (3, 4, 5, 6):
    # To a leaf, which no draft has scored, and a bonus token.
    path = np.array([[0, (leaf - 1) // 2, leaf]] * len(rows), np.int32)
    stages = list_trees.kept(drafter, stages, path, 0 * length + 3)
    for row in rows:
      new = [*np.asarray(tree.token[row])[path[row, 1:]], rng.integers(9)]
      tokens[row, length[row] : length[row] + 3] = new
    length = length + 3
    stages, tree = grow_again(drafter, stages, tokens, length, *rest)
    _, expected = list_trees.grown(drafter, tokens, length, *rest)
    list_trees.assert_equal_trees(*map(list_trees.lists_of, (tree, expected)))


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
