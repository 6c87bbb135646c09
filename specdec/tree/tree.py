"""The token tree: candidate continuations of one row, as full-size arrays.

    index    0     1    2    3    4    .           root
    token    def   _    f    (    x    .           ├─ _        (1)
    parent  -1     0    0    1    1   -1           │  ├─ (     (3)
    depth    0     1    1    2    2    0           │  └─ x     (4)
                                                   └─ f        (2)

A parent always has a smaller index than its children, so every prefix of the
arrays is a tree. The functions here take one tree, `[M]` per field; callers
with a batch vmap them.
"""

from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

ROOT = 0
NO_NODE = -1


class TokenTree(flax.struct.PyTreeNode):
  """A tree of at most M nodes; entries from `size` on are unused.

  In a tree of fixed topology the used entries may have gaps between them.
  """

  token: jax.Array  #: `[M]` int32.
  #: `[M]` int32; `NO_NODE` at the root and in unused entries.
  parent: jax.Array
  depth: jax.Array  #: `[M]` int32; 0 at the root.
  #: `[M]` float32, the estimated log-probability that the target accepts the
  #: node, given that it accepts the parent; at most 0.
  cond_log_prob: jax.Array
  #: `[M]` float32, the estimated log-probability that the target accepts the
  #: node: `cond_log_prob` summed from the root. It never exceeds the parent's;
  #: -inf in unused entries.
  log_prob: jax.Array
  #: `[M]` int32, the source that proposed the node first, see `Drafter.labels`;
  #: 0 at the root.
  origin: jax.Array
  size: jax.Array  #: `[]` int32.
  #: `[M, ...]` for each adjuster, the states of the nodes, see
  #: `specdec.adjusters`.
  node_states: tuple[Any, ...] = ()

  @property
  def capacity(self) -> int:
    """M."""
    return self.token.shape[-1]


def init_tree(root_token: jax.Array, capacity: int) -> TokenTree:
  """A tree of M = `capacity` entries with the root alone."""
  is_root = jnp.arange(capacity) == ROOT
  # A GPU copies each constant array by a kernel of its own. XLA does not know
  # that tokens are not negative, so it computes all of these arrays in one.
  zero = jnp.minimum(root_token, 0).astype(jnp.int32)
  return TokenTree(
    token=jnp.where(is_root, root_token, zero).astype(jnp.int32),
    parent=jnp.full(capacity, zero + NO_NODE),
    depth=jnp.full(capacity, zero),
    cond_log_prob=jnp.full(capacity, zero.astype(jnp.float32)),
    log_prob=jnp.where(is_root, zero.astype(jnp.float32), -jnp.inf),
    origin=jnp.where(is_root, 0, zero),
    size=zero + 1,
  )


def pick(array: jax.Array, index: jax.Array) -> jax.Array:
  """`array [n, ...]` at `index`, or at the nearest entry.

  Unlike `array[index]`, it does not count negative indices from the end, which
  takes a GPU another kernel.
  """
  return jnp.take(array, index, axis=0, mode='clip')


def count_leading(flags: jax.Array) -> jax.Array:
  """`[...]` int32, how many of `flags [..., n]` are true before any is not."""
  size = flags.shape[-1]
  places = jnp.arange(size, dtype=jnp.int32)
  return jnp.min(jnp.where(flags, size, places), axis=-1, initial=size)


def is_first(same: jax.Array) -> jax.Array:
  """`[..., n]` bool, which entries differ from all entries before them.

  `same [..., n, n]` bool: which entries are equal.
  """
  # On a GPU an argmax, or the same along the last axis, is a kernel of its own.
  before = jnp.triu(jnp.ones(same.shape[-2:], bool), 1)
  return ~jnp.any(same & jnp.broadcast_to(before, same.shape), axis=-2)


def walk_up(parent: jax.Array, nodes: jax.Array, num_steps: int) -> jax.Array:
  """`[W, num_steps + 1]` int32: each of `nodes [W]`, its parent, and so on.

  `NO_NODE` above the root, and for nodes that are `NO_NODE`.
  """
  walk = [nodes]
  for _ in range(num_steps):
    here = walk[-1]
    walk.append(jnp.where(here >= 0, pick(parent, here), NO_NODE))
  return jnp.stack(walk, axis=1)


def ancestor_mask(
  parent: jax.Array, nodes: jax.Array, others: jax.Array, max_depth: int
) -> jax.Array:
  """Which of `others` are ancestors of a node, or the node itself.

  For the tree above, all nodes against all nodes:

      node 0   x . . . .
      node 1   x x . . .
      node 2   x . x . .
      node 3   x x . x .
      node 4   x x . . x

  `[W, T]` bool, from `parent [M]`, `nodes [W]` and `others [T]` int32;
  `NO_NODE` has no ancestors and is not an ancestor.
  """
  walk = walk_up(parent, nodes, max_depth)
  same = walk[:, :, None] == others[None, None]
  return jnp.any(same & (others >= 0)[None, None], axis=1)


