"""Decoding a text that is known already: drafting without the target.

With `verify='match'` the text does not depend on who drafts. So, once the
target has said it, any number of drafters can be tried on it with a stand-in
for the target that just knows the next token. The decode loop is the production
one, and so are the tokens, the steps and all other counts; what it takes is the
time of drafting.

    known = specdec.generate(target, key, prompts, ...).tokens
    texts = [prompt + new for prompt, new in zip(prompts, known)]
    stand_in = replay.stand_in(target.spec, texts)
    specdec.generate(stand_in, key, prompts, drafter=any_drafter, ...).stats
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec.draft.ranking import rank_logits
from specdec.model import LanguageModel
from specdec.model import ModelSpec
from specdec.sampling import adjust_logits
from specdec.sampling import position_noise
from specdec.sampling import SamplingParams


def _init_cache(batch_size: int, num_slots: int) -> kv.KVCache:
  return kv.init_cache(
    batch_size,
    num_slots,
    num_layers=0,
    num_heads=1,
    head_width=1,
    dtype=jnp.float32,
  )


@functools.cache
def _stand_in(definition: ModelSpec) -> ModelSpec:
  """One record per target, so that other texts do not recompile."""

  def apply(params, tokens, positions, mask, cache):
    del tokens, mask
    texts = params['texts']
    last = texts.shape[1] - 1
    following = jnp.take_along_axis(
      texts, jnp.minimum(positions + 1, last), axis=1
    )
    known = jax.nn.one_hot(following, definition.vocab_size, dtype=bool)
    # No bias, penalty, temperature or noise makes another token likelier.
    return jnp.where(known, 0.0, -jnp.inf), cache

  return dataclasses.replace(definition, apply=apply, init_cache=_init_cache)


def stand_in(
  definition: ModelSpec, texts: Sequence[Sequence[int]]
) -> LanguageModel:
  """A target that says what is known already, and costs next to nothing.

  To have the counts of the real target, decode with its row keys, sampling and
  limits. Its sizes in bytes are those of the real target: drafters that stop
  early look at them, and so does `relative_bandwidth`.

  Args:
    definition: of the real target.
    texts: of each row, the prompt and the tokens that the target said, in the
      order of the batch. What comes behind their end is arbitrary.

  Raises:
    ValueError: a text is longer than the context of the target.
  """
  longest = max(map(len, texts))
  if longest > definition.max_positions:
    raise ValueError(
      f'a text of {longest} tokens exceeds the context of the target,'
      f' {definition.max_positions} tokens'
    )
  padded = np.zeros((len(texts), definition.max_positions), np.int32)
  for row, text in enumerate(texts):
    padded[row, : len(text)] = text
  return LanguageModel(
    params={'texts': jnp.asarray(padded)}, spec=_stand_in(definition)
  )


@jax.jit
def next_token_ranks(
  draft: LanguageModel,
  tokens: jax.Array,
  row_keys: jax.Array,
  sampling: SamplingParams,
) -> jax.Array:
  """As which of the draft's guesses each next token of a text comes.

  The guesses are those of match verification, ranked with the noise of their
  positions. A repetition penalty is left out.

  Args:
    draft: a language model.
    tokens: `[B, T]` int32, texts, padded at the end with any valid token; T is
      at most the context of the draft.
    row_keys: `[B]` keys, of the decode that gave the texts.
    sampling: validated; likewise.

  Returns:
    `[B, T - 1]` int32; entry t of a row is the rank, from 0, of its token
    t + 1 among the guesses of what follows the first t + 1 tokens.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  logits = adjust_logits(draft.logits(tokens)[:, :-1], sampling, None)
  noise = position_noise(
    row_keys, positions[:, 1:], draft.spec.vocab_size, sampling
  )
  scores = rank_logits(logits, noise, sampling, 1.0, 1).scores
  own = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)
  return jnp.sum(scores > own, axis=-1).astype(jnp.int32)
