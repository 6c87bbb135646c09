"""From logits to a token, with randomness attached to positions.

The token at absolute position t is

    argmax(filter(logits / temperature) + gumbel(row key, t))

which is a draw from the filtered softmax (the Gumbel-max trick), and plain
argmax at temperature 0. The draw depends on (logits, seed, row, position) and
on nothing else: not on who drafted the token, nor on how many were verified
together. That is what makes speculative decoding reproduce plain decoding
token for token at any temperature (Gumbel coupling, arXiv 2408.07978).
"""

import math
import numbers
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Finite: -inf plus noise is fine, but -inf minus -inf in a softmax is not.
_FILTERED = -1e30


class Sampling(flax.struct.PyTreeNode, kw_only=True):
  """How to choose a token. What is set applies in the order of the fields.

  Values are arrays, so changing one does not recompile; switching one on or off
  does, so that what is off costs nothing. Each is for all rows, or there is one
  per row `[B]`.

  Attributes:
    logit_bias: `[V]` or `[B, V]`, added to the logits; -inf bans a token.
      `specdec.generate` also takes a mapping from token to bias, or one per
      row. None adds nothing.
    repetition_penalty: above 0; the logits of tokens that the row has, prompt
      included, are divided by it where they are positive, multiplied where not
      (CTRL, arXiv 1909.05858, section 4.1, as transformers does it). None
      changes nothing.
    temperature: at least 0; 0 is greedy.
    top_k: keep the k most likely tokens, and ties with the last of them; an
      entry None keeps all. None keeps all.
    top_p: keep the most likely tokens until their probability reaches top_p, in
      (0, 1]. None keeps all.
    min_p: keep tokens at least min_p times as likely as the likeliest, in
      [0, 1]. None keeps all.
    max_top_k: at least as large as any `top_k`; static. Set by `validated`.
  """

  logit_bias: Any = None
  repetition_penalty: float | jax.Array | None = None
  temperature: float | jax.Array = 0.0
  top_k: Any = None
  top_p: float | jax.Array | None = None
  min_p: float | jax.Array | None = None
  max_top_k: int | None = flax.struct.field(default=None, pytree_node=False)

  def validated(self) -> 'Sampling':
    """Returns itself with arrays, as `decode` wants it.

    Raises:
      ValueError: a value is outside its range or not a number.
    """
    arrays: dict[str, Any] = {}
    for name, (low, high, bounds) in _RANGES.items():
      value = getattr(self, name)
      if value is None and name != 'temperature':
        continue
      array = _floats(name, value)
      if not np.all(np.isfinite(array) & (array >= low) & (array <= high)):
        raise ValueError(f'{name} must be {bounds}, got {value}')
      arrays[name] = jnp.asarray(array)
    if self.logit_bias is not None:
      bias = _floats('logit_bias', self.logit_bias)
      if np.any(np.isnan(bias) | (bias == np.inf)):
        raise ValueError('logit_bias must be numbers or -inf')
      if np.any(np.all(bias < _FILTERED, axis=-1)):
        raise ValueError('logit_bias bans every token; leave one at least')
      arrays['logit_bias'] = jnp.maximum(bias, _FILTERED)
    top_k, largest = _check_top_k(self.top_k)
    arrays |= {'top_k': top_k, 'max_top_k': largest}
    return self.replace(**arrays)

  def of_row(self, row: int) -> 'Sampling':
    """That of one row of a batch; validated."""
    one = {}
    for name in (*_RANGES, 'top_k', 'logit_bias'):
      value = getattr(self, name)
      if np.ndim(value) > (name == 'logit_bias'):
        one[name] = value[row]
    return self.replace(**one)


_TINY = float(np.finfo(np.float32).tiny)
_RANGES: dict[str, tuple[float, float, str]] = {
  'repetition_penalty': (_TINY, math.inf, 'above 0'),
  'temperature': (0.0, math.inf, 'at least 0'),
  'top_p': (_TINY, 1.0, 'above 0 and at most 1'),
  'min_p': (0.0, 1.0, 'between 0 and 1'),
}

# Stands for all tokens, where other rows have a k.
_ALL = np.iinfo(np.int32).max


def _floats(name: str, value: Any) -> np.ndarray:
  try:
    if value is not None:  # which would become NaN
      return np.asarray(value, np.float32)
    raise TypeError
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'{name} must be a number or one per row, got {value!r}'
    ) from error


def _check_top_k(value: Any) -> tuple[jax.Array | None, int | None]:
  """As an array, and a power of two that is as large; None: all, sorted."""
  if hasattr(value, 'dtype'):
    value = np.asarray(value).tolist()
  single = value is None or isinstance(value, (numbers.Number, str))
  entries = [value] if single else list(value)
  for entry in entries:
    is_integer = isinstance(entry, numbers.Integral)
    if entry is not None and (
      not is_integer or isinstance(entry, bool) or entry < 1
    ):
      raise ValueError(f'top_k must be a positive integer, got {value}')
  if all(entry is None for entry in entries):
    return None, None
  array = np.array(
    [_ALL if one is None else min(one, _ALL) for one in entries], np.int32
  )
  largest = int(array.max())
  bound = None if largest == _ALL else 1 << (largest - 1).bit_length()
  return jnp.asarray(array[0] if single else array), bound


def per_row(value: jax.typing.ArrayLike, logits: jax.Array) -> jax.Array:
  """A number or `[B]` numbers, to broadcast against `[B, ..., V]`."""
  shape = jnp.shape(value) + (1,) * (logits.ndim - jnp.ndim(value))
  return jnp.reshape(value, shape)


