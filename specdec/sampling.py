"""From logits to a token, with randomness attached to positions.

The token at absolute position t is

    argmax(filter(logits / temperature) + gumbel(row key, t))

which is a draw from the filtered softmax (the Gumbel-max trick), and plain
argmax at temperature 0. It depends on (logits, seed, row, position) and on
nothing else: not on the stage that drafted the token, nor on how many tokens
were verified together. That is why speculative decoding reproduces plain
decoding token for token at any temperature (Gumbel coupling, arXiv 2408.07978).
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec import best as best_lib
from specdec import randomness as randomness_lib

_T = TypeVar('_T')

EXCLUDED = -np.inf
"""Log-probability of a token that cannot be chosen.

It is infinite, so that no temperature and no penalty makes it possible."""


def _largest(logits: jax.Array) -> jax.Array:
  """The largest of `logits [..., V]`, `[...]`; inf where NaN is among them."""
  # The maximum of XLA's CPU backend drops NaN from some 4,000 values on.
  nan_as_inf = jnp.where(logits < jnp.inf, logits, jnp.inf)
  return jnp.max(nan_as_inf, axis=-1)


def is_usable(logits: jax.Array) -> jax.Array:
  """Whether a token can be chosen from `logits [..., V]`; `[...]` bool.

  Tokens with a logit of -inf are never chosen. NaN, inf, or -inf for all tokens
  come from a broken model, and no choice follows from them.
  """
  return jnp.isfinite(_largest(logits))


def _units(vocab_size: int) -> float:
  """The number of units in 1, so that V terms of at most 1 fit 63 bits."""
  return 2.0 ** (62 - vocab_size.bit_length())


def _in_units(weights: jax.Array, vocab_size: int) -> jax.Array:
  """`weights` in [0, 1] as 64-bit integers; call it with 64 bits enabled."""
  units = np.array(_units(vocab_size), weights.dtype)
  return (weights * units).astype(jnp.int64)


def _mass(weights: jax.Array) -> jax.Array:
  """Sum of `weights [..., V]` in units; `[..., 1]` int64."""
  units = _in_units(weights, weights.shape[-1])
  return jnp.sum(units, axis=-1, keepdims=True)


def total(weights: jax.Array) -> jax.Array:
  """Sum of `weights [..., V]`, all in [0, 1]; `[..., 1]`.

  XLA chooses the order in which it adds floats by their shape, so the last bits
  of a row would depend on how many rows there are. Integers have no order.
  """
  units = np.array(_units(weights.shape[-1]), weights.dtype)
  with jax.enable_x64(True):
    return _mass(weights).astype(weights.dtype) / units


def softmax(logits: jax.Array) -> jax.Array:
  """Softmax of `logits [..., V]`; its bits do not depend on the shape."""
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  return weights / total(weights)


def log_softmax(logits: jax.Array) -> jax.Array:
  """Log-softmax of `logits [..., V]`; its bits do not depend on the shape."""
  logits = logits - jnp.max(logits, axis=-1, keepdims=True)
  return logits - jnp.log(total(jnp.exp(logits)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Parameters of the choice of tokens, as users state them; default: greedy.

  What is set applies in the order of the fields. Each value is for all rows, or
  there is one per row `[B]`. Changing a value does not recompile, except top_k
  across a power of two; setting one that was None does, so that what is not
  used costs nothing.
  """

  #: Added to the logits: a mapping from token to bias, one per row (or None),
  #: or an array `[V]` or `[B, V]`; -inf bans a token.
  logit_bias: (
    Mapping[int, float] | Sequence[Mapping[int, float] | None] | Any | None
  ) = None
  #: Above 0; the logits of tokens that the row has, prompt included, are
  #: divided by it where they are positive, multiplied where not (CTRL, arXiv
  #: 1909.05858, section 4.1, as transformers does it).
  repetition_penalty: Any = None
  temperature: Any = 0.0  #: At least 0; 0 is greedy.
  #: Keep the k most likely, and ties with the last; an entry None keeps all.
  top_k: Any = None
  #: Above 0, at most 1; keep the most likely until they reach that probability.
  top_p: Any = None
  #: Keep tokens at least min_p times as likely as the best one, in [0, 1].
  min_p: Any = None


