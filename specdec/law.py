"""Whether tokens have the law they should have: a test without a second sample.

If the token x at some position was drawn from the distribution p that the
target has there, given the text before, then

    u = sum of p over all tokens before x in some order + v p(x)

with v uniform is uniform on [0, 1), and independent of all u before
(Rosenblatt, 1952). So a text has the target's law if and only if its u are
independent and uniform, and every single token takes part in the test, whatever
its distribution was.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec.masks import causal_mask
from specdec.model import Model
from specdec.sampling import adjust_logits
from specdec.sampling import Sampling
from specdec.sampling import token_probs

_BINS = 20
_PAIR_BINS = 5


def _seen(tokens: jax.Array, vocab_size: int) -> jax.Array:
  """`[1, S, V]` bool: what the text has up to each of `tokens [1, S]`."""
  said = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.int32)
  return jnp.cumsum(said, axis=1) > 0


@jax.jit
def distributions(
  model: Model, tokens: jax.Array, sampling: Sampling
) -> jax.Array:
  """What each token of a text would be drawn from.

  Args:
    model: whose law it is.
    tokens: `[1, S]` int32, padded at the end with any valid token.
    sampling: validated; of this row.

  Returns:
    `[S, V]` float32; entry t is of the token after the first t + 1.
  """
  num_slots = tokens.shape[1]
  definition = model.definition
  logits, _ = model.apply(
    tokens,
    jnp.arange(num_slots)[None],
    causal_mask(jnp.zeros(1, jnp.int32), num_slots, num_slots),
    definition.init_cache(1, num_slots),
  )
  seen = None
  if sampling.repetition_penalty is not None:
    seen = _seen(tokens, definition.vocab_size)
  return token_probs(adjust_logits(logits, sampling, seen), sampling)[0]


@jax.jit
def _transform(probs, tokens, key):
  """`[n, 2]`: u of `tokens [n]` in two orders; and `[n]`: their p."""
  own = jnp.take_along_axis(probs, tokens[:, None], axis=1)
  chance_key, order_key = jax.random.split(key)
  chance = jax.random.uniform(chance_key, own.shape)
  index = jnp.arange(probs.shape[1])[None]
  likelier = (probs > own) | ((probs == own) & (index < tokens[:, None]))
  order = jax.random.permutation(order_key, probs.shape[1])
  earlier = order[None] < order[tokens][:, None]
  before = [
    jnp.sum(jnp.where(mask, probs, 0.0), axis=1) for mask in (likelier, earlier)
  ]
  return jnp.stack(before, axis=1) + chance * own, own[:, 0]


def padded(tokens: Sequence[int]) -> np.ndarray:
  """`[1, S]` int32, S a power of two: few shapes for many texts."""
  array = np.zeros((1, 1 << (len(tokens) - 1).bit_length()), np.int32)
  array[0, : len(tokens)] = tokens
  return array


def transform(
  model: Model,
  prompt: Sequence[int],
  new: Sequence[int],
  sampling: Sampling,
  key: jax.Array,
) -> tuple[np.ndarray, np.ndarray]:
  """The numbers u of a row's new tokens.

  Args:
    model: whose law they should have.
    prompt: its tokens.
    new: the tokens that were generated, at least one.
    sampling: of this row.
    key: for v.

  Returns:
    `[n, 2]` float32, u with tokens ordered by their probability and in an order
    without meaning; and `[n]` float32, the probability of each token: 0 where
    it could not have been drawn.
  """
  text = padded([*prompt, *new])
  probs = distributions(model, text, sampling.validated())
  tokens = jnp.asarray(np.roll(text[0], -1))
  values, own = jax.device_get(_transform(probs, tokens, key))
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
    rows: of each row `[n, 2]`, from `transform`; some hundred tokens in all.

  Returns:
    A p-value for each of four tests: that u is uniform, in both orders, and
    that it does not depend on the u before, likewise.
  """
  values = {}
  for column, order in enumerate(('by probability', 'by token')):
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
