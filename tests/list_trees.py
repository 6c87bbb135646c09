"""Token trees as lists, for references in plain Python; contexts of steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specdec import adjusters as adjusters_lib
from specdec import context as context_lib
from specdec import randomness as randomness_lib
from specdec.tree import tree as tree_lib
from specdec.verify import match

CAPACITY = 14
NUM_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Node:
  """One node of a tree that is a list."""

  token: int
  parent: int = tree_lib.NO_NODE
  depth: int = 0
  cond_log_prob: float = 0.0
  log_prob: float = 0.0
  origin: int = 0


def child(nodes, parent, token, cond_log_prob, origin) -> Node:
  """A new one, in float32 as the arrays."""
  above = nodes[parent]
  total = float(np.float32(above.log_prob) + np.float32(cond_log_prob))
  return Node(token, parent, above.depth + 1, cond_log_prob, total, origin)


def random_edge(rng, ties: bool) -> float:
  """With ties, also of a child with its parent."""
  if ties:
    return float(rng.choice([0.0, -0.5, -1.0]))
  return float(np.float32(-rng.exponential()))


def random_tree(rng, ties=False) -> list[Node]:
  """Deep and broad ones; siblings have different tokens."""
  size = int(rng.integers(1, CAPACITY + 1))
  nodes = [Node(int(rng.integers(NUM_TOKENS)))]
  reach = rng.choice([1, 3, CAPACITY])
  while len(nodes) < size:
    parent = int(rng.integers(max(0, len(nodes) - reach), len(nodes)))
    token = int(rng.integers(NUM_TOKENS))
    if find(nodes, parent, token) == tree_lib.NO_NODE:
      edge, origin = random_edge(rng, ties), int(rng.integers(1, 4))
      nodes.append(child(nodes, parent, token, edge, origin))
    else:
      reach = CAPACITY
  return nodes


def find(nodes, parent, token) -> int:
  """The index of the child of a node with a token."""
  for index, node in enumerate(nodes):
    if (
      parent != tree_lib.NO_NODE
      and node.parent == parent
      and node.token == token
    ):
      return index
  return tree_lib.NO_NODE


def up(nodes, index) -> list[int]:
  """The node and its ancestors."""
  walk = []
  while index != tree_lib.NO_NODE:
    walk.append(index)
    index = nodes[index].parent
  return walk


def to_arrays(nodes, capacity=CAPACITY) -> tree_lib.TokenTree:
  """The list as arrays."""
  unused = Node(0, log_prob=-np.inf)
  padded = [*nodes, *[unused] * (capacity - len(nodes))]
  columns = {
    field.name: jnp.array(
      [getattr(node, field.name) for node in padded],
      jnp.float32 if field.type is float else jnp.int32,
    )
    for field in dataclasses.fields(Node)
  }
  return tree_lib.TokenTree(size=jnp.asarray(len(nodes), jnp.int32), **columns)


def from_arrays(tree: tree_lib.TokenTree) -> list[Node]:
  """The used entries of the arrays as a list."""
  names = [field.name for field in dataclasses.fields(Node)]
  used = slice(int(tree.size))
  columns = [np.asarray(getattr(tree, name))[used].tolist() for name in names]
  return [Node(*row) for row in zip(*columns, strict=True)]


def stack(items):
  """A batch of rows."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *items)


def match_context(
  tokens, length, noise, sampling, seen=None, **kw
) -> context_lib.StepContext:
  """Context of a step, by default of match verification.

  `noise`: `[B, D + 1, V]`; `seen`: `[B, V]`, for a repetition penalty.
  """
  kw = {'active': length > 0, 'rule': match.MatchRule(), 'target_bytes': 1} | kw
  if seen is not None:
    penalty = adjusters_lib.RepetitionPenalty(seen.shape[1])
    kw |= {'adjusters': (penalty,), 'adjuster_states': (seen,)}
  return context_lib.StepContext(
    tokens=tokens,
    length=length,
    sampling=sampling,
    randomness=randomness_lib.Randomness(
      noise=randomness_lib.noise_table(noise),
      draft_keys=None,
      uniforms=None,
      residual_noise=None,
    ),
    max_depth=noise.shape[1] - 1,
    **kw,
  )
