"""The context of one step of a decode, for the target and for all stages."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import constraint as constraint_lib
from specdec import hidden as hidden_lib
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
  #: `[B, V]` bool, tokens of the text; None without repetition penalty.
  seen: jax.Array | None
  sampling: (
    sampling_lib.SamplingParams
  )  #: The parameters, of target and drafts alike.
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
  #: What may follow what; None without constraint.
  constraint: constraint_lib.Constraint | None = None
  #: `[B]` int32, the state of the constraint after the text.
  state: jax.Array | None = None
  #: The target's hidden states at the D + 1 tokens before the root, if it keeps
  #: any.
  hidden: hidden_lib.HiddenStates = flax.struct.field(
    default_factory=hidden_lib.HiddenStates
  )

  def root_trees(self) -> tree_lib.TokenTree:
    """Trees of the last tokens alone, `[B, M]` per field."""
    root = jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)
    tree = jax.vmap(tree_lib.init_tree, (0, None))(
      root[:, 0], self.shape.capacity
    )
    if self.state is None:
      return tree
    state = jnp.broadcast_to(self.state[:, None], tree.token.shape)
    return tree.replace(state=state)

  def followed(self, tree: tree_lib.TokenTree) -> tree_lib.TokenTree:
    """The trees, `[B, M]` per field, with the states of new children.

    The states of their parents are known.
    """
    if self.constraint is None or tree.state is None:
      return tree
    parent = jnp.maximum(tree.parent, tree_lib.ROOT)
    before = jnp.take_along_axis(tree.state, parent, axis=1)
    after = constraint_lib.follow(self.constraint, before, tree.token)
    return tree.replace(state=jnp.where(tree.parent >= 0, after, tree.state))

  def adjusted(
    self, logits: jax.Array, tree: tree_lib.TokenTree, nodes: jax.Array
  ) -> jax.Array:
    """`logits [B, W, V]` of `nodes [B, W]` with all that changes them.

    These are bias, repetition penalty and constraint.
    """
    seen = self.seen
    if seen is not None:
      seen = sampling_lib.seen_by_nodes(tree, nodes, seen, self.max_depth)
    logits = sampling_lib.adjust_logits(logits, self.sampling, seen)
    state = states_of(tree, nodes)
    if self.constraint is None or state is None:
      return logits
    return constraint_lib.exclude(self.constraint, logits, state)

  def conditioned(
    self,
    log_probs: jax.Array,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
  ) -> jax.Array:
    """`log_probs [B, W, C]` of `tokens [B, W, C]` under the constraint.

    The tokens are candidates after `nodes [B, W]`.
    """
    state = states_of(tree, nodes)
    if self.constraint is None or state is None:
      return log_probs
    return constraint_lib.condition(self.constraint, log_probs, state, tokens)


def states_of(tree: tree_lib.TokenTree, nodes: jax.Array) -> jax.Array | None:
  """`[B, W]` int32, the states of the constraint after `nodes [B, W]`.

  `FORBIDDEN` for `NO_NODE`; None without a constraint.
  """
  if tree.state is None:
    return None
  state = jax.vmap(tree_lib.pick)(tree.state, nodes)
  return jnp.where(nodes >= 0, state, constraint_lib.FORBIDDEN)
