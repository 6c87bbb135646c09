"""Match verification: a guess stands if the target chose the same token.

The target's choice at every node is a function of its logits and of the
position alone (see `specdec.sampling`), so what is emitted is what plain
decoding would have emitted, whatever was guessed.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec.cache import keep
from specdec.cache import KVCache
from specdec.masks import window_mask
from specdec.model import Model
from specdec.sampling import choose
from specdec.sampling import Sampling
from specdec.tree import accepted_path
from specdec.tree import ancestor_mask
from specdec.tree import NO_NODE
from specdec.tree import ROOT
from specdec.tree import TokenTree


class Verdict(flax.struct.PyTreeNode):
  """What the target says about a batch of trees.

  Attributes:
    path: `[B, D + 1]` int32, the accepted node of each depth, the root first;
      `NO_NODE` from where the target disagrees.
    accepted: `[B]` int32, how many guesses were accepted, at most D.
    chosen: `[B, D + 1]` int32, the target's choice after each of the path; the
      tokens to emit are the first `accepted + 1`, the bonus token included.
    cache: of the target, with the entries of all nodes written behind `length`.
  """

  path: jax.Array
  accepted: jax.Array
  chosen: jax.Array
  cache: KVCache


def verify(
  target: Model,
  cache: KVCache,
  tree: TokenTree,
  noise: jax.Array,
  sampling: Sampling,
) -> Verdict:
  """One target forward over all nodes.

  Args:
    target: the model.
    cache: holds the text but for the root; room for N more entries.
    tree: `[B, N]` per field.
    noise: `[B, D + 1, V]` float32; entry d is of the position that follows
      nodes of depth d.
    sampling: validated.
  """
  max_depth = noise.shape[1] - 1
  nodes = jnp.arange(tree.capacity)
  sees = jax.vmap(ancestor_mask, (0, None, None, None))(
    tree.parent, nodes, nodes, max_depth
  )
  logits, cache = target.apply(
    tree.token,
    cache.length[:, None] + tree.depth,
    window_mask(cache.length, sees, cache.num_slots),
    cache,
  )
  noise_of_nodes = jax.vmap(lambda one, depth: one[depth])(noise, tree.depth)
  choices = choose(logits, noise_of_nodes, sampling)
  path, accepted = jax.vmap(accepted_path, (0, 0, None))(
    tree, choices, max_depth
  )
  return Verdict(
    path=path,
    accepted=accepted,
    chosen=jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1),
    cache=cache,
  )


def commit(verdict: Verdict, emitted: jax.Array, num_nodes: int) -> KVCache:
  """The target's cache after a step: the accepted path, no more of the tree.

  Args:
    verdict: of the step.
    emitted: `[B]` int32, how many tokens were emitted; rows with 0 stay as they
      are.
    num_nodes: N.
  """
  length = verdict.cache.length
  cache = keep(
    verdict.cache,
    length + 1,
    verdict.path[:, 1:],
    emitted - 1,
    window=num_nodes,
  )
  # The root is in place, hence as many entries as tokens were emitted.
  return cache.replace(length=length + emitted)


def count_emitted(
  accepted: jax.Array,
  chosen: jax.Array,
  room: jax.Array,
  eos_ids: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
  """Cuts the accepted tokens and the bonus at the limit and after an EOS.

  Plain decoding goes through here with D = 0: one stop rule for all.

  Args:
    accepted: `[B]` int32, as in `Verdict`.
    chosen: `[B, D + 1]` int32, likewise.
    room: `[B]` int32, how many tokens may still be emitted; 0 for a row that
      is done.
    eos_ids: tokens that end a row; they are emitted themselves.

  Returns:
    `[B]` int32, how many of `chosen` to emit, and `[B]` bool, whether the row
    is done.
  """
  is_end = jnp.isin(chosen, jnp.array(eos_ids, jnp.int32))
  until_end = jnp.where(
    jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1) + 1, chosen.shape[1]
  )
  emitted = jnp.minimum(accepted + 1, jnp.minimum(until_end, room))
  kept = jnp.arange(chosen.shape[1])[None] < emitted[:, None]
  ended = jnp.any(is_end & kept, axis=1)
  return emitted.astype(jnp.int32), ended | (emitted >= room)


def emitted_origins(tree: TokenTree, verdict: Verdict) -> jax.Array:
  """Who proposed each of `Verdict.chosen`, `[B, D + 1]` int32; 0: nobody."""
  # The token after a node was proposed as the next node of the path, if any.
  following = jnp.pad(
    verdict.path[:, 1:], ((0, 0), (0, 1)), constant_values=NO_NODE
  )
  # Where there is none, the root stands in: nobody proposed it.
  return jnp.take_along_axis(tree.origin, jnp.maximum(following, ROOT), axis=1)
