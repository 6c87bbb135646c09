"""Block drafters in Flax NNX: DFlash, DFlash 2 and DSpark.

A block drafter is a few Qwen 3 layers. Their rows are a block: the root and
mask tokens after it. Keys and values of the text are made of hidden states of
the target; `specdec.draft.block` says how such a drafter is used.

    DFlash     the layers alone (arXiv 2602.06036)
    DSpark     a term of low rank for the token before, and the probability that
               a token is accepted (arXiv 2607.05147)
    DFlash 2   convolutions within the block, and an edge score between tokens

Embedding and output matrix may be the target's, so they are not part of the
module.
"""

import dataclasses
import functools
from typing import Any
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.draft import block as block_lib
from specdec.models.nn import adapter
from specdec.models.nn import contraction
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import rope as rope_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.tree import topology as topology_lib

VANILLA, GATED, EDGES = 'vanilla', 'gated', 'edges'

LOOKED_UP = ('markov_w1', 'markov_w2')
"""Names of matrices `[tokens, rank]`; a forward reads a few of their rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDrafterConfig(nn_llama.LlamaConfig):
  """Shape of a block drafter: its layers, and what surrounds them.

  `vocab_size` is the target's, `num_layers` the drafter's.
  """

  target_width: int = dataclasses.field()  # The width of the target's states.
  block_size: int = dataclasses.field()  # R, rows of a block.
  mask_token: int = 0  # The token in all rows except the first.
  reads: tuple[int, ...] = ()  # See `KVCache.hidden`.
  # Whether row j gives the token that follows root + j, not the one there.
  samples_root: bool = False
  # Whether rows of a block see no later ones, for all layers or for each.
  causal: bool | tuple[bool, ...] = False
  # Window positions: measured from the root (True) or from each row (False).
  window_from_root: bool = False
  # The term for the token before, `VANILLA` or `GATED` (DSpark) or `EDGES`
  # (DFlash 2),
  markov: str | None = None
  markov_rank: int = 0  # and its rank.
  confidence: bool = False  # Whether the drafter rates its own tokens,
  confidence_with_markov: bool = False  # and whether by the token before, too.
  conv_size: int = 0  # Taps of the convolutions, 0 for none,
  conv_group: int = 16  # and channels with the same dynamic part.
  num_candidates: int | None = None  # Tokens that are rated per depth.

  @property
  def depth(self) -> int:
    """How many tokens a block drafts."""
    return self.block_size - (not self.samples_root)

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 < self.depth <= topology_lib.LARGEST_DEPTH:
      raise ValueError(
        f'block_size={self.block_size} drafts {self.depth} tokens; from 1 to'
        f' {topology_lib.LARGEST_DEPTH} are supported'
      )
    if not 0 <= self.mask_token < self.vocab_size:
      raise ValueError(
        f'mask_token_id={self.mask_token} is beyond the vocabulary of'
        f' {self.vocab_size} tokens'
      )
    self._set_layers('causal', self.of_layers('causal'))


class _BlockConvolution(nnx.Module):
  """Two causal convolutions within blocks, before and after a layer's part.

  Each tap of a channel is a constant plus a number of the row, shared by a
  group of channels. The numbers of both follow from the part's input.
  """

  def __init__(
    self,
    width: int,
    block_size: int,
    size: int,
    group: int,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.block_size = block_size
    self.shape = (2, size, width // group)
    start = jnp.zeros((2, size, width)).at[:, 0].set(1.0)
    self.base_kernel = nnx.Param(start)
    outputs = 2 * size * self.shape[2]
    self.kernel_projection = layers.Linear(
      width, outputs, dtype=dtype, rngs=rngs, use_bias=False
    )

  def before(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The input `[B, L, H]` of the part, and what `after` takes."""
    dynamic = self.kernel_projection(rows)
    dynamic = dynamic.reshape(*rows.shape[:2], *self.shape)
    return self._apply(0, rows, dynamic), dynamic

  def after(self, rows: jax.Array, dynamic: jax.Array) -> jax.Array:
    """The output `[B, L, H]` of the part, convolved."""
    return self._apply(1, rows, dynamic)

  def _apply(
    self, place: int, rows: jax.Array, dynamic: jax.Array
  ) -> jax.Array:
    _, size, groups = self.shape
    batch, length, width = rows.shape
    channels = (batch, -1, self.block_size, groups, width // groups)
    blocks = rows.reshape(channels)
    dynamic = dynamic[:, :, place].reshape(*channels[:3], size, groups, 1)
    base = self.base_kernel[...][place].reshape(1, 1, 1, size, *channels[3:])
    out = jnp.zeros_like(blocks)
    for tap in range(size):
      shifted = jnp.pad(blocks, ((0, 0), (0, 0), (tap, 0), (0, 0), (0, 0)))
      factor = base[:, :, :, tap] + dynamic[:, :, :, tap]
      out += factor * shifted[:, :, : self.block_size]
    return out.reshape(batch, length, width)


class _ConvolvedLayer(nn_llama.Layer):
  """A layer of DFlash 2, with convolutions around both of its parts."""

  self_attn: nn_llama.Attention
  input_layernorm: layers.RMSNorm
  post_attention_layernorm: layers.RMSNorm

  def __init__(
    self, config: BlockDrafterConfig, layer: int, **new: Unpack[layers.New]
  ):
    super().__init__(config, layer, **new)
    make = functools.partial(
      _BlockConvolution,
      config.width,
      config.block_size,
      config.conv_size,
      config.conv_group,
      **new,
    )
    self.attention_conv, self.mlp_conv = make(), make()

  def __call__(
    self,
    x: jax.Array,
    rotation: rope_lib.Rotation | None,
    mask: jax.Array,
    cache: cache_lib.KVCache | None,
  ) -> tuple[jax.Array, cache_lib.KVCache | None]:
    rows, dynamic = self.attention_conv.before(self.input_layernorm(x))
    out, cache = self.self_attn(rows, None, rotation, mask, cache, None)
    x = x + self.attention_conv.after(out, dynamic)
    rows, dynamic = self.mlp_conv.before(self.post_attention_layernorm(x))
    out = self.mlp(rows, None, None)
    return x + self.mlp_conv.after(out, dynamic), cache


class _MarkovHead(nnx.Module):
  """A term of low rank that is added to scores, by the token before."""

  def __init__(
    self,
    config: BlockDrafterConfig,
    num_outputs: int,
    **new: Unpack[layers.New],
  ):
    width, rank = config.width, config.markov_rank
    make = functools.partial(layers.Linear, **new)
    is_edge = config.markov == EDGES
    tokens = config.vocab_size if is_edge else num_outputs
    self.markov_w1 = make(rank, config.vocab_size, use_bias=False)
    self.markov_w2 = make(rank, tokens, use_bias=False)
    if is_edge:
      self.hidden_projection = make(width, rank, use_bias=False)
    if config.markov == GATED:
      self.gate_proj = make(width + rank, rank)

  def context(self, states: jax.Array, parents: jax.Array) -> jax.Array:
    """`[B, W, rank]`, which is multiplied with rows of `markov_w2`."""
    rows = _rows(self.markov_w1, parents)
    if hasattr(self, 'hidden_projection'):
      rows *= self.hidden_projection(states)
    if hasattr(self, 'gate_proj'):
      gate = self.gate_proj(jnp.concatenate([states, rows], axis=-1))
      rows *= jax.nn.sigmoid(gate)
    return rows


def _rows(table: layers.Linear, index: jax.Array) -> jax.Array:
  """Rows `[..., rank]` float32 of a matrix, for `index [...]`."""
  return matrices_lib.take_rows(table.weight.get_value(), index)


class BlockDrafter(nnx.Module):
  """A block drafter without embedding and output matrix.

  Args:
    config: the shape.
    num_outputs: rows of the output matrix, if it has not all tokens.
    dtype: of the matrices.
    rngs: of the random weights.
  """

  def __init__(
    self,
    config: BlockDrafterConfig,
    num_outputs: int | None = None,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    make = functools.partial(layers.Linear, dtype=dtype, rngs=rngs)
    inputs = len(config.reads) * config.target_width
    self.fc = make(inputs, config.width, use_bias=False)
    norm = functools.partial(layers.RMSNorm, config.width, config.norm_epsilon)
    self.hidden_norm = norm()
    layer: Any = _ConvolvedLayer if config.conv_size else nn_llama.Layer
    self.layers = nnx.List(
      [
        layer(config, index, dtype=dtype, rngs=rngs)
        for index in range(config.num_layers)
      ]
    )
    self.norm = norm()
    if config.markov:
      self.markov_head = _MarkovHead(
        config, num_outputs or config.vocab_size, dtype=dtype, rngs=rngs
      )
    if config.confidence:
      inputs = config.width + config.confidence_with_markov * config.markov_rank
      self.confidence_head = nnx.Dict(proj=make(inputs, 1))

  def read(
    self,
    states: tuple[jax.Array, ...],
    positions: jax.Array,
    cache: cache_lib.KVCache,
  ) -> cache_lib.KVCache:
    """See `specdec.draft.block.BlockSpec.read`."""
    floats = [state.astype(jnp.float32) for state in states]
    rows = self.hidden_norm(self.fc(jnp.concatenate(floats, axis=-1)))
    rotations = nn_llama.rotations(self.config, positions)
    for layer, rotation in zip(self.layers, rotations, strict=True):
      cache = layer.self_attn.write(rows, rotation, cache)
    return cache

  def _masks(
    self, positions: jax.Array, mask: jax.Array, cache: cache_lib.KVCache
  ) -> list[jax.Array]:
    """The slots that the rows see, for each layer."""
    config, size = self.config, self.config.block_size
    slots = jnp.arange(mask.shape[2])[None]
    at = slots - cache.write_at[:, None]
    in_blocks = (at >= 0) & (at < positions.shape[1])
    at = jnp.clip(at, 0, positions.shape[1] - 1)
    # The text has its positions in the order of its slots.
    keys = jnp.take_along_axis(positions, at, axis=1)
    keys = jnp.where(in_blocks, keys, slots)[:, None]
    rows = positions[:, :, None]
    roots = jnp.repeat(positions[:, ::size], size, axis=1)[:, :, None]

    def seen(window: int | None, causal: bool) -> jax.Array:
      sees = mask
      if causal:
        sees &= keys <= rows
      if window and config.window_from_root:
        sees &= roots - keys <= window
      elif window:
        sees &= jnp.abs(rows - keys) < window
      return sees

    kinds = [*zip(*map(config.of_layers, ('window', 'causal')), strict=True)]
    by_kind = {kind: seen(*kind) for kind in dict.fromkeys(kinds)}
    return [by_kind[kind] for kind in kinds]

  def __call__(
    self,
    embedded: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """States of the rows that draft tokens, and the cache.

    Args:
      embedded: `[B, N R, H]` float32, the embeddings of N blocks, one after the
        other; N is 1 except in training.
      positions: `[B, N R]` int32.
      mask: `[B, N R, S]` bool: the text before the root, and the rows of the
        same block. Windows and `causal` take away from it.
      cache: holds the text, slot i the token at position i.

    Returns:
      `[B, N D, H]` float32, after the last norm; the output matrix multiplies
      the states of depth d for the tokens at root + d + 1.
    """
    config = self.config
    x = embedded
    if config.embedding_scale != 1.0:
      x *= config.embedding_scale
    rotations = nn_llama.rotations(config, positions)
    masks = self._masks(positions, mask, cache)
    for layer, *seen in zip(self.layers, rotations, masks, strict=True):
      x, cache = layer(x, *seen, cache)
    x = self.norm(x)
    blocks = x.reshape(x.shape[0], -1, config.block_size, x.shape[-1])
    drafts = blocks[:, :, config.block_size - config.depth :]
    return drafts.reshape(x.shape[0], -1, x.shape[-1]), cache

  def edges(
    self, states: jax.Array, parents: jax.Array, tokens: jax.Array, rows: Any
  ) -> jax.Array:
    """See `BlockSpec.edges`; `rows [V]` of the output matrix, None for all."""
    table = self.markov_head.markov_w2
    # A reduced vocabulary of the drafter's own; a token without a row has no
    # score.
    if rows is not None and table.weight.shape[0] < self.config.vocab_size:
      tokens = jnp.maximum(rows[tokens], 0)
    return jnp.einsum(
      'bwr,bwcr->bwc',
      self.markov_head.context(states, parents),
      _rows(table, tokens),
      precision=jax.lax.Precision.HIGHEST,
    )

  def confidence(self, states: jax.Array, parents: jax.Array) -> jax.Array:
    """See `BlockSpec.confidence`, before the sigmoid."""
    if self.config.confidence_with_markov:
      before = _rows(self.markov_head.markov_w1, parents)
      states = jnp.concatenate([states, before], axis=-1)
    return self.confidence_head.proj(states)[..., 0]


@functools.cache
def _spec(
  graph: nnx.GraphDef[BlockDrafter],
  config: BlockDrafterConfig,
  dtype: jnp.dtype,
  layout: sharding_lib.Layout,
  amounts: adapter.Amounts,
  num_outputs: int,
) -> block_lib.BlockSpec:
  """The record of a shape; cached, so that loading it again does not recompile.

  For the arguments see `models/nn/adapter`.
  """
  module: Any = lambda params: nnx.merge(graph, params['drafter'])
  in_use = contraction.in_use(contraction.Backend(kernels=amounts.kernels))

  @in_use
  def propose(
    params: Any, tokens: jax.Array, *others: Any
  ) -> tuple[jax.Array, jax.Array, cache_lib.KVCache]:
    embedded = matrices_lib.take_rows(params['embedding'], tokens)
    states, cache = module(params)(embedded, *others)
    head = matrices_lib.computed(params['lm_head'])
    scores = nn_llama.scores(config, states, head)
    return layout.gather_vocabulary(scores), states, cache

  edges = lambda params, *args: module(params).edges(
    *args, rows=getattr(params['lm_head'], 'index', None)
  )
  confidence = lambda params, *args: jax.nn.sigmoid(
    module(params).confidence(*args)
  )
  return block_lib.BlockSpec(
    read=in_use(lambda params, *args: module(params).read(*args)),
    propose=propose,
    edges=edges if config.markov else None,
    confidence=confidence if config.confidence else None,
    reads=config.reads,
    block_size=config.block_size,
    depth=config.depth,
    width=config.width,
    mask_token=config.mask_token,
    num_candidates=config.num_candidates,
    num_outputs=num_outputs,
    outputs=(
      None if num_outputs == config.vocab_size else lambda params: params['ids']
    ),
    **adapter.network_facts(config, dtype, layout, amounts),
  )


def as_drafter(
  module: BlockDrafter,
  *,
  embedding: Any,
  lm_head: Any,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
) -> block_lib.BlockDrafter:
  """Splits a module into the parameters and functions that `specdec` uses.

  For the arguments see `eagle.as_head`.
  """
  graph, variables = nnx.split(module)
  drafter_params = nnx.to_pure_dict(variables)
  params = {
    'drafter': drafter_params,
    'embedding': embedding,
    'lm_head': lm_head,
  }
  num_outputs = matrices_lib.computed(lm_head).shape[0]
  if isinstance(lm_head, matrices_lib.FewOutputs):
    order = jnp.argsort(lm_head.index)  # Outputs are last.
    params['ids'] = order[-num_outputs:].astype(jnp.int32)
  return block_lib.BlockDrafter(
    params=params,
    spec=_spec(
      graph,
      module.config,
      module.dtype,
      layout,
      adapter.amounts(
        {'drafter': drafter_params, 'lm_head': lm_head},
        lambda path: 0.0 if {*path} & {*LOOKED_UP} else 1.0,
      ),
      num_outputs,
    ),
  )
