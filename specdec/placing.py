"""Writing single entries of several arrays at once."""

import jax
from jax import lax
import jax.numpy as jnp


def _scattered(old, index, new):
  put = lambda one, values: one.at[index].set(values, mode='drop')
  return tuple(map(put, old, new))


def _looked_up(old, index, new):
  """Every entry looks for what is to be written there: one kernel for all."""
  hits = index[None] == jnp.arange(old[0].shape[0])[:, None]  # [M, n]
  is_hit, source = jnp.any(hits, axis=1), jnp.argmax(hits, axis=1)
  put = lambda one, values: jnp.where(is_hit, values[source], one)
  return tuple(map(put, old, new))


def place(
  old: tuple[jax.Array, ...], index: jax.Array, new: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Writes the same entries of several arrays.

  Shaped for the machine: a scatter costs an accelerator a kernel per array, a
  look-up costs a CPU a pass over `M * n` entries.

  Args:
    old: `[M]` each.
    index: `[n]` int32, where to write; distinct, M or more writes nothing.
    new: `[n]` each, of the dtypes of `old`.

  Returns:
    `[M]` each.
  """
  return lax.platform_dependent(
    old, index, new, cpu=_scattered, default=_looked_up
  )
