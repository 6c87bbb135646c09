"""Fixed shapes, by hand and by their properties; and settings refused."""

import math
import random

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import tiny_drafters

import specdec
from specdec.tree import topology as topology_lib

NOWHERE = np.iinfo(np.int32).max

_PATH = strategies.lists(strategies.integers(0, 3), min_size=1, max_size=4)
_PATHS = strategies.lists(_PATH.map(tuple), min_size=1, max_size=8).map(
  lambda paths: [path[:end] for path in paths for end in range(1, 5)]
)


@hypothesis.given(_PATHS, strategies.randoms(use_true_random=False))
def test_any_tree(paths, rng: random.Random):
  """However its paths are ordered, and however often one is named."""
  shape = topology_lib.Topology([list(path) for path in paths])
  rng.shuffle(paths)
  again = topology_lib.Topology(paths)
  assert (shape, hash(shape)) == (again, hash(again))
  assert shape == specdec.Topology(tuple(paths))
  nodes = sorted({(), *paths}, key=lambda path: (len(path), path))
  assert shape.paths == tuple(nodes[1:])
  assert shape.num_nodes == len(nodes)
  assert shape.max_depth == max(map(len, paths))
  assert shape.branching == 1 + max(rank for path in paths for rank in path)
  # Where each child goes, and nowhere else.
  where = {path: at for at, path in enumerate(nodes)}
  assert shape.children.tolist() == [
    [where.get((*path, rank), NOWHERE) for rank in range(shape.branching)]
    for path in nodes
  ]
  # Level by level all nodes with children, each once.
  inner = {path[:-1] for path in shape.paths}
  parents = [
    [where[path] for path in nodes if len(path) == level and path in inner]
    for level in range(shape.max_depth)
  ]
  assert [[at for at in row if at >= 0] for row in shape.schedule] == parents
  assert shape.schedule.shape[1] == max(map(len, parents))
  # Every path but a leaf's is needed.
  missing = rng.choice(shape.paths)
  if missing in inner:
    with pytest.raises(ValueError, match='but not its parent'):
      topology_lib.Topology([path for path in shape.paths if path != missing])


def test_a_chain_and_a_binary_tree():
  assert topology_lib.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
  tree = topology_lib.k_ary(2, 2)
  assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
  assert tree.schedule.tolist() == [[0, -1], [1, 2]]
  assert topology_lib.k_ary(1, 3) == topology_lib.chain(3) != tree
  assert topology_lib.k_ary(2, 11).num_nodes == 4095


def test_shapes_that_are_refused():
  for make, message in (
    (lambda: topology_lib.chain(0), 'at least 1 and at most 64, got 0'),
    (lambda: topology_lib.k_ary(0, 2), 'integer of at least 1, got 0'),
    (lambda: topology_lib.k_ary(2, 12), '2-ary tree of depth 12 has more'),
    (lambda: topology_lib.k_ary(5000, 1), 'more than 4096 nodes'),
    (lambda: topology_lib.Topology([()]), r'ranks from 0 to 4095, got \(\)'),
    (lambda: topology_lib.Topology([[10**12]]), r'4095, got \(1000'),
    (lambda: specdec.Topology(((0,), (0, -1))), r'4095, got \(0, -1\)'),
  ):
    with pytest.raises(ValueError, match=message):
      make()


_NO_LIST = 'must hold a JSON list of lists of ranks'


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'[[0], ', 'cannot be read'),
    (b'\xff\xfe', 'cannot be read'),
    (b'{"0": 1}', _NO_LIST),
    (b'[0, 1]', _NO_LIST),
    (b'[["0"]]', _NO_LIST),
    (b'[[0.5]]', _NO_LIST),
    (b'[[true]]', _NO_LIST),
    (b'[[0, 0]]', 'but not its parent'),
    (b'[]', 'topology has no path'),
  ],
)
def test_files(tmp_path, content, message):
  path = tmp_path / 'shape.json'
  with pytest.raises(ValueError, match='cannot be read'):
    topology_lib.load_topology(str(path))
  path.write_text('[[0], [1], [1, 2], [1, 0]]')
  assert topology_lib.load_topology(str(path)) == topology_lib.Topology(
    [(0,), (1,), (1, 0), (1, 2)]
  )
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    topology_lib.load_topology(str(path))
  assert str(path) in str(error.value)


