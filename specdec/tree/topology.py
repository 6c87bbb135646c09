"""The shape of the tree: limits for best-first growth, or a fixed topology.

`TreeShape` limits a tree that grows where it is most likely. A `Topology` fixes
every place beforehand, as a list of paths, each a tuple of ranks: `(0,)` is the
most likely child of the root, `(0, 1)` the second child of that node. Then
growth needs no sorting: level by level, the ranked children of every node go to
known places (Sequoia, arXiv 2402.12374, section 3).
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import json
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import arguments as arguments_lib
from specdec.text import text_files
from specdec.text import whole_files
from specdec.tree import tree as tree_lib

# Marks "no node" in the tables: writes to it are dropped.
_NOWHERE = np.iinfo(np.int32).max


LARGEST_TREE = 4096
"""Nodes of a tree that the target verifies, at most: one forward reads them."""

LARGEST_DEPTH = 64
"""Levels of a tree, at most; a fixed topology has its levels unrolled.

Compiling a chain of 32 tokens took 27 seconds on two cores, of 64 a minute.
"""


def setting(
  default: Any, help_text: str, low: float = 1, high: float = math.inf
) -> Any:
  """A field of a settings record: default, help text, least and largest value.

  Flags, benchmark arms and plans are derived from these fields.
  """
  metadata = {'help': help_text, 'low': low, 'high': high}
  return dataclasses.field(default=default, metadata=metadata)


def check_settings(record: Any, names: Sequence[str] = ()) -> None:
  """Checks a dataclass of `setting` fields; ValueError names the wrong field.

  A field of integers takes no other numbers; a field whose default is None
  takes None, too. Given names, only these fields are checked.
  """
  for field in dataclasses.fields(record):
    if names and field.name not in names:
      continue
    value = getattr(record, field.name)
    low, high = field.metadata['low'], field.metadata['high']
    integral = field.type in (int, int | None)
    if value is None and field.default is None:
      continue
    number_type = numbers.Integral if integral else numbers.Real
    fits = isinstance(value, number_type) and not isinstance(value, bool)
    if not (fits and low <= value <= high and value < math.inf):
      what = 'an integer' if integral else 'a number'
      bound = 'above 0' if 0 < low < 1 else f'of at least {low}'
      if high < math.inf:
        bound += f' and at most {high}'
      optional = ', or None' if field.default is None else ''
      raise ValueError(
        f'{field.name} must be {what} {bound}{optional}, got {value!r}'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeShape:
  """Limits of a tree that grows best first; hashable, so static under `jit`.

  Raises:
    ValueError: a value is out of range; names it.
  """

  #: N, nodes that the target verifies, the root included.
  num_nodes: int = setting(
    32,
    'nodes of the tree that the target verifies, the root included',
    high=LARGEST_TREE,
  )
  #: D, the largest depth of a node.
  max_depth: int = setting(16, 'largest depth of a node', high=LARGEST_DEPTH)
  #: M, nodes that the tree can hold while it grows, of all stages together;
  #: further candidates are dropped. A tree larger than N lets later rounds
  #: replace earlier candidates.
  capacity: int = setting(
    256,
    'nodes that the tree can hold while it grows',
    high=16 * LARGEST_TREE,
  )

  def __post_init__(self) -> None:
    check_settings(self)
    if self.capacity < self.num_nodes:
      raise ValueError(
        f'capacity must be at least num_nodes={self.num_nodes}, got'
        f' {self.capacity}'
      )

  def select(self, tree: tree_lib.TokenTree) -> jax.Array:
    """`[B, N]` int32, the N most likely nodes, see `select_best`."""
    return jax.vmap(tree_lib.select_best, (0, None))(tree, self.num_nodes)


@dataclasses.dataclass(frozen=True)
class Topology:
  """A fixed shape; hashable, so static under `jit`.

  Raises:
    ValueError: a path is empty, has a negative rank or lacks its parent, or
      there are too many.
  """

  #: The path of every node but the root, in any order; kept in the order of the
  #: nodes, parents before their children.
  paths: tuple[tuple[int, ...], ...]

  def __post_init__(self) -> None:
    paths = tuple(tuple(path) for path in self.paths)
    paths = tuple(sorted(set(paths), key=lambda path: (len(path), path)))
    nodes = {(), *paths}
    for path in paths:
      if not path or not 0 <= min(path) <= max(path) < LARGEST_TREE:
        raise ValueError(
          f'a path is one or more ranks from 0 to {LARGEST_TREE - 1}, got'
          f' {path}'
        )
      if path[:-1] not in nodes:
        raise ValueError(
          f'topology has the path {path} but not its parent {path[:-1]}'
        )
    if not paths:
      raise ValueError('topology has no path; give at least (0,)')
    depth = len(paths[-1])
    if depth > LARGEST_DEPTH or len(paths) >= LARGEST_TREE:
      raise ValueError(
        f'topology has {len(paths) + 1} nodes and depth {depth}, more than'
        f' {LARGEST_TREE} or {LARGEST_DEPTH}'
      )
    object.__setattr__(self, 'paths', paths)

  @property
  def num_nodes(self) -> int:
    """N, the root included."""
    return len(self.paths) + 1

  @property
  def capacity(self) -> int:
    """M, equal to N because every node has its place."""
    return self.num_nodes

  @property
  def max_depth(self) -> int:
    """D, the depth of the deepest node; as many rounds fill the tree."""
    return len(self.paths[-1])

  @property
  def branching(self) -> int:
    """K, one more than the highest rank."""
    return max(path[-1] for path in self.paths) + 1

  @property
  def has_all_siblings(self) -> bool:
    """Whether each node has all siblings of lower rank."""
    paths = set(self.paths)
    return all(
      not path[-1] or (*path[:-1], path[-1] - 1) in paths for path in paths
    )

  @functools.cached_property
  def schedule(self) -> np.ndarray:
    """`[D, W]` int32: the nodes of each level that have children; else -1."""
    parents = {path[:-1] for path in self.paths}
    levels = [
      [
        index
        for index, path in enumerate([(), *self.paths])
        if len(path) == level and path in parents
      ]
      for level in range(self.max_depth)
    ]
    table = np.full((self.max_depth, max(map(len, levels))), -1, np.int32)
    for level, nodes in enumerate(levels):
      table[level, : len(nodes)] = nodes
    return table

  @functools.cached_property
  def children(self) -> np.ndarray:
    """`[N, K]` int32: the node of each ranked child; M or more if none."""
    index = {path: node for node, path in enumerate([(), *self.paths])}
    table = np.full((self.num_nodes, self.branching), _NOWHERE, np.int32)
    for path in self.paths:
      table[index[path[:-1]], path[-1]] = index[path]
    return table

  def select(self, tree: tree_lib.TokenTree) -> jax.Array:
    """`[B, N]` int32, all places; `NO_NODE` where no candidate was found."""
    places = jnp.arange(self.num_nodes)[None]
    return jnp.where(
      (places == tree_lib.ROOT) | (tree.parent >= 0), places, tree_lib.NO_NODE
    )


def chain(num_tokens: int) -> Topology:
  """One path of most likely children; ValueError if it is empty or too long."""
  arguments_lib.check_count('num_tokens of a chain', num_tokens, LARGEST_DEPTH)
  return Topology(tuple((0,) * depth for depth in range(1, num_tokens + 1)))


def k_ary(branching: int, depth: int) -> Topology:
  """A topology in which every node above the last level has K children.

  Raises:
    ValueError: `branching` or `depth` is below 1, or the tree has more than
      `LARGEST_TREE` nodes or `LARGEST_DEPTH` levels.
  """
  arguments_lib.check_count('branching', branching)
  arguments_lib.check_count('depth', depth, LARGEST_DEPTH)
  if sum(branching**level for level in range(depth + 1)) > LARGEST_TREE:
    raise ValueError(
      f'a {branching}-ary tree of depth {depth} has more than {LARGEST_TREE}'
      ' nodes'
    )
  ranks = range(branching)
  return Topology(
    tuple(
      path
      for level in range(1, depth + 1)
      for path in itertools.product(ranks, repeat=level)
    )
  )


def load_topology(name: str) -> Topology:
  """Reads a topology file: a JSON list of paths, `[[0], [0, 0], [1]]`.

  Raises ValueError if the file cannot be read or has something else.
  """
  with whole_files.reading(
    f'topology file {name}',
    'it must hold a JSON list of lists of ranks, such as [[0], [0, 0], [1]]',
  ):
    paths = json.loads(text_files.read(name))
    text_files.check_types({'paths': paths}, {'paths': list[list[int]]})
    return Topology(paths)
