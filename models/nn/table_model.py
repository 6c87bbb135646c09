"""A language model that is a table of logits, for tests and notebooks.

The next token depends on the last token alone, so the cache holds no layers.
"""

import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import model as model_lib


def _apply(
  params: dict[str, jax.Array],
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  cache: cache_lib.KVCache,
) -> tuple[jax.Array, cache_lib.KVCache]:
  del positions, mask
  return params['logits'][tokens], cache


def table_model(
  logits: jax.Array, *, max_positions: int
) -> model_lib.LanguageModel:
  """A Markov chain of order 1 as a model.

  Row i of the logits `[V, V]` is for the token after token i. Tables of one
  size share their spec, and so their compiled programs.

  Raises:
    ValueError: `logits` is not square.
  """
  logits = jnp.asarray(logits, jnp.float32)
  if logits.ndim != 2 or logits.shape[0] != logits.shape[1]:
    raise ValueError(f'logits must be [V, V], got shape {logits.shape}')
  return model_lib.LanguageModel(
    params={'logits': logits},
    spec=model_lib.ModelSpec(
      apply=_apply,
      init_cache=cache_lib.init_empty_cache,
      vocab_size=logits.shape[0],
      max_positions=max_positions,
      weight_bytes=logits.nbytes,
      cache_bytes_per_slot=0,
    ),
  )
