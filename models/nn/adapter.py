"""Adapter from NNX modules to the pure functions that decoding calls."""

import dataclasses
import functools
import math
from typing import Any

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp

from models.nn import gpt2 as nn_gpt2
from models.nn import llama as nn_llama
from models.nn import matrices as matrices_lib
from models.nn import sharding as sharding_lib
from models.nn.cpu import ops
from specdec import cache as cache_lib
from specdec import cached_states as states_lib
from specdec import model as model_lib
from specdec import recurrent as recurrent_lib

# A module and its shape, of any family; a Mixtral is a Llama.
Module = nn_gpt2.GPT2 | nn_llama.Llama
Config = nn_gpt2.GPT2Config | nn_llama.LlamaConfig


@functools.cache
def _resized(spec: model_lib.ModelSpec, vocab_size: int) -> model_lib.ModelSpec:
  own_size = spec.vocab_size

  def apply(params, tokens, positions, mask, cache):
    # Ids from own_size on are vocabulary padding, which is never emitted.
    tokens = jnp.minimum(tokens, own_size - 1)
    logits, cache = spec.apply(params, tokens, positions, mask, cache)
    padding = ((0, 0), (0, 0), (0, max(vocab_size - own_size, 0)))
    logits = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return logits[..., :vocab_size], cache

  return dataclasses.replace(spec, apply=apply, vocab_size=vocab_size)


def with_vocab_size(
  model: model_lib.LanguageModel, vocab_size: int
) -> model_lib.LanguageModel:
  """Pads the logits `[..., V]` of a model with -inf, or cuts off padding.

  The vocabulary of the model must differ from the new one by padding only.
  """
  if model.spec.vocab_size == vocab_size:
    return model
  return model.replace(spec=_resized(model.spec, vocab_size))


def _share_read(path: tuple[Any, ...], config: Config) -> float:
  """Fraction of a parameter that a forward of one position reads."""
  if path[0] == config.position_embedding:
    return 0.0  # A few rows.
  if path[0] == config.embedding:
    return 1.0 if config.tie_embeddings else 0.0
  if 'experts' in path:
    return config.experts_per_token / config.num_experts
  return 1.0


def _states(
  config: Config, batch_size: int, *, kernels: bool
) -> dict[int, recurrent_lib.Recurrent]:
  """The layers that have a state in place of keys and values, empty."""
  if isinstance(config, nn_gpt2.GPT2Config):
    return {}
  return {
    layer: config.state_of_layer(batch_size, kernels=kernels)
    for layer in range(config.num_layers)
    if layer not in config.attention_layers
  }


@functools.cache
def _spec(
  graph: nnx.GraphDef,
  config: Config,
  dtype: jnp.dtype,
  weight_bytes: int,
  parameters: int,
  kernels: bool,
  layout: sharding_lib.Layout,
  hidden: tuple[int, ...],
) -> model_lib.ModelSpec:
  """The record of a shape; cached, so that loading it again does not recompile.

  The arguments are those of `ModelSpec`, `graph` of the module; `kernels` says
  whether those of `models.nn.cpu` compute.
  """
  cache_ops = sharding_lib.slot_ops(layout)
  if kernels:
    cache_ops = cache_ops._replace(write=ops.write_slots)
  empty = functools.partial(_states, config, kernels=kernels)
  num_layers = config.num_layers - len(empty(1))

  def apply(params, tokens, positions, mask, cache):
    module = nnx.merge(graph, params)
    with layout.in_use():
      logits, cache = module(tokens, positions, mask, cache)
    # Later functions sort and draw over the whole vocabulary.
    return layout.gather_vocabulary(logits), cache

  def init_cache(batch_size, num_slots):
    cache = cache_lib.init_cache(
      batch_size,
      num_slots,
      num_layers=num_layers,
      num_heads=config.num_kv_heads,
      head_width=config.head_width,
      dtype=dtype,
    )
    widths = dict.fromkeys(hidden, config.width)
    cache = cache_lib.with_hidden(cache, widths, dtype)
    cache = states_lib.with_recurrent(cache, empty(batch_size))
    return layout.place(cache.replace(ops=cache_ops))

  per_slot = 2 * num_layers * config.num_kv_heads * config.head_width
  head_parts = layout.parts('kv_heads')
  return model_lib.ModelSpec(
    apply=apply,
    init_cache=init_cache,
    vocab_size=config.vocab_size,
    max_positions=config.num_positions,
    weight_bytes=weight_bytes,
    cache_bytes_per_slot=per_slot * dtype.itemsize,
    state_bytes=sum(one.state_bytes for one in empty(1).values()),
    parameters=parameters,
    place=layout.place,
    row_shards=layout.parts('rows'),
    slot_shards=head_parts if config.num_kv_heads % head_parts == 0 else 1,
    hidden=hidden,
  )


def as_model(
  module: Module,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
  hidden: tuple[int, ...] = (),
) -> model_lib.LanguageModel:
  """Splits a module into the parameters and functions that `specdec` decodes.

  The module has weights, or shapes only; the result shares its arrays.

  Args:
    module: of any family.
    layout: where the module lies, as it was loaded.
    hidden: the hidden states that its cache keeps for a drafting head, keys of
      `specdec.cache.KVCache.hidden`.
  """
  config = module.config
  graph, variables = nnx.split(module)
  params = nnx.to_pure_dict(variables)
  weight_bytes = parameters = 0.0
  kernels = False
  for path, leaf in traverse_util.flatten_dict(params).items():
    share = _share_read(path, config)
    leaf = matrices_lib.computed(leaf)
    kernels |= matrices_lib.uses_kernels(leaf)
    # Shapes have no `nbytes`.
    weight_bytes += share * sum(
      part.size * part.dtype.itemsize for part in jax.tree.leaves(leaf)
    )
    if len(leaf.shape) == 2:
      parameters += share * math.prod(leaf.shape)
  return model_lib.LanguageModel(
    params=params,
    spec=_spec(
      graph,
      config,
      module.dtype,
      round(weight_bytes),
      round(parameters),
      kernels,
      layout,
      hidden,
    ),
  )
