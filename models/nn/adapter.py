"""Adapter from NNX modules to the pure functions that decoding calls."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any
from typing import cast
from typing import NamedTuple

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import model as model_lib
from specdec import recurrent as recurrent_lib
from specdec.models.nn import contraction
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.models.nn.cpu import ops

# A library's products on a GPU take a multiple of this number of rows; other
# numbers are padded by separate kernels, and XLA computes a single row by sums.
# The products also add the bias, activate and add the residual.
_FULL_ROWS = 8

# Bytes of keys and values in a layer of a cache that is one array on a GPU.
# Attention of many rows copies them first, which takes longer than to keep a
# path layer by layer where there are more (docs/accelerators.md).
_LARGEST_LAYER = 8 << 20

Path = tuple[Any, ...]  # The place of a parameter in a module.
# A module and its shape, of any family; a Mixtral is a Llama.
Module = nn_gpt2.GPT2 | nn_llama.Llama
Config = nn_gpt2.GPT2Config | nn_llama.LlamaConfig


@functools.cache
def _resized(spec: model_lib.ModelSpec, vocab_size: int) -> model_lib.ModelSpec:
  own_size = spec.vocab_size

  def apply(
    params: Any, tokens: jax.Array, *others: Any
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    # Ids from own_size on are vocabulary padding, which is never emitted.
    tokens = jnp.minimum(tokens, own_size - 1)
    logits, cache = spec.apply(params, tokens, *others)
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


def _share_read(path: Path, config: Config) -> float:
  """Fraction of a parameter that a forward of one position reads."""
  if path[0] == config.looked_up:
    return 0.0  # A few rows.
  if path[0] == config.embedding:
    return 1.0 if config.tie_embeddings else 0.0
  if 'experts' in path:
    return config.experts_per_token / config.num_experts
  return 1.0


# Layers whose products are added to the residual stream.
_ADDED = frozenset({'c_proj', 'o_proj', 'down_proj'})


def _for_gpu(params: Any, config: Config) -> Any:
  """Parameters as a library's products take them, without work in each step.

  Biases of sums with the residual stream are float32, as the stream is. The
  outputs of a head are a multiple of 8, or a copy is made of it.
  """

  def convert(path: Path, leaf: Any) -> Any:
    is_head = path[0] == config.embedding or path[0] == 'lm_head'
    shape, dtype = leaf.shape, leaf.dtype
    if len(shape) == 2 and is_head:
      shape = (shape[0] + -shape[0] % 8, shape[1])
    if path[-1] == 'bias' and _ADDED & {*path}:
      dtype = jnp.dtype('float32')
    if (shape, dtype) == (leaf.shape, leaf.dtype):
      return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(shape, dtype, sharding=leaf.sharding)
    rows = ((0, shape[0] - leaf.shape[0]), *((0, 0),) * (len(shape) - 1))
    return jnp.pad(leaf.astype(dtype), rows)

  is_array = lambda leaf: isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
  flat = traverse_util.flatten_dict(params)
  return traverse_util.unflatten_dict(
    {
      path: convert(path, leaf) if is_array(leaf) else leaf
      for path, leaf in flat.items()
    }
  )


def _in_full_rows(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """`[B, L, ...]` each, with more of the last position."""
  rows, length = arrays[0].shape
  more = -length % (_FULL_ROWS // math.gcd(rows, _FULL_ROWS))
  widths = (0, 0), (0, more), (0, 0)
  return tuple(
    jnp.pad(array, widths[: array.ndim], mode='edge') for array in arrays
  )


class Amounts(NamedTuple):
  """The amounts that a forward of one position reads.

  Attributes:
    weight_bytes: the bytes of weights.
    parameters: the weights that each position is multiplied with.
    kernels: whether the kernels of `models/nn/cpu` compute.
  """

  weight_bytes: int
  parameters: int
  kernels: bool


def amounts(
  params: dict[str, Any], share: Callable[[Path], float] = lambda path: 1.0
) -> Amounts:
  """The amounts of parameters; `share` of a path is the part that is read."""
  weight_bytes = parameters = 0.0
  kernels = False
  for path, leaf in traverse_util.flatten_dict(params).items():
    leaf = matrices_lib.computed(leaf)
    kernels |= isinstance(leaf, matrices_lib.PackedMatrix)
    # Shapes have no `nbytes`.
    weight_bytes += share(path) * sum(
      part.size * part.dtype.itemsize for part in jax.tree.leaves(leaf)
    )
    if len(leaf.shape) == 2:
      parameters += share(path) * math.prod(leaf.shape)
  return Amounts(round(weight_bytes), round(parameters), kernels)


def network_facts(
  config: Any,
  dtype: jnp.dtype,
  layout: sharding_lib.Layout,
  amounts: Amounts,
  *,
  hidden: tuple[int, ...] = (),
  on_gpu: bool = False,
) -> dict[str, Any]:
  """The fields of a `NetworkSpec` that follow from the shape of its layers.

  Args:
    config: the shape of the network.
    dtype: of its cache.
    layout: where it lies.
    amounts: of a forward.
    hidden: the states that its cache keeps, see `as_model`.
    on_gpu: whether it has the form for a GPU.
  """
  cache_ops = sharding_lib.slot_ops(layout)
  if amounts.kernels:
    cache_ops = cache_ops._replace(write=ops.write_slots)

  @contraction.in_use(contraction.Backend(kernels=amounts.kernels))
  def states(batch_size: int) -> dict[int, recurrent_lib.Recurrent]:
    return {
      layer: config.state_of_layer(batch_size) for layer in config.state_layers
    }

  widths = config.cache_widths
  per_slot = 2 * config.num_kv_heads * sum(widths)

  def init_cache(batch_size: int, num_slots: int) -> cache_lib.KVCache:
    size = per_slot * batch_size * num_slots * dtype.itemsize
    may_be_one = on_gpu and len({*widths}) == 1  # An array has one width.
    cache = cache_lib.init_cache(
      batch_size,
      num_slots,
      num_heads=config.num_kv_heads,
      head_widths=widths,
      dtype=dtype,
      together=may_be_one and size <= _LARGEST_LAYER * len(widths),
    )
    kept = dict.fromkeys(hidden, config.width)
    cache = cache_lib.with_hidden(cache, kept, dtype)
    cache = cache_lib.with_recurrent(cache, states(batch_size))
    return layout.place(cache.replace(ops=cache_ops))

  head_parts = layout.parts('kv_heads')
  return {
    'weight_bytes': amounts.weight_bytes,
    'parameters': amounts.parameters,
    'init_cache': init_cache,
    'vocab_size': config.vocab_size,
    'max_positions': config.num_positions,
    'cache_bytes_per_slot': per_slot * dtype.itemsize,
    'state_bytes': sum(
      layer_state.state_bytes for layer_state in states(1).values()
    ),
    'place': layout.place,
    'row_shards': layout.parts('rows'),
    'slot_multiple': _FULL_ROWS if on_gpu else 1,
    'slot_shards': head_parts if config.num_kv_heads % head_parts == 0 else 1,
  }


@functools.cache
def _spec(
  graph: nnx.GraphDef[Module],
  config: Config,
  dtype: jnp.dtype,
  layout: sharding_lib.Layout,
  amounts: Amounts,
  hidden: tuple[int, ...],
  on_gpu: bool,
) -> model_lib.ModelSpec:
  """The record of a shape; cached, so that loading it again does not recompile.

  `graph` is the module's; for the others see `network_facts`.
  """
  backend = contraction.Backend(kernels=amounts.kernels, gpu=on_gpu)

  def apply(
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    module = nnx.merge(graph, params)
    length = tokens.shape[1]
    if on_gpu:
      tokens, positions, mask = _in_full_rows(tokens, positions, mask)
      cache = cache.replace(num_new=length)
    with layout.in_use(), contraction.in_use(backend):
      logits, updated = module(tokens, positions, mask, cache)
    written = cast(cache_lib.KVCache, updated)  # Only training has no cache.
    if on_gpu:
      logits, written = logits[:, :length], written.replace(num_new=None)
    # Later functions sort and draw over the whole vocabulary.
    return layout.gather_vocabulary(logits), written

  return model_lib.ModelSpec(
    apply=apply,
    hidden=hidden,
    **network_facts(
      config, dtype, layout, amounts, hidden=hidden, on_gpu=on_gpu
    ),
  )


def as_model(
  module: Module,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
  hidden: tuple[int, ...] = (),
  *,
  on_gpu: bool | None = None,
) -> model_lib.LanguageModel:
  """Splits a module into the parameters and functions that `specdec` decodes.

  The module has weights, or shapes only; the result shares its arrays.

  Args:
    module: of any family.
    layout: where the module lies, as it was loaded.
    hidden: the hidden states that its cache keeps for a drafting head, keys of
      `specdec.cache.KVCache.hidden`.
    on_gpu: whether it will run on a GPU; None: if that is JAX's default.
  """
  if on_gpu is None:
    on_gpu = jax.default_backend() == 'gpu'
  config = module.config
  on_gpu = on_gpu and layout.mesh is None  # Several have parts of the heads.
  graph, variables = nnx.split(module)
  params = nnx.to_pure_dict(variables)
  if on_gpu:
    params = _for_gpu(params, config)
  read = amounts(params, functools.partial(_share_read, config=config))
  return model_lib.LanguageModel(
    params=params,
    spec=_spec(graph, config, module.dtype, layout, read, hidden, on_gpu),
  )
