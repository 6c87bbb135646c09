"""The decode loop: one jitted `lax.while_loop`, prompt to last token.

Each step, for every row at once:

    draft    g tokens after the root (none, for plain decoding)
    verify   root and drafted tokens in one target forward
    accept   as far as the target agrees, plus its own bonus token

Rows advance by their own counts. Plain decoding is this loop with g = 0.
"""

import dataclasses
import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.cache import KVCache
from specdec.drafting import commit_chain
from specdec.drafting import draft_chain
from specdec.masks import causal_mask
from specdec.model import Model
from specdec.sampling import choose
from specdec.sampling import position_noise
from specdec.sampling import Sampling
from specdec.statistics import count_step
from specdec.statistics import Counters
from specdec.statistics import init_counters
from specdec.verification import count_accepted
from specdec.verification import count_emitted


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """What is static about a decode: changing it recompiles.

  Attributes:
    num_draft_tokens: g, drafted per step; 0 is plain decoding.
    max_new_tokens: room in the buffers. The limit itself is dynamic and may be
      anything up to this.
    eos_ids: tokens that end a row; the emitted text includes them.
  """

  num_draft_tokens: int = 0
  max_new_tokens: int = 128
  eos_ids: tuple[int, ...] = ()


class DecodeResult(flax.struct.PyTreeNode):
  """What a decode returns.

  Attributes:
    tokens: `[B, T]` int32, prompt and new tokens of each row, then garbage.
    length: `[B]` int32, how many of them are valid.
    counters: see `specdec.statistics`.
  """

  tokens: jax.Array
  length: jax.Array
  counters: Counters


class _LoopState(flax.struct.PyTreeNode):
  """Carried from step to step.

  Between steps the target cache holds all tokens but the last, the root.
  """

  tokens: jax.Array  # [B, T]
  length: jax.Array  # [B]
  done: jax.Array  # [B] bool
  target_cache: KVCache
  draft_cache: KVCache | None
  counters: Counters


def _prefill(
  model: Model, prompt: jax.Array, num_cached: jax.Array, num_slots: int
) -> KVCache:
  """A cache of each row's first `num_cached` tokens; logits are not computed.

  (Nobody asks for them, so XLA removes the head.) Padding is fed too: no real
  token can see it, and its slots are beyond `num_cached`.
  """
  batch_size, length = prompt.shape
  cache = model.definition.init_cache(batch_size, num_slots)
  positions = jnp.broadcast_to(jnp.arange(length), prompt.shape)
  mask = causal_mask(cache.length, length, num_slots)
  _, cache = model.apply(prompt, positions, mask, cache)
  return cache.replace(length=num_cached)


def _append(tokens, length, new, count):
  """Writes the first `count` of `new` `[B, n]` behind each row's tokens."""
  offsets = jnp.arange(new.shape[1])[None]
  kept = offsets < count[:, None]
  # Out of range, hence dropped.
  index = jnp.where(kept, length[:, None] + offsets, tokens.shape[1])
  rows = jnp.arange(tokens.shape[0])[:, None]
  return tokens.at[rows, index].set(new, mode='drop')


@functools.partial(jax.jit, static_argnames='config')
def decode(
  target: Model,
  draft: Model | None,
  row_keys: jax.Array,
  prompt: jax.Array,
  prompt_length: jax.Array,
  limit: jax.Array,
  sampling: Sampling,
  *,
  config: DecodeConfig,
) -> DecodeResult:
  """Decodes a batch; the pure function under `specdec.generate`.

  Arguments are trusted: `specdec.generate` checks them, and calls this with
  prompts padded to buckets so that few shapes are compiled.

  Args:
    target: the model whose output is kept exactly.
    draft: guesses ahead; None if `config.num_draft_tokens` is 0.
    row_keys: `[B]` keys, one per row; consumed.
    prompt: `[B, P]` int32, padded at the end with any valid token.
    prompt_length: `[B]` int32, at least 1.
    limit: `[B]` int32, new tokens per row, at most `config.max_new_tokens`.
    sampling: validated.
    config: see `DecodeConfig`.

  Returns:
    Tokens, lengths and counters. With equal arguments, every draft and every
    `num_draft_tokens` gives equal tokens.
  """
  batch_size, prompt_bucket = prompt.shape
  num_drafted = config.num_draft_tokens
  vocab_size = target.definition.vocab_size
  # A row at its limit still verifies until the others are done: one block more.
  num_slots = prompt_bucket + config.max_new_tokens + num_drafted + 1
  end = prompt_length + limit
  offsets = jnp.arange(num_drafted + 1)[None]

  def step(state: _LoopState) -> _LoopState:
    length = state.length
    positions = length[:, None] + offsets  # of the tokens to be chosen
    noise = position_noise(row_keys, positions, vocab_size, sampling)
    root = jnp.take_along_axis(state.tokens, length[:, None] - 1, axis=1)
    if draft is None or state.draft_cache is None:
      draft_cache, block = None, root
    else:
      chain = draft_chain(
        draft,
        state.draft_cache,
        state.tokens,
        length,
        noise[:, :-1],
        sampling,
      )
      draft_cache = chain.cache
      block = jnp.concatenate([root, chain.tokens], axis=1)

    logits, target_cache = target.apply(
      block,
      positions - 1,
      causal_mask(length - 1, num_drafted + 1, num_slots),
      state.target_cache,
    )
    chosen = choose(logits, noise, sampling)
    accepted = count_accepted(block[:, 1:], chosen)
    room = jnp.where(state.done, 0, end - length)
    emitted, done = count_emitted(accepted, chosen, room, config.eos_ids)

    if draft_cache is not None:
      draft_cache = commit_chain(draft_cache, length, emitted, num_drafted)
    return _LoopState(
      tokens=_append(state.tokens, length, chosen, emitted),
      length=length + emitted,
      done=state.done | done,
      target_cache=target_cache.replace(length=target_cache.length + emitted),
      draft_cache=draft_cache,
      counters=count_step(state.counters, length, emitted),
    )

  tokens = jnp.pad(prompt, ((0, 0), (0, num_slots - prompt_bucket)))
  prefill = lambda model: _prefill(model, prompt, prompt_length - 1, num_slots)
  final = lax.while_loop(
    lambda state: ~jnp.all(state.done),
    step,
    _LoopState(
      tokens=tokens,
      length=prompt_length,
      done=limit <= 0,
      target_cache=prefill(target),
      draft_cache=None if draft is None else prefill(draft),
      counters=init_counters(batch_size, num_drafted),
    ),
  )
  return DecodeResult(
    tokens=final.tokens, length=final.length, counters=final.counters
  )
