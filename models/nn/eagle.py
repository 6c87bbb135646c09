"""Drafting heads in Flax NNX: EAGLE-3, EAGLE-1 and multi-token prediction.

A head is one or a few Llama layers that read the embedding of a token and the
state before it; `specdec.draft.head` says which states these are. Embedding and
output matrix may be the target's, so they are not part of the module.
"""

import dataclasses
import functools
from typing import Any
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.draft import head as head_lib
from specdec.models.nn import adapter
from specdec.models.nn import contraction
from specdec.models.nn import delta as delta_lib
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import rope as rope_lib
from specdec.models.nn import sharding as sharding_lib

EAGLE3, EAGLE, MTP = 'eagle3', 'eagle', 'mtp'
KINDS = (EAGLE3, EAGLE, MTP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(nn_llama.LlamaConfig):
  """Shape of a head: its layers, and how they are fed.

  `vocab_size` is the target's, `num_layers` the head's.
  """

  target_width: int = dataclasses.field()  # The width of the target's states.
  kind: str = EAGLE3
  reads: tuple[int, ...] = (cache_lib.AFTER_NORM,)  # See `KVCache.hidden`.
  fc_bias: bool = False
  # EAGLE-3 has these.
  norm_before_residual: bool = False  # Whether the residual is normalised.
  fc_norm: bool = False  # Whether each state is normalised before `fc`.
  norm_before_fc: bool = False  # Whether all of them are, as one vector.
  norm_output: bool = False  # Whether a state is fed back after the norm.
  # Multi-token prediction has these.
  state_first: bool = False  # Whether the state comes before the embedding.
  gated_attention: bool = False  # Whether it is `delta.GatedAttention`.

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.kind not in KINDS:
      raise ValueError(f'kind {self.kind!r} is not known; choose from {KINDS}')
    if self.kind == EAGLE3 and not self.reads:
      raise ValueError('an EAGLE-3 head reads at least one state')
    if self.kind != EAGLE3 and self.target_width != self.width:
      raise ValueError(
        f'a head of width {self.width} cannot read the states of a target of'
        f' width {self.target_width}'
      )


class _WideLayer(nn_llama.Layer):
  """First layer of EAGLE-3. Its queries, keys and values see both inputs."""

  config: HeadConfig
  self_attn: nn_llama.Attention
  input_layernorm: layers.RMSNorm

  def __init__(self, config: HeadConfig, layer: int, **new: Unpack[layers.New]):
    attention = functools.partial(
      nn_llama.Attention, input_width=2 * config.width
    )
    super().__init__(config, layer, mixers={'self_attn': attention}, **new)
    self.hidden_norm = layers.RMSNorm(config.width, config.norm_epsilon)

  def __call__(  # type: ignore[override]
    self,
    embedded: jax.Array,
    x: jax.Array,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: cache_lib.KVCache | None,
  ) -> tuple[jax.Array, cache_lib.KVCache | None]:
    normalized = self.hidden_norm(x)
    both = jnp.concatenate([self.input_layernorm(embedded), normalized], -1)
    residual = normalized if self.config.norm_before_residual else x
    x, cache = self.self_attn(both, None, rotation, mask, cache, residual)
    return self.mlp(x, self.post_attention_layernorm, x), cache


class _BareLayer(nn_llama.Layer):
  """First layer of EAGLE-1, which does not normalise its input."""

  def __init__(self, *args: Any, **new: Unpack[layers.New]):
    super().__init__(*args, **new)
    self.input_layernorm = None


class Head(nnx.Module):
  """A drafting head without embedding and output matrix.

  EAGLE-3 (arXiv 2503.01840, section 3) fuses states of several layers, and its
  layer keeps embedding and state apart. In EAGLE-1 (arXiv 2401.15077, section
  4.1) and multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)
  one matrix makes a single input of both; the latter normalises them before.
  """

  def __init__(
    self,
    config: HeadConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    width, wide = config.width, config.kind == EAGLE3
    norm = functools.partial(layers.RMSNorm, epsilon=config.norm_epsilon)
    fused = len(config.reads) * config.target_width
    self.fc = layers.Linear(
      fused if wide else 2 * width,
      width,
      dtype=dtype,
      rngs=rngs,
      use_bias=config.fc_bias,
    )
    layer: Any = nn_llama.Layer
    if config.gated_attention:
      layer = functools.partial(layer, mixers=delta_lib.Delta.mixers)
    kinds = [layer] * config.num_layers
    kinds[0] = {EAGLE3: _WideLayer, EAGLE: _BareLayer, MTP: layer}[config.kind]
    self.layers = nnx.List(
      [
        kind(config, layer, dtype=dtype, rngs=rngs)
        for layer, kind in enumerate(kinds)
      ]
    )
    if wide and config.fc_norm:
      each = [norm(config.target_width) for _ in config.reads]
      self.fc_norm = nnx.List(each)
    if wide and config.norm_before_fc:
      self.input_norm = norm(fused)
    if config.kind == MTP:
      self.enorm, self.hnorm = norm(width), norm(width)
    if config.kind != EAGLE:
      self.norm = norm(width)

  def fuse(self, *states: jax.Array) -> jax.Array:
    """See `specdec.draft.head.HeadSpec.fuse`."""
    config = self.config
    floats = [state.astype(jnp.float32) for state in states]
    if config.kind != EAGLE3:
      return floats[0]
    if config.fc_norm:
      floats = [
        norm(state) for norm, state in zip(self.fc_norm, floats, strict=True)
      ]
    fused = jnp.concatenate(floats, axis=-1)
    if config.norm_before_fc:
      fused = self.input_norm(fused)
    return self.fc(fused)

  def _first_input(self, embedded: jax.Array, states: jax.Array) -> jax.Array:
    """`[B, L, H]`, one input of both, except for EAGLE-3."""
    if self.config.kind == MTP:
      embedded, states = self.enorm(embedded), self.hnorm(states)
    inputs = [embedded, states]
    return self.fc(
      jnp.concatenate(inputs[::-1] if self.config.state_first else inputs, -1)
    )

  def __call__(
    self,
    embedded: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
    states: jax.Array,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """States `[B, L, H]` that are fed back, and the cache.

    Args:
      embedded: `[B, L, H]` float32, embeddings of the tokens.
      positions: `[B, L]` int32.
      mask: `[B, L, S]` bool, as of `gpt2.GPT2`.
      cache: where keys and values are written.
      states: `[B, L, H]` float32, before the tokens.
    """
    config = self.config
    seen, *others = nn_llama.of_layers(config, positions, mask)
    if config.kind == EAGLE3:
      x, cache = self.layers[0](embedded, states, *seen, cache)
    else:
      x = self._first_input(embedded, states)
      x, cache = self.layers[0](x, *seen, cache)
    for index, seen in enumerate(others, 1):
      x, cache = self.layers[index](x, *seen, cache)
    if config.kind == MTP or config.norm_output:
      x = self.norm(x)
    return x, cache

  def output(self, states: jax.Array) -> jax.Array:
    """`[B, L, H]`, what the output matrix multiplies, of what is fed back."""
    if self.config.kind != EAGLE3 or self.config.norm_output:
      return states
    return self.norm(states)


@functools.cache
def _spec(
  graph: nnx.GraphDef[Head],
  config: HeadConfig,
  dtype: jnp.dtype,
  layout: sharding_lib.Layout,
  amounts: adapter.Amounts,
) -> head_lib.HeadSpec:
  """The record of a shape; cached, so that loading it again does not recompile.

  For the arguments see `models/nn/adapter`.
  """
  in_use = contraction.in_use(contraction.Backend(kernels=amounts.kernels))

  @in_use
  def apply(
    params: dict[str, Any], tokens: jax.Array, *others: Any
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    embedded = matrices_lib.take_rows(params['embedding'], tokens)
    return nnx.merge(graph, params['head'])(embedded, *others)

  @in_use
  def fuse(params: dict[str, Any], *states: jax.Array) -> jax.Array:
    return nnx.merge(graph, params['head']).fuse(*states)

  @in_use
  def logits(params: dict[str, Any], states: jax.Array) -> jax.Array:
    states = nnx.merge(graph, params['head']).output(states)
    scores = matrices_lib.matmul(states, params['lm_head'])
    return layout.gather_vocabulary(scores)

  return head_lib.HeadSpec(
    apply=apply,
    fuse=fuse,
    logits=logits,
    reads=config.reads,
    target_width=config.target_width,
    width=config.width,
    **adapter.network_facts(config, dtype, layout, amounts),
  )


def as_head(
  module: Head,
  *,
  embedding: matrices_lib.Weight,
  lm_head: matrices_lib.Weight,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
) -> head_lib.Head:
  """Splits a module into the parameters and functions that `specdec` uses.

  Args:
    module: the head.
    embedding: `[V, H]`, its own or the target's.
    lm_head: `[V, H]`, its own or the target's; of a reduced vocabulary a
      `matrices.FewOutputs`.
    layout: where the module lies.
  """
  graph, variables = nnx.split(module)
  head_params = nnx.to_pure_dict(variables)
  parameters = {'head': head_params, 'embedding': embedding, 'lm_head': lm_head}
  read = adapter.amounts({'head': head_params, 'lm_head': lm_head})
  return head_lib.Head(
    params=parameters,
    spec=_spec(graph, module.config, module.dtype, layout, read),
  )
