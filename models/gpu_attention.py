"""Writing new entries to the cache and attending, as one kernel for GPUs.

A program of the kernel has one row of the batch and one head: it goes over the
filled slots block by block with a running softmax (FlashAttention, arXiv
2205.14135, section 3.1), then over the new entries, then writes these. No two
programs touch the same slot, and none reads a slot that is written.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp

from models.attention import MASKED_SCORE
from models.matmul import precision
from specdec import gpu

_SLOTS_PER_BLOCK = 64
_MOST_ROWS = 128
# Of a matrix product on tensor cores.
_FEWEST_ROWS = 16


def _power_of_two(number: int) -> int:
  """A size of arrays, large enough for a matrix product on tensor cores."""
  return max(_FEWEST_ROWS, gpu.power_of_two(number))


def fits(query: jax.Array, key: jax.Array) -> bool:
  """Whether the kernel serves these shapes, `[B, Hq, L, Dh]`, `[B, H, L, Dh]`.

  The queries of a head have to fit into registers; a long prompt, which does
  not, keeps the device busy anyway.
  """
  if not gpu.runs_kernels():
    return False
  width = key.shape[3]
  rows = query.shape[1] // key.shape[1] * key.shape[2]
  return rows <= _MOST_ROWS and width == _power_of_two(width)


def _dot(x, y):
  return triton.dot(x, y, precision=precision(y.dtype))


def _absorb(carry, scores, visible, exists, values):
  """One more block of slots for the running softmax."""
  out, top, total = carry
  scores = jnp.where(visible, scores, MASKED_SCORE)
  new_top = jnp.maximum(top, jnp.max(scores, axis=1))
  weights = jnp.where(exists, jnp.exp(scores - new_top[:, None]), 0.0)
  shrink = jnp.exp(top - new_top)
  out = out * shrink[:, None] + _dot(weights.astype(values.dtype), values)
  return out, new_top, total * shrink + jnp.sum(weights, axis=1)


def _kernel(
  start_ref,
  mask_ref,
  query_ref,
  new_key_ref,
  new_value_ref,
  key_ref,
  value_ref,
  out_ref,
  written_key_ref,
  written_value_ref,
  *,
  scale,
):
  num_rows, width = query_ref.shape
  num_new, num_slots = mask_ref.shape
  row = jnp.arange(_power_of_two(num_rows))
  column = jnp.arange(width)
  start = start_ref[...]
  of_row = (row < num_rows)[:, None]
  load = lambda ref, index, real: triton.load(
    ref.at[index, column[None]],
    mask=jnp.broadcast_to(real, (real.shape[0], width)),
    other=0,
  )
  query = load(query_ref, row[:, None], of_row)
  # Rows beyond the first L are other heads of the same group.
  query_index = (row % num_new)[:, None]

  def see(slot, exists):
    seen = triton.load(
      mask_ref.at[query_index, slot[None]],
      mask=of_row & exists[None],
      other=False,
    )
    return seen != 0

  def old_block(block, carry):
    slot = block * _SLOTS_PER_BLOCK + jnp.arange(_SLOTS_PER_BLOCK)
    exists = slot < start
    keys = load(key_ref, slot[:, None], exists[:, None])
    values = load(value_ref, slot[:, None], exists[:, None])
    scores = scale * _dot(query, keys.T)
    return _absorb(carry, scores, see(slot, exists), exists[None], values)

  carry = (
    jnp.zeros((row.size, width), jnp.float32),
    jnp.full(row.size, MASKED_SCORE, jnp.float32),
    jnp.zeros(row.size, jnp.float32),
  )
  carry = lax.fori_loop(0, pl.cdiv(start, _SLOTS_PER_BLOCK), old_block, carry)
  new = jnp.arange(_power_of_two(num_new))
  # There is room for all; if not, none is written to the memory behind.
  exists = (new < num_new) & (start + new < num_slots)
  keys = load(new_key_ref, new[:, None], exists[:, None])
  values = load(new_value_ref, new[:, None], exists[:, None])
  scores = scale * _dot(query, keys.T)
  out, _, total = _absorb(
    carry, scores, see(start + new, exists), exists[None], values
  )
  store = lambda ref, what, real: triton.store(
    ref, what, mask=jnp.broadcast_to(real, what.shape)
  )
  place = out_ref.at[query_index, (row // num_new)[:, None], column[None]]
  store(place, (out / total[:, None]).astype(out_ref.dtype), of_row)
  slot = (start + new)[:, None]
  for ref, what in ((written_key_ref, keys), (written_value_ref, values)):
    store(ref.at[slot, column[None]], what, exists[:, None])


@functools.partial(jax.jit, static_argnames=('scale', 'interpret'))
def attend_and_write(
  query,
  new_key,
  new_value,
  mask,
  keys,
  values,
  start,
  *,
  scale,
  interpret=False,
):
  """See `models.cached_attention.attend_and_write`.

  Args:
    query: `[B, Hq, L, Dh]`; Hq a multiple of H.
    new_key: `[B, H, L, Dh]`, finite.
    new_value: `[B, H, L, Dh]`, finite.
    mask: `[B, L, S]` bool.
    keys: `[B, H, S, Dh]`.
    values: `[B, H, S, Dh]`.
    start: `[B]` int32, where the new entries go.
    scale: multiplies the scores.
    interpret: run it on anything, for tests.

  Returns:
    `[B, Hq, L, Dh]` float32, rounded to the dtype of the cache, and `keys` and
    `values` with the new entries.
  """
  batch_size, num_heads, num_new, width = new_key.shape
  num_slots = keys.shape[2]
  group = query.shape[1] // num_heads
  rows = group * num_new
  query = query.reshape(batch_size, num_heads, rows, width)
  of_head = lambda size: pl.BlockSpec(
    (None, None, size, width), lambda row, head: (row, head, 0, 0)
  )
  cache_array = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
  out, keys, values = pl.pallas_call(
    functools.partial(_kernel, scale=scale),
    grid=(batch_size, num_heads),
    in_specs=[
      pl.BlockSpec((None,), lambda row, head: (row,)),
      pl.BlockSpec((None, num_new, num_slots), lambda row, head: (row, 0, 0)),
      of_head(rows),
      of_head(num_new),
      of_head(num_new),
      of_head(num_slots),
      of_head(num_slots),
    ],
    out_specs=[
      # Positions first, as the product that follows wants it.
      pl.BlockSpec(
        (None, num_new, group, width), lambda row, head: (row, 0, head, 0)
      ),
      of_head(num_slots),
      of_head(num_slots),
    ],
    out_shape=[
      jax.ShapeDtypeStruct(
        (batch_size, num_new, num_heads * group, width), keys.dtype
      ),
      cache_array,
      cache_array,
    ],
    input_output_aliases={5: 1, 6: 2},
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name='attend_and_write',
  )(start, mask, query, new_key, new_value, keys, values)
  return out.swapaxes(1, 2).astype(jnp.float32), keys, values