class SamplingParams(flax.struct.PyTreeNode, kw_only=True):
  """`Sampling` as arrays, made by `arguments.to_params`."""

  temperature: jax.Array  #: `[B]` float32.
  logit_bias: jax.Array | None = None  #: `[V]` or `[B, V]` float32, or None.
  repetition_penalty: jax.Array | None = None  #: `[B]` float32, or None.
  top_k: jax.Array | None = None  #: `[B]` int32, or None.
  top_p: jax.Array | None = None  #: `[B]` float32, or None.
  min_p: jax.Array | None = None  #: `[B]` float32, or None.
  #: At least as large as any `top_k` below V; None: the vocabulary; static.
  max_top_k: int | None = flax.struct.field(default=None, pytree_node=False)
  #: Whether some rows may have a `top_k` of V or more, which keeps all tokens,
  #: where `max_top_k` is smaller; static.
  some_keep_all: bool = flax.struct.field(default=False, pytree_node=False)

  @property
  def is_stochastic(self) -> jax.Array:
    """`[B]` bool, the rows that sample; the others are greedy."""
    return self.temperature > 0

  @property
  def has_filters(self) -> bool:
    """Whether a filter may exclude tokens; static."""
    limits = (self.top_k, self.top_p, self.min_p)
    return any(limit is not None for limit in limits)


def per_row(values: jax.Array, like: jax.Array) -> jax.Array:
  """`[B]` values, shaped to broadcast against `like [B, ...]`."""
  return values.reshape(-1, *(1,) * (like.ndim - 1))


