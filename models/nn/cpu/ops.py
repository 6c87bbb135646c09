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
  call = jax.ffi.ffi_call('specdec_multiply', out)
  result = call(
    rows,
    norm.scale,
    or_empty(norm.bias),
    or_empty(residual),
    *arguments,
    dtype=dtype,
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
  """`specdec.cache.write_slots`, in place for batches, too."""
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
  """The norm of `x [..., width]` float32."""
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
  """
  check(
    {}, rows=(rows, 'PD'), index=(index, 'TK', 'int32'), weights=(weights, 'TK')
  )
  out = jax.ShapeDtypeStruct((index.shape[0], rows.shape[1]), jnp.float32)
  return jax.ffi.ffi_call('specdec_sum_rows', out)(rows, index, weights)


# Layers with a state.

_MOST_BEFORE = 15
"""The largest number of inputs before one that a convolution sees."""

_Arrays = Mapping[str, jax.Array]  # By their names in `Recurrent`.
_Tree = tuple[jax.Array, jax.Array]
"""The parents `[B, T]` int32 of all slots, -1: none; and `[B]` int32, the slot
of the first node."""


def _mix(
  name: str,
  projected: jax.Array,
  state: Sequence[jax.Array],
  windows: Sequence[jax.Array],
  others: Sequence[Any],
  width: int,
  **attributes: Any,
) -> Sequence[jax.Array]:
  """The result `[B, L, width]` of a kernel, and the windows with the nodes.

  The first of `state` is the state of the convolution.
  """
  before, slots = state[0].shape[1], windows[0].shape[2]
  if projected.shape[1] > slots:
    raise ValueError(f'{projected.shape[1]} nodes in {slots} slots')
  if before > _MOST_BEFORE:
    raise ValueError(
      f'a convolution of {before + 1} positions; the kernel takes at most'
      f' {_MOST_BEFORE + 1}'
    )
  # A window that is written as a whole is not written in place.
  some = len(windows) if projected.shape[1] < slots else 0
  shapes = [
    (*projected.shape[:2], width),
    *(window.shape for window in windows),
  ]
  call = jax.ffi.ffi_call(
    name,
    [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
    input_output_aliases={1 + len(state) + i: 1 + i for i in range(some)},
  )
  return call(projected, *state, *windows, *others, **attributes)


def mix_convolution(
  projected: jax.Array,
  state: jax.Array,
  window: jax.Array,
  tree: _Tree,
  weight: jax.Array,
  bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """The gated convolution of LFM2 along the paths of trees.

  Args:
    projected: `[B, L, 3 width]` float32: gates of the inputs, gates of the
      result, and inputs.
    state: `[B, n, width]` float32, the last inputs of the text.
    window: `[B, 1, T, width]` float32, the inputs of the window.
    tree: see `_Tree`.
    weight: `[n + 1, width]` float32, the farthest input's first.
    bias: `[width]` float32, or None.

  Returns:
    `[B, L, width]` float32, and the window with the nodes.
  """
  width = state.shape[-1]
  check(
    {'P': state.shape[1] + 1, 'W': 3 * width},
    state=(state, 'BND'),
    projected=(projected, 'BLW'),
    window=(window, 'B1TD'),
    parents=(tree[0], 'BT', 'int32'),
    first=(tree[1], 'B', 'int32'),
    weight=(weight, 'PD'),
    bias=(bias, 'D'),
  )
  others = *tree, weight, or_empty(bias)
  out, window = _mix(
    'specdec_mix_convolution', projected, [state], [window], others, width
  )
  return out, window


def gate(x: jax.Array, gates: jax.Array) -> jax.Array:
  """Values `[..., width]` times the sigmoid of `gates`, float32."""
  rows = lambda array: array.reshape(-1, array.shape[-1])
  check({}, x=(rows(x), 'RD'), gates=(rows(gates), 'RD'))
  call = jax.ffi.ffi_call(
    'specdec_gate', jax.ShapeDtypeStruct(x.shape, jnp.float32)
  )
  return call(x, gates)


def _check_window(
  state: jax.Array, inputs: Any, axis_sizes: Mapping[str, int], **others: Any
) -> None:
  key = inputs['key']
  sizes = check({}, state=(state, 'BHIJ'), key=(key, 'B1TK'))
  heads, key_width, width = (sizes[axis] for axis in 'HIJ')
  key_heads = key.shape[3] // key_width
  if key_heads < 1 or heads % key_heads:
    raise ValueError(
      f'key of shape {key.shape} does not fit a state of shape {state.shape}'
    )
  keys, values = key_heads * key_width, heads * width
  check(
    {'K': keys, 'V': values, 'M': 2 * keys + values, 'H': heads, **axis_sizes},
    state=(state, 'BHIJ'),
    key=(key, 'B1TK'),
    delta=(inputs['delta'], 'B1TV'),
    decay=(inputs['decay'], 'B1TH'),
    **others,
  )


def fold_delta(
  state: jax.Array,
  inputs: Any,
  slots: jax.Array,
  count: jax.Array,
  *,
  tiled: bool,
) -> jax.Array:
  """States `[B, H, K, V]` after some slots, see `Recurrent.fold_all`; in place.

  Args:
    state: `[B, H, K, V]` float32.
    inputs: `key`, `delta` and `decay`, `[B, 1, T, ...]` float32.
    slots: `[B, n]` int32.
    count: `[B]` int32, how many of them.
    tiled: whether heads share keys in turns, and not side by side.
  """
  _check_window(
    state, inputs, {}, slots=(slots, 'BN', 'int32'), count=(count, 'B', 'int32')
  )
  call = jax.ffi.ffi_call(
    'specdec_fold_delta',
    jax.ShapeDtypeStruct(state.shape, jnp.float32),
    input_output_aliases={0: 0},
  )
  added = (inputs[name] for name in ('key', 'delta', 'decay'))
  return call(state, *added, slots, count, tiled=tiled)


def mix_delta(
  projected: jax.Array,
  state: _Arrays,
  inputs: _Arrays,
  tree: _Tree,
  weight: jax.Array,
  rates: tuple[jax.Array, jax.Array],
  norm: Norm,
  *,
  tiled: bool,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """A gated delta net at the nodes of trees, between its projections.

  Args:
    projected: `[B, L, C]` float32: queries, keys and values before the
      convolution, the gates of the result, and per head what strengths and
      decays are made of.
    state: after the text, `conv` `[B, n, ...]` and `matrix` `[B, H, K, V]`.
    inputs: `conv`, `key`, `delta` and `decay` of the window.
    tree: see `_Tree`.
    weight: `[n + 1, ...]` float32 of the convolution, the farthest input's
      first.
    rates: `[H]` float32 each, the rate of the decay and what is added before.
    norm: of the result of each head.
    tiled: see `fold_delta`.

  Returns:
    `[B, L, H V]` float32, and the window with the nodes.
  """
  mixed, values, heads = (
    inputs[name].shape[-1] for name in ('conv', 'delta', 'decay')
  )
  _check_window(
    state['matrix'],
    inputs,
    {'P': state['conv'].shape[1] + 1, 'C': mixed + values + 2 * heads},
    parents=(tree[0], 'BT', 'int32'),
    first=(tree[1], 'B', 'int32'),
    conv=(inputs['conv'], 'B1TM'),
    projected=(projected, 'BLC'),
    conv_state=(state['conv'], 'BNM'),
    norm_scale=(norm.scale, 'J'),
    weight=(weight, 'PM'),
    **{f'rate_{i}': (rate, 'H') for i, rate in enumerate(rates)},
  )
  names = 'conv', 'key', 'delta', 'decay'
  out, *windows = _mix(
    'specdec_mix_delta',
    projected,
    (state['conv'], state['matrix']),
    [inputs[name] for name in names],
    (*tree, weight, *rates, norm.scale),
    values,
    epsilon=np.float32(norm.epsilon),
    tiled=tiled,
  )
  return out, dict(zip(names, windows, strict=True))
