"""The best fixed tree, from acceptance probabilities by rank and step times.

Let p_i be the probability that the draft token of rank i after an accepted
token is accepted. A tree emits one token for its root (the target's own) plus,
for each child of rank i, p_i times the tokens of the subtree below it. The best
tree of n nodes follows by dynamic programming over how the nodes are
distributed among the children (Sequoia, arXiv 2402.12374). The best n and depth
follow from the time of a step, in which each level is a draft forward.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from specdec.tree import topology as topology_lib


@dataclasses.dataclass(frozen=True, eq=False)
class TreeTable:
  """The best trees of all sizes and depths."""

  acceptance: np.ndarray  # `[K]` float64, acceptance probability of each rank.
  # `[N + 1, D + 1]` float64; entry n, d is the expected number of tokens of the
  # best tree of n nodes (root included) and depth at most d; -inf for no tree.
  tokens: np.ndarray
  # `[N + 1, D + 1, K + 1]` int; where the ranks from i on share m nodes and
  # subtrees have depth at most d, entry m, d, i is the number of nodes in the
  # subtree of the child of rank i; 0 if no node is left.
  first: np.ndarray

  def paths(self, num_nodes: int, depth: int) -> list[tuple[int, ...]]:
    """Paths of the best tree as in `Topology`; the root alone has none."""
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
  """`[K]` float64; ValueError if a value is negative or the sum exceeds 1."""
  p = np.asarray(acceptance, np.float64)
  sums_to = p.sum() if p.ndim == 1 else np.nan
  if not (p.size and np.all(p >= 0) and sums_to <= 1 + 1e-6):
    raise ValueError(
      'acceptance must be probabilities by rank, each at least 0 and together'
      f' at most 1, got {acceptance}'
    )
  return p


def best_trees(
  acceptance: Sequence[float], *, num_nodes: int, max_depth: int
) -> TreeTable:
  """The best trees of all sizes up to N, `num_nodes`, and depths up to D.

  A child of some rank has siblings of all lower ranks. Raises ValueError if an
  argument is out of range; see `check_acceptance`.
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
    # Most tokens of m nodes in the subtrees of the ranks from `rank` on.
    shared = np.full(num_nodes, -np.inf)
    shared[0] = 0.0
    for rank in reversed(range(p.size)):
      own = np.full(num_nodes + 1, -np.inf)  # no such tree
      np.multiply(p[rank], below, out=own, where=np.isfinite(below))
      here = np.full(num_nodes, -np.inf)
      here[0] = 0.0
      for m in range(1, num_nodes):
        sizes = np.arange(1, m + 1)
        expected = own[sizes] + shared[m - sizes]
        best = int(np.argmax(expected))
        here[m] = expected[best]
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
) -> topology_lib.Topology | None:
  """The tree that emits most tokens per second; None for plain decoding.

  Arguments and errors are those of `best_trees`. `seconds` returns the seconds
  of a step, given the number of nodes (root included) and the depth, which is
  the number of draft forwards; (1, 0) is plain decoding.
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
  return topology_lib.Topology(tuple(table.paths(*best)))


def acceptance_by_rank(ranks: np.ndarray, max_branching: int) -> np.ndarray:
  """`[K]` float64, the share of positions whose next token has each rank.

  `ranks` are from `replay.next_token_ranks`; ValueError if there are none.
  """
  ranks = np.ravel(ranks)
  if not ranks.size:
    raise ValueError('ranks must have at least one position, got none')
  counts = np.bincount(ranks, minlength=max_branching)[:max_branching]
  return counts / ranks.size


def expected_tokens(
  topology: topology_lib.Topology, acceptance: Sequence[float]
) -> float:
  """Expected tokens per step of a tree, the target's own token included."""
  return 1.0 + sum(
    math.prod(acceptance[rank] for rank in path) for path in topology.paths
  )
