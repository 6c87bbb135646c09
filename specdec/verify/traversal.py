"""Traversal verification: a tree is accepted from its leaves to its root.

Weng et al., arXiv 2505.12398. Rejection verification goes token by token, and
forgets by how much earlier tokens exceeded what was needed. Here a node has a
*weight*, the probability that it or a node below it is accepted; a node is
tried after all that is below it, and accepted with all in front of it. On a
chain this is block verification (Sun et al., arXiv 2403.10444, algorithm 2).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec import sampling as sampling_lib
from specdec.verify import rejection


@dataclasses.dataclass(frozen=True)
class TraversalRule(rejection.RejectionRule):
  """Accepts the first node that passes, each after those below it; see `Rule`.

  The weight of the root is 1, and it is the last to be tried.
  """

  #: Whether trees must be chains: block verification.
  needs_chain: bool = False

  leaves_nodes = True

  def enter(
    self, chance: jax.Array, uniform: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Every child is; its weight is min(1, weight target(x) / draft(x))."""
    del uniform
    return jnp.ones(chance.shape, bool), chance

  def weight_left(
    self, weight: jax.Array, target: jax.Array, draft: jax.Array
  ) -> jax.Array:
    """It is s / (s + 1 - weight), s = sum of (weight target - draft)+."""
    mass = sampling_lib.total(jnp.maximum(target - draft, 0.0))[:, 0]
    whole = mass + (1.0 - weight)  # in this order a weight of 1 remains 1
    return jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1.0), weight)