def adjust_logits(
  logits: jax.Array, sampling: Sampling, seen: jax.Array | None
) -> jax.Array:
  """The logits with bias and repetition penalty.

  Args:
    logits: `[B, W, V]` float32, as the model gave them.
    sampling: validated.
    seen: `[B, W, V]` bool, the tokens that each sequence has; None if there is
      no penalty.

  Returns:
    `[B, W, V]` float32.
  """
  if sampling.logit_bias is not None:
    bias = sampling.logit_bias
    bias = bias[None, None] if bias.ndim == 1 else bias[:, None]
    logits = logits + bias
  if sampling.repetition_penalty is not None and seen is not None:
    penalty = per_row(sampling.repetition_penalty, logits)
    weakened = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen, weakened, logits)
  return logits


def _top_p_threshold(logits: jax.Array, top_p: jax.Array) -> jax.Array:
  """What a logit must reach for top-p to keep it; exact, without sorting.

  A token is kept if all likelier ones together have less than top_p. Numbers of
  one sign are in the order of their bits, so as many halvings as there are bits
  find the threshold. To sort a vocabulary takes several times longer.

  Args:
    logits: `[..., V]` float32, the best is 0; -inf takes no part.
    top_p: `[..., 1]` float32; from 1 on all are kept.

  Returns:
    `[..., 1]` float32.
  """
  probs = jax.nn.softmax(logits, axis=-1)
  num_bits = jnp.finfo(logits.dtype).bits
  integers = jnp.dtype(f'int{num_bits}')
  bits = lax.bitcast_convert_type(jnp.abs(logits), integers)

  def halve(_, bounds):
    kept, dropped = bounds
    middle = kept + (dropped - kept) // 2
    likelier = jnp.where(bits < middle, probs, 0.0)
    # Rounding may bring the sum to 1 early.
    keeps = (jnp.sum(likelier, -1, keepdims=True) < top_p) | (top_p >= 1)
    return jnp.where(keeps, middle, kept), jnp.where(keeps, dropped, middle)

  infinity = np.array(np.inf, logits.dtype).view(integers)
  none = jnp.zeros((*logits.shape[:-1], 1), integers)
  kept, _ = lax.fori_loop(0, num_bits, halve, (none, none + (infinity + 1)))
  return -lax.bitcast_convert_type(kept, logits.dtype)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """Temperature, then top-k, top-p and min-p.

  Every filter keeps the tokens whose logit reaches some threshold, so together
  they are one threshold. At temperature 0 the logits are filtered as at 1,
  which leaves the argmax what it was.

  Args:
    logits: `[B, ..., V]` float32, adjusted.
    sampling: validated.

  Returns:
    `[B, ..., V]` float32: the log-probabilities up to a constant, with a
    large negative number for tokens filtered out.
  """
  temperature = per_row(sampling.temperature, logits)
  # Relative to the best, so that a tiny temperature cannot overflow.
  logits = logits - jnp.max(logits, axis=-1, keepdims=True)
  logits = logits / jnp.where(temperature > 0, temperature, 1.0)
  candidates = logits
  threshold = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
  if sampling.top_k is not None:
    largest = min(sampling.max_top_k or logits.shape[-1], logits.shape[-1])
    # Without the barrier XLA's CPU backend sees that only a slice is used, and
    # sorts the whole vocabulary instead: 100 times slower.
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
  return jnp.where(logits >= threshold, logits, _FILTERED)


def token_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """The distribution that a token is drawn from.

  Args:
    logits: `[B, ..., V]` float32, adjusted.
    sampling: validated.

  Returns:
    `[B, ..., V]` float32, each adding up to 1; at temperature 0 all of it is on
    the token that greedy decoding chooses.
  """
  hot = per_row(sampling.temperature, logits) > 0
  greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
  return jnp.where(
    hot, jax.nn.softmax(filter_logits(logits, sampling), axis=-1), greedy
  )


def position_noise(
  row_keys: jax.Array,
  positions: jax.Array,
  vocab_size: int,
  sampling: Sampling,
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
  hot = jnp.asarray(sampling.temperature) > 0
  noise = lax.cond(
    jnp.any(hot),
    lambda: jax.vmap(jax.vmap(draw, (None, 0)))(row_keys, positions),
    lambda: jnp.zeros(shape),
  )
  return jnp.where(per_row(hot, noise), noise, 0.0)


# What randomness is for, when it belongs to a step and not to a position. Far
# from any position, so that no stream is ever that of `position_noise`.
DRAFTING, ACCEPTANCE, RESIDUAL = (2**31 - 1 - stream for stream in range(3))


def step_keys(row_keys: jax.Array, stream: int, length: jax.Array) -> jax.Array:
  """Keys that no other step and no other stream has.

  Args:
    row_keys: `[B]` keys; not consumed.
    stream: `DRAFTING`, `ACCEPTANCE` or `RESIDUAL`.
    length: `[B]` int32, of the text when the step begins; every step adds to
      it.

  Returns:
    `[B]` keys.
  """
  fold = jax.vmap(jax.random.fold_in, (0, 0))
  of_stream = jax.vmap(jax.random.fold_in, (0, None))(row_keys, stream)
  return fold(of_stream, length)


def choose(
  logits: jax.Array, noise: jax.Array, sampling: Sampling
) -> jax.Array:
  """The token of each position; target and drafts choose alike.

  Args:
    logits: `[B, ..., V]` float32.
    noise: `[B, ..., V]` float32 from `position_noise`, for the position of the
      token to be chosen.
    sampling: validated.

  Returns:
    `[B, ...]` int32.
  """
  scores = filter_logits(logits, sampling) + noise
  return jnp.argmax(scores, axis=-1).astype(jnp.int32)
