"""Growing a tree, as two kernels for GPUs: what lies between two forwards.

XLA makes a kernel of nearly every "any", "sum" or "top" of a few numbers. Here
a program has one row of the batch; what its threads tell each other goes
through the arrays of the tree, with barriers between writing and reading.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp

from specdec import gpu
from specdec.outlook import Outlook
from specdec.ranking import IMPOSSIBLE
from specdec.tree import NO_NODE

# Nodes that all nodes are compared with at a time.
_BLOCK = 16
# Of what is no entry of the tree, so that nobody is its parent.
_NO_PARENT = NO_NODE - 1
# All nodes are compared with all, by one multiprocessor.
_MOST_NODES = 1024
_MOST_SCORED, _MOST_GUESSES = 256, 4096
_NUM_WARPS = 4


def fits(capacity: int, width: int, branching: int = 1) -> bool:
  """Whether the kernels serve trees of M nodes, and W scored with K guesses."""
  few = capacity <= _MOST_NODES and width <= _MOST_SCORED
  return few and width * branching <= _MOST_GUESSES and gpu.runs_kernels()


def _load(ref, index, real, other):
  return triton.load(ref.at[index], mask=real, other=other)


def _store(ref, index, values, real):
  """Where `real`."""
  # Interpreted, the other entries are written too, with what was there.
  index = jnp.where(real, index, ref.shape[0])
  triton.store(ref.at[index], values, mask=real)


def _load_closed(ref, index, real):
  """False where nothing is closed."""
  if ref is None:
    return jnp.zeros(index.shape, jnp.bool_)
  return _load(ref, index, real, True)


def _any(condition, axis):
  return jnp.max(condition.astype(jnp.int32), axis=axis) > 0


def _num_blocks(size):
  return pl.cdiv(size, _BLOCK)


def _of_rows(arrays):
  """Each program has its row of all of them."""
  return [
    pl.BlockSpec(
      (None, *array.shape[1:]),
      lambda row, n=array.ndim: (row, *[0] * (n - 1)),
    )
    for array in arrays
  ]


def _rescore(nodes_ref, given_ref, closed_ref, tree, *, barrier):
  """See `extension._rescore`."""
  entry = jnp.arange(gpu.power_of_two(tree.parent.shape[0]))
  size = tree.size[...]
  used = entry < size
  parent = _load(tree.parent, entry, used, NO_NODE)
  has_parent, above = parent >= 0, jnp.maximum(parent, 0)
  column = jnp.arange(gpu.power_of_two(nodes_ref.shape[0]))
  nodes = _load(nodes_ref, column, column < nodes_ref.shape[0], NO_NODE)
  # Nodes along the last axis throughout, so that few sums cross threads.
  of_parent = nodes[:, None] == parent[None]
  known = _any(of_parent & (nodes >= 0)[:, None], axis=0)
  known &= ~_load_closed(closed_ref, above, has_parent)
  edge = _load(tree.edge, entry, used, 0.0)
  edge = jnp.where(known, _load(given_ref, entry, used, 0.0), edge)
  _store(tree.edge, entry, edge, used)
  log_prob = _load(tree.log_prob, entry, used, 0.0)

  def next_level(_, log_prob):
    above_it = _load(tree.log_prob, above, has_parent, 0.0)
    log_prob = jnp.where(has_parent, above_it + edge, log_prob)
    barrier()
    _store(tree.log_prob, entry, log_prob, used)
    barrier()
    return log_prob

  depth = _load(tree.depth, entry, used, 0)
  lax.fori_loop(0, jnp.max(depth), next_level, log_prob)


def _add(scores, closed_ref, tree, *, label, max_depth, barrier):
  """See `extension._add`."""
  capacity = tree.parent.shape[0]
  size = tree.size[...]
  num_guesses = scores.tokens.shape[0] * scores.tokens.shape[1]
  guess = jnp.arange(gpu.power_of_two(num_guesses))
  real = guess < num_guesses
  node, rank = guess // scores.tokens.shape[1], guess % scores.tokens.shape[1]
  parent = _load(scores.nodes, node, real, NO_NODE)
  is_node, above = parent >= 0, jnp.maximum(parent, 0)
  token = _load(scores.tokens, (node, rank), real, 0)
  edge = _load(scores.edges, (node, rank), real, IMPOSSIBLE)
  depth = _load(tree.depth, above, is_node, max_depth) + 1
  may_have = is_node & ~_load_closed(closed_ref, above, is_node)
  wanted = may_have & (depth <= max_depth) & (edge > IMPOSSIBLE / 2)

  def look(block, found):
    entry = block * _BLOCK + jnp.arange(_BLOCK)
    used = entry < size
    same = _load(tree.parent, entry, used, _NO_PARENT)[:, None] == parent[None]
    same &= _load(tree.token, entry, used, 0)[:, None] == token[None]
    return found + jnp.sum(same.astype(jnp.int32), axis=0)

  found = jnp.zeros(guess.shape, jnp.int32)
  new = wanted & (lax.fori_loop(0, _num_blocks(size), look, found) == 0)
  index = size + jnp.cumsum(new.astype(jnp.int32)) - 1
  new &= index < capacity
  log_prob = _load(tree.log_prob, above, is_node, 0.0) + edge
  origin = jnp.full(guess.shape, label, jnp.int32)
  if scores.sources is not None:
    origin += _load(scores.sources, (node, rank), real, 0)
  barrier()  # All have read what is written now.
  for ref, values in (
    (tree.token, token),
    (tree.parent, parent),
    (tree.depth, depth),
    (tree.edge, edge),
    (tree.log_prob, log_prob),
    (tree.origin, origin),
  ):
    _store(ref, index, values, new)
  tree.size[...] = size + jnp.sum(new.astype(jnp.int32))


def _extend_kernel(inputs, changing, *, label, max_depth, rescores, barrier):
  scores, closed_ref, _ = inputs  # The rest is in the memory of `changing`.
  tree, scored_ref = changing
  if rescores:
    _rescore(scores.nodes, scores.given, closed_ref, tree, barrier=barrier)
  _add(
    scores,
    closed_ref,
    tree,
    label=label,
    max_depth=max_depth,
    barrier=barrier,
  )
  column = jnp.arange(gpu.power_of_two(scores.nodes.shape[0]))
  nodes = _load(scores.nodes, column, column < scores.nodes.shape[0], NO_NODE)
  _store(scored_ref, nodes, jnp.ones(nodes.shape, jnp.bool_), nodes >= 0)


def _look_ahead_kernel(inputs, out, *, width, num_nodes, needs_ancestors):
  growing, reach = inputs
  tree = growing.tree
  size = tree.size[...]
  deepest, active = reach.depth[...], reach.active[...]

  def nodes_at(entry):
    """What there is to know of some entries."""
    used = entry < size
    log_prob = _load(tree.log_prob, entry, used, -jnp.inf)
    possible = log_prob > -jnp.inf
    depth = _load(tree.depth, entry, used, 0)
    closed = _load_closed(growing.closed, entry, used)
    wanted = possible & ~_load(growing.scored, entry, used, True)
    wanted &= depth <= deepest
    can_grow = wanted & ~closed & (depth < reach.max_depth) & active
    if not needs_ancestors:
      wanted &= ~closed
    return possible, wanted, can_grow, log_prob

  entry = jnp.arange(gpu.power_of_two(tree.parent.shape[0]))
  possible, wanted, can_grow, log_prob = nodes_at(entry)
  prob = jnp.exp(log_prob)

  def compare(block, carry):
    """Who comes before whom, and who is whose child: `[_BLOCK, M]`."""
    others = block * _BLOCK + jnp.arange(_BLOCK)
    *kinds, other_log_prob = nodes_at(others)
    before = other_log_prob[:, None] > log_prob[None]
    equal = other_log_prob[:, None] == log_prob[None]
    before |= equal & (others[:, None] < entry[None])
    parent = _load(tree.parent, others, others < size, _NO_PARENT)
    is_child = parent[:, None] == entry[None]
    *ranks, of_children = carry
    ranks = [
      rank + jnp.sum((before & kind[:, None]).astype(jnp.int32), axis=0)
      for rank, kind in zip(ranks, kinds, strict=True)
    ]
    mass = jnp.where(is_child, jnp.exp(other_log_prob)[:, None], 0.0)
    return *ranks, of_children + jnp.sum(mass, axis=0)

  zeros = jnp.zeros(entry.shape, jnp.int32)
  rank, rank_wanted, rank_can_grow, of_children = lax.fori_loop(
    0, _num_blocks(size), compare, (zeros, zeros, zeros, jnp.zeros(entry.shape))
  )
  of_children = jnp.minimum(of_children, prob)
  scored = _load(growing.scored, entry, entry < size, False)
  total = lambda mass, of: jnp.sum(jnp.where(of, mass, 0.0))
  of_scored = total(prob, scored)
  share = total(of_children, scored) / jnp.maximum(of_scored, 1e-6)
  share = jnp.where(of_scored > 0, share, 1.0)
  gain = jnp.maximum(share * prob - of_children, 0.0)
  out.gain[...] = total(gain, can_grow & (rank_can_grow < width))
  out.expected[...] = total(prob, possible & (rank < num_nodes))
  out.can_grow[...] = _any(can_grow, axis=0)
  # The entries of `nodes` are written once each: here, or as missing.
  _store(out.nodes, rank_wanted, entry, wanted & (rank_wanted < width))
  place = jnp.arange(gpu.power_of_two(width))
  missing = place >= jnp.sum(wanted.astype(jnp.int32))
  none = jnp.full(place.shape, NO_NODE, jnp.int32)
  _store(out.nodes, place, none, missing & (place < width))


def _call(kernel, inputs, out_shape, *, name, interpret, aliases=None):
  """One program for each row; `kernel` gets the two pytrees as references."""
  leaves, structure = jax.tree.flatten(inputs)
  out_leaves, out_structure = jax.tree.flatten(out_shape)

  def on_references(*references):
    ins, outs = references[: len(leaves)], references[len(leaves) :]
    kernel(
      jax.tree.unflatten(structure, ins),
      jax.tree.unflatten(out_structure, outs),
    )

  outs = pl.pallas_call(
    on_references,
    grid=(leaves[0].shape[0],),
    in_specs=_of_rows(leaves),
    out_specs=_of_rows(out_leaves),
    out_shape=out_leaves,
    input_output_aliases=aliases or {},
    # One stage: loops read what they wrote, so nothing may be prefetched.
    compiler_params=triton.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
    interpret=interpret,
    name=name,
  )(*leaves)
  return jax.tree.unflatten(out_structure, outs)


@functools.partial(
  jax.jit, static_argnames=('label', 'max_depth', 'rescores', 'interpret')
)
def extend(growing, scores, *, label, max_depth, rescores, interpret=False):
  """See `extension.extend`; `interpret`: run it on anything, for tests."""
  changing = (growing.tree, growing.scored)
  inputs = (scores, growing.closed, changing)
  first = len(jax.tree.leaves((scores, growing.closed)))
  tree, scored = _call(
    functools.partial(
      _extend_kernel,
      label=label,
      max_depth=max_depth,
      rescores=rescores,
      barrier=(lambda: None) if interpret else triton.debug_barrier,
    ),
    inputs,
    jax.tree.map(
      lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), changing
    ),
    name='extend_tree',
    interpret=interpret,
    aliases={first + i: i for i in range(len(jax.tree.leaves(changing)))},
  )
  return growing.replace(tree=tree, scored=scored)


@functools.partial(
  jax.jit,
  static_argnames=('width', 'num_nodes', 'needs_ancestors', 'interpret'),
)
def look_ahead(
  growing, reach, *, width, num_nodes, needs_ancestors, interpret=False
):
  """See `outlook.look_ahead`; `interpret`: run it on anything, for tests."""
  rows, shape = reach.depth.shape, jax.ShapeDtypeStruct
  out_shape: dict[str, Any] = {
    'nodes': shape((*rows, width), jnp.int32),
    'can_grow': shape(rows, jnp.bool_),
    'gain': shape(rows, jnp.float32),
    'expected': shape(rows, jnp.float32),
  }
  return _call(
    functools.partial(
      _look_ahead_kernel,
      width=width,
      num_nodes=num_nodes,
      needs_ancestors=needs_ancestors,
    ),
    (growing, reach),
    Outlook(**out_shape),
    name='look_ahead',
    interpret=interpret,
  )
