"""The state that a text carries from step to step, and how it changes.

Several parts of a decode have a state that depends on the text so far: the
caches of the target and of the stages, adjusters of logits (a constraint, a
repetition penalty), watchers (stop strings, log-probabilities). They answer the
same verbs:

    start(texts)           the state after the texts that decoding begins with
    keep(state, added)     the state after a step that added tokens
    observe(state, seen)   before that, by stages and watchers: the state after
                           the target's verification
    restart(state, texts)  the state after other texts that begin like the old
                           ones; parts without this verb start again

During a step a state may also hold what each node of the tree would add to it,
such as its keys and values. `keep` takes over what the accepted path would add.

Drafting heads also read the target's hidden states. Its cache holds them next
to keys and values (`KVCache.hidden`), one for every token that it has read, and
keeps and drops them together. A head reads for each token the states at the
token before it (EAGLE, arXiv 2401.15077, section 4.1):

    token          a    b    c    d
    state read     0   h(a) h(b) h(c)
"""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.tree import tree as tree_lib


class HiddenStates(flax.struct.PyTreeNode):
  """Hidden states at some consecutive positions of every text."""

  #: `[B, 1, n, width]` by layer, see `KVCache.hidden`.
  states: Mapping[int, jax.Array] = flax.struct.field(default_factory=dict)
  start: jax.Array | None = None  #: `[B]` int32, the first position.

  @property
  def num_positions(self) -> int:
    """The number of positions, n."""
    return next(iter(self.states.values())).shape[2]

  def at(
    self, positions: jax.Array, layers: tuple[int, ...]
  ) -> tuple[jax.Array, ...]:
    """`[B, W, width]` of each layer, at the tokens at `positions [B, W]`.

    Zeros for positions that are not among these, such as -1.
    """
    assert self.start is not None
    index = positions - self.start[:, None]
    taken = []
    for layer in layers:
      states = self.states[layer][:, 0]
      is_held = (index >= 0) & (index < states.shape[1])
      at = jnp.clip(index, 0, states.shape[1] - 1)[:, :, None]
      state = jnp.take_along_axis(states, at, axis=1)
      taken.append(jnp.where(is_held[:, :, None], state, 0))
    return tuple(taken)


class Texts(flax.struct.PyTreeNode):
  """Texts that decoding begins with, or goes on from."""

  #: `[B, P]` int32, padded at the end with any valid token.
  tokens: jax.Array
  #: `[B]` int32; in `restart` 0 for a row that has nothing to read.
  length: jax.Array
  #: T, the longest that a text may become, in tokens; static.
  num_slots: int = flax.struct.field(pytree_node=False)
  #: `[B]` int32, the tokens of each text, from its first on, that the state has
  #: already taken in. None in `start`.
  kept: jax.Array | None = None
  #: The target's hidden states at all tokens except the last.
  hidden: HiddenStates = HiddenStates()


class Added(flax.struct.PyTreeNode):
  """The tokens and nodes that one step adds to the texts."""

  #: `[B, D + 1]` int32, the accepted node of each depth, the root first, then
  #: `NO_NODE`.
  path: jax.Array
  #: `[B, D + 1]` int32, the target's token after each node of the path.
  tokens: jax.Array
  #: `[B]` int32, how many of these tokens and nodes become text; 0 for a row
  #: that is done.
  count: jax.Array
  length: jax.Array  #: `[B]` int32, of the texts before the step.

  def append(
    self, arrays: tuple[jax.Array, ...], new: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, ...]:
    """Writes the first `count` of each of `new [B, D + 1]` after the text.

    `arrays`, `[B, T]` each, have an entry for each token of the text. For the
    values see `tree.scatter`.
    """
    num_slots, offsets = arrays[0].shape[1], jnp.arange(self.tokens.shape[1])
    # Writes that are out of range are dropped.
    index = jnp.where(
      offsets[None] < self.count[:, None],
      self.length[:, None] + offsets[None],
      num_slots,
    )
    # A TPU takes longer to look up for all slots of a text.
    return lax.platform_dependent(
      arrays,
      index,
      new,
      cuda=jax.vmap(tree_lib.looked_up),
      default=jax.vmap(tree_lib.scattered),
    )


class Verified(flax.struct.PyTreeNode):
  """The target's logits at all nodes of one step, rejected ones too."""

  #: `[B, N]` int32, the token of each node, the root first; -1 for entries
  #: without a node and for rows that are done.
  tokens: jax.Array
  #: `[B, N, V]` float32, the target's after each node, as the model gave them.
  logits: jax.Array


def of_text(cache: cache_lib.KVCache) -> HiddenStates:
  """The hidden states of the whole text: slot i has those at position i."""
  return HiddenStates(cache.hidden, jnp.zeros_like(cache.length))


def before_root(
  cache: cache_lib.KVCache, length: jax.Array, num_tokens: int
) -> HiddenStates:
  """The states at the last `num_tokens` tokens before the roots.

  The texts have `length [B]` tokens, the roots included.

  A step reads these alone: it would be slow to take the whole array into the
  loop of growth.
  """
  if not cache.hidden:
    return HiddenStates()
  start = jnp.maximum(length - 1 - num_tokens, 0)
  read = lambda array: cache.ops.read(array, start, num_tokens)
  return HiddenStates(jax.tree.map(read, cache.hidden), start)


def start(carriers: tuple[Any, ...], texts: Texts) -> tuple[Any, ...]:
  """The states of adjusters or of watchers after texts."""
  return tuple(carrier.start(texts) for carrier in carriers)
