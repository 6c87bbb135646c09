"""A language model that is a table: exact expectations for tests and notebooks.

The next token depends on the last one alone, so there is nothing to cache.
"""

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec.model import LanguageModel
from specdec.model import ModelSpec


def _apply(params, tokens, positions, mask, cache):
  del positions, mask
  return params['logits'][tokens], cache


def _init_cache(batch_size: int, num_slots: int) -> kv.KVCache:
  return kv.init_cache(
    batch_size,
    num_slots,
    num_layers=0,
    num_heads=1,
    head_width=1,
    dtype=jnp.float32,
  )


def table_model(logits: jax.Array, *, max_positions: int) -> LanguageModel:
  """A model of order 1.

  Tables of one size share their definition, and so their compiled programs.

  Args:
    logits: `[V, V]`; row i holds the logits of the token after token i.
    max_positions: the longest context; the table itself has no limit.

  Returns:
    The model, with an empty cache. A forward is counted as reading all of the
    table.

  Raises:
    ValueError: `logits` is not square.
  """
  logits = jnp.asarray(logits, jnp.float32)
  if logits.ndim != 2 or logits.shape[0] != logits.shape[1]:
    raise ValueError(f'logits must be [V, V], got shape {logits.shape}')
  return LanguageModel(
    params={'logits': logits},
    spec=ModelSpec(
      apply=_apply,
      init_cache=_init_cache,
      vocab_size=logits.shape[0],
      max_positions=max_positions,
      weight_bytes=logits.nbytes,
      cache_bytes_per_slot=0,
    ),
  )
