"""The token tree: candidate continuations of one row, as full-size arrays.

    index    0     1    2    3    4    .           root
    token    def   _    f    (    x    .           ├─ _        (1)
    parent  -1     0    0    1    1   -1           │  ├─ (     (3)
    depth    0     1    1    2    2    0           │  └─ x     (4)
                                                   └─ f        (2)

A parent always has a smaller index than its children, so every prefix of the
arrays is a tree. Functions here are for one tree, `[M]` per field; callers with
a batch vmap them.
"""

import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

ROOT = 0
NO_NODE = -1


class TokenTree(flax.struct.PyTreeNode):
  """A tree of at most M nodes; unused entries are behind `size`.

  Attributes:
    token: `[M]` int32.
    parent: `[M]` int32; `NO_NODE` at the root and in unused entries.
    depth: `[M]` int32; 0 at the root.
    edge: `[M]` float32, the estimated log-probability that the target accepts
      the node, given that it accepts the parent; at most 0.
    log_prob: `[M]` float32, that of accepting the node: edges summed from the
      root. Never above the parent's; -inf in unused entries.
    origin: `[M]` int32, who proposed the node first, see `Drafter.labels`; 0 is
      the target itself.
    size: `[]` int32.
  """

  token: jax.Array
  parent: jax.Array
  depth: jax.Array
  edge: jax.Array
  log_prob: jax.Array
  origin: jax.Array
  size: jax.Array

  @property
  def capacity(self) -> int:
    """M."""
    return self.token.shape[-1]


def init_tree(root_token: jax.Array, capacity: int) -> TokenTree:
  """A tree of the root alone.

  Args:
    root_token: `[]` int32, the last token of the row.
    capacity: M, at least 1.
  """
  zeros = jnp.zeros(capacity, jnp.int32)
  is_root = jnp.arange(capacity) == ROOT
  return TokenTree(
    token=jnp.where(is_root, root_token, 0).astype(jnp.int32),
    parent=jnp.full(capacity, NO_NODE, jnp.int32),
    depth=zeros,
    edge=jnp.zeros(capacity),
    log_prob=jnp.where(is_root, 0.0, -jnp.inf),
    origin=zeros,
    size=jnp.ones((), jnp.int32),
  )


def walk_up(parent: jax.Array, nodes: jax.Array, num_steps: int) -> jax.Array:
  """The nodes and their ancestors.

  Args:
    parent: `[M]` int32.
    nodes: `[W]` int32; `NO_NODE` is allowed.
    num_steps: how far up.

  Returns:
    `[W, num_steps + 1]` int32: the node, its parent, and so on; `NO_NODE`
    above the root.
  """
  walk = [nodes]
  for _ in range(num_steps):
    here = walk[-1]
    # Clipped: to count from the end, as is the default, takes more kernels.
    above = jnp.take(parent, here, mode='clip')
    walk.append(jnp.where(here >= 0, above, NO_NODE))
  return jnp.stack(walk, axis=1)


def ancestor_mask(
  parent: jax.Array, nodes: jax.Array, others: jax.Array, max_depth: int
) -> jax.Array:
  """Which of `others` are a node's ancestors, or the node itself.

  For the tree above, all nodes against all nodes:

      node 0   x . . . .
      node 1   x x . . .
      node 2   x . x . .
      node 3   x x . x .
      node 4   x x . . x

  Args:
    parent: `[M]` int32.
    nodes: `[W]` int32.
    others: `[T]` int32. `NO_NODE` in either is nobody's ancestor.
    max_depth: of any node.

  Returns:
    `[W, T]` bool.
  """
  walk = walk_up(parent, nodes, max_depth)
  same = walk[:, :, None] == others[None, None]
  return jnp.any(same & (others >= 0)[None, None], axis=1)


def histories(
  tree: TokenTree, nodes: jax.Array, recent: jax.Array
) -> jax.Array:
  """The tokens that end at each node, the node's own first.

  Args:
    tree: the tree.
    nodes: `[W]` int32 nodes.
    recent: `[n]` int32, the last tokens of the text, the root's first, -1 where
      the text has no more.

  Returns:
    `[W, n]` int32: those of the path, then those of the text.
  """
  num_tokens = recent.shape[0]
  if num_tokens == 0:
    return jnp.zeros((*nodes.shape, 0), jnp.int32)
  back = jnp.arange(num_tokens)[None]
  behind_root = back - jnp.take(tree.depth, nodes, mode='clip')[:, None]
  walk = walk_up(tree.parent, nodes, num_tokens - 1)
  return jnp.where(
    behind_root > 0,
    jnp.take(recent, behind_root, mode='clip'),
    jnp.take(tree.token, walk, mode='clip'),
  )


