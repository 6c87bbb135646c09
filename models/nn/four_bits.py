"""Rounds matrices of floats to the four-bit blocks of `models/nn/blocks`."""

from collections.abc import Iterable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.models.nn import blocks as blocks_lib

_SUPER = 256  # Inputs that share the two factors of Q4_K,
_GROUPS = 8  # in groups of 32.
_LARGEST = 15.0  # The largest q,
_LARGEST_SCALE = 63.0  # and of scales and minima in Q4_K.
_STEPS = 11  # Scales that are tried for a group.
_CHUNK = 1 << 10  # Rows of 256 inputs that are rounded at once.


_Fit = tuple[jax.Array, ...]  # An error, a scale and a minimum `[n]`.


def _fit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Scales and minima of groups `[32, n]`, both `[n]` and not negative.

  The search of llama.cpp (`make_qkx2_quants` of ggml-quants.c): for each of
  some first scales weights are rounded, and scale and minimum chosen by least
  squares, larger weights counting more; the best of these is taken.
  """
  importance = jnp.sqrt(jnp.mean(x * x, axis=0))[None] + jnp.abs(x)
  low = jnp.minimum(jnp.min(x, axis=0), 0.0)
  span = jnp.max(x, axis=0) - low
  safe = jnp.where(span > 0.0, span, 1.0)
  total = lambda values: jnp.sum(values, axis=0)
  sum_w, weighted = total(importance), importance * x
  sum_x = total(weighted)

  def attempt(step: jax.Array, best: _Fit) -> _Fit:
    steps = (_LARGEST - 1.0 + 0.2 * step) / safe
    q = jnp.round(steps[None] * (x - low[None])).clip(0.0, _LARGEST)
    sum_q, sum_qq = total(importance * q), total(importance * q * q)
    sum_qx = total(weighted * q)
    det = sum_w * sum_qq - sum_q * sum_q
    usable = det > 0.0
    det = jnp.where(usable, det, 1.0)
    scale = (sum_w * sum_qx - sum_x * sum_q) / det
    start = (sum_qq * sum_x - sum_q * sum_qx) / det
    alone = sum_qx / jnp.where(sum_qq > 0.0, sum_qq, 1.0)
    scale = jnp.where(start > 0.0, alone, scale)
    start = jnp.minimum(start, 0.0)
    # The part of the sum of squares that differs.
    error = scale * (scale * sum_qq + 2.0 * (start * sum_q - sum_qx))
    error += start * (start * sum_w - 2.0 * sum_x)
    better = usable & (error < best[0])
    fit = error, scale, start
    return tuple(
      jnp.where(better, new, old) for new, old in zip(fit, best, strict=True)
    )

  first = jnp.full_like(low, jnp.inf), safe / _LARGEST, low
  _, scale, start = lax.fori_loop(0, _STEPS, attempt, first)
  return jnp.where(span > 0.0, scale, 0.0), -start


@jax.jit
def _fitted(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Scales and minima `[n, 8]` of rows `[n, 256]`."""
  scale, minimum = _fit(rows.reshape(-1, 32).T)
  return scale.reshape(-1, _GROUPS), minimum.reshape(-1, _GROUPS)


@jax.jit
def _rounded(
  rows: jax.Array, scale: jax.Array, minimum: jax.Array
) -> jax.Array:
  """Integers `[n, groups, 32]`, for scales and minima `[n, groups]`."""
  groups = rows.reshape(*scale.shape, 32)
  inverse = jnp.where(scale > 0.0, 1.0 / scale, 0.0)[..., None]
  q = jnp.round((groups + minimum[..., None]) * inverse)
  return q.clip(0.0, _LARGEST).astype(jnp.uint8)


def _halves(values: np.ndarray) -> np.ndarray:
  """Floats `[..., n]` as float16, in bytes `[..., 2 n]`."""
  return values.astype(np.float16).view(np.uint8)


