"""Drafting a chain of tokens with a small language model.

The draft's cache lags the sequence. After a step that accepted every draft
token, the last of them was never fed to the draft model, so its key and value
are missing; this is the classic off-by-one of the field. Here the first forward
of every step has two tokens wide room: whatever is missing, and the root.

    length of the sequence      7       tokens  a b c d e f g      root g
    draft cache, usual case     6               a b c d e f        feeds g, -
    after full acceptance       5               a b c d e          feeds f, g
"""

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.cache import KVCache
from specdec.masks import causal_mask
from specdec.model import Model
from specdec.sampling import choose
from specdec.sampling import Sampling


class Chain(flax.struct.PyTreeNode):
  """The drafted continuation of each row's root.

  Attributes:
    tokens: `[B, g]` int32.
    cache: of the draft, with `length` still as before drafting.
  """

  tokens: jax.Array
  cache: KVCache


def _gather_tokens(tokens, start, count):
  index = start[:, None] + jnp.arange(count)[None]
  return jnp.take_along_axis(tokens, index, axis=1), index


def draft_chain(
  draft: Model,
  cache: KVCache,
  tokens: jax.Array,
  length: jax.Array,
  noise: jax.Array,
  sampling: Sampling,
) -> Chain:
  """Drafts `g = noise.shape[1]` tokens in g forwards of the draft.

  Args:
    draft: the draft model.
    cache: holds each row's first `length - 1` tokens, or one fewer.
    tokens: `[B, T]` int32, the sequences so far; `T > length` in every row.
    length: `[B]` int32, their lengths; the root is the token before.
    noise: `[B, g, V]` float32, of the positions `length ... length + g - 1`.
      The same noise that the target will use: drafts guess the very draw.
    sampling: validated; the target's.

  Returns:
    The drafted tokens, and the cache with their keys and values written.
  """
  rows = jnp.arange(tokens.shape[0])
  num_slots = cache.num_slots

  pair, positions = _gather_tokens(tokens, cache.length, 2)
  mask = causal_mask(cache.length, 2, num_slots)
  logits, written = draft.apply(pair, positions, mask, cache)
  root = length - 1 - cache.length  # 0, or 1 where a token was missing
  first = choose(logits[rows, root], noise[:, 0], sampling)

  def extend(carry, noise):
    token, position, cache = carry
    cache = cache.replace(length=position)
    mask = causal_mask(position, 1, num_slots)
    logits, cache = draft.apply(token[:, None], position[:, None], mask, cache)
    token = choose(logits[:, 0], noise, sampling)
    return (token, position + 1, cache), token

  (_, _, written), rest = lax.scan(
    extend, (first, length, written), jnp.moveaxis(noise[:, 1:], 1, 0)
  )
  drafted = jnp.concatenate([first[:, None], rest.T], axis=1)
  return Chain(tokens=drafted, cache=written.replace(length=cache.length))


def commit_chain(
  cache: KVCache, length: jax.Array, num_emitted: jax.Array, num_drafted: int
) -> KVCache:
  """Keeps what the draft has seen of the tokens that were emitted.

  Args:
    cache: from `draft_chain`.
    length: `[B]` int32, of the sequences before the step.
    num_emitted: `[B]` int32, at most g + 1; rows with 0 stay as they are.
    num_drafted: g. The last drafted token was never fed to the draft.
  """
  seen = length - 1 + jnp.minimum(num_emitted, num_drafted)
  return cache.replace(length=jnp.where(num_emitted > 0, seen, cache.length))
