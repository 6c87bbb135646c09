"""The context of one step of a decode, for the target and for all stages."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import hidden as hidden_lib
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
  randomness: sampling_lib.Randomness  #: The randomness of the step.
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
  #: The target's hidden states at the D + 1 tokens before the root, if it keeps
  #: any.
  hidden: hidden_lib.HiddenStates = flax.struct.field(
    default_factory=hidden_lib.HiddenStates
  )

  def root_trees(self) -> tree_lib.TokenTree:
    """Trees of the last tokens alone, `[B, M]` per field."""
    root = jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)
    return jax.vmap(tree_lib.init_tree, (0, None))(
      root[:, 0], self.shape.capacity
    )

  def adjusted(
    self, logits: jax.Array, tree: tree_lib.TokenTree, nodes: jax.Array
  ) -> jax.Array:
    """`logits [B, W, V]` of `nodes [B, W]` with bias and repetition penalty."""
    seen = self.seen
    if seen is not None:
      seen = sampling_lib.seen_by_nodes(tree, nodes, seen, self.max_depth)
    return sampling_lib.adjust_logits(logits, self.sampling, seen)
