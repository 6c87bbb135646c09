"""Which tokens a sequence has already: what a repetition penalty asks.

After a node of a tree these are the tokens of the text and of the path down to
the node, so a penalty composes with speculation: every node is judged as plain
decoding would judge it there.
"""

import jax
import jax.numpy as jnp

from specdec.tree.tree import TokenTree
from specdec.tree.tree import walk_up


def init_seen(
  prompt: jax.Array, prompt_length: jax.Array, vocab_size: int
) -> jax.Array:
  """The tokens of each prompt, `[B, V]` bool.

  Args:
    prompt: `[B, P]` int32.
    prompt_length: `[B]` int32.
    vocab_size: V.
  """
  nothing = jnp.zeros((prompt.shape[0], vocab_size), bool)
  return add_seen(nothing, prompt, prompt_length)


def add_seen(seen: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
  """Adds the first `count [B]` of `tokens [B, n]` to `seen [B, V]`."""
  index = jnp.arange(tokens.shape[1])[None]
  tokens = jnp.where(index < count[:, None], tokens, seen.shape[1])
  rows = jnp.arange(tokens.shape[0])[:, None]
  return seen.at[rows, tokens].set(True, mode='drop')


def seen_by_nodes(
  tree: TokenTree, nodes: jax.Array, seen: jax.Array, max_depth: int
) -> jax.Array:
  """What each node's sequence has, the node itself included.

  Args:
    tree: `[B, M]` per field.
    nodes: `[B, W]` int32; entries of `NO_NODE` get what the text has.
    seen: `[B, V]` bool, of the text.
    max_depth: of any node.

  Returns:
    `[B, W, V]` bool.
  """

  def of_row(tree, nodes, seen):
    walk = walk_up(tree.parent, nodes, max_depth)
    tokens = jnp.where(walk >= 0, tree.token[walk], seen.shape[0])
    index = jnp.arange(nodes.shape[0])[:, None]
    spread = jnp.broadcast_to(seen[None], (nodes.shape[0], seen.shape[0]))
    return spread.at[index, tokens].set(True, mode='drop')

  return jax.vmap(of_row)(tree, nodes, seen)
