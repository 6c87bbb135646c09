"""The best fixed tree, against an enumeration of all trees."""

import functools
import itertools

import numpy as np
import pytest

from specdec.models.lab.bench import optimal
from specdec.tree import topology as topology_lib


@functools.cache
def _all_trees(num_nodes, max_depth, max_branching):
  """Every tree, as its paths, in which ranks are taken in their order."""
  if num_nodes == 1:
    return [()]
  if max_depth == 0:
    return []
  found = []
  for children in range(1, min(max_branching, num_nodes - 1) + 1):
    for cut in itertools.combinations(range(1, num_nodes - 1), children - 1):
      bounds = (0, *cut, num_nodes - 1)
      sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
      below = [_all_trees(size, max_depth - 1, max_branching) for size in sizes]
      for subtrees in itertools.product(*below):
        paths = [
          [(rank,), *((rank, *path) for path in subtree)]
          for rank, subtree in enumerate(subtrees)
        ]
        found.append(tuple(itertools.chain(*paths)))
  return found


# Ranks may be in disorder by chance.
_ACCEPTANCE = [(0.6, 0.2, 0.1), (0.3, 0.3, 0.3), (0.2, 0.5, 0.1)]
_ACCEPTANCE += [(0.5, 0.0, 0.25), (0.9,), (0.0,)]


@pytest.mark.parametrize('acceptance', _ACCEPTANCE)
def test_no_tree_is_better(acceptance):
  # Ordered trees are as many as the Catalan numbers.
  assert [len(_all_trees(n, n, n)) for n in range(4, 8)] == [5, 14, 42, 132]
  table = optimal.best_trees(acceptance, num_nodes=7, max_depth=6)
  for size, depth in itertools.product(range(1, 8), range(1, 7)):
    tokens = [
      optimal.expected_tokens(topology_lib.Topology(paths), acceptance)
      if paths
      else 1.0
      for paths in _all_trees(size, depth, len(acceptance))
    ]
    best = max(tokens, default=-np.inf)
    assert table.tokens[size, depth] == pytest.approx(best, abs=1e-12)
    if best > 0 and size > 1:
      shape = topology_lib.from_paths(table.paths(size, depth))
      assert shape.num_nodes == size
      assert shape.max_depth <= depth
      assert shape.has_all_siblings
      assert optimal.expected_tokens(shape, acceptance) == pytest.approx(best)


def test_time_decides_on_size_and_depth():
  p, most = (0.7, 0.2, 0.05), {'num_nodes': 16, 'max_depth': 8}
  shape = lambda seconds: optimal.fastest_tree(p, seconds=seconds, **most)
  # Nodes and rounds cost nothing: as many as allowed.
  assert shape(lambda n, d: 1.0).num_nodes == 16
  # A draft forward takes nearly as long as the target: one wide level.
  assert shape(lambda n, d: 1.0 + 0.9 * d).max_depth == 1
  assert shape(lambda n, d: 1.0 + 0.9 * d).num_nodes == 4
  # Nodes are expensive and rounds cost nothing: a short chain.
  assert shape(lambda n, d: 0.7 + 0.3 * n) == topology_lib.chain(2)
  # A step takes at least as long as its tokens in plain decoding.
  assert shape(lambda n, d: float(n)) is None
  assert shape(lambda n, d: 1.0 + 3.0 * d) is None
  # The choice is the best of the table by its own measure.
  seconds = lambda n, d: 1.0 + 0.03 * n + 0.1 * d
  rate = lambda one: (
    optimal.expected_tokens(one, p) / seconds(one.num_nodes, one.max_depth)
  )
  best = rate(shape(seconds))
  for paths in _all_trees(6, 5, 3):
    assert best >= rate(topology_lib.Topology(paths))


def test_ranks_become_probabilities():
  ranks = np.array([[0, 0, 1], [5, 0, 2]])
  assert optimal.acceptance_by_rank(ranks, 3).tolist() == [3 / 6, 1 / 6, 1 / 6]
  assert optimal.acceptance_by_rank(np.array([9]), 2).tolist() == [0, 0]
  with pytest.raises(ValueError, match='at least one position'):
    optimal.acceptance_by_rank(np.zeros(0, int), 2)


def test_bad_input_is_refused():
  for acceptance, depth, message in (
    ((), 4, 'acceptance'),
    ((0.7, 0.7), 4, 'together at most 1'),
    ((-0.1,), 4, 'at least 0'),
    ((0.5,), 0, 'num_nodes and max_depth'),
  ):
    with pytest.raises(ValueError, match=message):
      optimal.best_trees(acceptance, num_nodes=4, max_depth=depth)
