"""Fixed shapes by hand, and what shapes and settings are refused."""

import json
import math

import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings

from specdec import fixed_drafter
from specdec import PromptLookup
from specdec import StageConfig
from specdec import staged
from specdec import Topology
from specdec.tree.topology import chain
from specdec.tree.topology import from_paths
from specdec.tree.topology import k_ary
from specdec.tree.topology import load_topology

NOWHERE = np.iinfo(np.int32).max


def test_a_chain():
  shape = chain(3)
  assert shape.paths == ((0,), (0, 0), (0, 0, 0))
  assert (shape.num_nodes, shape.max_depth, shape.branching) == (4, 3, 1)
  assert shape.schedule.tolist() == [[0], [1], [2]]
  assert shape.children.tolist() == [[1], [2], [3], [NOWHERE]]


def test_a_binary_tree():
  shape = k_ary(2, 2)
  assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
  assert (shape.num_nodes, shape.max_depth, shape.branching) == (7, 2, 2)
  assert shape.schedule.tolist() == [[0, -1], [1, 2]]
  assert shape.children.tolist() == [
    [1, 2],
    [3, 4],
    [5, 6],
    *[[NOWHERE, NOWHERE]] * 4,
  ]
  assert k_ary(1, 3) == chain(3)
  assert k_ary(3, 3).num_nodes == 1 + 3 + 9 + 27
  assert k_ary(2, 11).num_nodes == 4095


def test_any_paths_in_any_order():
  """The second child of the root has one that is third; others have none.

    0
  ├─ 1
  ├─ 2 ── 4 (rank 2) ── 5
  └─ 3 (rank 3)
  """
  paths = [(1, 2, 0), (3,), (1,), (0,), (1, 2), (0,)]
  shape = from_paths(paths)
  assert shape.paths == ((0,), (1,), (3,), (1, 2), (1, 2, 0))
  assert (shape.num_nodes, shape.max_depth, shape.branching) == (6, 3, 4)
  assert shape.schedule.tolist() == [[0], [2], [4]]
  x = NOWHERE
  assert shape.children.tolist() == [
    [1, 2, x, 3],
    [x, x, x, x],
    [x, x, 4, x],
    [x, x, x, x],
    [5, x, x, x],
    [x, x, x, x],
  ]
  assert shape == from_paths([list(path) for path in reversed(paths)])
  assert hash(shape) == hash(from_paths(reversed(paths)))
  assert shape != chain(3)


@pytest.mark.parametrize(
  ('paths', 'message'),
  [
    ([], 'topology has no path'),
    ([()], r'one or more ranks from 0, got \(\)'),
    ([(0,), (0, -1)], r'one or more ranks from 0, got \(0, -1\)'),
    ([(0,), (1, 0)], r'the path \(1, 0\) but not its parent \(1,\)'),
    ([(0, 0)], r'the path \(0, 0\) but not its parent \(0,\)'),
  ],
)
def test_paths_that_are_no_tree(paths, message):
  with pytest.raises(ValueError, match=message):
    from_paths(paths)
  with pytest.raises(ValueError, match=message):
    Topology(tuple(paths))


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: chain(0), 'at least one token, got 0'),
    (lambda: k_ary(0, 2), 'at least 1, got 0 and 2'),
    (lambda: k_ary(2, 0), 'at least 1, got 2 and 0'),
    (lambda: k_ary(2, 12), 'binary|more than 4096 nodes'),
    (lambda: k_ary(5000, 1), 'more than 4096 nodes'),
  ],
)
def test_shapes_that_are_too_small_or_too_large(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_file(tmp_path):
  path = tmp_path / 'shape.json'
  path.write_text(json.dumps([[0], [1], [1, 2], [1, 0]]))
  shape = load_topology(str(path))
  assert shape == from_paths([(0,), (1,), (1, 0), (1, 2)])


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('[[0], ', 'cannot be read'),
    ('{"0": 1}', 'must hold a JSON list of lists of ranks'),
    ('[0, 1]', 'must hold a JSON list of lists of ranks'),
    ('[["0"]]', 'must hold a JSON list of lists of ranks'),
    ('[[0.5]]', 'must hold a JSON list of lists of ranks'),
    ('[[true]]', 'must hold a JSON list of lists of ranks'),
    ('[[0, 0]]', 'but not its parent'),
    ('[]', 'topology has no path'),
    ('[[-1]]', 'one or more ranks'),
  ],
)
def test_bad_files(tmp_path, text, message):
  path = tmp_path / 'shape.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    load_topology(str(path))
  assert str(path) in str(error.value)


