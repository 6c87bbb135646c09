"""Token trees, against the same functions on lists in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import list_trees
import numpy as np
import pytest

from specdec.tree import tree as tree_lib

NUM_TREES = 200


def _lists_of(batch) -> list[list[list_trees.Node]]:
  """The rows of a batch of trees; unused entries must be blank."""
  unused = np.arange(list_trees.CAPACITY) >= np.asarray(batch.size)[:, None]
  assert (np.asarray(batch.parent)[unused] == tree_lib.NO_NODE).all()
  assert (np.asarray(batch.log_prob)[unused] == -np.inf).all()
  row_of = lambda row: jax.tree.map(lambda leaf: leaf[row], batch)
  return [list_trees.from_arrays(row_of(row)) for row in range(NUM_TREES)]


@functools.cache
def _batched(function, *static):
  """Jitted and vmapped; `static` goes last."""
  return jax.jit(jax.vmap(lambda *args: function(*args, *static)))


def _random_trees(seed, **kw):
  """Lists, the same as arrays, and a generator of what else is needed."""
  rng = np.random.default_rng(seed)
  lists = [list_trees.random_tree(rng, **kw) for _ in range(NUM_TREES)]
  return lists, list_trees.stack(map(list_trees.to_arrays, lists)), rng


def _with_gaps(rng, lists, width) -> np.ndarray:
  """Distinct nodes of each tree in any order, `NO_NODE` among them."""
  padded = np.full((len(lists), width), tree_lib.NO_NODE, np.int32)
  for row, nodes in zip(padded, lists, strict=True):
    chosen = rng.permutation(len(nodes))[:width]
    row[: len(chosen)] = chosen
  return rng.permuted(padded, axis=1)


def test_walks_and_masks():
  lists, batch, rng = _random_trees(1)
  nodes, others = (_with_gaps(rng, lists, width) for width in (6, 8))
  walks = _batched(tree_lib.walk_up, list_trees.CAPACITY)(batch.parent, nodes)
  masks = _batched(tree_lib.ancestor_mask, list_trees.CAPACITY)(
    batch.parent, nodes, others
  )
  for row, nodes_of_row in enumerate(lists):
    for place, node in enumerate(nodes[row]):
      above = list_trees.up(nodes_of_row, node)
      padding = [tree_lib.NO_NODE] * (list_trees.CAPACITY + 1 - len(above))
      assert walks[row, place].tolist() == above + padding
      assert masks[row, place].tolist() == [
        other in above for other in others[row]
      ]
  assert masks.any(axis=(1, 2)).mean() > 0.9


def test_adding_children():
  """All at once: duplicates, overflow, parents that are none."""
  lists, batch, rng = _random_trees(4)
  parents = _with_gaps(rng, lists, 4)
  shape = (*parents.shape, 3)
  # Distinct within each parent.
  tokens = np.argsort(rng.random((*shape[:2], list_trees.NUM_TOKENS)))[..., :3]
  edges = -rng.exponential(size=shape).astype(np.float32)
  origins = rng.integers(1, 5, size=shape)
  wanted = (rng.random(shape) < 0.7) & (parents >= 0)[..., None]
  children = tree_lib.Children(parents, tokens, edges, origins)
  given = (batch, children, wanted)
  grown = jax.device_get(_batched(tree_lib.add_children)(*given))
  dropped = doubled = 0
  for at in map(tuple, np.argwhere(wanted)):
    nodes, parent = lists[at[0]], int(parents[at[:2]])
    if list_trees.find(nodes, parent, tokens[at]) != tree_lib.NO_NODE:
      doubled += 1
    elif len(nodes) == list_trees.CAPACITY:
      dropped += 1
    else:
      new = (int(tokens[at]), float(edges[at]), int(origins[at]))
      nodes.append(list_trees.child(nodes, parent, *new))
  assert _lists_of(grown) == lists
  assert min(dropped, doubled) > 100


# Sums of these swallow what is added: -1e30 stands for impossible.
_HUGE = (-1e30, -1e6, -1.0, -1e-3, -1e-9, 0.0)
_NEW_EDGES = {
  'random': lambda rng: list_trees.random_edge(rng, ties=False),
  'tiny': lambda rng: float(np.float32(rng.choice([-1.0, -3e-8]))),
  'huge': lambda rng: float(np.float32(rng.choice(_HUGE))),
}


def _rescored(seed, edges):
  """Lists and their arrays with new edges, and sums of the old edges."""
  lists, _, rng = _random_trees(seed)
  old = []
  for nodes in lists:
    for index, node in enumerate(nodes[1:], 1):
      edge = _NEW_EDGES[edges](rng)
      nodes[index] = dataclasses.replace(node, cond_log_prob=edge)
    old.append(list_trees.to_arrays(nodes))
    for index, node in enumerate(nodes[1:], 1):
      new = (node.token, node.cond_log_prob, node.origin)
      nodes[index] = list_trees.child(nodes, node.parent, *new)
  return lists, _batched(tree_lib.accumulate, list_trees.CAPACITY)(
    list_trees.stack(old)
  )


@pytest.mark.parametrize('edges', _NEW_EDGES)
def test_accumulating_new_edges(edges):
  lists, summed = _rescored(5, edges)
  assert _lists_of(jax.device_get(summed)) == lists
  for nodes in lists:
    for node in nodes[1:]:
      assert node.log_prob <= nodes[node.parent].log_prob


@pytest.mark.parametrize(
  ('number', 'edges'),
  [(1, 'ties'), (6, 'different'), (6, 'ties'), (list_trees.CAPACITY, 'huge')],
)
def test_the_best_nodes_are_a_connected_subtree(number, edges):
  """Also where sums are so huge that a child is as likely as its parent."""
  lists, batch, _ = _random_trees(7, ties=edges == 'ties')
  if edges == 'huge':
    lists, batch = _rescored(7, edges)
  kept = _batched(tree_lib.select_best, number)(batch)
  assert kept.dtype == jnp.int32
  equals = 0
  for row, nodes_of_row in enumerate(lists):
    # The most likely; of equals the first.
    order = sorted(
      range(len(nodes_of_row)), key=lambda index: -nodes_of_row[index].log_prob
    )
    expected = order[:number]
    padding = [tree_lib.NO_NODE] * (number - len(expected))
    assert kept[row].tolist() == sorted(expected) + padding
    assert tree_lib.ROOT in expected
    for node in nodes_of_row[1:]:
      equals += node.log_prob == nodes_of_row[node.parent].log_prob
    above = [*expected, tree_lib.NO_NODE]
    assert all(nodes_of_row[index].parent in above for index in expected)
  assert (equals > NUM_TREES) == (edges != 'different')


def test_the_accepted_path():
  lists, batch, rng = _random_trees(9)
  # Half of the choices are right somewhere below.
  shape = (NUM_TREES, list_trees.CAPACITY)
  chosen = np.int32(rng.integers(4, size=shape))
  for row, nodes_of_row in enumerate(lists):
    for node in nodes_of_row[1:]:
      if rng.random() < 0.5:
        chosen[row, node.parent] = node.token
  for number in (list_trees.CAPACITY, 5):
    nodes = np.asarray(_batched(tree_lib.select_best, number)(batch))
    at = np.maximum(nodes, 0)
    places, accepted = _batched(tree_lib.accepted_path, list_trees.CAPACITY)(
      batch, nodes, np.take_along_axis(chosen, at, axis=1)
    )
    for row, nodes_of_row in enumerate(lists):
      selected, path = nodes[row].tolist(), [tree_lib.ROOT]
      follow = lambda at, nodes_of_row=nodes_of_row, row=row: list_trees.find(
        nodes_of_row, at, chosen[row, at]
      )
      while (below := follow(path[-1])) in {*selected} - {tree_lib.NO_NODE}:
        path.append(below)
      padding = [tree_lib.NO_NODE] * (list_trees.CAPACITY + 1 - len(path))
      assert places[row].tolist() == [*map(selected.index, path), *padding]
      assert accepted[row] == len(path) - 1
    assert {*accepted.tolist()} >= {*range(min(6, number))}


def test_equal_children_are_one_guess():
  """A fixed shape may have them; the path goes on below either."""
  nodes = [(0,), (1, 0, 1), (1, 0, 1), (2, 2, 2)]
  nodes = [list_trees.Node(*node) for node in nodes]
  chosen = jnp.array([1, 2, 2, 5, *[0] * (list_trees.CAPACITY - 4)])
  path, accepted = tree_lib.accepted_path(
    list_trees.to_arrays(nodes), jnp.arange(list_trees.CAPACITY), chosen, 3
  )
  assert accepted == 2
  assert [nodes[node].token for node in path.tolist() if node >= 0] == [0, 1, 2]