def add_bias(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
  """`logits [B, W, V]` float32 of a model, with the bias if there is one."""
  bias = sampling.logit_bias
  if bias is None:
    return logits
  return logits + (bias[None, None] if bias.ndim == 1 else bias[:, None])


def penalize(
  logits: jax.Array, sampling: SamplingParams, seen: jax.Array
) -> jax.Array:
  """`logits [B, W, V]` float32 with the repetition penalty if there is one.

  `seen`: `[B, W, V]` bool, the tokens that each sequence has.
  """
  if sampling.repetition_penalty is None:
    return logits
  penalty = per_row(sampling.repetition_penalty, logits)
  weakened = jnp.where(logits > 0, logits / penalty, logits * penalty)
  return jnp.where(seen, weakened, logits)


# How many of the most likely tokens are looked at first. Filters nearly always
# exclude all others, and a search among a large vocabulary takes far longer.
_FIRST_RANKED = 256


def _bisect(
  logits: jax.Array, least: jax.Array, allowed: jax.Array
) -> jax.Array:
  """The smallest logit that top-p keeps; see `_top_p_threshold`.

  Numbers of one sign are in the order of their bits, so as many bisections as
  there are bits find it. Sorting a vocabulary takes five times longer.

  `least [..., 1]` is one of the `logits [..., V]` that is kept; more probable
  tokens have less than `allowed [..., 1]` int64 together.
  """
  integers = jnp.dtype(f'int{jnp.finfo(logits.dtype).bits}')
  bits_of = lambda logits: lax.bitcast_convert_type(jnp.abs(logits), integers)
  bits, weights = bits_of(logits), jnp.exp(logits)

  def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    kept, dropped = bounds
    middle = kept + (dropped - kept) // np.array(2, integers)
    above = jnp.where(bits < middle, weights, np.array(0, weights.dtype))
    keeps = _mass(above) < allowed
    return jnp.where(keeps, middle, kept), jnp.where(keeps, dropped, middle)

  # Tokens from exp(-64) on have no mass, and those before it all there is.
  bounds = bits_of(least), bits_of(jnp.full_like(least, -64))
  is_open = lambda bounds: jnp.any(bounds[1] - bounds[0] > 1)
  kept, _ = lax.while_loop(is_open, halve, bounds)
  return -lax.bitcast_convert_type(kept, logits.dtype)


def _top_p_threshold(
  candidates: Callable[[], jax.Array], ranked: jax.Array, top_p: jax.Array
) -> jax.Array:
  """The smallest logit that top-p keeps, `[..., 1]` float32.

  A token is kept if all more probable ones together have less than top_p; from
  a `top_p [..., 1]` of 1 on all are kept. `candidates` gives logits `[..., V]`
  of at most 0, where -inf is left out; it is called where they are read,
  because what a branch is given is written to memory. `ranked [..., n]` has the
  largest ones in descending order.
  """
  with jax.enable_x64(True):
    weights = jnp.exp(candidates())
    mass = _mass(weights).astype(top_p.dtype)
    allowed = (mass * top_p).astype(jnp.int64)
    masses = _in_units(jnp.exp(ranked), weights.shape[-1])
    until = jnp.cumsum(masses, axis=-1)
    kept = jnp.where(until - masses < allowed, ranked, 0)
    least = jnp.min(kept, axis=-1, keepdims=True)
    suffice = (until[..., -1:] >= allowed) | (top_p >= 1)
    threshold = lax.cond(
      jnp.all(suffice) | (ranked.shape[-1] == weights.shape[-1]),
      lambda: least,
      lambda: _bisect(candidates(), least, allowed),
    )
  return jnp.where(top_p >= 1, -jnp.inf, threshold)


def _relative(
  logits: jax.Array, best: jax.Array, temperature: jax.Array
) -> jax.Array:
  """The logits at a temperature, less the best, so that none overflows."""
  return (logits - best) / temperature


class Kept(NamedTuple):
  """The tokens that filters keep, of `[B, ..., V]` logits.

  Every filter keeps the tokens whose logit reaches some threshold, so together
  they are one threshold.
  """

  logits: jax.Array  # [B, ..., V] float32, adjusted
  best: jax.Array  # [B, ..., 1] float32, the largest of them
  temperature: jax.Array  # [B, 1, ...] float32, above 0
  threshold: jax.Array  # [B, ..., 1] float32, relative, of what is kept
  # [B, ..., n] float32 and int32, the largest relative logits, in descending
  # order, and their tokens; None without filters.
  ranked: tuple[jax.Array, jax.Array] | None = None

  def filtered(self) -> jax.Array:
    """The relative logits, `EXCLUDED` where a filter excludes the token."""
    # Computed where it is wanted, as to keep it would be to write it to memory.
    relative = _relative(self.logits, self.best, self.temperature)
    return jnp.where(relative >= self.threshold, relative, EXCLUDED)

  def scores_of(self, noise: randomness_lib.Noise) -> jax.Array:
    """`[B, L, V]`, the filtered logits plus the noise of their positions."""
    return self.filtered() + noise.of_all(self.logits.shape[-1])

  def among_few(
    self,
    noise: randomness_lib.Noise,
    of_scores: Callable[[jax.Array, jax.Array], _T],
    otherwise: Callable[[], _T],
    *,
    least: int = 1,
  ) -> _T:
    """A result that follows from the scores of the tokens that are kept.

    Where these are among the ranked, `of_scores` is called with the scores
    `[B, L, n]` of the ranked, as `scores_of` gives them, and their tokens. Then
    neither the noise nor the scores of all others are computed.

    Args:
      noise: of the L positions.
      of_scores: the result.
      otherwise: the same by the scores of all tokens.
      least: the least n that `of_scores` accepts.
    """
    if self.ranked is None or self.ranked[0].shape[-1] < least:
      return otherwise()
    ranked, tokens = self.ranked

    def few() -> _T:
      kept = jnp.where(ranked >= self.threshold, ranked, EXCLUDED)
      return of_scores(kept + noise.of_tokens(tokens), tokens)

    if ranked.shape[-1] == self.logits.shape[-1]:
      return few()
    suffice = jnp.all(ranked[..., -1:] < self.threshold)
    return lax.cond(suffice, few, otherwise)


def keep(logits: jax.Array, sampling: SamplingParams) -> Kept:
  """Temperature, then top-k, top-p and min-p.

  At temperature 0 the logits are filtered as at 1, which leaves the argmax what
  it was. `logits [B, ..., V]` are adjusted.
  """
  temperature = per_row(sampling.temperature, logits)
  temperature = jnp.where(temperature > 0, temperature, 1.0)
  threshold = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
  if not sampling.has_filters:
    return Kept(logits, _largest(logits)[..., None], temperature, threshold)
  vocab_size = logits.shape[-1]
  number = _FIRST_RANKED
  if sampling.top_k is not None:
    # One more tells whether there are ties with the last.
    number = (sampling.max_top_k or vocab_size) + 1
  ranked, tokens = best_lib.top_k(logits, min(number, vocab_size))
  best = ranked[..., :1]
  ranked = likeliest = _relative(ranked, best, temperature)
  candidates = lambda: _relative(logits, best, temperature)
  if sampling.top_k is not None:
    count = jnp.broadcast_to(per_row(sampling.top_k, logits), threshold.shape)
    has_count = count < vocab_size
    last = jnp.minimum(count, ranked.shape[-1]) - 1
    of_top_k = jnp.take_along_axis(ranked, last, axis=-1)
    threshold = jnp.where(has_count, of_top_k, -jnp.inf)
    rank = jnp.expand_dims(jnp.arange(ranked.shape[-1]), range(logits.ndim - 1))
    likeliest = jnp.where(rank <= last, ranked, -jnp.inf)
    candidates = lambda: likeliest
  if sampling.top_p is not None:
    top_p = jnp.broadcast_to(per_row(sampling.top_p, logits), threshold.shape)
    of_top_p = _top_p_threshold(candidates, likeliest, top_p)
    if sampling.some_keep_all:
      of_all = lambda: _relative(logits, best, temperature)
      among_all = _top_p_threshold(of_all, ranked, top_p)
      of_top_p = jnp.where(has_count, of_top_p, among_all)
    threshold = jnp.maximum(threshold, of_top_p)
  if sampling.min_p is not None:
    floor = jnp.log(per_row(sampling.min_p, logits))  # the best logit is 0
    threshold = jnp.maximum(threshold, floor)
  return Kept(logits, best, temperature, threshold, (ranked, tokens))


def filter_logits(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
  """The log-probabilities up to a constant, `[B, ..., V]` float32.

  They are `EXCLUDED` for tokens that a filter excludes. `logits [B, ..., V]`
  are adjusted; see `keep`.
  """
  return keep(logits, sampling).filtered()


def token_probs(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
  """The distributions that tokens are drawn from, `[B, ..., V]` float32.

  `logits [B, ..., V]` are adjusted. At temperature 0 the token that greedy
  decoding chooses has probability 1.
  """
  stochastic = per_row(sampling.is_stochastic, logits)
  greedy = jax.nn.one_hot(best_lib.best_token(logits), logits.shape[-1])
  return jnp.where(stochastic, softmax(filter_logits(logits, sampling)), greedy)


def choose(
  logits: jax.Array, noise: randomness_lib.Noise, sampling: SamplingParams
) -> jax.Array:
  """The token of each position, `[B, L]` int32.

  `logits [B, L, V]` are adjusted; the noise belongs to the positions of the
  tokens to be chosen.
  """
  kept = keep(logits, sampling)
  otherwise = lambda: best_lib.best_token(kept.scores_of(noise))
  return kept.among_few(noise, best_lib.best_of_few, otherwise)


WITH_REPLACEMENT = 'with_replacement'
WITHOUT_REPLACEMENT = 'without_replacement'
BEST = 'best'
CHILDREN = (BEST, WITHOUT_REPLACEMENT, WITH_REPLACEMENT)
"""How the k children of a node are chosen: the best, or k draws."""
