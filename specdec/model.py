"""The model contract: what decoding asks of a language model."""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.struct
import jax

from specdec.cache import KVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
  """A language model as pure functions; hashable, so static under `jit`.

  Attributes:
    apply: `(params, tokens [B, L], positions [B, L], mask [B, L, S], cache) ->
      (logits [B, L, V] float32, cache)`. Writes its L entries to the cache and
      looks only where the mask is true. Positions and mask being arguments,
      prefill, a chain, a tree and plain decoding are the same forward.
      Positions beyond the context must not give NaN: padding has them.
    init_cache: `(batch_size, num_slots) -> KVCache`, empty.
    vocab_size: V.
    max_positions: the longest context.
    weight_bytes: read from memory by one forward. Where that depends on the
      tokens (a mixture of experts), by that of a single one.
    cache_bytes_per_slot: read from memory per row, forward and visible slot.
    parameters: multiplied with each position.
  """

  apply: Callable[..., tuple[jax.Array, KVCache]]
  init_cache: Callable[[int, int], KVCache]
  vocab_size: int
  max_positions: int
  weight_bytes: int
  cache_bytes_per_slot: int
  parameters: int = 0


class Model(flax.struct.PyTreeNode):
  """A language model with its weights: a pytree whose structure is static.

  Attributes:
    params: any pytree of arrays.
    definition: what to do with them.
  """

  params: Any
  definition: LanguageModel = flax.struct.field(pytree_node=False)

  def apply(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: KVCache,
  ) -> tuple[jax.Array, KVCache]:
    """One forward, see `LanguageModel.apply`."""
    with jax.named_scope('forward'):  # as profiles and compiled programs say
      return self.definition.apply(self.params, tokens, positions, mask, cache)
