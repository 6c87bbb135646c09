"""What another round of growth would score, and what that should bring."""

import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.extension import Growing
from specdec.placing import add_up
from specdec.tree import best_nodes
from specdec.tree import TokenTree


class Reach(flax.struct.PyTreeNode):
  """How deep a stage gets.

  Attributes:
    depth: `[B]` int32, nodes at most so deep can be scored; -1: none.
    active: `[B]` bool, rows that are not done.
    max_depth: D, no node is deeper; static.
  """

  depth: jax.Array
  active: jax.Array
  max_depth: int = flax.struct.field(pytree_node=False)


class Outlook(flax.struct.PyTreeNode):
  """See the module.

  Attributes:
    nodes: `[B, W]` int32, the likeliest nodes to score, `NO_NODE` where there
      are fewer.
    can_grow: `[B]` bool, whether any node could get children.
    gain: `[B]` float32, tokens that scoring them is expected to add.
    expected: `[B]` float32, tokens that the tree is expected to yield as it is.
      The root is certain, and stands for the target's bonus token.
  """

  nodes: jax.Array
  can_grow: jax.Array
  gain: jax.Array
  expected: jax.Array


def _gain(growing: Growing, can_grow: jax.Array, width: int) -> jax.Array:
  """Unbatched.

  That is the probability of the nodes that would be scored, as far as their
  children in the tree do not have it yet, times the share that scoring has
  brought into the tree so far: K children do not have all of their parent's
  probability.
  """
  tree, scored = growing.tree, growing.scored
  prob = jnp.exp(tree.log_prob)
  parent = jnp.where(tree.parent >= 0, tree.parent, tree.capacity)
  of_children = jnp.minimum(add_up(parent, prob, tree.capacity), prob)
  of_scored = jnp.sum(jnp.where(scored, prob, 0.0))
  share = jnp.sum(jnp.where(scored, of_children, 0.0))
  share = jnp.where(of_scored > 0, share / jnp.maximum(of_scored, 1e-6), 1.0)
  nodes, _ = best_nodes(tree, can_grow, width)
  new = jnp.maximum(share * prob - of_children, 0.0)[nodes]
  return jnp.sum(jnp.where(nodes >= 0, new, 0.0))


def _expected(tree: TokenTree, num_nodes: int) -> jax.Array:
  """Unbatched."""
  used = tree.log_prob > -jnp.inf
  _, log_prob = best_nodes(tree, used, num_nodes)
  return jnp.sum(jnp.exp(log_prob))


def _of_row(growing, reach, *, width, num_nodes, needs_ancestors):
  tree = growing.tree
  candidates = (
    (tree.log_prob > -jnp.inf) & ~growing.scored & (tree.depth <= reach.depth)
  )
  can_grow = candidates & (tree.depth < reach.max_depth) & reach.active
  if growing.closed is not None:
    can_grow &= ~growing.closed
    if not needs_ancestors:
      candidates &= ~growing.closed
  nodes, _ = best_nodes(tree, candidates, width)
  return Outlook(
    nodes=nodes,
    can_grow=jnp.any(can_grow),
    gain=_gain(growing, can_grow, width),
    expected=_expected(tree, num_nodes),
  )


def _in_steps(growing, reach, **static):
  of_row = lambda growing, reach: _of_row(growing, reach, **static)
  return jax.vmap(of_row)(growing, reach)


def _in_one_kernel(growing, reach, **static):
  """On a GPU the steps are about a dozen kernels."""
  # Here, so that plain decoding does not wait for Pallas.
  from specdec import gpu_growth

  if not gpu_growth.fits(growing.tree.capacity, static['width']):
    return _in_steps(growing, reach, **static)
  return gpu_growth.look_ahead(growing, reach, **static)


def look_ahead(
  growing: Growing,
  reach: Reach,
  *,
  width: int,
  num_nodes: int,
  needs_ancestors: bool,
) -> Outlook:
  """What one stage could do next.

  Args:
    growing: the trees.
    reach: of the stage.
    width: W, nodes that are scored in a round.
    num_nodes: N, nodes that the target verifies.
    needs_ancestors: whether closed nodes are to be scored too, since the keys
      of a node may be needed by its descendants.
  """
  static = {
    'width': width,
    'num_nodes': num_nodes,
    'needs_ancestors': needs_ancestors,
  }
  return lax.platform_dependent(
    growing,
    reach,
    cuda=functools.partial(_in_one_kernel, **static),
    default=functools.partial(_in_steps, **static),
  )