def histories(
  tree: TokenTree, nodes: jax.Array, recent: jax.Array
) -> jax.Array:
  """The tokens that end at each node, the token of the node first.

  Args:
    tree: `[M]` per field.
    nodes: `[W]` int32.
    recent: `[n]` int32, the last tokens of the text, the root's first; -1 where
      the text has no more.

  Returns:
    `[W, n]` int32: the tokens of the path, then the tokens of the text.
  """
  num_tokens = recent.shape[0]
  if num_tokens == 0:
    return jnp.zeros((*nodes.shape, 0), jnp.int32)
  back = jnp.arange(num_tokens)[None]
  before_root = back - pick(tree.depth, nodes)[:, None]
  walk = walk_up(tree.parent, nodes, num_tokens - 1)
  return jnp.where(
    before_root > 0, pick(recent, before_root), pick(tree.token, walk)
  )


def _has_child(
  tree: TokenTree, parents: jax.Array, tokens: jax.Array
) -> jax.Array:
  """`[W, K]` bool, whether `parents [W]` have children `tokens [W, K]`.

  Without meaning for a parent of `NO_NODE`.
  """
  is_child = tree.parent[None] == parents[:, None]
  same = tree.token[None, None] == tokens[:, :, None]
  return jnp.any(is_child[:, None] & same, axis=2)


class Children(NamedTuple):
  """K children of each of W nodes of a tree."""

  parents: jax.Array  # [W] int32, distinct nodes, or NO_NODE
  tokens: jax.Array  # [W, K] int32
  cond_log_probs: jax.Array  # [W, K] float32, at most 0
  origins: jax.Array  # [W, K] int32


def put_children(
  tree: TokenTree, index: jax.Array, children: Children
) -> TokenTree:
  """Writes children to given entries of the arrays.

  `index [W, K]` int32 are distinct and above the parents'; M or more drops the
  child. Places that a fixed topology leaves free are gaps.
  """
  parents, tokens, cond_log_probs, origins = children
  spread = lambda values: jnp.broadcast_to(values[:, None], index.shape)
  # They are read first, so that their arrays can be written in place.
  depth, log_prob = lax.optimization_barrier(
    (pick(tree.depth, parents) + 1, pick(tree.log_prob, parents))
  )
  new = {
    'token': tokens,
    'parent': spread(parents),
    'depth': spread(depth),
    'cond_log_prob': cond_log_probs,
    'log_prob': spread(log_prob) + cond_log_probs,
    'origin': origins,
  }
  placed = scatter(
    tuple(getattr(tree, name) for name in new),
    index.reshape(-1),
    tuple(values.reshape(-1) for values in new.values()),
  )
  size = tree.size + jnp.sum(index < tree.capacity)
  return tree.replace(**dict(zip(new, placed, strict=True)), size=size)


def add_children(
  tree: TokenTree, children: Children, wanted: jax.Array
) -> TokenTree:
  """Appends the children that are not in the tree yet, as long as they fit.

  The most important parents come first: what does not fit is dropped from the
  end. Tokens are distinct within each parent where they are `wanted [W, K]`
  bool, which is false for parents of `NO_NODE`.
  """
  new = wanted & ~_has_child(tree, children.parents, children.tokens)
  order = jnp.cumsum(new.reshape(-1)).reshape(new.shape)
  index = jnp.where(new, tree.size + order - 1, tree.capacity)
  # Computed once, not for every entry that searches for it.
  index = lax.optimization_barrier(jnp.minimum(index, tree.capacity))
  return put_children(tree, index, children)


def accumulate(tree: TokenTree, max_depth: int) -> TokenTree:
  """The tree with `log_prob` recomputed from `cond_log_prob`.

  It is summed level by level, not over each path: the sum of a child must not
  exceed the sum of its parent by rounding, or the best nodes would no longer be
  connected.
  """
  is_child = tree.parent >= 0
  log_prob = jnp.where(jnp.arange(tree.capacity) == ROOT, 0.0, -jnp.inf)
  for _ in range(max_depth):
    summed = pick(log_prob, tree.parent) + tree.cond_log_prob
    log_prob = jnp.where(is_child, summed, log_prob)
  return tree.replace(log_prob=log_prob)


