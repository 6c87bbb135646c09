"""Proposers that look up: in an n-gram table, or in the row's own text.

Text repeats itself. The tokens that end at a node are searched for in the row's
prompt and output, and what followed there is proposed. The longest match comes
first, among equally long ones the most recent (arXiv 2304.04487; prompt lookup
decoding, A. Saxena 2023).
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import arguments as arguments_lib
from specdec import sampling as sampling_lib
from specdec.ngram import table as table_lib
from specdec.tree import tree as tree_lib

LONGEST_MATCH = 32
"""Lengths of matches that are told apart, at most; they are unrolled."""


def recent_tokens(
  tokens: jax.Array, length: jax.Array, number: int
) -> jax.Array:
  """`[number]` int32, the last tokens of a text, the last token first.

  `tokens`: `[T]` int32; `length`: `[]` int32. -1 where the text has no more.
  """
  index = length - 1 - jnp.arange(number)
  return jnp.where(index >= 0, tokens[index], -1)


class NGram(flax.struct.PyTreeNode):
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
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """The most likely tokens after the longest known context."""
    recent = recent_tokens(tokens, length, self.table.order - 1)
    context = table_lib.find_context(
      self.table, tree_lib.histories(tree, nodes, recent)
    )
    return self.table.next_tokens[context], self.table.next_log_probs[context]


class PromptLookup(flax.struct.PyTreeNode):
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
  vocab_size = None

  def __post_init__(self) -> None:
    good = all(0 <= p < 1 for p in self.confidence)
    if not (good and 1 <= len(self.confidence) <= LONGEST_MATCH):
      raise ValueError(
        'confidence needs an entry per length of match, each at least 0 and'
        f' below 1, and at most {LONGEST_MATCH}, got {self.confidence}'
      )
    arguments_lib.check_count('num_matches', self.num_matches)

  @property
  def bytes_per_node(self) -> int:
    """0, since the text is in the processor's own cache."""
    return 0

  def propose(
    self,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """The tokens that followed the best matches, see `Proposer`."""
    longest, num_tokens = len(self.confidence), tokens.shape[0]
    recent = recent_tokens(tokens, length, longest)
    ends = tree_lib.histories(tree, nodes, recent)
    matched = jnp.zeros((nodes.shape[0], num_tokens), jnp.int32)
    matches = jnp.ones_like(matched, bool)
    for back in range(longest):
      shifted = jnp.pad(tokens, (back, 0), constant_values=-1)[:num_tokens]
      matches &= (shifted[None] == ends[:, back, None]) & (shifted >= 0)[None]
      matched += matches
    confidence = jnp.array((0.0, *self.confidence))
    position = jnp.arange(num_tokens)[None]
    usable = (position < length - 1) & (matched > 0)
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
