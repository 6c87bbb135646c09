"""The functions of `kernels.cc` in JAX.

They lower for CPU only, and only after `build.is_available()`. The bits of a
row depend on nothing but the row itself, and those of a query on nothing but
the slots that it sees.
"""

import jax
import jax.numpy as jnp
import numpy as np


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array,
  *,
  scale: float,
) -> jax.Array:
  """Softmax attention `[B, Hq, L, Dh]`, see `models.nn.attention.attend`."""
  call = jax.ffi.ffi_call(
    'specdec_attend', jax.ShapeDtypeStruct(query.shape, jnp.float32)
  )
  return call(query, key, value, mask, scale=np.float32(scale))


def write_slots(
  slots: jax.Array, new: jax.Array, start: jax.Array
) -> jax.Array:
  """`specdec.cache.write_slots`, in place for batches, too."""
  call = jax.ffi.ffi_call(
    'specdec_write_slots',
    jax.ShapeDtypeStruct(slots.shape, slots.dtype),
    input_output_aliases={0: 0},
  )
  return call(slots, new, start)


def normalize(
  x: jax.Array, scale: jax.Array, *, epsilon: float, center: bool
) -> jax.Array:
  """`x [..., width]` float32 over its root mean square, times `scale [width]`.

  Args:
    x: the rows.
    scale: of the width.
    epsilon: added to the mean square.
    center: whether the mean is subtracted before.
  """
  rows = x.reshape(-1, x.shape[-1])
  call = jax.ffi.ffi_call(
    'specdec_normalize', jax.ShapeDtypeStruct(rows.shape, jnp.float32)
  )
  out = call(rows, scale, epsilon=np.float32(epsilon), center=center)
  return out.reshape(x.shape)


def route(
  logits: jax.Array, count: int, *, renormalize: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The fields of a `models.nn.experts.Routing`, see `models.nn.experts.route`.

  Of equally probable experts the first is taken.
  """
  rows = logits.reshape(-1, logits.shape[-1])
  chosen = (rows.shape[0], count)
  call = jax.ffi.ffi_call(
    'specdec_route',
    (
      jax.ShapeDtypeStruct(chosen, jnp.int32),
      jax.ShapeDtypeStruct(chosen, jnp.float32),
      jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    ),
  )
  experts, weights, probs = (
    part.reshape(*logits.shape[:-1], -1)
    for part in call(rows, renormalize=renormalize)
  )
  return experts, weights, probs


def sum_rows(rows: jax.Array, index: jax.Array, weights: jax.Array):
  """Weighted sums `[T, width]` of k rows each, added in the order of k.

  Args:
    rows: `[P, width]` float32.
    index: `[T, k]` int32, rows of each sum.
    weights: `[T, k]` float32.
  """
  out = jax.ShapeDtypeStruct((index.shape[0], rows.shape[1]), jnp.float32)
  return jax.ffi.ffi_call('specdec_sum_rows', out)(rows, index, weights)
