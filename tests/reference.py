"""Plain decoding, written down slowly: one row, one token, all in float64.

It shares no code with `specdec`, and has no cache and no batch.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a row, see `specdec.Sampling`."""

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float = 1.0
  min_p: float = 0.0
  logit_bias: Mapping[int, float] | None = None
  repetition_penalty: float = 1.0


_MOST_POSITIONS = 128  # One program for texts of any length.


@functools.partial(jax.jit, static_argnums=1)
def _noise(row_key, vocab_size):
  draw = lambda position: jax.random.gumbel(
    jax.random.fold_in(row_key, position), (vocab_size,)
  )
  return jax.vmap(draw)(np.arange(_MOST_POSITIONS))


def noise(row_key: jax.Array, vocab_size: int) -> np.ndarray:
  """`[positions, V]` Gumbel noise, of each position from a key of its own."""
  return np.asarray(_noise(row_key, vocab_size), np.float64)


def adjusted(logits: np.ndarray, options: Options, text) -> np.ndarray:
  """Bias, then penalty."""
  logits = np.array(logits, np.float64)
  for token, value in (options.logit_bias or {}).items():
    logits[token] += value
  for token in set(text):
    penalty = options.repetition_penalty
    logits[token] *= 1 / penalty if logits[token] > 0 else penalty
  return logits


def filtered(logits: np.ndarray, options: Options) -> np.ndarray:
  """Divided by the temperature; token by token, from the most likely on."""
  logits = (logits - logits.max()) / options.temperature
  order = np.argsort(-logits, kind='stable')[: options.top_k]
  probs = np.exp(logits[order])
  probs /= probs.sum()
  kept = np.full(logits.shape, -np.inf)
  total = 0.0
  for token, prob in zip(order, probs, strict=True):
    if total < options.top_p and np.exp(logits[token]) >= options.min_p:
      kept[token] = logits[token]
    total += prob
  return kept


def probs(logits: np.ndarray, options: Options, text=()) -> np.ndarray:
  """The distribution of the token after a text, `[V]`."""
  scores = adjusted(logits, options, text)
  if not options.temperature:
    return np.eye(len(scores))[np.argmax(scores)]
  weights = np.exp(filtered(scores, options))
  return weights / weights.sum()


def log_prob(logits: np.ndarray, token: int) -> float:
  """The log-probability of a token by the target's own `logits [V]`."""
  logits = np.asarray(logits, np.float64)
  largest = logits.max()
  return float(logits[token] - largest - np.log(np.exp(logits - largest).sum()))


def decode(
  logits_of: Callable[[list[int]], np.ndarray],
  prompt: Sequence[int],
  limit: int,
  row_key: jax.Array,
  options: Options = Options(),
) -> tuple[list[int], list[float]]:
  """At most `limit` new tokens of one row, and their log-probabilities.

  `logits_of` is what the target says after a text, `[V]`.
  """
  text, log_probs = list(prompt), []
  every = None
  for position in range(len(text), len(text) + limit):
    logits = logits_of(text)
    scores = adjusted(logits, options, text)
    if options.temperature:
      if every is None:
        every = noise(row_key, len(logits))
      scores = filtered(scores, options) + every[position]
    text.append(int(np.argmax(scores)))
    log_probs.append(log_prob(logits, text[-1]))
  return text[len(prompt) :], log_probs