def test_files_that_are_not_there_or_no_text(tmp_path):
  with pytest.raises(ValueError, match='cannot be read'):
    load_topology(str(tmp_path / 'nothing.json'))
  (tmp_path / 'binary').write_bytes(b'\xff\xfe')
  with pytest.raises(ValueError, match='cannot be read'):
    load_topology(str(tmp_path / 'binary'))


# Settings of a stage.


def test_settings_follow_from_a_topology():
  shape = from_paths([(0,), (1,), (3,), (1, 2), (3, 0)])
  drafter = fixed_drafter(PromptLookup(), shape, calibration=1.5)
  assert (drafter.shape.num_nodes, drafter.shape.capacity) == (6, 6)
  assert drafter.stages[0].config == StageConfig(
    width=2, branching=4, rounds=2, calibration=1.5
  )
  assert drafter.max_depth == shape.max_depth == 2
  assert hash(shape) == hash(from_paths(shape.paths))


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    *[
      ({name: value}, f'{name} must be an integer of at least 1, got {value}')
      for name in ('num_nodes', 'width', 'branching', 'rounds', 'max_depth')
      for value in (0, -3, 2.5, True)
    ],
    ({'capacity': 31}, 'capacity must be at least num_nodes=32, got 31'),
    ({'num_nodes': 300}, 'at least num_nodes=300, got 256'),
    ({'calibration': 0.0}, 'calibration must be a number above 0, got 0.0'),
    ({'calibration': -1.0}, 'calibration must be a number above 0'),
    ({'calibration': math.inf}, 'calibration must be a number above 0'),
    ({'calibration': math.nan}, 'calibration must be a number above 0'),
    (
      {'cost_ratio': -0.1},
      'cost_ratio must be a number of at least 0, or None, got -0.1',
    ),
    ({'cost_ratio': math.nan}, 'cost_ratio must be a number of at least 0'),
    ({'cost_ratio': math.inf}, 'cost_ratio must be a number of at least 0'),
  ],
)
def test_settings_out_of_range(settings, message):
  with pytest.raises(ValueError, match=message):
    Settings(**settings).drafter(PromptLookup())


@pytest.mark.parametrize(
  'settings',
  [
    {'width': 4.0},
    {'rounds': math.inf},
    {'rounds': math.nan},
    {'capacity': 64.5},
    {'capacity': math.inf},
  ],
)
def test_sizes_must_be_integers(settings):
  name = next(iter(settings))
  with pytest.raises(ValueError, match=f'{name} must be an integer'):
    Settings(**settings).drafter(PromptLookup())


def test_a_fixed_shape_and_an_inner_stage_exclude_each_other():
  draft = tiny.gpt2()
  fixed = tiny_drafters.model(draft, Settings(topology=chain(2)), 'fixed')
  grown = tiny_drafters.model(draft, Settings(), 'grown')
  with pytest.raises(ValueError, match='a fixed topology leaves no room'):
    staged(fixed, grown)
  with pytest.raises(ValueError, match='a fixed topology leaves no room'):
    grown.replace(shape=chain(2), stages=(*grown.stages, *fixed.stages))


def test_staging_is_associative():
  draft = tiny.gpt2()
  one, two, three = (
    tiny_drafters.model(draft, Settings(rounds=rounds), name)
    for rounds, name in ((2, 'one'), (3, 'two'), (1, 'three'))
  )
  nested = staged(one, staged(two, three))
  assert [stage.name for stage in nested.stages] == ['one', 'two', 'three']
  assert nested.labels == ('one', 'two', 'three')
  other = staged(staged(one, two), three)
  assert [stage.config for stage in other.stages] == [
    stage.config for stage in nested.stages
  ]
  assert other.labels == nested.labels


@pytest.mark.parametrize(
  ('rounds', 'settings', 'expected'),
  [
    ((3,), {}, 3),
    # Four levels before the first round, and one and four more in each.
    ((2, 4), {}, 4 + 2 * 5),
    ((2, 1, 3), {}, 7 + 2 * 8),
    ((3,), {'max_depth': 2}, 2),
    ((2, 4), {'max_depth': 9}, 9),
    ((3,), {'num_nodes': 3}, 2),
    ((3,), {'num_nodes': 1}, 0),
  ],
)
def test_how_deep_a_tree_can_grow(rounds, settings, expected):
  settings = {'max_depth': 100} | settings
  drafters = [
    tiny_drafters.model(
      tiny.gpt2(), Settings(rounds=count, **settings), str(index)
    )
    for index, count in enumerate(rounds)
  ]
  assert staged(*drafters).max_depth == expected
