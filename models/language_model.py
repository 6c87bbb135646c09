"""From a module with weights to the pure functions that decoding wants."""

from flax import nnx
import jax
import jax.numpy as jnp

from models.gpt2 import GPT2
from specdec import cache as kv
from specdec.model import LanguageModel
from specdec.model import Model


def as_model(module: GPT2) -> Model:
  """Splits a module once; from here on there are only pytrees.

  Args:
    module: with its weights; shared with the result, not copied.

  Returns:
    The model as `specdec` decodes it.
  """
  config = module.config
  graph, variables = nnx.split(module)
  params = nnx.to_pure_dict(variables)
  dtype = params['wte']['embedding'].dtype

  def apply(params, tokens, positions, mask, cache):
    return nnx.merge(graph, params)(tokens, positions, mask, cache)

  def init_cache(batch_size, num_slots):
    return kv.init_cache(
      batch_size,
      num_slots,
      num_layers=config.num_layers,
      num_heads=config.num_heads,
      head_width=config.head_width,
      dtype=dtype,
    )

  def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

  # A forward looks up a few rows of the embeddings; it reads all of the token
  # embedding only where that is the head.
  looked_up = num_bytes(params['wpe'])
  if not config.tie_embeddings:
    looked_up += num_bytes(params['wte'])
  return Model(
    params=params,
    definition=LanguageModel(
      apply=apply,
      init_cache=init_cache,
      vocab_size=config.vocab_size,
      max_positions=config.num_positions,
      weight_bytes=num_bytes(params) - looked_up,
      cache_bytes_per_slot=(
        2 * config.num_layers * config.width * jnp.dtype(dtype).itemsize
      ),
    ),
  )