def find_children(
  tree: TokenTree, parents: jax.Array, tokens: jax.Array
) -> jax.Array:
  """Where a child with a given token is.

  Args:
    tree: the tree.
    parents: `[W]` int32.
    tokens: `[W, K]` int32.

  Returns:
    `[W, K]` int32, `NO_NODE` where there is no such child.
  """
  same_parent = tree.parent[None] == parents[:, None]
  same = same_parent[:, None] & (tree.token[None, None] == tokens[:, :, None])
  same &= (parents >= 0)[:, None, None]  # unused entries have parent NO_NODE
  return jnp.where(jnp.any(same, axis=2), jnp.argmax(same, axis=2), NO_NODE)


def place_children(
  tree: TokenTree,
  index: jax.Array,
  parents: jax.Array,
  tokens: jax.Array,
  edges: jax.Array,
  origins: jax.Array,
) -> TokenTree:
  """Writes children at given entries of the arrays.

  Args:
    tree: the tree.
    index: `[W, K]` int32, distinct, above the parents' and without gaps behind
      `size`; M or more drops the child.
    parents: `[W]` int32, nodes of the tree where any child is not dropped.
    tokens: `[W, K]` int32.
    edges: `[W, K]` float32, at most 0.
    origins: `[W, K]` int32.
  """
  spread = lambda values: jnp.broadcast_to(values[:, None], index.shape)
  token, parent, depth, edge, log_prob, origin = place(
    (
      tree.token,
      tree.parent,
      tree.depth,
      tree.edge,
      tree.log_prob,
      tree.origin,
    ),
    index.reshape(-1),
    tuple(
      values.reshape(-1)
      for values in (
        tokens,
        spread(parents),
        spread(tree.depth[parents] + 1),
        edges,
        spread(tree.log_prob[parents]) + edges,
        origins,
      )
    ),
  )
  return TokenTree(
    token=token,
    parent=parent,
    depth=depth,
    edge=edge,
    log_prob=log_prob,
    origin=origin,
    size=tree.size + jnp.sum(index < tree.capacity),
  )


def add_children(
  tree: TokenTree,
  parents: jax.Array,
  tokens: jax.Array,
  edges: jax.Array,
  origins: jax.Array,
  wanted: jax.Array,
) -> TokenTree:
  """Appends the children that are not in the tree yet, as long as they fit.

  Args:
    tree: the tree.
    parents: `[W]` int32, distinct nodes, the most important first: what does
      not fit is dropped from the end.
    tokens: `[W, K]` int32, distinct within each parent where wanted.
    edges: `[W, K]` float32, at most 0; ignored for children that exist.
    origins: `[W, K]` int32, likewise.
    wanted: `[W, K]` bool.
  """
  new = wanted & (find_children(tree, parents, tokens) == NO_NODE)
  order = jnp.cumsum(new.reshape(-1)).reshape(new.shape)
  index = jnp.where(new, tree.size + order - 1, tree.capacity)
  index = jnp.minimum(index, tree.capacity)
  return place_children(tree, index, parents, tokens, edges, origins)


def accumulate(tree: TokenTree, max_depth: int) -> TokenTree:
  """Recomputes `log_prob` from edges that have changed.

  Level by level, not as a sum over each path: a child's sum must not exceed its
  parent's by rounding, or the best nodes would no longer be connected.
  """
  is_child = tree.parent >= 0
  log_prob = tree.log_prob
  for _ in range(max_depth):
    summed = log_prob[tree.parent] + tree.edge
    log_prob = jnp.where(is_child, summed, log_prob)
  return tree.replace(log_prob=log_prob)


def best_nodes(
  tree: TokenTree, allowed: jax.Array, number: int
) -> tuple[jax.Array, jax.Array]:
  """The likeliest of the allowed nodes, in descending order.

  Of equals the one with the smaller index comes first, hence a parent before
  its child.

  Args:
    tree: the tree.
    allowed: `[M]` bool.
    number: how many.

  Returns:
    `[number]` int32 nodes, `NO_NODE` where there are fewer, and `[number]`
    float32, their log-probabilities (-inf where there is none).
  """
  number_of_entries = min(number, tree.capacity)
  score = jnp.where(allowed, tree.log_prob, -jnp.inf)
  score, nodes = lax.top_k(score, number_of_entries)
  nodes = jnp.where(score > -jnp.inf, nodes, NO_NODE).astype(jnp.int32)
  padding = (0, number - number_of_entries)
  return (
    jnp.pad(nodes, padding, constant_values=NO_NODE),
    jnp.pad(score, padding, constant_values=-jnp.inf),
  )


