"""Verdicts of verification, its rules, and the tokens that follow."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec.tree import tree as tree_lib

# Why a row ended, see `count_emitted`.
RUNNING, LIMIT, EOS, STOP, NOT_FINITE = range(5)


class Verdict(flax.struct.PyTreeNode):
  """The path of accepted nodes in the tree of each row."""

  #: `[B, D + 1]` int32, the index among the verified nodes of the accepted node
  #: of each depth, the root first; `NO_NODE` from where the target disagrees.
  index: jax.Array
  #: `[B]` int32, the number of accepted nodes, the root not counted; at most D.
  accepted: jax.Array
  #: `[B, D + 1]` int32, the target's token after each node of the path; the
  #: tokens to emit are the first `accepted + 1`, the bonus token included.
  chosen: jax.Array

  def along_path(self, array: jax.Array) -> jax.Array:
    """`array [B, N, ...]` along the path, `[B, D + 1, ...]`, then garbage."""
    return jax.vmap(lambda row, at: row[at])(
      array, jnp.maximum(self.index, tree_lib.ROOT)
    )

  def path(self, nodes: jax.Array) -> jax.Array:
    """`[B, D + 1]` int32, the accepted ones of `nodes [B, N]`."""
    return jnp.where(self.index >= 0, self.along_path(nodes), tree_lib.NO_NODE)


class Rule:
  """Base of rules of verification; hashable, so static under `jit`."""

  #: Whether the target's choice at a position depends on noise that drafts may
  #: know, so that they rank tokens with it.
  shares_noise: bool = False
  #: How drafts choose the children of a node, one of `sampling.CHILDREN`.
  children: str = sampling_lib.BEST
  needs_chain: bool = False  #: Whether trees must be chains.
  may_draw: bool = False  #: Whether children may be drawn.
  #: Whether the tokens are the same as by plain decoding, whatever is drafted.
  #: If not, their distribution is the target's.
  keeps_tokens: bool = False

  def __call__(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    logits: jax.Array,
    drawn_from: jax.Array,
    randomness: randomness_lib.Randomness,
    sampling: sampling_lib.SamplingParams,
  ) -> Verdict:
    """Decides which nodes are accepted.

    Args:
      tree: `[B, M]` per field.
      nodes: `[B, N]` int32, the verified nodes, ascending, a connected subtree
        with the root in front; `NO_NODE` for entries without a node.
      logits: `[B, N, V]` float32, the target's after each of them, adjusted.
      drawn_from: `[B, M, V]` float32, the distributions that the children of
        each node were drawn from; of size 0 if they were not drawn.
      randomness: of the step.
      sampling: the parameters.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class MatchRule(Rule):
  """Accepts nodes as long as they are the target's choice; see `Rule`.

  The target's choice at every node is a function of its logits and of the
  position alone (see `specdec.sampling`), so plain decoding emits the same
  tokens, whatever was drafted (arXiv 2408.07978).
  """

  shares_noise = True
  keeps_tokens = True

  def __call__(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    logits: jax.Array,
    drawn_from: jax.Array,
    randomness: randomness_lib.Randomness,
    sampling: sampling_lib.SamplingParams,
  ) -> Verdict:
    del drawn_from
    noise = randomness.noise.at(jax.vmap(tree_lib.pick)(tree.depth, nodes))
    choices = sampling_lib.choose(logits, noise, sampling)
    max_depth = randomness.noise.num_positions - 1
    index, accepted = jax.vmap(tree_lib.accepted_path, (0, 0, 0, None))(
      tree, nodes, choices, max_depth
    )
    # The choices along the path take the place of the nodes.
    verdict = Verdict(index=index, accepted=accepted, chosen=index)
    return verdict.replace(chosen=verdict.along_path(choices))


def count_valid(logits: jax.Array, verdict: Verdict) -> jax.Array:
  """The number of nodes of the path, from the root on, with usable logits.

  `logits`: `[B, N, V]` float32 of the target, adjusted; see
  `sampling.is_usable`. `[B]` int32; D + 1 if all nodes have.
  """
  usable = verdict.along_path(sampling_lib.is_usable(logits)) | (
    verdict.index < 0
  )
  return tree_lib.count_leading(usable)


def count_emitted(
  verdict: Verdict, ends: jax.Array, valid: jax.Array, room: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cuts the accepted tokens and the bonus token where the row ends.

  Plain decoding passes through here with D = 0: there is one stop rule.

  Args:
    verdict: of the step.
    ends: `[B, D + 1]` int32, why the text ends with each of `chosen`, `EOS` or
      `STOP`; `RUNNING` if it does not. The token that ends it is emitted.
    valid: `[B]` int32, see `count_valid`.
    room: `[B]` int32, how many tokens may still be emitted; 0 for a row that
      is done.

  Returns:
    `[B]` int32, the number of tokens of `chosen` to emit, and `[B]` int32, why
    the row ends with them: `EOS`, `STOP`, `LIMIT` or `NOT_FINITE`, else
    `RUNNING`.
  """
  is_end = ends != RUNNING
  until_end = jnp.where(
    jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1) + 1, is_end.shape[1]
  )
  wanted = jnp.minimum(verdict.accepted + 1, jnp.minimum(until_end, room))
  emitted = jnp.minimum(wanted, valid)
  kept = jnp.arange(is_end.shape[1])[None] < emitted[:, None]
  end = jnp.max(jnp.where(kept, ends, RUNNING), axis=1)  # there is at most one
  reason = jnp.select(
    [emitted < wanted, end != RUNNING, emitted >= room],
    [NOT_FINITE, end, LIMIT],
    RUNNING,
  )
  return emitted.astype(jnp.int32), reason.astype(jnp.int32)


def emitted_origins(
  tree: tree_lib.TokenTree, nodes: jax.Array, verdict: Verdict
) -> jax.Array:
  """The origins of `Verdict.chosen`, `[B, D + 1]` int32; 0: the target's own.

  `tree` is `[B, M]` per field; `nodes` are the verified nodes, `[B, N]` int32.
  """
  # The token after a node was proposed as the next node of the path, if any.
  following = jnp.pad(
    verdict.path(nodes)[:, 1:],
    ((0, 0), (0, 1)),
    constant_values=tree_lib.NO_NODE,
  )
  # Where there is none, the root, whose origin is 0, takes its place.
  return jnp.take_along_axis(
    tree.origin, jnp.maximum(following, tree_lib.ROOT), axis=1
  )
