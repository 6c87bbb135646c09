"""Who may see whom."""

import jax
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
