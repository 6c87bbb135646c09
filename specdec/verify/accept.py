"""What is the same for all rules: the target's forward, and what is emitted."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec.cache import keep
from specdec.cache import KVCache
from specdec.cache import window_mask
from specdec.model import Model
from specdec.tree.tree import ancestor_mask
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import ROOT
from specdec.tree.tree import TokenTree

# Why a row goes on no longer, see `count_emitted`.
RUNNING, LIMIT, EOS, STOP, NOT_FINITE = range(5)


class Verdict(flax.struct.PyTreeNode):
  """What the target says about a batch of trees.

  Attributes:
    path: `[B, D + 1]` int32, the accepted node of each depth, the root first;
      `NO_NODE` from where the target disagrees.
    accepted: `[B]` int32, how many guesses were accepted, at most D.
    chosen: `[B, D + 1]` int32, the target's token after each of the path; the
      tokens to emit are the first `accepted + 1`, the bonus token included.
  """

  path: jax.Array
  accepted: jax.Array
  chosen: jax.Array


def score_nodes(
  target: Model, cache: KVCache, tree: TokenTree, max_depth: int
) -> tuple[jax.Array, KVCache]:
  """One target forward over all nodes.

  Args:
    target: the model.
    cache: holds the text but for the root; room for N more entries.
    tree: `[B, N]` per field.
    max_depth: D, of any node.

  Returns:
    `[B, N, V]` float32 logits, and the cache with the entries of all nodes
    written behind `length`.
  """
  nodes = jnp.arange(tree.capacity)
  sees = jax.vmap(ancestor_mask, (0, None, None, None))(
    tree.parent, nodes, nodes, max_depth
  )
  return target.apply(
    tree.token,
    cache.length[:, None] + tree.depth,
    window_mask(cache.length, sees, cache.num_slots),
    cache,
  )


def along_path(array: jax.Array, verdict: Verdict) -> jax.Array:
  """`array [B, N, ...]` at the nodes of the path, `[B, D + 1, ...]`.

  Arbitrary behind its end.
  """
  index = jnp.maximum(verdict.path, ROOT)
  return jax.vmap(lambda one, at: one[at])(array, index)


def count_valid(logits: jax.Array, verdict: Verdict) -> jax.Array:
  """How many nodes of the path, from the root on, have usable logits.

  Logits of -inf are those of tokens that are never chosen. NaN, inf, or -inf
  for all tokens is a broken model, and no choice follows from it.

  Args:
    logits: `[B, N, V]`, as the target gave them.
    verdict: of the step.

  Returns:
    `[B]` int32; D + 1 if all have.
  """
  largest = along_path(jnp.max(logits, axis=-1), verdict)  # NaN if any is
  usable = jnp.isfinite(largest) | (verdict.path < 0)
  return jnp.sum(jnp.cumprod(usable.astype(jnp.int32), axis=1), axis=1)


def count_emitted(
  verdict: Verdict,
  is_eos: jax.Array,
  is_stop: jax.Array,
  valid: jax.Array,
  room: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Cuts the accepted tokens and the bonus where the row ends.

  Plain decoding goes through here with D = 0: one stop rule for all.

  Args:
    verdict: of the step.
    is_eos: `[B, D + 1]` bool, which of `chosen` end the text. They are emitted
      themselves.
    is_stop: `[B, D + 1]` bool, in which of them a stop string is complete;
      likewise.
    valid: `[B]` int32, see `count_valid`.
    room: `[B]` int32, how many tokens may still be emitted; 0 for a row that
      is done.

  Returns:
    `[B]` int32, how many of `chosen` to emit, and `[B]` int32, why the row
    ends with them: `EOS`, `STOP`, `LIMIT` or `NOT_FINITE`, else `RUNNING`.
  """
  is_end = is_eos | is_stop
  until_end = jnp.where(
    jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1) + 1, is_end.shape[1]
  )
  wanted = jnp.minimum(verdict.accepted + 1, jnp.minimum(until_end, room))
  emitted = jnp.minimum(wanted, valid)
  kept = jnp.arange(is_end.shape[1])[None] < emitted[:, None]
  reason = jnp.select(
    [
      emitted < wanted,
      jnp.any(is_eos & kept, axis=1),
      jnp.any(is_stop & kept, axis=1),
      emitted >= room,
    ],
    [NOT_FINITE, EOS, STOP, LIMIT],
    RUNNING,
  )
  return emitted.astype(jnp.int32), reason.astype(jnp.int32)


def commit(
  cache: KVCache, verdict: Verdict, emitted: jax.Array, num_nodes: int
) -> KVCache:
  """The target's cache after a step: the accepted path, no more of the tree.

  Args:
    cache: with the entries of all nodes written behind `length`.
    verdict: of the step.
    emitted: `[B]` int32, how many tokens were emitted; rows with 0 stay as they
      are.
    num_nodes: N.
  """
  length = cache.length
  cache = keep(
    cache, length + 1, verdict.path[:, 1:], emitted - 1, window=num_nodes
  )
  # The root is in place, hence as many entries as tokens were emitted.
  return cache.replace(length=length + emitted)


def emitted_origins(tree: TokenTree, verdict: Verdict) -> jax.Array:
  """Who proposed each of `Verdict.chosen`, `[B, D + 1]` int32; 0: nobody."""
  # The token after a node was proposed as the next node of the path, if any.
  following = jnp.pad(
    verdict.path[:, 1:], ((0, 0), (0, 1)), constant_values=NO_NODE
  )
  # Where there is none, the root stands in: nobody proposed it.
  return jnp.take_along_axis(tree.origin, jnp.maximum(following, ROOT), axis=1)
