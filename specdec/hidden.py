"""Hidden states of a target, which drafting heads read.

They lie in the target's cache beside keys and values (`KVCache.hidden`), one
for every token that it has read, and are kept and dropped with these. A head
reads for each token the states at the token before it (EAGLE, arXiv 2401.15077,
section 4.1):

    token          a    b    c    d
    state read     0   h(a) h(b) h(c)
"""

from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib


class HiddenStates(flax.struct.PyTreeNode):
  """Hidden states at some consecutive positions of every text."""

  #: `[B, 1, n, width]` by layer, see `KVCache.hidden`.
  states: Mapping[int, jax.Array] = flax.struct.field(default_factory=dict)
  start: jax.Array | None = None  #: `[B]` int32, the first position.

  @property
  def num_positions(self) -> int:
    """N."""
    return next(iter(self.states.values())).shape[2]

  def before(
    self, positions: jax.Array, layers: tuple[int, ...]
  ) -> tuple[jax.Array, ...]:
    """`at` the tokens before `positions [B, W]`."""
    return self.at(positions - 1, layers)

  def at(
    self, positions: jax.Array, layers: tuple[int, ...]
  ) -> tuple[jax.Array, ...]:
    """`[B, W, width]` of each layer, at the tokens at `positions [B, W]`.

    Zeros for positions that are not among these, such as -1.
    """
    assert self.start is not None
    index = positions - self.start[:, None]
    found = []
    for layer in layers:
      states = self.states[layer][:, 0]
      known = (index >= 0) & (index < states.shape[1])
      at = jnp.clip(index, 0, states.shape[1] - 1)[:, :, None]
      taken = jnp.take_along_axis(states, at, axis=1)
      found.append(jnp.where(known[:, :, None], taken, 0))
    return tuple(found)


def of_text(cache: cache_lib.KVCache) -> HiddenStates:
  """The hidden states of the whole text. Slot i holds those at position i."""
  return HiddenStates(cache.hidden, jnp.zeros_like(cache.length))


def before_root(
  cache: cache_lib.KVCache, length: jax.Array, number: int
) -> HiddenStates:
  """The states at the last `number` tokens before the roots.

  The texts have `length [B]` tokens, the roots included.

  A step reads these alone: it would be slow to take the whole array into the
  loop of growth.
  """
  if not cache.hidden:
    return HiddenStates()
  start = jnp.maximum(length - 1 - number, 0)
  read = lambda array: cache.ops.read(array, start, number)
  return HiddenStates(jax.tree.map(read, cache.hidden), start)
