"""The functions of the C++ kernels in JAX.

They lower for CPU only, and only after `build.is_available()`. The bits of a
row depend only on the row itself, and the bits of a query only on the slots
that it sees.

All shapes and dtypes are checked here, once, when a program is traced: a wrong
operand raises a ValueError. Only words of matrices are counted in C++, which
knows how many a format has.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import string
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS = 'silu', 'gelu_tanh', 'quick_gelu', 'relu', 'clamped_swiglu'
"""Names of the activations that `multiply` knows."""

_FLOATS = 'float32', 'bfloat16'  # Dtypes of caches and of biases.


class Norm(NamedTuple):
  """A norm over the last axis: rows over the root of their mean square.

  Attributes:
    scale: `[width]` float32, a factor of the result.
    bias: `[width]` float32 that is added to it, or None.
    epsilon: added to the mean square.
    center: whether the mean is subtracted before.
  """

  scale: jax.Array
  bias: jax.Array | None
  epsilon: float
  center: bool


class Matrix(NamedTuple):
  """A packed matrix `[out, in]` and a bias.

  Attributes:
    words: see `matrices.PackedMatrix` and `models/nn/blocks`.
    scale: `[out]` float32 of int8, otherwise `[0]` or None.
    outputs: their number.
    bias: `[out]` float32 or bfloat16, or None.
    kind: the number that GGUF has for a kind of blocks, otherwise 0.
  """

  words: jax.Array
  scale: jax.Array | None
  outputs: int
  bias: jax.Array | None = None
  kind: int = 0


def or_empty(array: jax.Array | None) -> Any:
  """The array, or for None one of no elements."""
  return np.zeros(0, np.float32) if array is None else array


def check(axis_sizes: Mapping[str, int], **operands: Any) -> dict[str, int]:
  """Checks operands of a kernel, which would read beyond smaller ones.

  Args:
    axis_sizes: sizes of axes by their letters. Another letter has the size of
      its first axis; 1 is a size.
    **operands: an array or None, the letters of its axes, and its possible
      dtypes, if it is not float32.

  Returns:
    The sizes of all axes by their letters.

  Raises:
    ValueError: an operand has another shape or dtype.
  """
  sizes = {'1': 1, **axis_sizes}
  for name, (array, axes, *dtypes) in operands.items():
    if array is None:
      continue
    if len(array.shape) == len(axes):
      sizes = dict(zip(axes, array.shape, strict=True)) | sizes
    shape = tuple(sizes.get(axis, axis) for axis in axes)
    dtypes = dtypes or ['float32']
    if array.shape != shape or array.dtype.name not in dtypes:
      raise ValueError(
        f'{name} must be {" or ".join(dtypes)} of shape {shape}, not'
        f' {array.dtype} of shape {array.shape}'
      )
  return sizes


def _check_product(
  x: jax.Array,
  matrices: Sequence[Matrix],
  dtype: str,
  norm: Norm | None,
  activation: str | None,
  gated: bool,
  residual: jax.Array | None,
) -> int:
  """Checks the operands of `multiply`, and returns the width of its result."""
  outputs = [matrix.outputs for matrix in matrices]
  if gated and outputs != 2 * outputs[:1]:
    raise ValueError(f'a gate needs two equal matrices, not outputs {outputs}')
  if activation not in (None, *ACTIVATIONS):
    raise ValueError(f'activation={activation} is not one of {ACTIVATIONS}')
  width = outputs[0] if gated else sum(outputs)
  rows = string.ascii_lowercase[: x.ndim - 1]
  check(
    {'O': width},
    x=(x, rows + 'I'),
    residual=(residual, rows + 'O'),
    norm_scale=(norm and norm.scale, 'I'),
    norm_bias=(norm and norm.bias, 'I'),
  )
  for index, matrix in enumerate(matrices):
    scale = or_empty(matrix.scale) if dtype == 'int8' else None
    fields = {'scale': (scale, 'O'), 'bias': (matrix.bias, 'O', *_FLOATS)}
    operands = {f'{name}_{index}': field for name, field in fields.items()}
    check({'O': matrix.outputs}, **operands)
  return width


def multiply(
  x: jax.Array,
  matrices: Sequence[Matrix],
  *,
  dtype: str,
  norm: Norm | None = None,
  activation: str | None = None,
  gated: bool = False,
  residual: jax.Array | None = None,
) -> jax.Array:
  """Products `norm(x) @ matrix.T + bias`, and what follows them, in one call.

  Args:
    x: `[..., in]` float32.
    matrices: of `in` inputs each.
    dtype: of their weights; rows are rounded to it. `blocks`: weights of
      `models/nn/blocks`, of any kinds.
    norm: of the rows before.
    activation: of the products, one of `ACTIVATIONS`.
    gated: whether the result is the activation of the first of two products
      times the second one.
    residual: `[..., out]` float32 that is added.

  Returns:
    `[..., out]` float32, the products next to one another.

  Raises:
    ValueError: an operand or the activation is wrong, or a gate does not
      have two matrices with equal numbers of outputs.
  """
  width = _check_product(x, matrices, dtype, norm, activation, gated, residual)
  rows = x.reshape(-1, x.shape[-1])
  if norm is None:
    norm = Norm(or_empty(None), None, 0.0, False)
  if residual is not None:
    residual = residual.reshape(-1, width)
  arguments = [
    or_empty(part)
    for matrix in matrices
    for part in (matrix.words, matrix.scale, matrix.bias)
  ]
  out = jax.ShapeDtypeStruct((rows.shape[0], width), jnp.float32)
  call = jax.ffi.ffi_call(f'specdec_multiply_{dtype}', out)
  result = call(
    rows,
    norm.scale,
    or_empty(norm.bias),
    or_empty(residual),
    *arguments,
    epsilon=np.float32(norm.epsilon),
    center=norm.center,
    activation=activation or '',
    gated=gated,
    outputs=np.array([matrix.outputs for matrix in matrices], np.int64),
    kinds=np.array([matrix.kind for matrix in matrices], np.int64),
  )
  return result.reshape(*x.shape[:-1], width)


def _misfit(name: str, array: jax.Array, keys: jax.Array) -> ValueError:
  return ValueError(
    f'{name} of shape {array.shape} does not fit a cache of shape {keys.shape}'
  )


def _check_attention(
  projections: jax.Array,
  mask: jax.Array,
  start: jax.Array | None,
  keys: jax.Array,
  values: jax.Array,
  norms: Sequence[Norm | None],
  rotation: tuple[jax.Array, jax.Array] | None,
) -> tuple[int, int, int]:
  """Checks the operands of `attend`, and returns the shape of its result."""
  query_norm, key_norm, value_norm = norms
  cos, sin = rotation or (None, None)
  sizes = check(
    {},
    keys=(keys, 'BHSD', *_FLOATS),
    values=(values, 'BHSD', keys.dtype.name),
    projections=(projections, 'BLP'),
    mask=(mask, 'BLS', 'bool'),
    start=(start, 'B', 'int32'),
    query_norm=(query_norm and query_norm.scale, 'D'),
    key_norm=(key_norm and key_norm.scale, 'D'),
    value_norm=(value_norm and value_norm.scale, 'D'),
    cos=(cos, 'B1LR'),
    sin=(sin, 'B1LR'),
  )
  heads = sizes['H'] * sizes['D']
  width = sizes['P'] - (0 if start is None else 2 * heads)
  if width <= 0 or width % heads or sizes['L'] > sizes['S']:
    raise _misfit('projections', projections, keys)
  if cos is not None and 2 * sizes['R'] > sizes['D']:
    raise _misfit('cos', cos, keys)
  plain = query_norm and (True, False, query_norm.epsilon)
  for norm in filter(None, norms):
    if (norm.bias is None, norm.center, norm.epsilon) != plain:
      raise ValueError('norms of heads have no bias, no mean and one epsilon')
  return sizes['B'], sizes['L'], width


def attend(
  projections: jax.Array,
  mask: jax.Array,
  start: jax.Array | None,
  keys: jax.Array,
  values: jax.Array,
  *,
  scale: float,
  norms: tuple[Norm | None, ...] = (),
  rotation: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Writes new keys and values to a cache, in place, and attends to it.

  Args:
    projections: `[B, L, (Hq + 2 H) Dh]` float32: heads of queries, of keys and
      of values; of queries alone if nothing is written.
    mask: `[B, L, S]` bool, true where a query may look.
    start: `[B]` int32, slots of the first new entries; None: there are none.
    keys: `[B, H, S, Dh]` float32 or bfloat16.
    values: like the keys.
    scale: factor of the scores.
    norms: of each head of queries, of keys and of values, as many as there are;
      they differ in their scales only, without biases and means.
    rotation: cosines and sines `[B, 1, L, pairs]` float32, see
      `rope.rotate`.

  Returns:
    `[B, L, Hq Dh]` float32, and the keys and values with the new ones.

  Raises:
    ValueError: an operand is wrong.
  """
  norms = (*norms, None, None, None)[:3]
  out = _check_attention(
    projections, mask, start, keys, values, norms, rotation
  )
  call = jax.ffi.ffi_call(
    'specdec_attend',
    (
      jax.ShapeDtypeStruct(out, jnp.float32),
      jax.ShapeDtypeStruct(keys.shape, keys.dtype),
      jax.ShapeDtypeStruct(values.shape, values.dtype),
    ),
    input_output_aliases={8: 1, 9: 2},
  )
  result, new_keys, new_values = call(
    projections,
    *(or_empty(norm and norm.scale) for norm in norms),
    *(rotation or 2 * [or_empty(None)]),
    mask,
    np.zeros(len(mask), np.int32) if start is None else start,
    keys,
    values,
    epsilon=np.float32(norms[0].epsilon if norms[0] else 0.0),
    scale=np.float32(scale),
    writes=start is not None,
  )
  return result, new_keys, new_values


