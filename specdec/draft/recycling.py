"""Recycling: what the target last rated best after a token is proposed again.

Every verification rates continuations of all nodes, rejected ones too, and only
one token of each is used. A table keeps the k best after each token, so a tree
grows where the text does not repeat itself (Token Recycling, arXiv 2408.08696).
"""

import math

import flax.struct
import jax
import jax.numpy as jnp

from specdec import arguments as arguments_lib
from specdec import best as best_lib
from specdec import carried as carried_lib
from specdec import sampling as sampling_lib
from specdec.draft import candidates
from specdec.tree import tree as tree_lib


class RecyclingTable(flax.struct.PyTreeNode):
  """The likeliest tokens after tokens; an entry is of an id modulo S."""

  owner: jax.Array  #: `[B, S]` int32, the token that an entry is about, or -1.
  tokens: jax.Array  #: `[B, S, k]` int32, the likeliest tokens after it.
  log_probs: jax.Array  #: `[B, S, k]` float32, their log-probabilities.


class Recycling(flax.struct.PyTreeNode, candidates.Learner):
  """A `Learner` of the target's own second choices.

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

  def propose_for(
    self,
    state: RecyclingTable,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """The tokens that the target rated best after the tokens of the nodes."""
    del tokens, length
    token = tree_lib.pick(tree.token, nodes)
    entry = token % self.size
    known = (state.owner[entry] == token)[:, None]
    log_probs = jnp.where(known, state.log_probs[entry], sampling_lib.EXCLUDED)
    return state.tokens[entry], log_probs
