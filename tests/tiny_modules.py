"""Random tiny GPT-2 modules in which every parameter matters."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.nn.gpt2 import GPT2
from models.nn.gpt2 import GPT2Config

SHAPE = {
  'vocab_size': 40,
  'num_positions': 8,
  'width': 16,
  'num_layers': 2,
  'num_heads': 2,
}


def make(*, dtype=jnp.float32, seed: int = 0, **config) -> GPT2:
  """A GPT-2 of `SHAPE | config`; biases are not zero and scales not one."""
  rng = np.random.default_rng(seed)
  shape = GPT2Config(**(SHAPE | config))
  # Its weights are replaced, so do not spend time on drawing them.
  module = nnx.eval_shape(lambda: GPT2(shape, dtype=dtype, rngs=nnx.Rngs(0)))
  graph, variables = nnx.split(module)

  def draw(path, leaf):
    noise = 0.3 * rng.standard_normal(leaf.shape)
    is_scale = path[-1].key == 'scale'
    return jnp.asarray(noise + is_scale, leaf.dtype)

  params = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(variables))
  return nnx.merge(graph, params)


def parameters(module: GPT2) -> dict[str, np.ndarray]:
  """Every parameter by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    nnx.to_pure_dict(nnx.split(module)[1])
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(leaf)
    for path, leaf in leaves
  }


def tokens(batch_size: int = 2, length: int = 8, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(SHAPE['vocab_size'], size=(batch_size, length))


def logits(module: GPT2, tokens: np.ndarray) -> np.ndarray:
  """Those of the plain causal forward."""
  batch_size, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  causal = jnp.tril(jnp.ones((length, length), bool))
  mask = jnp.broadcast_to(causal[None], (batch_size, length, length))
  return np.asarray(module(jnp.asarray(tokens), positions, mask)[0])
