"""Prompt lookup: a proposer that searches the row's own text.

Text repeats itself. The tokens that end at a node are searched for in the row's
prompt and output, and what followed there is proposed. The longest match comes
first, among equally long ones the most recent (arXiv 2304.04487; prompt lookup
decoding, A. Saxena 2023).
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import sampling as sampling_lib
from specdec.draft import ngram as ngram_lib
from specdec.tree import tree as tree_lib

LONGEST_MATCH = 32
"""Lengths of matches that are told apart, at most; they are unrolled."""


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
    if self.num_matches < 1:
      raise ValueError(
        f'num_matches must be at least 1, got {self.num_matches}'
      )

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
    ends = tree_lib.histories(
      tree, nodes, ngram_lib.recent_tokens(tokens, length, longest)
    )
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
