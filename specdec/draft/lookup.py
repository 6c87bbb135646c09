"""Proposers: an n-gram table, the row's own text, earlier texts, recycling.

Text repeats itself. The tokens that end at a node are searched for in the row's
prompt and output, and what followed there is proposed. The longest match comes
first, among equally long ones the most recent (arXiv 2304.04487; prompt lookup
decoding, A. Saxena 2023).
"""

from collections.abc import Sequence
import math
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec import arguments as arguments_lib
from specdec import best as best_lib
from specdec import carried as carried_lib
from specdec import sampling as sampling_lib
from specdec.draft import candidates
from specdec.ngram import table as table_lib
from specdec.tree import tree as tree_lib

LONGEST_MATCH = 32
"""Lengths of matches that are told apart, at most; they are unrolled."""


class NGram(flax.struct.PyTreeNode, candidates.Proposer):
  """A `Proposer` that looks contexts up in a table."""

  table: table_lib.NGramTable  #: From `specdec.ngram`.

  name = 'ngram'

  @property
  def vocab_size(self) -> int:
    """V of the table."""
    return self.table.vocab_size

  @property
  def bytes_per_node(self) -> int:
    """Bytes of one look-up."""
    return self.table.lookup_bytes

  def propose(
    self, state: Any, query: candidates.Query
  ) -> tuple[jax.Array, jax.Array]:
    """The most likely tokens after the longest known context."""
    del state
    context = table_lib.find_context(
      self.table, query.histories(self.table.order - 1)
    )
    return self.table.next_tokens[context], self.table.next_log_probs[context]


class PromptLookup(flax.struct.PyTreeNode, candidates.Proposer):
  """A `Proposer` of what followed earlier in the text.

  Raises:
    ValueError: a value is out of range.
  """

  #: The probability that a match continues as it did, by the length of the
  #: match: 1 token, 2 tokens and so on; 0 ignores matches of that length. The
  #: last entry is for matches of that length or longer. Static.
  confidence: tuple[float, ...] = flax.struct.field(
    pytree_node=False, default=(0.1, 0.4, 0.6, 0.75)
  )
  #: The number of matches that are used for a node. Static.
  num_matches: int = flax.struct.field(pytree_node=False, default=4)

  name = 'lookup'

  def __post_init__(self) -> None:
    good = all(0 <= p < 1 for p in self.confidence)
    if not (good and 1 <= len(self.confidence) <= LONGEST_MATCH):
      raise ValueError(
        'confidence needs an entry per length of match, each at least 0 and'
        f' below 1, and at most {LONGEST_MATCH}, got {self.confidence}'
      )
    arguments_lib.check_count('num_matches', self.num_matches)

  def propose(
    self, state: Any, query: candidates.Query
  ) -> tuple[jax.Array, jax.Array]:
    """The tokens that followed the best matches, see `Proposer`."""
    del state
    tokens, longest = query.tokens, len(self.confidence)
    num_tokens, ends = tokens.shape[0], query.histories(longest)
    matched = jnp.zeros((ends.shape[0], num_tokens), jnp.int32)
    matches = jnp.ones_like(matched, bool)
    for back in range(longest):
      shifted = jnp.pad(tokens, (back, 0), constant_values=-1)[:num_tokens]
      matches &= (shifted[None] == ends[:, back, None]) & (shifted >= 0)[None]
      matched += matches
    confidence = jnp.array((0.0, *self.confidence))
    position = jnp.arange(num_tokens)[None]
    usable = (position < query.length - 1) & (matched > 0)
    for number, chance in enumerate(self.confidence, 1):
      if not chance:
        usable &= matched != number
    quality = jnp.where(usable, matched * num_tokens + position, -1)
    # As floats, exact below 2^24: XLA's CPU backend sorts integers in full.
    quality, at = lax.top_k(
      quality.astype(jnp.float32), min(self.num_matches, num_tokens)
    )
    quality = quality.astype(jnp.int32)
    proposed = tree_lib.pick(tokens, at + 1)
    # A token that follows several matches is proposed by the first of them.
    same = proposed[:, :, None] == proposed[:, None]
    good = (quality >= 0) & tree_lib.is_first(same)
    prob = tree_lib.pick(confidence, jnp.maximum(quality, 0) // num_tokens)
    prob = jnp.where(good, prob, 0)
    left = jnp.cumprod(1.0 - prob, axis=1) / (1.0 - prob)
    log_prob = jnp.log(jnp.maximum(prob * left, 1e-30))
    return proposed, jnp.where(good, log_prob, sampling_lib.EXCLUDED)


LONGEST_CONTEXT = 8
"""Tokens before a place by which places are sorted."""
SMALLEST_SIZE = 1 << 14
"""Tokens for which an index has room at least: few sizes, few programs."""
# Places that are looked at for a node.
_NUM_PLACES = 8


class StoredTexts(flax.struct.PyTreeNode, candidates.Proposer):
  """A `Proposer` of what followed in earlier texts; make it with `of_texts`.

  All places in the texts are sorted by the tokens before them, read backwards.
  So the places whose contexts are most like a node's lie next to each other,
  and one binary search finds them, however many texts there are (a suffix
  array, as in SuffixDecoding, arXiv 2411.04975).
  """

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
    self, state: Any, query: candidates.Query
  ) -> tuple[jax.Array, jax.Array]:
    """The tokens at the places whose contexts are most like the nodes'."""
    del state
    ends = query.histories(LONGEST_CONTEXT)
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


