"""The context of one step of a decode, for the target and for all stages."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec import adjusters as adjusters_lib
from specdec import carried as carried_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec.tree import topology as topology_lib
from specdec.tree import tree as tree_lib
from specdec.verify import accept


class StepContext(flax.struct.PyTreeNode):
  """Inputs of one step, shared by the target and all stages."""

  tokens: jax.Array  #: `[B, T]` int32, the text so far.
  length: jax.Array  #: `[B]` int32, its lengths; the root is the last token.
  active: jax.Array  #: `[B]` bool, rows that are not done.
  #: The parameters, of target and drafts alike.
  sampling: sampling_lib.SamplingParams
  randomness: randomness_lib.Randomness  #: The randomness of the step.
  #: The shape of the tree; static.
  shape: topology_lib.TreeShape | topology_lib.Topology = flax.struct.field(
    pytree_node=False
  )
  #: D, the largest depth of a node; static.
  max_depth: int = flax.struct.field(pytree_node=False)
  #: Bytes that one target forward reads; static.
  target_bytes: int = flax.struct.field(pytree_node=False)
  #: The rule of verification; static.
  rule: accept.Rule = flax.struct.field(pytree_node=False)
  adjusters: tuple[adjusters_lib.Adjuster, ...] = ()  #: The request's.
  adjuster_states: tuple[Any, ...] = ()  #: After the texts.
  #: The target's hidden states at the D + 1 tokens before the root, if it keeps
  #: any.
  hidden: carried_lib.HiddenStates = carried_lib.HiddenStates()

  def root_trees(self) -> tree_lib.TokenTree:
    """Trees of the last tokens alone, `[B, M]` per field."""
    root = jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)
    tree = jax.vmap(tree_lib.init_tree, (0, None))(
      root[:, 0], self.shape.capacity
    )
    spread = lambda array: jnp.broadcast_to(
      array[:, None], (*tree.token.shape, *array.shape[1:])
    )
    at_root = tuple(
      adjuster.at_root(state)
      for adjuster, state in zip(
        self.adjusters, self.adjuster_states, strict=True
      )
    )
    return tree.replace(node_states=jax.tree.map(spread, at_root))

  def followed(self, tree: tree_lib.TokenTree) -> tree_lib.TokenTree:
    """The trees, `[B, M]` per field, with the `node_states` of new children.

    Their parents must already have states.
    """
    if not jax.tree.leaves(tree.node_states):
      return tree
    is_root = tree.parent < 0
    of_parents = adjusters_lib.states_of_nodes(tree, tree.parent)

    def follow(adjuster: Any, before: Any, now: Any) -> Any:
      return jax.tree.map(
        lambda after, now: jnp.where(
          is_root.reshape(*is_root.shape, *(1,) * (now.ndim - 2)), now, after
        ),
        adjuster.after(before, tree.token),
        now,
      )

    followed = map(follow, self.adjusters, of_parents, tree.node_states)
    return tree.replace(node_states=tuple(followed))

  def adjusted(
    self, logits: jax.Array, tree: tree_lib.TokenTree, nodes: jax.Array
  ) -> jax.Array:
    """`logits [B, W, V]` of `nodes [B, W]` with the bias and all adjusters."""
    logits = sampling_lib.add_bias(logits, self.sampling)
    at = adjusters_lib.Nodes(tree, nodes, self.sampling, self.max_depth)
    node_states = adjusters_lib.states_of_nodes(tree, nodes)
    for adjuster, state, node_state in zip(
      self.adjusters, self.adjuster_states, node_states, strict=True
    ):
      logits = adjuster.adjust(logits, state, node_state, at)
    return logits

  def adjusted_few(
    self,
    log_probs: jax.Array,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
  ) -> jax.Array:
    """Adjusts the log-probabilities of a few candidate tokens.

    `tokens [B, W, C]` are candidates after `nodes [B, W]`, and
    `log_probs [B, W, C]` are theirs.
    """
    node_states = adjusters_lib.states_of_nodes(tree, nodes)
    for adjuster, node_state in zip(self.adjusters, node_states, strict=True):
      log_probs = adjuster.adjust_few(log_probs, tokens, node_state)
    return log_probs
