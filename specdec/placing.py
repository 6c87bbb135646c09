"""Writing to single entries of arrays, shaped for the machine.

A scatter costs an accelerator a kernel for each array, and one to prepare it. A
look-up, where every entry looks for what is to be written there, is one kernel
for all, but costs a CPU a pass over `M * n` entries.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp


def _scattered(old, index, new):
  put = lambda one, values: one.at[index].set(values, mode='drop')
  return tuple(map(put, old, new))


def _looked_up(old, index, new):
  hits = index[None] == jnp.arange(old[0].shape[0])[:, None]  # [M, n]
  source = jnp.max(jnp.where(hits, jnp.arange(index.size)[None], -1), axis=1)
  put = lambda one, values: jnp.where(
    source >= 0, values[jnp.maximum(source, 0)], one
  )
  return tuple(map(put, old, new))


def place(
  old: tuple[jax.Array, ...], index: jax.Array, new: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Writes the same entries of several arrays.

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


def _scattered_sums(index, values, size):
  return jnp.zeros(size, values.dtype).at[index].add(values, mode='drop')


def _looked_up_sums(index, values, size):
  hits = index[None] == jnp.arange(size)[:, None]
  return jnp.sum(jnp.where(hits, values[None], 0), axis=1)


def add_up(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
  """Adds values up by where they belong.

  Args:
    index: `[n]` int32, M or more counts nowhere.
    values: `[n]`.
    size: M.

  Returns:
    `[M]`, of the dtype of `values`; in which order is up to the machine.
  """
  return lax.platform_dependent(
    index,
    values,
    cpu=functools.partial(_scattered_sums, size=size),
    default=functools.partial(_looked_up_sums, size=size),
  )
