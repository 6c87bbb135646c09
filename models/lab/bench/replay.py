"""Replays of known texts: decoding without the target, to try drafters.

With `verify='match'` the text does not depend on the drafter. So any drafter
can be tried on a text of the target with an oracle target, which knows the next
token. All counts are those of the real decode; the time is that of drafting.
With V(N), the measured time of one target forward over N tree nodes of each
row, they predict the time of a decode after its prompt:

    replay seconds + steps * V(N)

The models were timed apart, so the prediction leaves out that they evict each
other from the caches of the processor: it is a lower bound.

    known = specdec.generate(target, key, prompts, ...).tokens
    texts = [prompt + new for prompt, new in zip(prompts, known)]
    oracle = replay.oracle_target(target, texts)
    specdec.generate(oracle, key, prompts, drafter=any_drafter, ...).stats
"""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as cache_lib
from specdec import mappings
from specdec import model as model_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec.models.lab.bench import exactness


@functools.cache
def _oracle_spec(spec: model_lib.ModelSpec) -> model_lib.ModelSpec:
  """The same object for all texts, so that other texts do not recompile."""

  def apply(params, tokens, positions, mask, cache):
    del tokens, mask
    texts = params['texts']
    next_positions = jnp.minimum(positions + 1, texts.shape[1] - 1)
    following = jnp.take_along_axis(texts, next_positions, axis=1)
    known = jax.nn.one_hot(following, spec.vocab_size, dtype=bool)
    for layer, states in params['hidden'].items():
      # Right for the tokens of the text; those of others are not kept.
      index = jnp.clip(positions, 0, states.shape[1] - 1)[:, :, None]
      states = jnp.take_along_axis(states, index, axis=1)
      cache = cache_lib.write_hidden(cache, layer, states)
    # No bias, penalty, temperature or noise makes another token likelier.
    return jnp.where(known, 0.0, -jnp.inf), cache

  def init_cache(batch_size, num_slots):
    kept = jax.eval_shape(lambda: spec.init_cache(1, 1)).hidden
    cache = cache_lib.init_empty_cache(batch_size, num_slots)
    return cache_lib.with_hidden(
      cache,
      {layer: array.shape[-1] for layer, array in kept.items()},
      next((array.dtype for array in kept.values()), jnp.float32),
    )

  return dataclasses.replace(spec, apply=apply, init_cache=init_cache)


@mappings.jit()
def _hidden_states(
  target: model_lib.LanguageModel, tokens: jax.Array
) -> dict[int, jax.Array]:
  """`[B, T, width]` by layer, those that the target keeps of texts."""
  cache = target.spec.init_cache(*tokens.shape)
  hidden = target.causal(tokens, cache)[1].hidden
  return {layer: states[:, 0] for layer, states in hidden.items()}


def oracle_target(
  target: model_lib.LanguageModel, texts: Sequence[Sequence[int]]
) -> model_lib.LanguageModel:
  """A target that predicts the known next token, at almost no cost.

  Its counts are those of the real target, whose `spec` it takes, for the same
  row keys, sampling and limits. `texts` are the prompts and the tokens that the
  target emitted; tokens behind their end are arbitrary. The hidden states that
  a head reads are computed once. ValueError if a text is longer than the
  context of the target.
  """
  spec = target.spec
  longest = max(map(len, texts))
  if longest > spec.max_positions:
    raise ValueError(
      f'a text of {longest} tokens exceeds the context of the target,'
      f' {spec.max_positions} tokens'
    )
  padded = np.zeros((len(texts), spec.max_positions), np.int32)
  for row, text in enumerate(texts):
    padded[row, : len(text)] = text
  params = {'texts': jnp.asarray(padded), 'hidden': {}}
  if spec.hidden:
    size = exactness.padded(max(texts, key=len)).shape[1]
    params['hidden'] = _hidden_states(target, padded[:, :size])
  return model_lib.LanguageModel(params=params, spec=_oracle_spec(spec))


@mappings.jit()
def next_token_ranks(
  draft: model_lib.LanguageModel,
  tokens: jax.Array,
  row_keys: jax.Array,
  sampling: sampling_lib.SamplingParams,
) -> jax.Array:
  """The rank of each next token of a text among the draft's candidates.

  Candidates are those of match verification, ranked with the noise of their
  positions. A repetition penalty is left out. A token that the filters exclude
  has the rank V.

  Args:
    draft: a language model.
    tokens: `[B, T]` int32, texts, padded at the end with any valid token; T is
      at most the context of the draft.
    row_keys: `[B]` keys of the decode that gave the texts.
    sampling: of that decode.

  Returns:
    `[B, T - 1]` int32; entry t of a row is the rank, from 0, of its token
    t + 1 after the first t + 1 tokens.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  logits = sampling_lib.adjust_logits(
    draft.logits(tokens)[:, :-1], sampling, None
  )
  noise = randomness_lib.position_noise(
    row_keys, positions[:, 1:], sampling.is_stochastic
  )
  scores = sampling_lib.keep(logits, sampling).scores_of(noise)
  own = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)
  ranks = jnp.sum(scores > own, axis=-1)
  possible = own[..., 0] > sampling_lib.EXCLUDED
  return jnp.where(possible, ranks, scores.shape[-1]).astype(jnp.int32)
