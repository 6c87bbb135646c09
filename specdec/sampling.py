"""From logits to a token, with randomness attached to positions.

The token at absolute position t is

    argmax(filter(logits / temperature) + gumbel(row key, t))

which is a draw from the filtered softmax (the Gumbel-max trick), and plain
argmax at temperature 0. It depends on (logits, seed, row, position) and on
nothing else: not on the stage that drafted the token, nor on how many tokens
were verified together. That is why speculative decoding reproduces plain
decoding token for token at any temperature (Gumbel coupling, arXiv 2408.07978).
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.tree import tree as tree_lib

EXCLUDED = -np.inf
"""Log-probability of a token that cannot be chosen.

It is infinite, so that no temperature and no penalty makes it possible."""


def is_usable(logits: jax.Array) -> jax.Array:
  """Whether a token can be chosen from `logits [..., V]`; `[...]` bool.

  Logits of -inf are those of tokens that are never chosen. NaN, inf, or -inf
  for all tokens come from a broken model, and no choice follows from them.
  """
  # The maximum of XLA's CPU backend drops NaN from some 4,000 values on.
  nan_as_inf = jnp.where(logits < jnp.inf, logits, jnp.inf)
  return jnp.isfinite(jnp.max(nan_as_inf, axis=-1))


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
  one = np.array(_units(weights.shape[-1]), weights.dtype)
  with jax.enable_x64(True):
    return _mass(weights).astype(weights.dtype) / one


def softmax(logits: jax.Array) -> jax.Array:
  """Softmax of `logits [..., V]`, whose bits do not depend on the shape."""
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  return weights / total(weights)


def log_softmax(logits: jax.Array) -> jax.Array:
  """Log-softmax of `logits [..., V]`, whose bits do not depend on the shape."""
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
  #: Keep tokens at least min_p times as likely as the likeliest, in [0, 1].
  min_p: Any = None


class SamplingParams(flax.struct.PyTreeNode, kw_only=True):
  """`Sampling` as arrays, made by `checks.to_params`."""

  temperature: jax.Array  #: `[B]` float32.
  logit_bias: jax.Array | None = None  #: `[V]` or `[B, V]` float32, or None.
  repetition_penalty: jax.Array | None = None  #: `[B]` float32, or None.
  top_k: jax.Array | None = None  #: `[B]` int32, or None.
  top_p: jax.Array | None = None  #: `[B]` float32, or None.
  min_p: jax.Array | None = None  #: `[B]` float32, or None.
  #: At least as large as any `top_k`; None: the vocabulary; static.
  max_top_k: int | None = flax.struct.field(default=None, pytree_node=False)

  @property
  def is_stochastic(self) -> jax.Array:
    """`[B]` bool, the rows that sample; the others are greedy."""
    return self.temperature > 0


def per_row(values: jax.Array, like: jax.Array) -> jax.Array:
  """`[B]` values, shaped to broadcast against `like [B, ...]`."""
  return values.reshape(-1, *(1,) * (like.ndim - 1))


def adjust_logits(
  logits: jax.Array, sampling: SamplingParams, seen: jax.Array | None
) -> jax.Array:
  """`logits [B, W, V]` float32 of a model, with bias and repetition penalty.

  `seen`: `[B, W, V]` bool, the tokens that each sequence has; None if there is
  no penalty.
  """
  if sampling.logit_bias is not None:
    bias = sampling.logit_bias
    bias = bias[None, None] if bias.ndim == 1 else bias[:, None]
    logits = logits + bias
  if seen is not None and sampling.repetition_penalty is not None:
    penalty = per_row(sampling.repetition_penalty, logits)
    weakened = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen, weakened, logits)
  return logits


def add_seen(seen: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
  """Adds the first `count [B]` of `tokens [B, n]` to `seen [B, V]` bool."""
  index = jnp.arange(tokens.shape[1])[None]
  tokens = jnp.where(index < count[:, None], tokens, seen.shape[1])
  rows = jnp.arange(tokens.shape[0])[:, None]
  return seen.at[rows, tokens].set(True, mode='drop')


def seen_by_nodes(
  tree: tree_lib.TokenTree, nodes: jax.Array, seen: jax.Array, max_depth: int
) -> jax.Array:
  """The tokens that the sequence of each node has, its own included.

  A repetition penalty then has the same effect on a node as in plain decoding.

  Args:
    tree: `[B, M]` per field.
    nodes: `[B, W]` int32; entries of `NO_NODE` get the tokens of the text.
    seen: `[B, V]` bool, the tokens of the text.
    max_depth: D.

  Returns:
    `[B, W, V]` bool. The root's token is in `seen`, too; a count would have to
    leave it out once.
  """

  def of_row(
    tree: tree_lib.TokenTree, nodes: jax.Array, seen: jax.Array
  ) -> jax.Array:
    walk = tree_lib.walk_up(tree.parent, nodes, max_depth)
    tokens = jnp.where(walk >= 0, tree.token[walk], seen.shape[0])
    index = jnp.arange(nodes.shape[0])[:, None]
    spread = jnp.broadcast_to(seen[None], (nodes.shape[0], seen.shape[0]))
    return spread.at[index, tokens].set(True, mode='drop')

  return jax.vmap(of_row)(tree, nodes, seen)


# Top-p looks at so many of the likeliest tokens first. They nearly always
# suffice, and a search among all of a large vocabulary takes far longer.
_FIRST_RANKED = 256


def _bisect(
  logits: jax.Array, least: jax.Array, allowed: jax.Array
) -> jax.Array:
  """The smallest logit that top-p keeps; see `_top_p_threshold`.

  Numbers of one sign are in the order of their bits, so as many bisections as
  there are bits find it. Sorting a vocabulary takes five times longer.

  Of `logits [..., V]`, `least [..., 1]` is one that is kept; likelier tokens
  have less than `allowed [..., 1]` int64 together.
  """
  integers = jnp.dtype(f'int{jnp.finfo(logits.dtype).bits}')
  bits_of = lambda logits: lax.bitcast_convert_type(jnp.abs(logits), integers)
  bits, weights = bits_of(logits), jnp.exp(logits)

  def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    kept, dropped = bounds
    middle = kept + (dropped - kept) // np.array(2, integers)
    likelier = jnp.where(bits < middle, weights, np.array(0, weights.dtype))
    keeps = _mass(likelier) < allowed
    return jnp.where(keeps, middle, kept), jnp.where(keeps, dropped, middle)

  # Tokens from exp(-64) on have no mass, and those before it all there is.
  bounds = bits_of(least), bits_of(jnp.full_like(least, -64))
  is_open = lambda bounds: jnp.any(bounds[1] - bounds[0] > 1)
  kept, _ = lax.while_loop(is_open, halve, bounds)
  return -lax.bitcast_convert_type(kept, logits.dtype)


def _top_p_threshold(
  logits: jax.Array, ranked: jax.Array, top_p: jax.Array
) -> jax.Array:
  """The smallest logit that top-p keeps, `[..., 1]` float32.

  A token is kept if all likelier ones together have less than top_p; from a
  `top_p [..., 1]` of 1 on all are kept.

  Args:
    logits: `[..., V]` float32, at most 0; -inf is left out.
    ranked: `[..., n]` float32, the n largest of them, in descending order.
    top_p: `[..., 1]` float32.
  """
  with jax.enable_x64(True):
    mass = _mass(jnp.exp(logits)).astype(top_p.dtype)
    allowed = (mass * top_p).astype(jnp.int64)
    own = _in_units(jnp.exp(ranked), logits.shape[-1])
    until = jnp.cumsum(own, axis=-1)
    kept = jnp.where(until - own < allowed, ranked, 0)
    least = jnp.min(kept, axis=-1, keepdims=True)
    suffice = (until[..., -1:] >= allowed) | (top_p >= 1)
    threshold = lax.cond(
      jnp.all(suffice) | (ranked.shape[-1] == logits.shape[-1]),
      lambda: least,
      lambda: _bisect(logits, least, allowed),
    )
  return jnp.where(top_p >= 1, -jnp.inf, threshold)


def _ranked(logits: jax.Array, number: int) -> jax.Array:
  """The largest of `logits [..., V]` in descending order, `[..., number]`."""
  # Without the barrier XLA's CPU backend notices that only a slice is used, and
  # sorts the whole vocabulary instead: 100 times slower.
  number = min(number, logits.shape[-1])
  return lax.optimization_barrier(lax.top_k(logits, number)[0])


def filter_logits(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
  """Temperature, then top-k, top-p and min-p.

  Every filter keeps the tokens whose logit reaches some threshold, so together
  they are one threshold. At temperature 0 the logits are filtered as at 1,
  which leaves the argmax what it was. `logits [B, ..., V]` are adjusted.

  Returns:
    `[B, ..., V]` float32: the log-probabilities up to a constant, `EXCLUDED`
    for tokens that were filtered out.
  """
  temperature = per_row(sampling.temperature, logits)
  # Relative to the best, so that a tiny temperature cannot overflow.
  logits = logits - jnp.max(logits, axis=-1, keepdims=True)
  logits = logits / jnp.where(temperature > 0, temperature, 1.0)
  candidates = ranked = logits
  threshold = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
  if sampling.top_k is not None:
    ranked = _ranked(logits, sampling.max_top_k or logits.shape[-1])
    last = jnp.minimum(per_row(sampling.top_k, logits), ranked.shape[-1]) - 1
    last = jnp.broadcast_to(last, threshold.shape)
    threshold = jnp.take_along_axis(ranked, last, axis=-1)
    rank = jnp.expand_dims(jnp.arange(ranked.shape[-1]), range(logits.ndim - 1))
    candidates = ranked = jnp.where(rank <= last, ranked, -jnp.inf)
  elif sampling.top_p is not None:
    ranked = _ranked(logits, _FIRST_RANKED)
  if sampling.top_p is not None:
    top_p = jnp.broadcast_to(per_row(sampling.top_p, logits), threshold.shape)
    of_top_p = _top_p_threshold(candidates, ranked, top_p)
    threshold = jnp.maximum(threshold, of_top_p)
  if sampling.min_p is not None:
    floor = jnp.log(per_row(sampling.min_p, logits))  # the best logit is 0
    threshold = jnp.maximum(threshold, floor)
  return jnp.where(logits >= threshold, logits, EXCLUDED)


def _first_largest(scores: jax.Array) -> jax.Array:
  """`best_token` by two passes that XLA's CPU backend vectorises."""
  largest = jnp.max(scores, axis=-1, keepdims=True)
  tokens = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
  last = scores.shape[-1] - 1  # Where NaN is among the scores.
  return jnp.min(jnp.where(scores == largest, tokens, last), axis=-1)


