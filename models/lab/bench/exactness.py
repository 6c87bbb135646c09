"""Where two texts part, and by how much the choice there was decided."""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec import arguments as arguments_lib
from specdec import mappings
from specdec import model as model_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib


def _logits(
  model: model_lib.LanguageModel,
  tokens: jax.Array,
  sampling: sampling_lib.SamplingParams,
) -> jax.Array:
  """`[1, S, V]`, adjusted logits after each token of `tokens [1, S]`."""
  logits = sampling_lib.add_bias(model.logits(tokens), sampling)
  if sampling.repetition_penalty is None:
    return logits
  occurs = jax.nn.one_hot(tokens, model.spec.vocab_size, dtype=jnp.int32)
  seen = jnp.cumsum(occurs, axis=1) > 0
  return sampling_lib.penalize(logits, sampling, seen)


def padded(tokens: Sequence[int]) -> np.ndarray:
  """`[1, S]` int32, padded to a power of two so that few shapes compile."""
  array = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)
  array[0, : len(tokens)] = tokens
  return array


@mappings.jit()
def _margin(model, row_key, tokens, length, sampling):
  logits = lax.dynamic_slice_in_dim(
    _logits(model, tokens, sampling), length - 1, 1, axis=1
  )
  noise = randomness_lib.position_noise(
    row_key[None], length[None, None], sampling.is_stochastic
  )
  kept = sampling_lib.filter_logits(logits, sampling) > sampling_lib.EXCLUDED
  unfiltered = sampling.replace(top_k=None, top_p=None, min_p=None)
  logits = sampling_lib.filter_logits(logits, unfiltered)
  scores = logits + noise.of_all(model.spec.vocab_size)
  among = jnp.where(kept, scores, -jnp.inf)
  best, second = lax.top_k(among, 2)[0][0, 0]
  # Another choice needs that the second becomes the best, that the best falls
  # below a filter's edge, or that a better one rises above it.
  least_kept = jnp.min(jnp.where(kept, logits, jnp.inf))
  beyond = jnp.where(kept, -jnp.inf, logits)
  falls = logits[0, 0, jnp.argmax(among)] - jnp.max(beyond)
  rises = least_kept - jnp.max(jnp.where(scores > best, beyond, -jnp.inf))
  return jnp.minimum(best - second, jnp.minimum(falls, rises))


def choice_margin(
  model: model_lib.LanguageModel,
  row_key: jax.Array,
  tokens: Sequence[int],
  sampling: sampling_lib.Sampling,
) -> float:
  """By how much scores or logits must change for another token to be chosen.

  A score is a logit over the temperature plus noise (`specdec.sampling`). The
  margin, at least 0 and in nats, is the least of three differences: of the two
  best scores; of the chosen token's logit and the best one that a filter
  excludes; of the lowest logit that is kept and the logit of an excluded token
  with a better score. At temperature 0 it is the difference of two logits.

  `tokens` is the text so far; `row_key` and `sampling` belong to the row.
  """
  length = jnp.array(len(tokens), jnp.int32)
  params = arguments_lib.to_params(sampling, 1, model.spec.vocab_size)
  return float(_margin(model, row_key, padded(tokens), length, params))


def first_difference(
  tokens: Sequence[int], expected: Sequence[int]
) -> int | None:
  """The first index at which two sequences differ; None if they are equal.

  If a sequence is a prefix of the other, that is the length of the shorter.
  """
  if list(tokens) == list(expected):
    return None
  pairs = enumerate(zip(tokens, expected, strict=False))
  shorter = min(len(tokens), len(expected))
  return next((index for index, (a, b) in pairs if a != b), shorter)


def divergence(
  model: model_lib.LanguageModel,
  row_key: jax.Array,
  prompt: Sequence[int],
  tokens: Sequence[int],
  expected: Sequence[int],
  sampling: sampling_lib.Sampling,
) -> tuple[int, float] | None:
  """The first difference of new tokens, and the `choice_margin` there."""
  offset = first_difference(tokens, expected)
  if offset is None:
    return None
  text = [*prompt, *expected[:offset]]
  return offset, choice_margin(model, row_key, text, sampling)
