"""Arrays of the devices of several hosts, read on each of these hosts."""

from typing import Any

import jax
from jax.experimental import multihost_utils

from specdec import total as total_lib


def read(tree: Any) -> Any:
  """`jax.device_get`, also of arrays that are partly on other hosts.

  A `Total` becomes an array of int64. All hosts must read the same arrays in
  the same order.
  """

  def gather(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not (
      leaf.is_fully_addressable or leaf.is_fully_replicated
    ):
      return multihost_utils.process_allgather(leaf, tiled=True)
    return leaf

  is_total = lambda node: isinstance(node, total_lib.Total)
  return jax.tree.map(
    lambda node: node.value if is_total(node) else node,
    jax.device_get(jax.tree.map(gather, tree)),
    is_leaf=is_total,
  )