def select_best(tree: TokenTree, num_nodes: int) -> tuple[TokenTree, jax.Array]:
  """The N likeliest nodes; a connected subtree, root included.

  Args:
    tree: the tree.
    num_nodes: N.

  Returns:
    A tree of capacity N, and `[N]` int32: which node of `tree` each of its
    nodes was, `NO_NODE` where there are fewer.
  """
  capacity = tree.capacity
  entries = jnp.arange(capacity)
  nodes, _ = best_nodes(tree, entries < tree.size, num_nodes)
  keep = jnp.zeros(capacity, bool)
  keep = keep.at[jnp.where(nodes >= 0, nodes, capacity)].set(True, mode='drop')
  # By index, so that parents stay in front of their children.
  kept = jnp.nonzero(keep, size=num_nodes, fill_value=NO_NODE)[0]
  kept = kept.astype(jnp.int32)
  new_index = jnp.cumsum(keep) - 1
  used = kept >= 0
  parent = tree.parent[kept]
  has_parent = used & (parent >= 0)
  pick = lambda array, fill: jnp.where(used, array[kept], fill)
  subtree = TokenTree(
    token=pick(tree.token, 0),
    parent=jnp.where(has_parent, new_index[parent], NO_NODE).astype(jnp.int32),
    depth=pick(tree.depth, 0),
    edge=pick(tree.edge, 0.0),
    log_prob=pick(tree.log_prob, -jnp.inf),
    origin=pick(tree.origin, 0),
    size=jnp.sum(used).astype(jnp.int32),
  )
  return subtree, kept


def accepted_path(
  tree: TokenTree, chosen: jax.Array, max_depth: int
) -> tuple[jax.Array, jax.Array]:
  """Walks down from the root as long as the target agrees.

  Args:
    tree: the tree.
    chosen: `[M]` int32, the target's choice after each node.
    max_depth: D, of any node.

  Returns:
    `[D + 1]` int32, the accepted node of each depth, the root first and
    `NO_NODE` from where the target disagrees; and `[]` int32, how many were
    accepted, the root not counted.
  """
  is_child = tree.parent >= 0
  agrees = ~is_child | (tree.token == chosen[tree.parent])
  walk = walk_up(tree.parent, jnp.arange(tree.capacity), max_depth)
  is_root = jnp.arange(tree.capacity) == ROOT
  accepted = jnp.all(agrees[walk] | (walk < 0), axis=1) & (is_child | is_root)
  at_depth = tree.depth[None] == jnp.arange(max_depth + 1)[:, None]
  match = accepted[None] & at_depth
  path = jnp.where(jnp.any(match, axis=1), jnp.argmax(match, axis=1), NO_NODE)
  path = path.astype(jnp.int32)
  return path, jnp.sum(path >= 0).astype(jnp.int32) - 1


def _scattered(old, index, new):
  put = lambda one, values: one.at[index].set(values, mode='drop')
  return tuple(map(put, old, new))


def _looked_up(old, index, new):
  hits = index[None] == jnp.arange(old[0].shape[0])[:, None]  # [M, n]
  source = jnp.max(jnp.where(hits, jnp.arange(index.size)[None], -1), axis=1)
  put = lambda one, values: jnp.where(
    source >= 0, values[jnp.maximum(source, 0)], one
  )
  return tuple(map(put, old, new))


def place(
  old: tuple[jax.Array, ...], index: jax.Array, new: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Writes the same entries of several arrays.

  Args:
    old: `[M]` each.
    index: `[n]` int32, where to write; distinct, M or more writes nothing.
    new: `[n]` each, of the dtypes of `old`.

  Returns:
    `[M]` each.
  """
  return lax.platform_dependent(
    old, index, new, cpu=_scattered, default=_looked_up
  )


def _scattered_sums(index, values, size):
  return jnp.zeros(size, values.dtype).at[index].add(values, mode='drop')


def _looked_up_sums(index, values, size):
  hits = index[None] == jnp.arange(size)[:, None]
  return jnp.sum(jnp.where(hits, values[None], 0), axis=1)


def add_up(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
  """Adds values up by where they belong.

  Args:
    index: `[n]` int32, M or more counts nowhere.
    values: `[n]`.
    size: M.

  Returns:
    `[M]`, of the dtype of `values`; in which order is up to the machine.
  """
  return lax.platform_dependent(
    index,
    values,
    cpu=functools.partial(_scattered_sums, size=size),
    default=functools.partial(_looked_up_sums, size=size),
  )
