"""The functions of the C++ kernels for layers with a state, in JAX.

All shapes and dtypes are checked here, as in `models.nn.cpu.ops`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from models.nn.cpu import ops


def convolve(
  x: jax.Array,
  state: jax.Array,
  window: jax.Array,
  index: jax.Array,
  weight: jax.Array,
  bias: jax.Array | None,
  *,
  silu: bool,
) -> jax.Array:
  """A depthwise convolution along paths, see `models.nn.convolution`.

  Args:
    x: `[B, L, width]` float32, the inputs of the nodes.
    state: `[B, n, width]` float32, the last inputs of the text.
    window: `[B, 1, T, width]` float32, those of the window.
    index: `[B, L, n]` int32, where those before a node are, see
      `specdec.recurrent.places_before`.
    weight: `[n + 1, width]` float32, that of the farthest first.
    bias: `[width]` float32, or None.
    silu: whether the result is the SiLU of the sum.

  Returns:
    `[B, L, width]` float32.

  Raises:
    ValueError: an operand is wrong.
  """
  known = {'P': state.shape[1] + 1}
  ops.check(
    known,
    x=(x, 'BLD'),
    state=(state, 'BND'),
    window=(window, 'B1TD'),
    index=(index, 'BLN', 'int32'),
    weight=(weight, 'PD'),
    bias=(bias, 'D'),
  )
  out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  call = jax.ffi.ffi_call('specdec_convolve', out)
  bias = ops.or_empty(bias)
  return call(x, state, window, index, weight, bias, silu=silu)


def gate(x: jax.Array, gates: jax.Array, *, silu: bool) -> jax.Array:
  """Values `[..., width]` times the sigmoid or the SiLU of `gates`, float32.

  Raises:
    ValueError: an operand is wrong.
  """
  rows = lambda array: array.reshape(-1, array.shape[-1])
  ops.check({}, x=(rows(x), 'RD'), gates=(rows(gates), 'RD'))
  call = jax.ffi.ffi_call(
    'specdec_gate', jax.ShapeDtypeStruct(x.shape, jnp.float32)
  )
  return call(x, gates, silu=silu)


def _check_window(state: jax.Array, inputs: Any, **others: Any) -> None:
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
    {'K': keys, 'V': values, 'M': 2 * keys + values, 'H': heads},
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
  """States `[B, H, K, V]` after some slots, see `Recurrent.kernel`; in place.

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
    state, inputs, slots=(slots, 'BN', 'int32'), count=(count, 'B', 'int32')
  )
  call = jax.ffi.ffi_call(
    'specdec_fold_delta',
    jax.ShapeDtypeStruct(state.shape, jnp.float32),
    input_output_aliases={0: 0},
  )
  added = (inputs[name] for name in ('key', 'delta', 'decay'))
  return call(state, *added, slots, count, tiled=tiled)


def walk_delta(
  state: jax.Array,
  inputs: Any,
  parents: jax.Array,
  first: jax.Array,
  mixed: jax.Array,
  gates: tuple[jax.Array, jax.Array],
  rates: tuple[jax.Array, jax.Array],
  *,
  tiled: bool,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The gated delta rule at the nodes of trees, depth first.

  Args:
    state: `[B, H, K, V]` float32, after the text.
    inputs: of the slots of earlier forwards, see `fold_delta`.
    parents: `[B, T]` int32, of slots; -1: none.
    first: `[B]` int32, the slot of the first node.
    mixed: `[B, L, ...]` float32, queries, keys and values of all heads.
    gates: `[B, L, H]` float32 each, what decays and strengths are made of.
    rates: `[H]` float32 each, the rate of the decay and what is added before.
    tiled: see `fold_delta`.

  Returns:
    `[B, L, H V]` float32, and what the nodes add, `[B, L, ...]` by name.

  Raises:
    ValueError: an operand is wrong.
  """
  _check_window(
    state,
    inputs,
    parents=(parents, 'BT', 'int32'),
    first=(first, 'B', 'int32'),
    mixed=(mixed, 'BLM'),
    **{f'gate_{i}': (one, 'BLH') for i, one in enumerate(gates)},
    **{f'rate_{i}': (one, 'H') for i, one in enumerate(rates)},
  )
  if mixed.shape[1] > parents.shape[1]:
    raise ValueError(f'{mixed.shape[1]} nodes in {parents.shape[1]} slots')
  names = 'key', 'delta', 'decay'
  like = lambda width: jax.ShapeDtypeStruct(
    (*mixed.shape[:2], width), jnp.float32
  )
  widths = [inputs[name].shape[3] for name in names]
  call = jax.ffi.ffi_call(
    'specdec_walk_delta', [like(widths[1]), *map(like, widths)]
  )
  out, *added = call(
    state,
    *(inputs[name] for name in names),
    *(parents, first, mixed, *gates, *rates),
    tiled=tiled,
  )
  return out, dict(zip(names, added, strict=True))
