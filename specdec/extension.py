"""What a scorer said about nodes of the tree, put into the tree."""

import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.drafter import Scores
from specdec.ranking import IMPOSSIBLE
from specdec.tree import accumulate
from specdec.tree import add_children
from specdec.tree import TokenTree


class Growing(flax.struct.PyTreeNode):
  """A tree, as one stage sees it.

  Attributes:
    tree: `[B, M]` per field.
    scored: `[B, M]` bool, nodes that the stage has scored.
    closed: `[B, M]` bool, nodes that need no more children: a stage outside has
      scored them; None if there is no such stage.
  """

  tree: TokenTree
  scored: jax.Array
  closed: jax.Array | None

  @property
  def closed_for_all(self) -> jax.Array:
    """`[B, M]` bool: where a stage inside need not look."""
    return self.scored if self.closed is None else self.closed | self.scored


def _rescore(tree, scores, closed, *, max_depth):
  """This stage knows better than those inside it; unbatched."""
  of_parent = tree.parent[:, None] == scores.nodes[None]
  of_parent &= (scores.nodes >= 0)[None]
  known = jnp.any(of_parent, axis=1)
  if closed is not None:
    known &= ~closed[tree.parent]
  tree = tree.replace(edge=jnp.where(known, scores.given, tree.edge))
  return accumulate(tree, max_depth)


def _add(tree, scores, closed, *, label, max_depth):
  """The stage's own children; unbatched."""
  nodes = scores.nodes
  may_have = (nodes >= 0) & (tree.depth[nodes] < max_depth)
  if closed is not None:
    may_have &= ~closed[nodes]
  wanted = may_have[:, None] & (scores.edges > IMPOSSIBLE / 2)
  return add_children(
    tree, nodes, scores.tokens, scores.edges, scores.origins(label), wanted
  )


def mark(scored: jax.Array, nodes: jax.Array) -> jax.Array:
  """`scored [B, M]`, and `nodes [B, W]` too."""
  entries = jnp.arange(scored.shape[1])[None, :, None]
  return scored | jnp.any(entries == nodes[:, None], axis=2)


def _in_steps(growing, scores, *, label, max_depth, rescores):
  tree, closed = growing.tree, growing.closed
  if rescores:
    rescore = functools.partial(_rescore, max_depth=max_depth)
    tree = jax.vmap(rescore)(tree, scores, closed)
  add = functools.partial(_add, label=label, max_depth=max_depth)
  tree = jax.vmap(add)(tree, scores, closed)
  return growing.replace(tree=tree, scored=mark(growing.scored, scores.nodes))


def _in_one_kernel(growing, scores, **static):
  """On a GPU the steps are about a dozen kernels."""
  # Here, so that plain decoding does not wait for Pallas.
  from specdec import gpu_growth

  if not gpu_growth.fits(growing.tree.capacity, *scores.tokens.shape[1:]):
    return _in_steps(growing, scores, **static)
  # What is not needed would still be computed for the kernel.
  given = scores.given if static['rescores'] else None
  scores = scores.replace(given=given, slots_read=None, drawn_from=None)
  return gpu_growth.extend(growing, scores, **static)


def extend(
  growing: Growing,
  scores: Scores,
  *,
  label: int,
  max_depth: int,
  rescores: bool,
) -> Growing:
  """Adds the guesses of a stage below the nodes that it has scored.

  Args:
    growing: before.
    scores: of W nodes.
    label: origin of the nodes that the stage's first label proposes.
    max_depth: D, no node is deeper.
    rescores: whether children that those nodes have already get the numbers of
      this stage.
  """
  static = {'label': label, 'max_depth': max_depth, 'rescores': rescores}
  return lax.platform_dependent(
    growing,
    scores,
    cuda=functools.partial(_in_one_kernel, **static),
    default=functools.partial(_in_steps, **static),
  )
