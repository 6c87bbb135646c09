"""An n-gram table as a proposer."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec.ngram import table as table_lib
from specdec.tree import tree as tree_lib


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
