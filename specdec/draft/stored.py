"""A proposer that looks up in earlier texts: a sorted index of all of them.

All places in the texts are sorted by the tokens before them, read backwards. So
the places whose contexts are most like a node's lie next to each other, and one
binary search finds them, however many texts there are (a suffix array, as in
SuffixDecoding, arXiv 2411.04975).
"""

from collections.abc import Sequence

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec import sampling as sampling_lib
from specdec.draft import lookup
from specdec.tree import tree as tree_lib

LONGEST_CONTEXT = 8
"""Tokens before a place by which places are sorted."""
SMALLEST_SIZE = 1 << 14
"""Tokens for which an index has room at least: few sizes, few programs."""
# Places that are looked at for a node.
_NUM_PLACES = 8


class StoredTexts(flax.struct.PyTreeNode):
  """A `Proposer` of what followed in earlier texts; make it with `of_texts`."""

  #: `[S]` int32, the texts, each after `LONGEST_CONTEXT` times -1, then -1.
  tokens: jax.Array
  #: `[S]` int32, the indices of tokens after others, sorted; then -1.
  places: jax.Array
  num_places: jax.Array  #: `[]` int32, without those -1.
  #: The probability that a text goes on as after a match of 1 token, 2 tokens
  #: and so on; the last entry is for longer ones, too. Static.
  confidence: tuple[float, ...] = flax.struct.field(
    pytree_node=False, default=(0.2, 0.4, 0.6, 0.75)
  )

  name = 'store'
  vocab_size = None

  @classmethod
  def of_texts(cls, texts: Sequence[np.typing.ArrayLike]) -> 'StoredTexts':
    """The index of texts of token ids; S is a power of 2."""
    apart = np.full(LONGEST_CONTEXT, -1)
    parts = [part for text in texts for part in (apart, np.asarray(text, int))]
    tokens = np.concatenate([*parts, [-1]])
    size = max(SMALLEST_SIZE, 1 << (tokens.size - 1).bit_length())
    tokens = np.pad(tokens, (0, size - tokens.size), constant_values=-1)
    places = 1 + np.flatnonzero((tokens[1:] >= 0) & (tokens[:-1] >= 0))
    # The last key counts most.
    keys = [tokens[places - back] for back in range(LONGEST_CONTEXT, 0, -1)]
    places = places[np.lexsort(keys)] if places.size else places
    return cls(
      tokens=jnp.asarray(tokens, jnp.int32),
      places=jnp.asarray(
        np.pad(places, (0, size - places.size), constant_values=-1), jnp.int32
      ),
      num_places=jnp.asarray(places.size, jnp.int32),
    )

  @property
  def bytes_per_node(self) -> int:
    """Bytes that one search reads; whole cache lines are not counted."""
    probes = self.places.shape[0].bit_length()
    return 4 * (probes + _NUM_PLACES) * (1 + LONGEST_CONTEXT)

  def _contexts(self, index: jax.Array) -> jax.Array:
    """`[..., L]`, the tokens before sorted places, the last token first."""
    back = jnp.arange(1, LONGEST_CONTEXT + 1).reshape(*(1,) * index.ndim, -1)
    place = tree_lib.pick(self.places, index)[..., None]
    return tree_lib.pick(self.tokens, place - back)

  def _search(self, ends: jax.Array) -> jax.Array:
    """The number of places before each of `ends [W, L]`, `[W]` int32."""
    size = self.places.shape[0]

    def halve(step: int, before: jax.Array) -> jax.Array:
      probe = before + (size >> step)
      context = self._contexts(probe - 1)
      # The first difference decides.
      differs = context != ends
      at = jnp.argmax(differs, axis=1)[:, None]
      of = lambda array: jnp.take_along_axis(array, at, axis=1)[:, 0]
      is_before = jnp.any(differs, axis=1) & (of(context) < of(ends))
      fits = (probe <= self.num_places) & is_before
      return jnp.where(fits, probe, before)

    start = jnp.zeros(ends.shape[0], jnp.int32)
    return lax.fori_loop(0, size.bit_length(), halve, start)

  def propose(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """The tokens at the places whose contexts are most like the nodes'."""
    recent = lookup.recent_tokens(tokens, length, LONGEST_CONTEXT)
    ends = tree_lib.histories(tree, nodes, recent)
    offsets = jnp.arange(_NUM_PLACES) - _NUM_PLACES // 2
    index = self._search(ends)[:, None] + offsets[None]
    same = (self._contexts(index) == ends[:, None]) & (ends >= 0)[:, None]
    matched = jnp.sum(jnp.cumprod(same, axis=2), axis=2)
    matched = jnp.where((index >= 0) & (index < self.num_places), matched, 0)
    # Places with equally long matches share the confidence, and those with
    # shorter ones what is left.
    longest = len(self.confidence)
    chance = jnp.array((0.0, *self.confidence))[jnp.minimum(matched, longest)]
    equal = matched[:, :, None] == matched[:, None]
    number = jnp.sum(equal, axis=2)
    doubt = jnp.log1p(-chance) / number
    longer = matched[:, :, None] < matched[:, None]
    left = jnp.sum(jnp.where(longer, doubt[:, None], 0.0), axis=2)
    log_prob = jnp.log(jnp.maximum(chance / number, 1e-30)) + left
    proposed = tree_lib.pick(self.tokens, tree_lib.pick(self.places, index))
    return proposed, jnp.where(matched > 0, log_prob, sampling_lib.EXCLUDED)