def _argmax(scores: jax.Array) -> jax.Array:
  return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def best_token(scores: jax.Array) -> jax.Array:
  """The token with the highest score, `[...]` int32, for `scores [..., V]`.

  Among equal scores the lowest token wins. Where NaN is among them, any does.
  """
  # On CPU, eight rows of 151,936: 0.9 ms in place of 5.4 ms.
  return lax.platform_dependent(scores, cpu=_first_largest, default=_argmax)


def token_probs(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
  """The distributions that tokens are drawn from, `[B, ..., V]` float32.

  `logits [B, ..., V]` are adjusted. At temperature 0 the token that greedy
  decoding chooses has probability 1.
  """
  stochastic = per_row(sampling.is_stochastic, logits)
  greedy = jax.nn.one_hot(best_token(logits), logits.shape[-1])
  return jnp.where(stochastic, softmax(filter_logits(logits, sampling)), greedy)


def choose(
  logits: jax.Array, noise: jax.Array, sampling: SamplingParams
) -> jax.Array:
  """The token of each position, `[B, ...]` int32; for target and drafts alike.

  `logits [B, ..., V]` are adjusted; `noise [B, ..., V]` is from
  `position_noise`, for the position of the token to be chosen.
  """
  return best_token(filter_logits(logits, sampling) + noise)


def position_noise(
  row_keys: jax.Array,
  positions: jax.Array,
  vocab_size: int,
  sampling: SamplingParams,
) -> jax.Array:
  """The noise of the tokens at the given absolute positions.

  Args:
    row_keys: `[B]` keys; not consumed, the same keys serve every position.
    positions: `[B, L]` int32.
    vocab_size: V.
    sampling: rows at temperature 0 get zeros; if all are, none is drawn.

  Returns:
    `[B, L, V]` float32, standard Gumbel.
  """

  def draw(row_key: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.gumbel(
      jax.random.fold_in(row_key, position), (vocab_size,)
    )

  shape = (*positions.shape, vocab_size)
  stochastic = sampling.is_stochastic
  noise = lax.cond(
    jnp.any(stochastic),
    lambda: jax.vmap(jax.vmap(draw, (None, 0)))(row_keys, positions),
    lambda: jnp.zeros(shape),
  )
  return jnp.where(per_row(stochastic, noise), noise, 0.0)


WITH_REPLACEMENT = 'with_replacement'
WITHOUT_REPLACEMENT = 'without_replacement'
BEST_AND_DRAWN = 'best_and_drawn'
BEST = 'best'
CHILDREN = (BEST, WITHOUT_REPLACEMENT, WITH_REPLACEMENT, BEST_AND_DRAWN)
"""How the k children of a node are chosen: the best, k draws, or the k - 1 best
and, as the last, a draw among the other tokens."""

# Streams of randomness that belong to a step, not to a position. They are far
# from any position, so that none is ever a stream of `position_noise`.
DRAFTING, ACCEPTANCE, RESIDUAL = (2**31 - 1 - stream for stream in range(3))


def step_keys(row_keys: jax.Array, stream: int, length: jax.Array) -> jax.Array:
  """`[B]` keys that no other step and no other stream has.

  `stream` is `DRAFTING`, `ACCEPTANCE` or `RESIDUAL`. `length [B]` is that of
  the text when the step begins; every step increases it.
  """
  of_stream = jax.vmap(jax.random.fold_in, (0, None))(row_keys, stream)
  return jax.vmap(jax.random.fold_in)(of_stream, length)


class Randomness(flax.struct.PyTreeNode):
  """The randomness of a step; what a rule does not use is not computed."""

  #: `[B, D + 1, V]` float32; entry d is of the position that follows nodes of
  #: depth d. Drafts share it with the target; zeros under a rule that does not
  #: (`verify.accept.Rule.shares_noise`).
  noise: jax.Array
  draft_keys: jax.Array  #: `[B]` keys, for drawing children.
  uniforms: jax.Array  #: `[B, N]` float32 in [0, 1), for accepting the nodes.
  #: `[B, V]` float32, standard Gumbel, for the bonus token.
  residual_noise: jax.Array

  def noise_at(self, depth: jax.Array) -> jax.Array:
    """`[B, W, V]`, the noise after nodes of `depth [B, W]`."""
    return jax.vmap(tree_lib.pick)(self.noise, depth)


def step_randomness(
  row_keys: jax.Array,
  length: jax.Array,
  sampling: SamplingParams,
  *,
  max_depth: int,
  num_nodes: int,
  vocab_size: int,
  shares_noise: bool,
) -> Randomness:
  """The randomness of the step that begins at `length [B]` of the texts.

  D, N and V give the sizes; `shares_noise` is that of the rule, and `row_keys
  [B]` are not consumed.
  """
  positions = length[:, None] + jnp.arange(max_depth + 1)[None]
  if shares_noise:
    noise = position_noise(row_keys, positions, vocab_size, sampling)
  else:
    noise = jnp.zeros((*positions.shape, vocab_size))
  uniform = lambda key: jax.random.uniform(key, (num_nodes,))
  gumbel = lambda key: jax.random.gumbel(key, (vocab_size,))
  return Randomness(
    noise=noise,
    draft_keys=step_keys(row_keys, DRAFTING, length),
    uniforms=jax.vmap(uniform)(step_keys(row_keys, ACCEPTANCE, length)),
    residual_noise=jax.vmap(gumbel)(step_keys(row_keys, RESIDUAL, length)),
  )
