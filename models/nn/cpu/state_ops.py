"""The functions of the C++ kernels for layers with a state, in JAX.

All shapes and dtypes are checked here, as in `models/nn/cpu/ops`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec.models.nn.cpu import ops

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

  Raises:
    ValueError: an operand is wrong.
  """
  width = state.shape[-1]
  ops.check(
    {'P': state.shape[1] + 1, 'W': 3 * width},
    state=(state, 'BND'),
    projected=(projected, 'BLW'),
    window=(window, 'B1TD'),
    parents=(tree[0], 'BT', 'int32'),
    first=(tree[1], 'B', 'int32'),
    weight=(weight, 'PD'),
    bias=(bias, 'D'),
  )
  others = *tree, weight, ops.or_empty(bias)
  out, window = _mix(
    'specdec_mix_convolution', projected, [state], [window], others, width
  )
  return out, window


def gate(x: jax.Array, gates: jax.Array) -> jax.Array:
  """Values `[..., width]` times the sigmoid of `gates`, float32.

  Raises:
    ValueError: an operand is wrong.
  """
  rows = lambda array: array.reshape(-1, array.shape[-1])
  ops.check({}, x=(rows(x), 'RD'), gates=(rows(gates), 'RD'))
  call = jax.ffi.ffi_call(
    'specdec_gate', jax.ShapeDtypeStruct(x.shape, jnp.float32)
  )
  return call(x, gates)


def _check_window(
  state: jax.Array, inputs: Any, axis_sizes: Mapping[str, int], **others: Any
) -> None:
  key = inputs['key']
  sizes = ops.check({}, state=(state, 'BHIJ'), key=(key, 'B1TK'))
  heads, key_width, width = (sizes[axis] for axis in 'HIJ')
  key_heads = key.shape[3] // key_width
  if key_heads < 1 or heads % key_heads:
    raise ValueError(
      f'key of shape {key.shape} does not fit a state of shape {state.shape}'
    )
  keys, values = key_heads * key_width, heads * width
  ops.check(
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

  Raises:
    ValueError: an operand is wrong.
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
  norm: ops.Norm,
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

  Raises:
    ValueError: an operand is wrong.
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