class RecyclingTable(flax.struct.PyTreeNode):
  """The likeliest tokens after tokens; an entry is of an id modulo S."""

  owner: jax.Array  #: `[B, S]` int32, the token that an entry is about, or -1.
  tokens: jax.Array  #: `[B, S, k]` int32, the likeliest tokens after it.
  log_probs: jax.Array  #: `[B, S, k]` float32, their log-probabilities.


class Recycling(flax.struct.PyTreeNode, candidates.Proposer):
  """A `Proposer` of what the target last rated best after a token.

  Every verification rates continuations of all nodes, rejected ones too, and
  only one token of each is used. A table keeps the k best after each token, so
  a tree grows where the text does not repeat itself (Token Recycling, arXiv
  2408.08696).

  Raises:
    ValueError: a value is out of range.
  """

  #: k, the tokens that are kept after each token. Static.
  num_kept: int = flax.struct.field(pytree_node=False, default=4)
  #: S, the entries of the table of each row. Of tokens that share an entry, the
  #: last is known. Static.
  size: int = flax.struct.field(pytree_node=False, default=8192)
  #: The share of the target's probabilities that is believed: another context
  #: had them. Static.
  trust: float = flax.struct.field(pytree_node=False, default=0.3)

  name = 'recycling'

  def __post_init__(self) -> None:
    arguments_lib.check_count('num_kept', self.num_kept)
    arguments_lib.check_count('size', self.size)
    if not 0 < self.trust <= 1:
      raise ValueError(f'trust must be above 0 and at most 1, got {self.trust}')

  @property
  def bytes_per_node(self) -> int:
    """Bytes of one entry."""
    return 4 + 8 * self.num_kept

  def start(self, texts: carried_lib.Texts) -> RecyclingTable:
    """Empty tables."""
    shape = (texts.tokens.shape[0], self.size)
    return RecyclingTable(
      owner=jnp.full(shape, -1, jnp.int32),
      tokens=jnp.zeros((*shape, self.num_kept), jnp.int32),
      log_probs=jnp.zeros((*shape, self.num_kept)),
    )

  def observe(
    self, state: RecyclingTable, seen: carried_lib.Verified
  ) -> RecyclingTable:
    """Enters the best tokens after all nodes."""
    number = min(self.num_kept, seen.logits.shape[-1])
    best, tokens = best_lib.top_k(seen.logits, number)
    total = jax.nn.logsumexp(seen.logits, axis=-1, keepdims=True)
    log_probs = jnp.minimum(best - total, 0.0) + math.log(self.trust)
    usable = (seen.tokens >= 0) & jnp.all(jnp.isfinite(log_probs), axis=-1)
    entry = jnp.where(usable, seen.tokens % self.size, self.size)
    # The last of several nodes for an entry counts: writes to one place have
    # no order.
    later = jnp.triu(jnp.ones((entry.shape[1],) * 2, bool), 1)[None]
    is_again = jnp.any((entry[:, :, None] == entry[:, None]) & later, axis=2)
    entry = jnp.where(is_again, self.size, entry)
    rows = jnp.arange(entry.shape[0])[:, None]
    put = lambda array, new: array.at[rows, entry].set(new, mode='drop')
    missing = ((0, 0), (0, 0), (0, self.num_kept - number))
    pad = lambda array, value: jnp.pad(array, missing, constant_values=value)
    return RecyclingTable(
      owner=put(state.owner, seen.tokens),
      tokens=put(state.tokens, pad(tokens, 0)),
      log_probs=put(state.log_probs, pad(log_probs, sampling_lib.EXCLUDED)),
    )

  def propose(
    self, state: RecyclingTable, query: candidates.Query
  ) -> tuple[jax.Array, jax.Array]:
    """The tokens that the target rated best after the tokens of the nodes."""
    token = tree_lib.pick(query.tree.token, query.nodes)
    entry = token % self.size
    known = (state.owner[entry] == token)[:, None]
    log_probs = jnp.where(known, state.log_probs[entry], sampling_lib.EXCLUDED)
    return state.tokens[entry], log_probs
