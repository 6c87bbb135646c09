"""Who may see whom."""

import functools

import jax
from jax import lax
import jax.numpy as jnp


def causal_mask(start: jax.Array, length: int, num_slots: int) -> jax.Array:
  """Queries at consecutive slots see every slot up to their own.

  For `start = 2`, `length = 3`, `num_slots = 6`:

      slot     0 1 2 3 4 5
      query 0  x x x . . .
      query 1  x x x x . .
      query 2  x x x x x .

  Args:
    start: `[B]` int32, the slot of each row's first query.
    length: L.
    num_slots: S.

  Returns:
    `[B, L, S]` bool.
  """
  last = start[:, None, None] + jnp.arange(length)[None, :, None]
  return jnp.arange(num_slots)[None, None] <= last


def _written(start, window, *, num_slots):
  before = jnp.arange(num_slots)[None] < start[:, None]
  zero = jnp.zeros((), start.dtype)
  rows = []
  for row in range(window.shape[0]):  # cheaper than the gather of a vmap
    mask = jnp.broadcast_to(before[row], (window.shape[1], num_slots))
    index = (zero, start[row])
    rows.append(lax.dynamic_update_slice(mask, window[row], index))
  return jnp.stack(rows)


def _looked_up(start, window, *, num_slots):
  """Every slot looks up its place in the window: two kernels less on a GPU."""
  place = jnp.arange(num_slots)[None] - start[:, None]
  within = (place >= 0) & (place < window.shape[2])
  index = jnp.clip(place, 0, window.shape[2] - 1)
  seen = jax.vmap(lambda one, at: one[:, at])(window, index)
  return jnp.where(within[:, None], seen, place[:, None] < 0)


def window_mask(
  start: jax.Array, window: jax.Array, num_slots: int
) -> jax.Array:
  """Queries see all slots before a window, and of the window what it says.

  This is how the nodes of a tree see the text so far and their ancestors. For
  `start = 2`, a root with two children and `num_slots = 6`:

      slot     0 1 2 3 4 5
      root     x x x . . .
      child    x x x x . .
      child    x x x . x .

  Args:
    start: `[B]` int32, the first slot of each row's window.
    window: `[B, L, T]` bool, which of the T slots from there each query sees.
    num_slots: S; at least `start + T` in every row.

  Returns:
    `[B, L, S]` bool.
  """
  return lax.platform_dependent(
    start,
    window,
    cuda=functools.partial(_looked_up, num_slots=num_slots),
    default=functools.partial(_written, num_slots=num_slots),
  )
