"""Token trees, against the same functions on lists in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from list_trees import CAPACITY
from list_trees import child
from list_trees import find
from list_trees import from_arrays
from list_trees import Node
from list_trees import NUM_TOKENS
from list_trees import random_edge
from list_trees import random_tree
from list_trees import ranking
from list_trees import stack
from list_trees import to_arrays
from list_trees import up
import numpy as np
import pytest

from specdec.tree import tree as trees
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import TokenTree

NUM_TREES = 200


def _assert_unused_entries_are_blank(tree: TokenTree):
  unused = np.arange(tree.capacity) >= int(tree.size)
  assert (np.asarray(tree.parent)[unused] == NO_NODE).all()
  assert (np.asarray(tree.log_prob)[unused] == -np.inf).all()


def _unstack(batch, row):
  return jax.tree.map(lambda leaf: leaf[row], batch)


@functools.cache
def _batched(function, *static):
  """Jitted and vmapped; `static` goes last."""
  return jax.jit(jax.vmap(lambda *args: function(*args, *static)))


def _random_trees(seed, **kw) -> list[list[Node]]:
  rng = np.random.default_rng(seed)
  return [random_tree(rng, **kw) for _ in range(NUM_TREES)]


def _with_gaps(rng, nodes, width) -> np.ndarray:
  """Distinct nodes of a tree in any order, `NO_NODE` among them."""
  chosen = rng.permutation(len(nodes))[:width]
  padded = np.full(width, NO_NODE, np.int32)
  padded[: len(chosen)] = chosen
  return rng.permutation(padded)


def test_walks_and_masks():
  rng = np.random.default_rng(1)
  lists = _random_trees(1)
  nodes = np.stack([_with_gaps(rng, one, 6) for one in lists])
  others = np.stack([_with_gaps(rng, one, 8) for one in lists])
  parents = stack([to_arrays(one).parent for one in lists])
  walks = _batched(trees.walk_up, CAPACITY)(parents, nodes)
  masks = _batched(trees.ancestor_mask, CAPACITY)(parents, nodes, others)
  for row, one in enumerate(lists):
    for place, node in enumerate(nodes[row]):
      above = up(one, node)
      padding = [NO_NODE] * (CAPACITY + 1 - len(above))
      assert walks[row, place].tolist() == above + padding
      assert masks[row, place].tolist() == [
        other in above for other in others[row]
      ]
  assert masks.any(axis=(1, 2)).mean() > 0.9


def test_adding_children():
  """Of all at once: duplicates, overflow, parents that are none."""
  rng = np.random.default_rng(4)
  lists = _random_trees(4)
  width, branching = 4, 3
  shape = (NUM_TREES, width, branching)
  parents = np.stack([_with_gaps(rng, one, width) for one in lists])
  # Distinct within each parent.
  tokens = np.argsort(rng.random((*shape[:2], NUM_TOKENS)))[..., :branching]
  edges = -rng.exponential(size=shape).astype(np.float32)
  origins = rng.integers(1, 5, size=shape)
  wanted = (rng.random(shape) < 0.7) & (parents >= 0)[..., None]
  batch = stack([to_arrays(one) for one in lists])
  grown = jax.device_get(
    _batched(trees.add_children)(batch, parents, tokens, edges, origins, wanted)
  )
  dropped = doubled = 0
  for row, one in enumerate(lists):
    expected = list(one)
    for place, parent in enumerate(parents[row].tolist()):
      for rank in range(branching):
        at = (row, place, rank)
        if not wanted[at]:
          continue
        if find(expected, parent, tokens[at]) != NO_NODE:
          doubled += 1
        elif len(expected) == CAPACITY:
          dropped += 1
        else:
          expected.append(
            child(
              expected,
              parent,
              int(tokens[at]),
              float(edges[at]),
              int(origins[at]),
            )
          )
    tree = _unstack(grown, row)
    assert from_arrays(tree) == expected
    _assert_unused_entries_are_blank(tree)
  assert dropped > 100
  assert doubled > 100


def _rescored(rng, one, edge) -> list[Node]:
  """The list with new edges, and sums of the old ones."""
  return [
    dataclasses.replace(node, cond_log_prob=0.0 if index == 0 else edge(rng))
    for index, node in enumerate(one)
  ]


def _huge_or_tiny(rng) -> float:
  """Sums that swallow what is added: -1e30 stands for impossible."""
  return float(np.float32(rng.choice([-1e30, -1e6, -1.0, -1e-3, -1e-9, 0.0])))


_NEW_EDGES = {
  'random': lambda rng: random_edge(rng, ties=False),
  'huge': _huge_or_tiny,
  'tiny': lambda rng: float(np.float32(rng.choice([-1.0, -3e-8]))),
}


@pytest.mark.parametrize('edge', _NEW_EDGES)
def test_accumulating_new_edges(edge):
  edge = _NEW_EDGES[edge]
  rng = np.random.default_rng(5)
  lists = [_rescored(rng, one, edge) for one in _random_trees(5)]
  batch = stack([to_arrays(one) for one in lists])
  summed = jax.device_get(_batched(trees.accumulate, CAPACITY)(batch))
  for row, one in enumerate(lists):
    expected = [one[0]]
    for node in one[1:]:
      expected.append(
        child(
          expected, node.parent, node.token, node.cond_log_prob, node.origin
        )
      )
    tree = _unstack(summed, row)
    assert from_arrays(tree) == expected
    _assert_unused_entries_are_blank(tree)
    for node in expected[1:]:
      assert node.log_prob <= expected[node.parent].log_prob


@pytest.mark.parametrize('edges', ['different', 'ties', 'huge'])
@pytest.mark.parametrize('number', [1, 2, 6, CAPACITY])
def test_the_best_nodes_are_a_connected_subtree(number, edges):
  """Also where sums are so huge that a child is as likely as its parent."""
  rng = np.random.default_rng(8)
  lists = _random_trees(7, ties=edges == 'ties')
  if edges == 'huge':
    lists = [_rescored(rng, one, _huge_or_tiny) for one in lists]
  batch = stack([to_arrays(one) for one in lists])
  if edges == 'huge':
    batch = _batched(trees.accumulate, CAPACITY)(batch)
    batch = jax.device_get(batch)
    lists = [from_arrays(_unstack(batch, row)) for row in range(NUM_TREES)]
  kept = _batched(trees.select_best, number)(batch)
  assert kept.dtype == jnp.int32
  equals = 0
  for row, one in enumerate(lists):
    expected = ranking(one, [True] * len(one), min(number, len(one)))
    padding = [NO_NODE] * (number - len(expected))
    assert kept[row].tolist() == sorted(expected) + padding
    assert trees.ROOT in expected
    for node in one[1:]:
      equals += node.log_prob == one[node.parent].log_prob
    assert all(one[index].parent in [*expected, NO_NODE] for index in expected)
  assert (equals > NUM_TREES) == (edges != 'different')


def _slow_path(one, chosen) -> list[int]:
  path = [trees.ROOT]
  while (below := find(one, path[-1], chosen[path[-1]])) != NO_NODE:
    path.append(below)
  return path


def test_the_accepted_path():
  rng = np.random.default_rng(9)
  lists = _random_trees(9)
  # Half of the choices are right somewhere below.
  chosen = rng.integers(NUM_TOKENS, size=(NUM_TREES, CAPACITY)).astype(np.int32)
  for row, one in enumerate(lists):
    for node in one[1:]:
      if rng.random() < 0.5:
        chosen[row, node.parent] = node.token
  batch = stack([to_arrays(one) for one in lists])
  for number in (CAPACITY, 5):
    nodes = np.asarray(_batched(trees.select_best, number)(batch))
    at = np.maximum(nodes, 0)
    places, accepted = _batched(trees.accepted_path, CAPACITY)(
      batch, nodes, np.take_along_axis(chosen, at, axis=1)
    )
    seen = set()
    for row, one in enumerate(lists):
      selected = nodes[row].tolist()
      expected = _slow_path(one, chosen[row])
      verified = [node in selected for node in expected]
      expected = expected[: [*verified, False].index(False)]
      padding = [NO_NODE] * (CAPACITY + 1 - len(expected))
      assert places[row].tolist() == [*map(selected.index, expected), *padding]
      assert accepted[row] == len(expected) - 1
      seen.add(len(expected) - 1)
    assert seen >= set(range(min(6, number)))


def test_equal_children_are_one_guess():
  """A fixed shape may have them; the path goes on below either."""
  nodes = [Node(0), Node(1, 0, 1), Node(1, 0, 1), Node(2, 2, 2)]
  chosen = jnp.array([1, 2, 2, 5, *[0] * (CAPACITY - 4)])
  path, accepted = trees.accepted_path(
    to_arrays(nodes), jnp.arange(CAPACITY), chosen, 3
  )
  assert accepted == 2
  assert [nodes[node].token for node in path.tolist() if node >= 0] == [0, 1, 2]