# Settings of a stage.


def test_settings_follow_from_a_topology():
  shape = topology_lib.Topology([(0,), (1,), (3,), (1, 2), (3, 0)])
  lookup = specdec.PromptLookup()
  drafter = specdec.fixed_drafter(lookup, shape, calibration=1.5)
  assert (drafter.shape.num_nodes, drafter.shape.capacity) == (6, 6)
  assert drafter.stages[0].config == specdec.StageConfig(
    width=2, branching=4, rounds=2, calibration=1.5
  )
  assert drafter.max_depth == shape.max_depth == 2


_COUNT = 'must be an integer of at least 1 and .*got'
_RATIO = 'cost_ratio must be a number of at least 0, or None, got'
_TOO_SMALL = 'capacity must be at least num_nodes=32, got'
_NUMBERS = (math.inf, math.nan)


def test_settings_out_of_range():
  for name, values, message in (
    *[
      (name, (0, -3, 2.5, 4.0, True, *_NUMBERS), f'{name} {_COUNT}')
      for name in ('num_nodes', 'width', 'branching', 'rounds', 'max_depth')
    ],
    ('capacity', (64.5,), 'capacity must be an integer .*got'),
    ('capacity', (31,), _TOO_SMALL),
    ('calibration', (0.0, -1.0, *_NUMBERS), 'must be a number above 0, got'),
    ('cost_ratio', (-0.1, *_NUMBERS), _RATIO),
  ):
    for value in values:
      with pytest.raises(ValueError, match=f'{message} {value}'):
        tiny_drafters.Settings(**{name: value}).drafter(specdec.PromptLookup())


def _drafters(rounds, **settings):
  settings = [
    tiny_drafters.Settings(rounds=count, **settings) for count in rounds
  ]
  return [config.drafter(specdec.PromptLookup()) for config in settings]


def test_the_stage_of_a_topology_has_its_sizes():
  for sizes in ({'width': 1, 'branching': 2}, {'width': 2, 'branching': 4}):
    stage = specdec.Stage(specdec.PromptLookup(), specdec.StageConfig(**sizes))
    with pytest.raises(ValueError, match=r'branching=2, got .*fixed_drafter'):
      specdec.Drafter((stage,), topology_lib.k_ary(2, 2))


def test_staging_is_associative_and_leaves_fixed_shapes_alone():
  first, second, third = _drafters((2, 3, 1))
  staged = specdec.staged
  for drafter in (
    staged(first, staged(second, third)),
    staged(staged(first, second), third),
  ):
    assert [stage.config.rounds for stage in drafter.stages] == [2, 3, 1]
  fixed = specdec.fixed_drafter(specdec.PromptLookup(), topology_lib.chain(2))
  stages = (*first.stages, *fixed.stages)
  both = {'shape': topology_lib.chain(2), 'stages': stages}
  for make in (
    lambda: specdec.staged(fixed, first),
    lambda: first.replace(**both),
  ):
    with pytest.raises(ValueError, match='a fixed topology leaves no room'):
      make()


def test_how_deep_a_tree_can_grow():
  for rounds, settings, expected in (
    ((3,), {}, 3),
    # Four levels before the first round, and one and four more in each.
    ((2, 4), {}, 4 + 2 * 5),
    ((2, 1, 3), {}, 7 + 2 * 8),
    ((2, 4), {'max_depth': 9}, 9),
    ((3,), {'num_nodes': 3}, 2),
  ):
    drafters = _drafters(rounds, **({'max_depth': 64} | settings))
    assert specdec.staged(*drafters).max_depth == expected
