"""A language model that is a table of logits, for tests and notebooks.

The next token depends on the last token alone, so the cache holds no layers.
"""

import jax
import jax.numpy as jnp

from specdec.cache import init_empty_cache
from specdec.model import LanguageModel
from specdec.model import ModelSpec


def _apply(params, tokens, positions, mask, cache):
  del positions, mask
  return params['logits'][tokens], cache


def table_model(logits: jax.Array, *, max_positions: int) -> LanguageModel:
  """A Markov chain of order 1 as a model.

  Row i of the logits `[V, V]` is for the token after token i. Tables of one
  size share their spec, and so their compiled programs.

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
      init_cache=init_empty_cache,
      vocab_size=logits.shape[0],
      max_positions=max_positions,
      weight_bytes=logits.nbytes,
      cache_bytes_per_slot=0,
    ),
  )
