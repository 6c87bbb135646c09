"""The log-probabilities of the tokens of a text, in one pass over it."""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec import arguments as arguments_lib
from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec import sampling as sampling_lib

MOST_ALTERNATIVES = 20
"""The most alternatives to a token."""

# Tokens of one forward, so that logits of large vocabularies fit into memory.
_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class TokenScore:
  """How likely a token was after those before it."""

  token: int  #: Its id.
  log_prob: float  #: Before bias, penalty, temperature and filters.
  best: list[tuple[int, float]]  #: The likeliest tokens and theirs, in order.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty(spec: model_lib.ModelSpec, num_slots: int) -> cache_lib.KVCache:
  return cache_lib.with_window(spec.init_cache(1, num_slots), _CHUNK)


@functools.partial(jax.jit, donate_argnums=3)
def _read(
  model: model_lib.LanguageModel,
  tokens: jax.Array,
  following: jax.Array,
  cache: cache_lib.KVCache,
) -> tuple[jax.Array, jax.Array, jax.Array, cache_lib.KVCache]:
  """The log-probability of what follows each token, and the best tokens."""
  positions = cache.length[:, None] + jnp.arange(_CHUNK)[None]
  mask = cache_lib.causal_mask(cache.length, _CHUNK, cache.num_slots)
  logits, cache = model.apply(tokens, positions, mask, cache)
  cache = cache_lib.advance(cache, jnp.full_like(cache.length, _CHUNK))
  log_probs = sampling_lib.log_softmax(logits[0])
  own = jnp.take_along_axis(log_probs, following[0][:, None], axis=1)[:, 0]
  number = min(MOST_ALTERNATIVES, log_probs.shape[1])
  best, ids = jax.lax.top_k(log_probs, number)
  return own, best, ids, cache_lib.with_window(cache, _CHUNK)


def score(
  model: model_lib.LanguageModel, ids: Sequence[int]
) -> list[TokenScore]:
  """The scores of all tokens of a text but the first; it fits the context."""
  length = len(ids)
  num_slots = max(arguments_lib.padded_length(length), _CHUNK)
  tokens, _ = arguments_lib.pad([ids], num_slots + 1)
  num_slots += -num_slots % model.spec.slot_multiple
  cache = _empty(model.spec, num_slots)
  found: list[TokenScore] = []
  for begin in range(0, length - 1, _CHUNK):
    now, after = (tokens[:, i : i + _CHUNK] for i in (begin, begin + 1))
    *scored, cache = _read(model, now, after, cache)
    own, best, best_ids = (np.asarray(array).tolist() for array in scored)
    for place in range(min(_CHUNK, length - 1 - begin)):
      pairs = zip(best_ids[place], best[place], strict=True)
      token = ids[begin + place + 1]
      found.append(TokenScore(token, own[place], [*pairs]))
  return found
