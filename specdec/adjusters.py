"""Adjusters: what changes the logits of target and drafts, text by text.

An adjuster has a state per text (`specdec.carried`) and, if it wants, one per
node of the tree. The logits of the target and of every stage pass through the
adjusters in their order, so plain decoding under the same adjusters gives the
same tokens.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec import carried as carried_lib
from specdec import sampling as sampling_lib
from specdec.tree import tree as tree_lib


class Nodes(flax.struct.PyTreeNode):
  """The nodes whose logits are adjusted."""

  tree: tree_lib.TokenTree  #: `[B, M]` per field.
  index: jax.Array  #: `[B, W]` int32; `NO_NODE` for entries without a node.
  sampling: sampling_lib.SamplingParams  #: The parameters.
  #: D, the largest depth of a node; static.
  max_depth: int = flax.struct.field(pytree_node=False)


class Adjuster:
  """Base of adjusters: pure functions, and a pytree of what they need.

  A state is any pytree of arrays whose first axis is B. `adjust` is all that a
  subclass must have.
  """

  #: Whether it can exclude every token that may follow.
  excludes = False

  def start(self, texts: carried_lib.Texts) -> Any:
    """The states after texts; by default there are none."""
    del texts
    return ()

  def at_root(self, state: Any) -> Any:
    """The state of each root, `[B, ...]`; by default there is none."""
    del state
    return ()

  def after(self, node_state: Any, tokens: jax.Array) -> Any:
    """The states of nodes, from their parents' states and their own tokens.

    Args:
      node_state: `[B, M, ...]`, of their parents.
      tokens: `[B, M]` int32, of the nodes.
    """
    del tokens
    return node_state

  def adjust(
    self, logits: jax.Array, state: Any, node_state: Any, nodes: Nodes
  ) -> jax.Array:
    """The logits of some nodes, adjusted.

    Args:
      logits: `[B, W, V]` float32.
      state: of the texts.
      node_state: `[B, W, ...]`, of the nodes.
      nodes: the nodes.
    """
    raise NotImplementedError

  def adjust_few(
    self, log_probs: jax.Array, tokens: jax.Array, node_state: Any
  ) -> jax.Array:
    """The log-probabilities of a few tokens; by default they stay.

    It serves drafters that propose tokens without logits.

    Args:
      log_probs: `[B, W, C]` float32, of distinct tokens, adding up to at most
        1; `EXCLUDED` for entries that are no candidates.
      tokens: `[B, W, C]` int32, the tokens, which follow W nodes.
      node_state: `[B, W, ...]`, of the nodes.
    """
    del tokens, node_state
    return log_probs

  def keep(self, state: Any, node_state: Any, added: carried_lib.Added) -> Any:
    """The states after a step; by default they stay.

    Args:
      state: of the texts before the step.
      node_state: `[B, D + 1, ...]`, of the nodes of the accepted path.
      added: what the step added.
    """
    del node_state, added
    return state


def _add_seen(
  seen: jax.Array, tokens: jax.Array, count: jax.Array
) -> jax.Array:
  """Adds the first `count [B]` of `tokens [B, n]` to `seen [B, V]` bool."""
  index = jnp.arange(tokens.shape[1])[None]
  tokens = jnp.where(index < count[:, None], tokens, seen.shape[1])
  rows = jnp.arange(tokens.shape[0])[:, None]
  return seen.at[rows, tokens].set(True, mode='drop')


class RepetitionPenalty(flax.struct.PyTreeNode, Adjuster):
  """Weakens the tokens that a text has; the state is `[B, V]` bool.

  `SamplingParams.repetition_penalty` says by how much. What the path to a node
  adds is found from the tree, as V entries per node would be too many.
  """

  vocab_size: int = flax.struct.field(pytree_node=False)  #: V; static.

  def start(self, texts: carried_lib.Texts) -> jax.Array:
    nothing = jnp.zeros((texts.tokens.shape[0], self.vocab_size), bool)
    return _add_seen(nothing, texts.tokens, texts.length)

  def adjust(
    self, logits: jax.Array, state: jax.Array, node_state: Any, nodes: Nodes
  ) -> jax.Array:
    del node_state

    def add_path(
      tree: tree_lib.TokenTree, index: jax.Array, seen: jax.Array
    ) -> jax.Array:
      walk = tree_lib.walk_up(tree.parent, index, nodes.max_depth)
      tokens = jnp.where(walk >= 0, tree.token[walk], self.vocab_size)
      entries = jnp.arange(index.shape[0])[:, None]
      spread = jnp.broadcast_to(seen[None], (index.shape[0], self.vocab_size))
      return spread.at[entries, tokens].set(True, mode='drop')

    # The root's token is in the state, too; a count would have to leave it out.
    seen = jax.vmap(add_path)(nodes.tree, nodes.index, state)
    return sampling_lib.penalize(logits, nodes.sampling, seen)

  def keep(
    self, state: jax.Array, node_state: Any, added: carried_lib.Added
  ) -> jax.Array:
    del node_state
    return _add_seen(state, added.tokens, added.count)


def states_of_nodes(
  tree: tree_lib.TokenTree, nodes: jax.Array
) -> tuple[Any, ...]:
  """The states of `nodes [B, W]`, `[B, W, ...]` for each adjuster.

  Entries without a node get the state of the root.
  """
  at_nodes = jax.vmap(tree_lib.pick)
  return jax.tree.map(lambda array: at_nodes(array, nodes), tree.node_states)


def keep(
  adjusters: tuple[Adjuster, ...],
  states: tuple[Any, ...],
  tree: tree_lib.TokenTree,
  added: carried_lib.Added,
) -> tuple[Any, ...]:
  """The states of all adjusters after a step."""
  along_path = states_of_nodes(tree, added.path)
  return tuple(
    adjuster.keep(state, node_state, added)
    for adjuster, state, node_state in zip(
      adjusters, states, along_path, strict=True
    )
  )
