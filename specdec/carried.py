"""The state that a text carries from step to step, and how it changes.

Several parts of a decode have a state that depends on the text so far: the
caches of the target and of the stages, adjusters of logits (a constraint, a
repetition penalty), watchers (stop strings, log-probabilities). They answer the
same verbs:

    start(texts)           the state after the texts that decoding begins with
    keep(state, added)     the state after a step that added tokens
    restart(state, texts)  the state after other texts that begin like the old
                           ones; parts without this verb start anew

During a step a state may also hold what each node of the tree would add to it,
such as its keys and values. `keep` takes over those of the accepted path.
"""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import hidden as hidden_lib


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
  hidden: hidden_lib.HiddenStates = flax.struct.field(
    default_factory=hidden_lib.HiddenStates
  )


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

  def append(self, array: jax.Array, new: jax.Array) -> jax.Array:
    """Writes the first `count` of `new [B, D + 1]` behind `array [B, T]`.

    `array` has an entry for each token of the text.
    """
    offsets = jnp.arange(new.shape[1])[None]
    # Writes that are out of range are dropped.
    index = jnp.where(
      offsets < self.count[:, None],
      self.length[:, None] + offsets,
      array.shape[1],
    )
    rows = jnp.arange(array.shape[0])[:, None]
    return array.at[rows, index].set(new, mode='drop')
