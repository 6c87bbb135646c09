"""From a module with weights to the pure functions that decoding wants."""

import dataclasses
import functools
import math

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp

from models.checkpoints.family import Config
from models.checkpoints.family import Module
from models.checkpoints.family import Path
from models.nn.mixtral import MixtralConfig
from specdec import cache as kv
from specdec.model import LanguageModel
from specdec.model import ModelSpec


@functools.cache
def _resized(definition: ModelSpec, vocab_size: int) -> ModelSpec:
  own_size = definition.vocab_size

  def apply(params, tokens, positions, mask, cache):
    # Ids beyond are padding that nobody says; any embedding will do.
    tokens = jnp.minimum(tokens, own_size - 1)
    logits, cache = definition.apply(params, tokens, positions, mask, cache)
    padding = ((0, 0), (0, 0), (0, max(vocab_size - own_size, 0)))
    logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return logits[..., :vocab_size], cache

  return dataclasses.replace(definition, apply=apply, vocab_size=vocab_size)


def with_vocab_size(model: LanguageModel, vocab_size: int) -> LanguageModel:
  """A model whose vocabulary differs by padding only, as one of another size.

  Args:
    model: any.
    vocab_size: V; logits beyond its own are -inf, those beyond V are cut off.
  """
  if model.spec.vocab_size == vocab_size:
    return model
  return model.replace(spec=_resized(model.spec, vocab_size))


def _share_read(path: Path, config: Config) -> float:
  """How much of a parameter a forward of one position reads."""
  if path[0] == 'wpe':
    return 0.0  # A few rows.
  if path[0] in ('wte', 'embed_tokens'):
    return 1.0 if config.tie_embeddings else 0.0
  if isinstance(config, MixtralConfig) and 'experts' in path:
    return config.experts_per_token / config.num_experts
  return 1.0


@functools.cache
def _definition(
  graph: nnx.GraphDef,
  config: Config,
  dtype: jnp.dtype,
  weight_bytes: int,
  parameters: int,
) -> ModelSpec:
  """One record per shape, so that loading a model again does not recompile."""

  def apply(params, tokens, positions, mask, cache):
    return nnx.merge(graph, params)(tokens, positions, mask, cache)

  def init_cache(batch_size, num_slots):
    return kv.init_cache(
      batch_size,
      num_slots,
      num_layers=config.num_layers,
      num_heads=config.num_kv_heads,
      head_width=config.head_width,
      dtype=dtype,
    )

  per_slot = 2 * config.num_layers * config.num_kv_heads * config.head_width
  return ModelSpec(
    apply=apply,
    init_cache=init_cache,
    vocab_size=config.vocab_size,
    max_positions=config.num_positions,
    weight_bytes=weight_bytes,
    cache_bytes_per_slot=per_slot * dtype.itemsize,
    parameters=parameters,
  )


def as_model(module: Module) -> LanguageModel:
  """Splits a module once; from here on there are only pytrees.

  Args:
    module: with its weights; shared with the result, not copied.

  Returns:
    The model as `specdec` decodes it.
  """
  config = module.config
  graph, variables = nnx.split(module)
  params = nnx.to_pure_dict(variables)
  weight_bytes = parameters = 0.0
  for path, leaf in traverse_util.flatten_dict(params).items():
    share = _share_read(path, config)
    # Of shapes too, which have no `nbytes`.
    weight_bytes += share * sum(
      part.size * part.dtype.itemsize for part in jax.tree.leaves(leaf)
    )
    if len(leaf.shape) == 2:
      parameters += share * math.prod(leaf.shape)
  return LanguageModel(
    params=params,
    spec=_definition(
      graph, config, module.dtype, round(weight_bytes), round(parameters)
    ),
  )