def write_slots(
  slots: jax.Array, new: jax.Array, start: jax.Array
) -> jax.Array:
  """`specdec.cache.write_slots`, in place for batches, too.

  Raises:
    ValueError: an operand is wrong.
  """
  sizes = check(
    {},
    slots=(slots, 'BHSD', slots.dtype.name),
    new=(new, 'BHLD', slots.dtype.name),
    start=(start, 'B', 'int32'),
  )
  if sizes['L'] > sizes['S']:
    raise _misfit('new', new, slots)
  call = jax.ffi.ffi_call(
    'specdec_write_slots',
    jax.ShapeDtypeStruct(slots.shape, slots.dtype),
    input_output_aliases={0: 0},
  )
  return call(slots, new, start)


def normalize(x: jax.Array, norm: Norm) -> jax.Array:
  """The norm of `x [..., width]` float32; ValueError if an operand is wrong."""
  rows = x.reshape(-1, x.shape[-1])
  check({}, x=(rows, 'RD'), scale=(norm.scale, 'D'), bias=(norm.bias, 'D'))
  call = jax.ffi.ffi_call(
    'specdec_normalize', jax.ShapeDtypeStruct(rows.shape, jnp.float32)
  )
  out = call(
    rows,
    norm.scale,
    or_empty(norm.bias),
    epsilon=np.float32(norm.epsilon),
    center=norm.center,
  )
  return out.reshape(x.shape)


