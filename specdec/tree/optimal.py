"""The best fixed tree, from how often guesses of each rank stand and from time.

Let p_i be the chance that the i-th guess after any accepted token is the right
one. Then a tree is expected to yield one token for its root (the target's own),
and p_i times what the subtree below yields for its child of rank i. The best
tree of n nodes follows by dynamic programming over how the nodes are shared out
among the children (Sequoia, arXiv 2402.12374). The best n, and the best depth,
follow from what a step takes: every level is a draft forward, so the tree that
yields most tokens is not the fastest.

Plain numpy, on the host, before anything is compiled.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from specdec.tree.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class TreeTable:
  """The best trees of all sizes and depths.

  Attributes:
    acceptance: `[K]` float64, p.
    tokens: `[N + 1, D + 1]` float64; entry n, d is what the best tree of n
      nodes (root included), none deeper than d, is expected to yield. -inf
      where there is no such tree.
    first: `[N + 1, D + 1, K + 1]` int; entry m, d, i is how many of m nodes go
      to the child of rank i, where the ranks from i on share m nodes and
      subtrees are at most d deep; 0 if none is left.
  """

  acceptance: np.ndarray
  tokens: np.ndarray
  first: np.ndarray

  def paths(self, num_nodes: int, depth: int) -> list[tuple[int, ...]]:
    """Of the best tree, see `Topology`; the root alone has none."""
    paths: list[tuple[int, ...]] = []
    left = num_nodes - 1
    for rank in range(len(self.acceptance)):
      if not left:
        break
      size = int(self.first[left, depth - 1, rank])
      below = self.paths(size, depth - 1)
      paths += [(rank,), *((rank, *path) for path in below)]
      left -= size
    return paths


def check_acceptance(acceptance: Sequence[float]) -> np.ndarray:
  """P as `[K]` float64.

  Raises:
    ValueError: a chance is below 0, or they exceed 1 together.
  """
  p = np.asarray(acceptance, np.float64)
  sums_to = p.sum() if p.ndim == 1 else np.nan
  if not (p.size and np.all(p >= 0) and sums_to <= 1 + 1e-6):
    raise ValueError(
      'acceptance must be chances by rank, each at least 0 and together at most'
      f' 1, got {acceptance}'
    )
  return p


def best_trees(
  acceptance: Sequence[float], *, num_nodes: int, max_depth: int
) -> TreeTable:
  """All best trees up to a size and a depth.

  A child has a rank only if its siblings have all ranks before it.

  Args:
    acceptance: p, by rank: each at least 0, together at most 1.
    num_nodes: N, the root included.
    max_depth: D.

  Returns:
    The table.

  Raises:
    ValueError: a value is out of range; says which.
  """
  p = check_acceptance(acceptance)
  if num_nodes < 1 or max_depth < 1:
    raise ValueError(
      'num_nodes and max_depth must be at least 1, got'
      f' {num_nodes} and {max_depth}'
    )
  tokens = np.full((num_nodes + 1, max_depth + 1), -np.inf)
  first = np.zeros((num_nodes + 1, max_depth + 1, p.size + 1), np.int64)
  tokens[1] = 1.0
  for depth in range(1, max_depth + 1):
    below = tokens[:, depth - 1]
    # What m nodes yield at most as children of the ranks from `rank` on.
    shared = np.full(num_nodes, -np.inf)
    shared[0] = 0.0
    for rank in reversed(range(p.size)):
      own = np.full(num_nodes + 1, -np.inf)  # where there is no such tree
      np.multiply(p[rank], below, out=own, where=np.isfinite(below))
      here = np.full(num_nodes, -np.inf)
      here[0] = 0.0
      for m in range(1, num_nodes):
        sizes = np.arange(1, m + 1)
        yields = own[sizes] + shared[m - sizes]
        best = int(np.argmax(yields))
        here[m] = yields[best]
        first[m, depth - 1, rank] = sizes[best]
      shared = here
    tokens[1:, depth] = 1.0 + shared
  return TreeTable(acceptance=p, tokens=tokens, first=first)


def fastest_tree(
  acceptance: Sequence[float],
  *,
  num_nodes: int,
  max_depth: int,
  seconds: Callable[[int, int], float],
) -> Topology | None:
  """The tree that yields most tokens per second.

  Args:
    acceptance: see `best_trees`.
    num_nodes: N, the largest.
    max_depth: D, the deepest.
    seconds: of a step, given the number of nodes (root included) and the depth,
      which is the number of draft forwards; (1, 0) is plain decoding.

  Returns:
    The shape; None if plain decoding is faster than all of them.

  Raises:
    ValueError: see `best_trees`.
  """
  table = best_trees(acceptance, num_nodes=num_nodes, max_depth=max_depth)
  rates = {
    (size, depth): table.tokens[size, depth] / seconds(size, depth)
    for size in range(2, num_nodes + 1)
    for depth in range(1, max_depth + 1)
  }
  if not rates:
    return None
  best = max(rates, key=rates.__getitem__)
  if rates[best] <= 1.0 / seconds(1, 0):
    return None
  return Topology(tuple(table.paths(*best)))


def acceptance_by_rank(ranks: np.ndarray, max_branching: int) -> np.ndarray:
  """How often the next token has each rank, `[max_branching]` float64.

  Args:
    ranks: from `replay.next_token_ranks`, of any number of positions.
    max_branching: K.

  Raises:
    ValueError: there are no positions.
  """
  ranks = np.ravel(ranks)
  if not ranks.size:
    raise ValueError('no positions to count ranks at')
  counts = np.bincount(ranks, minlength=max_branching)[:max_branching]
  return counts / ranks.size


def expected_tokens(topology: Topology, acceptance: Sequence[float]) -> float:
  """What any tree is expected to yield, the target's own token included."""
  chance = lambda path: functools.reduce(
    lambda product, rank: product * acceptance[rank], path, 1.0
  )
  return 1.0 + sum(map(chance, topology.paths))
