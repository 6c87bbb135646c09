"""Fixed tree shapes: which ranks of guesses are tried after which.

A topology is a list of paths, each a tuple of ranks: `(0,)` is the likeliest
child of the root, `(0, 1)` its second child. Where the shape is known before
the decode starts, growth needs no sorting: level by level, every node's ranked
children go to places known beforehand (Sequoia, arXiv 2402.12374, section 3).
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import json
import pathlib

import numpy as np

# Stands for "no node" in the tables: dropped when written to.
_NOWHERE = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Topology:
  """The shape of a tree; hashable, so static under `jit`.

  Attributes:
    paths: of every node but the root, in the order of the nodes: a parent
      before its children.
  """

  paths: tuple[tuple[int, ...], ...]

  def __post_init__(self):
    paths = tuple(tuple(path) for path in self.paths)
    paths = tuple(sorted(set(paths), key=lambda path: (len(path), path)))
    known = {(), *paths}
    for path in paths:
      if not path or min(path) < 0:
        raise ValueError(f'a path is one or more ranks from 0, got {path}')
      if path[:-1] not in known:
        raise ValueError(
          f'topology has the path {path} but not its parent {path[:-1]}'
        )
    if not paths:
      raise ValueError('topology has no path; give at least (0,)')
    object.__setattr__(self, 'paths', paths)

  @property
  def num_nodes(self) -> int:
    """N, the root included."""
    return len(self.paths) + 1

  @property
  def depth(self) -> int:
    """D, of the deepest node; as many rounds fill the tree."""
    return len(self.paths[-1])

  @property
  def branching(self) -> int:
    """K, the highest rank and one."""
    return max(path[-1] for path in self.paths) + 1

  @property
  def has_all_siblings(self) -> bool:
    """Whether every rank is there with all ranks before it."""
    known = set(self.paths)
    return all(
      not path[-1] or (*path[:-1], path[-1] - 1) in known for path in self.paths
    )

  @functools.cached_property
  def schedule(self) -> np.ndarray:
    """`[D, W]` int32: the nodes with children of each level, padded with -1."""
    parents = {path[:-1] for path in self.paths}
    levels = [
      [
        index
        for index, path in enumerate([(), *self.paths])
        if len(path) == level and path in parents
      ]
      for level in range(self.depth)
    ]
    table = np.full((self.depth, max(map(len, levels))), -1, np.int32)
    for level, nodes in enumerate(levels):
      table[level, : len(nodes)] = nodes
    return table

  @functools.cached_property
  def children(self) -> np.ndarray:
    """`[N, K]` int32: the node that each ranked child is; large if none is."""
    index = {path: node for node, path in enumerate([(), *self.paths])}
    table = np.full((self.num_nodes, self.branching), _NOWHERE, np.int32)
    for path in self.paths:
      table[index[path[:-1]], path[-1]] = index[path]
    return table


def chain(num_tokens: int) -> Topology:
  """One path, of the likeliest child of each node.

  Raises:
    ValueError: `num_tokens` is below 1.
  """
  if num_tokens < 1:
    raise ValueError(f'a chain needs at least one token, got {num_tokens}')
  return Topology(tuple((0,) * depth for depth in range(1, num_tokens + 1)))


def k_ary(branching: int, depth: int) -> Topology:
  """Every node down to a depth with K children.

  Raises:
    ValueError: `branching` or `depth` is below 1, or the tree has more than
      4,096 nodes.
  """
  if branching < 1 or depth < 1:
    raise ValueError(
      f'a k-ary tree needs branching and depth of at least 1, got'
      f' {branching} and {depth}'
    )
  if sum(branching**level for level in range(depth + 1)) > 4096:
    raise ValueError(
      f'a {branching}-ary tree of depth {depth} has more than 4096 nodes'
    )
  ranks = range(branching)
  return Topology(
    tuple(
      path
      for level in range(1, depth + 1)
      for path in itertools.product(ranks, repeat=level)
    )
  )


def from_paths(paths: Iterable[Sequence[int]]) -> Topology:
  """A topology from any list of paths; the order does not matter.

  Raises:
    ValueError: a path is empty, has a negative rank or lacks its parent.
  """
  return Topology(tuple(tuple(path) for path in paths))


def load_topology(name: str) -> Topology:
  """Reads a topology file: a JSON list of paths, `[[0], [0, 0], [1]]`.

  Raises:
    ValueError: the file cannot be read or is no such list.
  """
  path = pathlib.Path(name)
  try:
    paths = json.loads(path.read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(f'topology file {path} cannot be read: {error}') from error
  well_formed = isinstance(paths, list) and all(
    isinstance(one, list) and all(type(rank) is int for rank in one)
    for one in paths
  )
  if not well_formed:
    raise ValueError(
      f'topology file {path} must hold a JSON list of lists of ranks, such as'
      ' [[0], [0, 0], [1]]'
    )
  try:
    return from_paths(paths)
  except ValueError as error:
    raise ValueError(f'topology file {path}: {error}') from error