def route(
  logits: jax.Array, count: int, *, renormalize: bool
) -> tuple[jax.Array, jax.Array]:
  """The fields of a `experts.Routing`, see `experts.route`.

  Of equally probable experts the first is taken.

  Raises:
    ValueError: the logits are wrong, or fewer than `count`.
  """
  rows = logits.reshape(-1, logits.shape[-1])
  check({}, logits=(rows, 'RE'))
  if not 0 < count <= rows.shape[1]:
    raise ValueError(f'{count} experts of logits of shape {logits.shape}')
  chosen = (rows.shape[0], count)
  call = jax.ffi.ffi_call(
    'specdec_route',
    (
      jax.ShapeDtypeStruct(chosen, jnp.int32),
      jax.ShapeDtypeStruct(chosen, jnp.float32),
    ),
  )
  experts, weights = (
    part.reshape(*logits.shape[:-1], -1)
    for part in call(rows, renormalize=renormalize)
  )
  return experts, weights


def sum_rows(
  rows: jax.Array, index: jax.Array, weights: jax.Array
) -> jax.Array:
  """Weighted sums `[T, width]` of k rows each, added in the order of k.

  Args:
    rows: `[P, width]` float32.
    index: `[T, k]` int32, rows of each sum.
    weights: `[T, k]` float32.

  Raises:
    ValueError: an operand is wrong.
  """
  check(
    {}, rows=(rows, 'PD'), index=(index, 'TK', 'int32'), weights=(weights, 'TK')
  )
  out = jax.ShapeDtypeStruct((index.shape[0], rows.shape[1]), jnp.float32)
  return jax.ffi.ffi_call('specdec_sum_rows', out)(rows, index, weights)
