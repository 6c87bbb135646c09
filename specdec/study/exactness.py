"""Whether tokens have the law they should have: a test without a second sample.

If the token x at some position was drawn from the distribution p that the
target has there, given the text before, then

    u = sum of p over all tokens before x in some order + v p(x)

with v uniform is uniform on [0, 1), and independent of all u before
(Rosenblatt, 1952). So a text has the target's law if and only if its u are
independent and uniform, and every single token takes part in the test, whatever
its distribution was.

What can be seen depends on the order. The bias of a wrong rule is mostly
towards what the draft likes better than the target does, or away from it, so
sorting by that ratio sees it best; sorted by anything else, it may average out.
"""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.checks import check_sampling
from specdec.model import LanguageModel
from specdec.sampling import add_seen
from specdec.sampling import adjust_logits
from specdec.sampling import filter_logits
from specdec.sampling import position_noise
from specdec.sampling import Sampling
from specdec.sampling import SamplingParams
from specdec.sampling import token_probs

_BINS = 20
_PAIR_BINS = 5

ORDERS = ('by probability', 'by token', 'by draft')
"""By the target's probability; without meaning; by draft over target."""


def _seen(tokens: jax.Array, vocab_size: int) -> jax.Array:
  """`[1, S, V]` bool: what the text has up to each of `tokens [1, S]`."""
  said = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.int32)
  return jnp.cumsum(said, axis=1) > 0


@jax.jit
def distributions(
  model: LanguageModel, tokens: jax.Array, sampling: SamplingParams
) -> jax.Array:
  """What each token of a text would be drawn from.

  Args:
    model: whose law it is.
    tokens: `[1, S]` int32, padded at the end with any valid token.
    sampling: validated; of this row.

  Returns:
    `[S, V]` float32; entry t is of the token after the first t + 1.
  """
  seen = None
  if sampling.repetition_penalty is not None:
    seen = _seen(tokens, model.spec.vocab_size)
  logits = adjust_logits(model.logits(tokens), sampling, seen)
  return token_probs(logits, sampling)[0]


@jax.jit
def _transform(probs, draft_probs, tokens, key):
  """`[n, orders]`: u of `tokens [n]` in each order; and `[n]`: their p."""
  of_token = lambda array: jnp.take_along_axis(array, tokens[:, None], axis=1)
  chance_key, order_key = jax.random.split(key)
  number = jax.random.permutation(order_key, probs.shape[1])[None]
  number = jnp.broadcast_to(number, probs.shape)
  own = of_token(probs)
  sort_by = [-probs, number]
  if draft_probs is not None:
    sort_by.append(-draft_probs / jnp.maximum(probs, 1e-37))
  columns = []
  for value in sort_by:
    same = (value == of_token(value)) & (number < of_token(number))
    is_before = (value < of_token(value)) | same
    columns.append(jnp.sum(jnp.where(is_before, probs, 0.0), axis=1))
  chance = jax.random.uniform(chance_key, own.shape)
  return jnp.stack(columns, axis=1) + chance * own, own[:, 0]


def padded(tokens: Sequence[int]) -> np.ndarray:
  """`[1, S]` int32, S a power of two: few shapes for many texts."""
  array = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)
  array[0, : len(tokens)] = tokens
  return array


def transform(
  model: LanguageModel,
  prompt: Sequence[int],
  new: Sequence[int],
  sampling: Sampling,
  key: jax.Array,
  draft: LanguageModel | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """The numbers u of a row's new tokens.

  Args:
    model: whose law they should have.
    prompt: its tokens.
    new: the tokens that were generated, at least one.
    sampling: of this row.
    key: for v and for the order without meaning.
    draft: who guessed, if it is a model.

  Returns:
    `[n, orders]` float32, u in the `ORDERS`, the last only if there is a draft;
    and `[n]` float32, the probability of each token: 0 where it could not have
    been drawn.
  """
  text = padded([*prompt, *new])
  sampling = check_sampling(sampling, 1, model.spec.vocab_size)
  probs = distributions(model, text, sampling)
  draft_probs = None if draft is None else distributions(draft, text, sampling)
  tokens = jnp.asarray(np.roll(text[0], -1))
  values, own = jax.device_get(_transform(probs, draft_probs, tokens, key))
  span = slice(len(prompt) - 1, len(prompt) - 1 + len(new))
  return values[span], own[span]


def _tail(statistic: float, degrees: int) -> float:
  """The probability that chi-square is at least as large."""
  return float(jax.scipy.special.gammaincc(degrees / 2, statistic / 2))


def _chi_square(counts: np.ndarray) -> float:
  expected = counts.sum() / counts.size
  statistic = ((counts - expected) ** 2 / expected).sum()
  return _tail(statistic, counts.size - 1)


def p_values(rows: Sequence[np.ndarray]) -> dict[str, float]:
  """How likely such u, or worse, would be, if the law is right.

  Args:
    rows: of each row `[n, orders]`, from `transform`; some hundred tokens in
      all.

  Returns:
    A p-value for each of two tests per order: that u is uniform, and that it
    does not depend on the u before.
  """
  values = {}
  for column in range(rows[0].shape[1]):
    order = ORDERS[column]
    scaled = [np.clip(row[:, column], 0, 1 - 1e-7) for row in rows]
    single = np.concatenate(scaled)
    counts = np.bincount((single * _BINS).astype(int), minlength=_BINS)
    values[f'uniform, {order}'] = _chi_square(counts)
    pairs = np.concatenate(
      [_PAIR_BINS * (row[:-1] * _PAIR_BINS).astype(int) for row in scaled]
    ) + np.concatenate([(row[1:] * _PAIR_BINS).astype(int) for row in scaled])
    counts = np.bincount(pairs, minlength=_PAIR_BINS**2)
    values[f'independent, {order}'] = _chi_square(counts)
  return values


@jax.jit
def _margin(model, row_key, tokens, length, sampling):
  vocab_size = model.spec.vocab_size
  noise = position_noise(
    row_key[None], length[None, None], vocab_size, sampling
  )
  logits = model.logits(tokens)
  last = lax.dynamic_slice_in_dim(logits, length - 1, 1, axis=1)
  seen = None
  if sampling.repetition_penalty is not None:
    nothing = jnp.zeros((1, vocab_size), bool)
    seen = add_seen(nothing, tokens, length[None])[:, None]
  last = adjust_logits(last, sampling, seen)
  best = lax.top_k(filter_logits(last, sampling) + noise, 2)[0][0, 0]
  return best[0] - best[1]


def choice_margin(
  model: LanguageModel,
  row_key: jax.Array,
  tokens: Sequence[int],
  sampling: Sampling,
) -> float:
  """The gap between the best two scores for the token after `tokens`.

  A score is a logit over the temperature plus noise (`specdec.sampling`), so at
  temperature 0 this is the gap between the best two logits, in nats.

  Args:
    model: whose choice it is.
    row_key: the row's key, as `specdec.decode` has it.
    tokens: the sequence so far.
    sampling: as decoded with; of this row, see `Sampling.of_row`.

  Returns:
    At least 0.
  """
  size = 1 << (len(tokens) - 1).bit_length()
  padded = np.zeros((1, size), np.int32)
  padded[0, : len(tokens)] = tokens
  length = jnp.array(len(tokens), jnp.int32)
  sampling = check_sampling(sampling, 1, model.spec.vocab_size)
  return float(_margin(model, row_key, padded, length, sampling))
