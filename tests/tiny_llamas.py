"""Random tiny Llamas and Mixtrals that say something, and their drafts."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import tiny_models

from models.checkpoints.families import family_of
from models.nn.adapter import as_model
from models.nn.adapter import Module
from models.nn.llama import LlamaConfig
from models.nn.mixtral import MixtralConfig
from models.nn.rope import Llama3Scaling
from models.nn.rope import Rope
from specdec import LanguageModel

_SHAPE = {
  'vocab_size': tiny_models.VOCAB_SIZE,
  'num_positions': tiny_models.MAX_POSITIONS,
  'width': 16,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_width': 8,
  'inner_width': 24,
}
CONFIGS = {
  'llama': LlamaConfig(
    **_SHAPE,
    qk_norm=True,
    rope=Rope(
      theta=1000.0,
      scaling=Llama3Scaling(
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
      ),
    ),
  ),
  # One layer: every expert has a loop of its own to compile.
  'mixtral': MixtralConfig(
    **(_SHAPE | {'num_layers': 1}), num_experts=4, experts_per_token=2
  ),
}


_SEED = 9000  # Of models that do not repeat themselves.


def _noise(seed, leaf):
  return np.random.default_rng(seed).standard_normal(leaf.shape)


@functools.cache
def module(name: str, noise: float = 0.0) -> Module:
  """A random model whose greedy text is varied.

  Args:
    name: of `CONFIGS`.
    noise: every weight is changed by about this fraction of itself.
  """
  config = CONFIGS[name]
  make = family_of(config).module
  graph, variables = nnx.split(
    nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
  )
  leaves, structure = jax.tree.flatten(nnx.to_pure_dict(variables))
  drawn = []
  for index, leaf in enumerate(leaves):
    values = 0.5 * _noise(_SEED + index, leaf) + (leaf.ndim == 1)
    values = values * (1 + noise * _noise(index, leaf))
    drawn.append(jnp.asarray(values, leaf.dtype))
  return nnx.merge(graph, jax.tree.unflatten(structure, drawn))


def target(name: str) -> LanguageModel:
  """The model without noise."""
  return as_model(module(name))


def draft(name: str, noise: float = 0.05) -> LanguageModel:
  """One that agrees with the target now and then; same definition."""
  return as_model(module(name, noise))