def best_by(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The highest of `scores [..., M]` in descending order, above -inf.

  Among equals the smaller index comes first.

  Returns:
    `[..., count]` int32 indices, `NO_NODE` where there are fewer, and
    `[..., count]` float32 scores, -inf there.
  """
  num_found = min(count, scores.shape[-1])
  scores, nodes = lax.top_k(scores, num_found)
  nodes = jnp.where(scores > -jnp.inf, nodes, NO_NODE).astype(jnp.int32)
  padding = [(0, 0)] * (nodes.ndim - 1) + [(0, count - num_found)]
  return (
    jnp.pad(nodes, padding, constant_values=NO_NODE),
    jnp.pad(scores, padding, constant_values=-jnp.inf),
  )


def best_nodes(
  tree: TokenTree, allowed: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
  """The most likely of the nodes that are `allowed [M]`, see `best_by`.

  A parent comes before its child.
  """
  return best_by(jnp.where(allowed, tree.log_prob, -jnp.inf), count)


def best_of_sets(
  tree: TokenTree, sets: Sequence[jax.Array], counts: Sequence[int]
) -> tuple[tuple[jax.Array, jax.Array], ...]:
  """`best_nodes` of several sets `[M]`, on an accelerator by one sort."""

  def all_at_once(*scores: jax.Array) -> tuple[Any, ...]:
    nodes, best = best_by(jnp.stack(scores), max(counts))
    return tuple(
      (nodes[place, :count], best[place, :count])
      for place, count in enumerate(counts)
    )

  return lax.platform_dependent(
    *(jnp.where(nodes, tree.log_prob, -jnp.inf) for nodes in sets),
    cpu=lambda *scores: tuple(map(best_by, scores, counts)),
    default=all_at_once,
  )


def select_best(tree: TokenTree, num_nodes: int) -> jax.Array:
  """The N most likely nodes; a connected subtree, the root included.

  `[N]` int32, ascending, so that parents come before their children, then
  `NO_NODE`; N is at most M.
  """
  nodes, _ = best_by(tree.log_prob, num_nodes)
  last = tree.capacity
  nodes = jnp.sort(jnp.where(nodes >= 0, nodes, last))
  return jnp.where(nodes < last, nodes, NO_NODE)


def accepted_path(
  tree: TokenTree, nodes: jax.Array, chosen: jax.Array, max_depth: int
) -> tuple[jax.Array, jax.Array]:
  """The path from the root along which every node is the target's choice.

  Args:
    tree: `[M]` per field.
    nodes: `[N]` int32, the verified nodes: a connected subtree with the root;
      `NO_NODE` for entries without a node.
    chosen: `[N]` int32, the target's choice after each of them.
    max_depth: D.

  Returns:
    `[D + 1]` int32, the index into `nodes` of the accepted node of each depth,
    the root first, `NO_NODE` from where the target disagrees; and `[]` int32,
    the number of accepted nodes, the root not counted.
  """
  is_parent = pick(tree.parent, nodes)[:, None] == nodes[None]
  wanted = jnp.max(jnp.where(is_parent, chosen[None], -1), axis=1)
  agrees = (nodes == ROOT) | (pick(tree.token, nodes) == wanted)
  is_above = ancestor_mask(tree.parent, nodes, nodes, max_depth)
  accepted = jnp.all(agrees[None] | ~is_above, axis=1) & (nodes >= 0)
  at_depth = pick(tree.depth, nodes)[None] == jnp.arange(max_depth + 1)[:, None]
  match = accepted[None] & at_depth
  path = jnp.where(jnp.any(match, axis=1), jnp.argmax(match, axis=1), NO_NODE)
  path = path.astype(jnp.int32)
  return path, jnp.sum(path >= 0).astype(jnp.int32) - 1


# On an accelerator a scatter costs one kernel per array plus one for setup. In
# a look-up every entry searches for what is written to it. That is one kernel
# for all arrays, but takes a CPU passes over `M * n` entries.


def scattered(
  old: tuple[jax.Array, ...], index: jax.Array, new: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """`scatter` by scatters."""
  put = lambda array, values: array.at[index].set(values, mode='drop')
  return tuple(map(put, old, new))


def looked_up(
  old: tuple[jax.Array, ...], index: jax.Array, new: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """`scatter` by look-ups."""
  hits = index[:, None] == jnp.arange(old[0].shape[0])[None]  # [n, M]
  is_new = jnp.any(hits, axis=0)

  def put(array: jax.Array, values: jax.Array) -> jax.Array:
    nothing = -jnp.inf if array.dtype == jnp.float32 else NO_NODE
    written = jnp.max(jnp.where(hits, values[:, None], nothing), axis=0)
    return jnp.where(is_new, written, array)

  return tuple(map(put, old, new))


def scatter(
  old: tuple[jax.Array, ...], index: jax.Array, new: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Writes `new [n]` to the entries `index [n]` of several arrays `[M]`.

  The entries are distinct; M or more writes nothing. The values are float32, or
  integers of at least `NO_NODE`.
  """
  return lax.platform_dependent(
    old, index, new, cpu=scattered, default=looked_up
  )


def _scattered_sums(
  index: jax.Array, values: jax.Array, size: int
) -> jax.Array:
  return jnp.zeros(size, values.dtype).at[index].add(values, mode='drop')


def _looked_up_sums(
  index: jax.Array, values: jax.Array, size: int
) -> jax.Array:
  hits = index[None] == jnp.arange(size)[:, None]
  return jnp.sum(jnp.where(hits, values[None], 0), axis=1)


def scatter_sum(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
  """`[M]`, the sums of `values [n]` by the entry `index [n]` they belong to.

  An index of M or more counts nowhere; the order of summation is not defined.
  """
  return lax.platform_dependent(
    index,
    values,
    cpu=functools.partial(_scattered_sums, size=size),
    default=functools.partial(_looked_up_sums, size=size),
  )
