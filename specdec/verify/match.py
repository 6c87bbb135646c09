"""Match verification: a guess stands if the target chose the same token.

The target's choice at every node is a function of its logits and of the
position alone (see `specdec.sampling`), so what is emitted is what plain
decoding would have emitted, whatever was guessed (arXiv 2408.07978).
"""

import jax
import jax.numpy as jnp

from specdec.sampling import choose
from specdec.sampling import Sampling
from specdec.tree.tree import accepted_path
from specdec.tree.tree import TokenTree
from specdec.verify.accept import Verdict


def match(
  tree: TokenTree, logits: jax.Array, noise: jax.Array, sampling: Sampling
) -> Verdict:
  """Walks down as long as a child is the target's choice.

  Args:
    tree: `[B, N]` per field.
    logits: `[B, N, V]` float32, adjusted.
    noise: `[B, D + 1, V]` float32; entry d is of the position that follows
      nodes of depth d.
    sampling: validated.
  """
  max_depth = noise.shape[1] - 1
  noise_of_nodes = jax.vmap(lambda one, depth: one[depth])(noise, tree.depth)
  choices = choose(logits, noise_of_nodes, sampling)
  path, accepted = jax.vmap(accepted_path, (0, 0, None))(
    tree, choices, max_depth
  )
  return Verdict(
    path=path,
    accepted=accepted,
    chosen=jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1),
  )
