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

from specdec.tree.tree import pick
from specdec.tree.tree import TokenTree
from specdec.tree.tree import walk_up

EXCLUDED = -1e30
"""Finite stand-in for the log-probability of a token that cannot be chosen.

-inf plus noise is fine, but -inf minus -inf in a softmax is not."""


def is_possible(log_probs: jax.Array) -> jax.Array:
  """Which are not `EXCLUDED`, whatever was added to it or divided it."""
  return log_probs > EXCLUDED * 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How to choose a token, as users state it; greedy by default.

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
  """`Sampling` as arrays, made by `checks.check_sampling`."""

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
  tree: TokenTree, nodes: jax.Array, seen: jax.Array, max_depth: int
) -> jax.Array:
  """The tokens that the sequence of each node has, its own included.

  A repetition penalty then has the same effect on a node as in plain decoding.

  Args:
    tree: `[B, M]` per field.
    nodes: `[B, W]` int32; entries of `NO_NODE` get the tokens of the text.
    seen: `[B, V]` bool, the tokens of the text.
    max_depth: D.

  Returns:
    `[B, W, V]` bool.
  """

  def of_row(tree, nodes, seen):
    walk = walk_up(tree.parent, nodes, max_depth)
    tokens = jnp.where(walk >= 0, tree.token[walk], seen.shape[0])
    index = jnp.arange(nodes.shape[0])[:, None]
    spread = jnp.broadcast_to(seen[None], (nodes.shape[0], seen.shape[0]))
    return spread.at[index, tokens].set(True, mode='drop')

  return jax.vmap(of_row)(tree, nodes, seen)


def _top_p_threshold(logits: jax.Array, top_p: jax.Array) -> jax.Array:
  """The smallest logit that top-p keeps; exact, without sorting.

  A token is kept if all likelier ones together have less than top_p. Numbers of
  one sign are in the order of their bits, so as many bisections as there are
  bits find the threshold. Sorting a vocabulary takes several times longer.

  `logits [..., V]` have a maximum of 0, and -inf is left out. From `top_p [...,
  1]` of 1 on all tokens are kept. Returns `[..., 1]` float32.
  """
  probs = jax.nn.softmax(logits, axis=-1)
  num_bits = jnp.finfo(logits.dtype).bits
  integers = jnp.dtype(f'int{num_bits}')
  bits = lax.bitcast_convert_type(jnp.abs(logits), integers)

  def bisect(_, bounds):
    kept, dropped = bounds
    middle = kept + (dropped - kept) // 2
    likelier = jnp.where(bits < middle, probs, 0.0)
    # Rounding may bring the sum to 1 early.
    keeps = (jnp.sum(likelier, -1, keepdims=True) < top_p) | (top_p >= 1)
    return jnp.where(keeps, middle, kept), jnp.where(keeps, dropped, middle)

  infinity = np.array(np.inf, logits.dtype).view(integers)
  none = jnp.zeros((*logits.shape[:-1], 1), integers)
  kept, _ = lax.fori_loop(0, num_bits, bisect, (none, none + (infinity + 1)))
  return -lax.bitcast_convert_type(kept, logits.dtype)


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
  candidates = logits
  threshold = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
  if sampling.top_k is not None:
    largest = min(sampling.max_top_k or logits.shape[-1], logits.shape[-1])
    # Without the barrier XLA's CPU backend notices that only a slice is used,
    # and sorts the whole vocabulary instead: 100 times slower.
    ranked = lax.optimization_barrier(lax.top_k(logits, largest)[0])
    last = jnp.minimum(per_row(sampling.top_k, logits), largest) - 1
    last = jnp.broadcast_to(last, threshold.shape)
    threshold = jnp.take_along_axis(ranked, last, axis=-1)
    rank = jnp.expand_dims(jnp.arange(largest), range(logits.ndim - 1))
    candidates = jnp.where(rank <= last, ranked, -jnp.inf)
  if sampling.top_p is not None:
    top_p = per_row(sampling.top_p, logits)
    threshold = jnp.maximum(threshold, _top_p_threshold(candidates, top_p))
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
  return jnp.where(
    stochastic, jax.nn.softmax(filter_logits(logits, sampling), axis=-1), greedy
  )


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

  def draw(row_key, position):
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
BEST = 'best'
CHILDREN = (BEST, WITHOUT_REPLACEMENT, WITH_REPLACEMENT)
"""How the children of a node are chosen; all but the best are drawn."""

# What randomness is for, when it belongs to a step and not to a position. Far
# from any position, so that no stream is ever that of `position_noise`.
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
    return jax.vmap(pick)(self.noise, depth)


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
