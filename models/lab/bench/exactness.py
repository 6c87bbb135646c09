"""Goodness-of-fit tests of sampled tokens, and margins of near-ties.

If the token x at some position was drawn from the target's distribution p given
the text before it, then

    u = sum of p over all tokens before x in some order + v p(x)

with v uniform is uniform on [0, 1) and independent of all earlier u, if and
only if the text is distributed as the target (Rosenblatt, 1952).

The power of the test depends on the order. A wrong verification rule mostly
favours or disfavours tokens that the draft prefers more than the target does,
so sorting by the ratio of draft to target detects its bias best.
"""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from scipy import special

from specdec import arguments as arguments_lib
from specdec import mappings
from specdec import model as model_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib

_BINS = 20
_PAIR_BINS = 5

ORDERS = ('by probability', 'by token', 'by draft')
"""By the target's probability; at random; by draft over target."""


def _logits(
  model: model_lib.LanguageModel,
  tokens: jax.Array,
  sampling: sampling_lib.SamplingParams,
) -> jax.Array:
  """`[1, S, V]`, adjusted logits after each token of `tokens [1, S]`."""
  seen = None
  if sampling.repetition_penalty is not None:
    occurs = jax.nn.one_hot(tokens, model.spec.vocab_size, dtype=jnp.int32)
    seen = jnp.cumsum(occurs, axis=1) > 0
  return sampling_lib.adjust_logits(model.logits(tokens), sampling, seen)


@mappings.jit()
def distributions(
  model: model_lib.LanguageModel,
  tokens: jax.Array,
  sampling: sampling_lib.SamplingParams,
) -> jax.Array:
  """The distributions from which the tokens of a text should be drawn.

  `tokens`: `[1, S]` int32, padded at the end with any valid token.

  Returns:
    `[S, V]` float32; entry t is the distribution of token t + 1.
  """
  return sampling_lib.token_probs(_logits(model, tokens, sampling), sampling)[0]


@mappings.jit()
def _transform(all_probs, tokens, key):
  """Values u of `tokens [n]` in each order, and their target probabilities.

  `all_probs`: `[n, V]` of the target and, if there is one, of the draft.
  Returns `[n, orders]` and `[n]`.
  """
  of_token = lambda array: jnp.take_along_axis(array, tokens[:, None], axis=1)
  probs = all_probs[0]
  uniform_key, order_key = jax.random.split(key)
  number = jax.random.permutation(order_key, probs.shape[1])[None]
  number = jnp.broadcast_to(number, probs.shape)
  own = of_token(probs)
  ratios = [-draft / jnp.maximum(probs, 1e-37) for draft in all_probs[1:]]
  columns = []
  for value in (-probs, number, *ratios):
    tie = (value == of_token(value)) & (number < of_token(number))
    is_before = (value < of_token(value)) | tie
    columns.append(jnp.sum(jnp.where(is_before, probs, 0.0), axis=1))
  uniform = jax.random.uniform(uniform_key, own.shape)
  return jnp.stack(columns, axis=1) + uniform * own, own[:, 0]


def padded(tokens: Sequence[int]) -> np.ndarray:
  """`[1, S]` int32, padded to a power of two so that few shapes compile."""
  array = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)
  array[0, : len(tokens)] = tokens
  return array


def transform(
  model: model_lib.LanguageModel,
  prompt: Sequence[int],
  new: Sequence[int],
  sampling: sampling_lib.Sampling,
  key: jax.Array,
  draft: model_lib.LanguageModel | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """The numbers u of the new tokens of a row; `key` is for v and random order.

  Returns:
    `[n, orders]` float32, u in the `ORDERS`, the last only with a draft; and
    `[n]` float32, the target's probability of each token.
  """
  text = padded([*prompt, *new])
  params = arguments_lib.to_params(sampling, 1, model.spec.vocab_size)
  models = [model, draft] if draft else [model]
  probs = [distributions(x, text, params) for x in models]
  tokens = jnp.asarray(np.roll(text[0], -1))
  values, own = jax.device_get(_transform(probs, tokens, key))
  span = slice(len(prompt) - 1, len(prompt) - 1 + len(new))
  return values[span], own[span]


def _chi_square(values: np.ndarray, bins: int) -> float:
  """The statistic of integers below `bins` that should be uniform."""
  counts = np.bincount(values, minlength=bins)
  expected = counts.sum() / bins
  return ((counts - expected) ** 2 / expected).sum()


def p_values(rows: Sequence[np.ndarray]) -> dict[str, float]:
  """P-values under the hypothesis that the tokens follow the target.

  Two chi-square tests per order: that u is uniform, and that it is independent
  of the u before it. The pairs of the second overlap, so it is the serial test
  of Good (1953): less the statistic of the first of each pair. `rows` are from
  `transform`, some hundred tokens in all.
  """
  values = {}
  for column, order in enumerate(ORDERS[: rows[0].shape[1]]):
    scaled = [np.clip(row[:, column], 0, 1 - 1e-7) for row in rows]
    fine = (np.concatenate(scaled) * _BINS).astype(int)
    uniform = _chi_square(fine, _BINS)
    values[f'uniform, {order}'] = float(special.chdtrc(_BINS - 1, uniform))
    coarse = [(row * _PAIR_BINS).astype(int) for row in scaled]
    pairs = np.concatenate([_PAIR_BINS * row[:-1] + row[1:] for row in coarse])
    serial = _chi_square(pairs, _PAIR_BINS**2)
    serial -= _chi_square(pairs // _PAIR_BINS, _PAIR_BINS)
    freedom = _PAIR_BINS**2 - _PAIR_BINS
    serial = max(serial, 0.0)
    values[f'independent, {order}'] = float(special.chdtrc(freedom, serial))
  return values


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
  excludes; of the lowest logit that is kept and that of an excluded token with
  a better score. At temperature 0 it is the difference of two logits.

  `tokens` is the text so far; `row_key` and `sampling` are those of the row.
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
