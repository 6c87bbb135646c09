"""Logits of whole texts, and of weights that are rounded.

Not in `variants`, which is imported where torch is and this library is not.
"""

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import variants

from models.checkpoints import hub
from models.nn import adapter


@jax.jit
def forward(model, tokens, positions, mask):
  """Logits of a prefill of 40 tokens into a cache that is longer."""
  cache = model.spec.init_cache(1, len(variants.LONG) + 3)
  mask = jnp.pad(mask[None], ((0, 0), (0, 0), (0, 3)))
  return model.apply(tokens[None], positions[None], mask, cache)[0][0]


def logits(
  module: adapter.Module,
  text: np.ndarray = variants.LONG,
  positions: np.ndarray | None = None,
  mask: np.ndarray = variants.CAUSAL,
) -> np.ndarray:
  """Logits `[40, V]` of a text, by default the long one."""
  positions = np.arange(len(variants.LONG)) if positions is None else positions
  return np.asarray(forward(adapter.as_model(module), text, positions, mask))


def in_floats(module: adapter.Module, floats: adapter.Module) -> adapter.Module:
  """A module of floats with the weights that another one has in few bits."""
  graph, params = hub.flat_params(floats)
  for path, leaf in hub.flat_params(module)[1].items():
    host = jax.tree.map(np.asarray, leaf)
    if not isinstance(leaf, jax.Array):
      host = host.take(np.arange(leaf.shape[0]))
    params[path] = np.asarray(host, np.float32)
  return nnx.merge(graph, traverse_util.unflatten_dict(params))
