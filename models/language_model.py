"""From a module with weights to the pure functions that decoding wants."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from models.gpt2 import GPT2
from models.gpt2 import GPT2Config
from specdec import cache as kv
from specdec.model import LanguageModel
from specdec.model import Model


@functools.cache
def _resized(definition: LanguageModel, vocab_size: int) -> LanguageModel:
  own_size = definition.vocab_size

  def apply(params, tokens, positions, mask, cache):
    # Ids beyond are padding that nobody says; any embedding will do.
    tokens = jnp.minimum(tokens, own_size - 1)
    logits, cache = definition.apply(params, tokens, positions, mask, cache)
    padding = ((0, 0), (0, 0), (0, max(vocab_size - own_size, 0)))
    logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return logits[..., :vocab_size], cache

  return dataclasses.replace(definition, apply=apply, vocab_size=vocab_size)


def with_vocab_size(model: Model, vocab_size: int) -> Model:
  """A model whose vocabulary differs by padding only, as one of another size.

  Args:
    model: any.
    vocab_size: V; logits beyond its own are -inf, those beyond V are cut off.
  """
  if model.definition.vocab_size == vocab_size:
    return model
  return model.replace(definition=_resized(model.definition, vocab_size))


@functools.cache
def _definition(
  graph: nnx.GraphDef, config: GPT2Config, dtype: jnp.dtype, weight_bytes: int
) -> LanguageModel:
  """One record per shape, so that loading a model again does not recompile."""

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

  return LanguageModel(
    apply=apply,
    init_cache=init_cache,
    vocab_size=config.vocab_size,
    max_positions=config.num_positions,
    weight_bytes=weight_bytes,
    cache_bytes_per_slot=2 * config.num_layers * config.width * dtype.itemsize,
  )


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
  # Of shapes alone too, which have no `nbytes`.
  num_bytes = lambda tree: sum(
    leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
  )
  # A forward looks up a few rows of the embeddings; it reads all of the token
  # embedding only where that is the head.
  weight_bytes = num_bytes(params) - num_bytes(params['wpe'])
  if not config.tie_embeddings:
    weight_bytes -= num_bytes(params['wte'])
  return Model(
    params=params,
    definition=_definition(graph, config, module.dtype, weight_bytes),
  )
