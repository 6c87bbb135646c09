"""The functions of `kernels.cc` in JAX.

They lower for CPU only, and only after `build.is_available()`. The bits of a
row depend on nothing but the row itself, and those of a query on nothing but
the slots that it sees.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 16  # Outputs that are stored together.
_BLOCKS = 3  # Blocks that are multiplied together.
_ALIGNMENT = 64  # Bytes; JAX copies arrays on the CPU that begin elsewhere.
DTYPES = ('float32', 'bfloat16', 'int8')
"""Dtypes of the matrices that the kernels multiply."""


class PackedMatrix(flax.struct.PyTreeNode):
  """A matrix as the kernels read it.

  Attributes:
    words: `[3 ceil(out / 48), ceil(in / g), 16]` uint32, each g consecutive
      weights of an output (g is 1, 2 or 4). Those of int8 are 128 larger.
    scale: `[out]` float32 of int8, `[0]` of other dtypes.
    shape: the shape `(out, in)` of the matrix.
    dtype: a name of `DTYPES`.
  """

  words: jax.Array
  scale: jax.Array
  shape: tuple[int, int] = flax.struct.field(pytree_node=False)
  dtype: str = flax.struct.field(pytree_node=False)


def _aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
  """Zeros of uint32 that JAX can take as they are, without a copy."""
  size = 4 * math.prod(shape)
  memory = np.zeros(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(np.uint32).reshape(shape)


def pack(values: np.ndarray, scale: np.ndarray | None = None) -> PackedMatrix:
  """Packs a matrix `[out, in]` of a dtype of `DTYPES`, on the host.

  Args:
    values: float32, bfloat16 or int8.
    scale: `[out]` float32 of int8 (see `models.nn.matmul.Int8Matrix`).
  """
  num_outputs, num_inputs = values.shape
  per_word = 4 // values.dtype.itemsize
  blocks = -(-num_outputs // (_BLOCK * _BLOCKS)) * _BLOCKS
  words = -(-num_inputs // per_word)
  packed = _aligned_zeros((blocks, words, _BLOCK))
  for block in range(-(-num_outputs // _BLOCK)):
    rows = values[block * _BLOCK : (block + 1) * _BLOCK]
    padded = np.zeros((_BLOCK, words * per_word), values.dtype)
    padded[: len(rows), :num_inputs] = rows
    packed[block] = padded.view(np.uint32).T
  if values.dtype == np.int8:
    packed ^= np.uint32(0x80808080)
  return PackedMatrix(
    words=jnp.asarray(packed),
    scale=jnp.asarray(np.zeros(0) if scale is None else scale, jnp.float32),
    shape=values.shape,
    dtype=values.dtype.name,
  )


def unpack(matrix: PackedMatrix) -> np.ndarray:
  """The values `[out, in]` that were packed."""
  words = np.array(matrix.words)
  if matrix.dtype == 'int8':
    words ^= np.uint32(0x80808080)
  rows = np.ascontiguousarray(words.swapaxes(1, 2))
  rows = rows.reshape(-1, words.shape[1])
  num_outputs, num_inputs = matrix.shape
  values = rows.view(jnp.dtype(matrix.dtype))
  return np.ascontiguousarray(values[:num_outputs, :num_inputs])


def multiply(x: jax.Array, matrix: PackedMatrix) -> jax.Array:
  """`x @ matrix.T` in float32 for `x` `[rows, in]` of any float dtype.

  Rows are rounded to the dtype of the matrix; of int8 as
  `models.nn.matmul.quantize_rows` does, with exact sums.
  """
  out = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
  call = jax.ffi.ffi_call(f'specdec_multiply_{matrix.dtype}', out)
  return call(x.astype(jnp.float32), matrix.words, matrix.scale)


def take_rows(matrix: PackedMatrix, index: jax.Array) -> jax.Array:
  """Rows `[..., in]` float32 of a matrix `[out, in]`, for `index [...]`."""
  words = matrix.words[index // _BLOCK, :, index % _BLOCK]
  if matrix.dtype == 'int8':
    words ^= jnp.uint32(0x80808080)
  values = jax.lax.bitcast_convert_type(words, matrix.dtype)
  values = values.reshape(*index.shape, -1)[..., : matrix.shape[1]]
  rows = values.astype(jnp.float32)
  if matrix.dtype == 'int8':
    # Not a product of XLA's, which may round it together with a sum that
    # follows, or not, by the shape.
    flat = rows.reshape(-1, matrix.shape[1])
    each = jnp.arange(index.size, dtype=jnp.int32)[:, None]
    scale = matrix.scale[index].reshape(-1, 1)
    rows = sum_rows(flat, each, scale).reshape(rows.shape)
  return rows


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