def _q4_k(rows: np.ndarray) -> np.ndarray:
  """Blocks of Q4_K, `[n, 144]` uint8, of rows `[n, 256]`."""
  scale, minimum = map(np.asarray, _fitted(rows))
  fields, exact, integers = [], [], []
  for values in (scale, minimum):
    peak = values.max(axis=1, keepdims=True)
    inverse = _LARGEST_SCALE / np.where(peak > 0.0, peak, 1.0)
    whole = np.round(values * inverse).astype(np.uint8)
    half = (peak / _LARGEST_SCALE).astype(np.float16)
    fields.append(_halves(half))
    integers.append(whole)
    exact.append(half.astype(np.float32) * whole)
  q = np.asarray(_rounded(rows, *exact)).reshape(-1, 4, 2, 32)
  scales, minima = integers
  first, last = np.split(scales, 2, axis=1), np.split(minima, 2, axis=1)
  fields += [
    first[0] | first[1] >> 4 << 6,
    last[0] | last[1] >> 4 << 6,
    first[1] & 15 | last[1] << 4,
    (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128),
  ]
  return np.concatenate(fields, axis=1)


def _q4_1(rows: np.ndarray) -> np.ndarray:
  """Blocks of Q4_1, `[8 n, 20]` uint8, of rows `[n, 256]`."""
  scale, minimum = map(np.asarray, _fitted(rows))
  exact = [part.astype(np.float16) for part in (scale, -minimum)]
  floats = [part.astype(np.float32) for part in exact]
  q = np.asarray(_rounded(rows, floats[0], -floats[1])).reshape(-1, 32)
  halves = np.stack(exact, axis=-1).reshape(-1, 2)
  return np.hstack([_halves(halves), q[:, :16] | q[:, 16:] << 4])


def _q8_0(rows: np.ndarray) -> np.ndarray:
  """Blocks of Q8_0, `[8 n, 34]` uint8, of rows `[n, 256]`."""
  groups = rows.reshape(-1, 32)
  scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
  inverse = 1.0 / np.where(scale > 0.0, scale, 1.0)
  q = np.round(groups * inverse).astype(np.int8)
  return np.hstack([_halves(scale), q.view(np.uint8)])


_ROUND = {'Q4_K': _q4_k, 'Q4_1': _q4_1, 'Q8_0': _q8_0}


def _raw_rows(rows: np.ndarray, kind: str) -> np.ndarray:
  """Rows `[n, in]` as a file of this kind has them, padded to whole blocks."""
  facts = blocks_lib.KINDS[kind]
  rows = np.asarray(rows, np.float32)
  if not np.isfinite(rows).all():
    raise ValueError('a matrix has weights that are not finite')
  count, width = rows.shape
  rows = np.pad(rows, ((0, 0), (0, -width % facts.file_inputs)))
  flat = rows.reshape(-1)
  # Always as many at once, so that one program serves all matrices.
  size = _CHUNK * _SUPER
  chunks = []
  for start in range(0, len(flat), size):
    part = flat[start : start + size]
    padded = np.pad(part, (0, size - len(part))).reshape(_CHUNK, _SUPER)
    rounded = _ROUND[kind](padded)
    chunks.append(rounded[: len(part) // facts.file_inputs])
  return np.concatenate(chunks).reshape(count, -1)


def quantize_blocks(
  blocks: Iterable[blocks_lib.Rows],
  shape: tuple[int, ...],
  *,
  is_head: bool = False,
) -> blocks_lib.BlockMatrix:
  """A matrix in four bits of floats that come block by block, on the host.

  In Q4_K, or in Q4_1 where its inputs are no multiple of 256; in Q8_0 if its
  rows are looked up or its outputs are logits.

  Args:
    blocks: indices of n rows, and their values `[n, in]`.
    shape: `(out, in)`.
    is_head: whether it is the token embedding or the head.

  Raises:
    ValueError: the matrix has a weight that is not finite.
  """
  kind = 'Q4_1' if shape[1] % _SUPER else 'Q4_K'
  kind = 'Q8_0' if is_head else kind
  raw = ((index, _raw_rows(rows, kind)) for index, rows in blocks)
  return blocks_lib.from_raw(raw, shape, kind, 'int4')
