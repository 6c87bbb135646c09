"""Google's drafters of Gemma 4 in Flax NNX (transformers, gemma4_assistant).

An assistant has layers without keys and values. They attend to keys and values
of the target's last layers of their kinds, with a window and without, and all
drafted tokens are rotated as the root. So a node sees the text before the root
and nothing of its ancestors but the state that its parent gave:

    row            position in        reads
    text, root     their own          h and x before it, of the target
    drafted node   the root's         h that its parent gave

The keys and values are computed again from `x`, the target's hidden states
before these layers, by the target's own matrices. Row t has the keys and values
of token t - 1, since heads read states before tokens (`specdec.draft.head`).

A state is `[h, other, place]`: of text h after the final norm and all x, with
place 0; of a node what is fed back and what the output matrix multiplies, with
the root's position + 1.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec.draft import head as head_lib
from specdec.models.nn import adapter
from specdec.models.nn import attention
from specdec.models.nn import contraction
from specdec.models.nn import gemma as gemma_lib
from specdec.models.nn import layers
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig(gemma_lib.Gemma4Config):
  """Shape of an assistant.

  Its first layers are layers of the target. The other layers read the keys and
  values of these; `kv_source` says which.
  """

  target: Any = None  # The shape of the target.
  sources: tuple[int, ...] = ()  # Layers of the target.
  num_groups: int = 0  # Groups of tokens; 0: none.
  top_groups: int = 0  # Groups whose tokens get a score.

  @property
  def reads(self) -> tuple[int, ...]:
    """The target's hidden states, see `KVCache.hidden`."""
    return (cache_lib.AFTER_NORM, *self.sources)

  @property
  def state_width(self) -> int:
    """The width of a state: of h, of all x, and the place."""
    return len(self.reads) * self.target.width + 1


class Source(nnx.Module):
  """The part of a layer of the target that makes keys and values."""

  def __init__(self, config: AssistantConfig, index: int, **new: Any):
    layer = config.sources[index]
    target = config.target
    self.input_layernorm = layers.RMSNorm(target.width, target.norm_epsilon)
    self.self_attn = nn_llama.Attention(target, layer, **new)
    self.self_attn.layer = index  # In the cache of the assistant.
    self.rope, self.width = (
      target.of_layers(name)[layer] for name in ('rope', 'head_width')
    )

  def __call__(
    self, x: jax.Array, positions: jax.Array, cache: cache_lib.KVCache
  ) -> cache_lib.KVCache:
    """Writes entries of rows `x [B, L, width]` at `positions [B, L]`."""
    rows = self.input_layernorm(x)
    rotation = self.rope and self.rope.rotation(positions, self.width)
    return self.self_attn.write(rows, rotation, cache)


class Assistant(nnx.Module):
  """The layers of an assistant, without embedding and output matrix."""

  def __init__(
    self,
    config: AssistantConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.config, self.dtype = config, jnp.dtype(dtype)
    make = functools.partial(
      layers.Linear, use_bias=False, dtype=dtype, rngs=rngs
    )
    width = config.target.width
    self.pre_projection = make(2 * width, config.width)
    self.post_projection = make(config.width, width)
    layer = gemma_lib.Gemma4.layer
    mixers = gemma_lib.Gemma4.mixers
    self.layers = nnx.List(
      [
        layer(config, index, mixers=mixers, dtype=dtype, rngs=rngs)
        for index in range(len(config.sources), config.num_layers)
      ]
    )
    self.norm = layers.RMSNorm(config.width, config.norm_epsilon)
    if config.num_groups:
      self.centroids = make(config.width, config.num_groups)

  def __call__(
    self,
    sources: nnx.List[Source],
    embedded: jax.Array,
    positions: jax.Array,
    cache: cache_lib.KVCache,
    states: jax.Array,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """States that are fed back and the cache; see `eagle.Head`."""
    config, width = self.config, self.config.target.width
    h, *read, place = jnp.split(
      states, [width * part for part in range(1, len(config.reads) + 1)], -1
    )
    for source, x in zip(sources, read, strict=True):
      cache = source(x, positions - 1, cache)
    place = place[..., 0].astype(jnp.int32)
    root = jnp.where(place > 0, place - 1, positions)
    slots = jnp.arange(cache.num_slots)[None, None]
    # Text lies in the slots of its positions; the first row has no entry.
    mask = (slots <= root[..., None]) & ((slots > 0) | (root == 0)[..., None])
    rotations = nn_llama.rotations(config, root)
    windows = config.of_layers('window')
    x = self.pre_projection(
      jnp.concatenate([embedded * config.target.embedding_scale, h], -1)
    )
    for index, layer in enumerate(self.layers, len(sources)):
      # As transformers has it, one more than the target's queries see.
      window = windows[index] and windows[index] + 1
      seen = attention.within_window(mask, window)
      x, cache = layer(x, rotations[index], seen, cache)
    x = self.norm(x)
    rest = len(config.sources) * width - config.width
    other = jnp.pad(x, ((0, 0), (0, 0), (0, rest)))
    place = (root + 1).astype(jnp.float32)[..., None]
    return jnp.concatenate([self.post_projection(x), other, place], -1), cache

  def logits(
    self, states: jax.Array, lm_head: Any, ordering: jax.Array | None
  ) -> jax.Array:
    """`[B, L, V]` float32; -inf of tokens outside the best groups.

    `ordering` is `[groups, tokens]` int32, the tokens of each group.
    """
    config = self.config
    x = states[..., config.target.width :][..., : config.width]
    if ordering is None:
      return matrices_lib.matmul(x, lm_head)
    _, best = jax.lax.top_k(self.centroids(x), config.top_groups)
    tokens = ordering[best].reshape(*x.shape[:2], -1)
    rows = matrices_lib.take_rows(lm_head, tokens)
    scores = jnp.einsum('blh,blnh->bln', x, rows)
    empty = jnp.full((*x.shape[:2], config.vocab_size), -jnp.inf)
    put = jax.vmap(jax.vmap(lambda row, at, new: row.at[at].set(new)))
    return put(empty, tokens, scores)


@functools.cache
def _spec(
  graphs: tuple[nnx.GraphDef[Any], nnx.GraphDef[Any]],
  config: AssistantConfig,
  dtype: jnp.dtype,
  layout: sharding_lib.Layout,
  amounts: adapter.Amounts,
) -> head_lib.HeadSpec:
  """The record of a shape; see `eagle`."""
  module, sources = graphs
  in_use = contraction.in_use(contraction.Backend(kernels=amounts.kernels))

  @in_use
  def apply(
    params: dict[str, Any],
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    *others: Any,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    del mask
    embedded = matrices_lib.take_rows(params['embedding'], tokens)
    of_target = nnx.merge(sources, params['sources'])
    return nnx.merge(module, params['head'])(
      of_target, embedded, positions, *others
    )

  def fuse(params: dict[str, Any], *states: jax.Array) -> jax.Array:
    del params
    place = jnp.zeros((*states[0].shape[:2], 1))
    return jnp.concatenate([*states, place], -1).astype(jnp.float32)

  @in_use
  def logits(params: dict[str, Any], states: jax.Array) -> jax.Array:
    head = nnx.merge(module, params['head'])
    return head.logits(states, params['lm_head'], params.get('ordering'))

  return head_lib.HeadSpec(
    apply=apply,
    fuse=fuse,
    logits=logits,
    reads=config.reads,
    target_width=config.target.width,
    width=config.state_width,
    **adapter.network_facts(config, dtype, layout, amounts),
  )


def as_head(
  module: Assistant,
  *,
  embedding: matrices_lib.Weight,
  lm_head: matrices_lib.Weight,
  target: Any,
  ordering: Any,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
) -> head_lib.Head:
  """Splits a module into parameters and functions; see `eagle.as_head`.

  Args:
    module: the assistant.
    embedding: `[V, width]`, the target's.
    lm_head: `[V, H]`, its own.
    target: the parameters of the target, which are shared.
    ordering: `[groups, tokens]` int32 or None, see `Assistant.logits`.
    layout: where the module lies.
  """
  config = module.config
  new = lambda: {'dtype': module.dtype, 'rngs': nnx.Rngs(0)}
  numbers = range(len(config.sources))
  shapes = nnx.eval_shape(
    lambda: nnx.List([Source(config, index, **new()) for index in numbers])
  )
  names = ('input_layernorm', 'self_attn')
  sources = {
    index: {part: target['layers'][layer][part] for part in names}
    for index, layer in enumerate(config.sources)
  }
  graph, variables = nnx.split(module)
  head_params = nnx.to_pure_dict(variables)
  params: dict[str, Any] = {'head': head_params, 'sources': sources}
  params |= {'embedding': embedding, 'lm_head': lm_head}
  if ordering is not None:
    params['ordering'] = jnp.asarray(ordering, jnp.int32)
  graphs = graph, nnx.split(shapes)[0]
  amounts = adapter.amounts({'head': head_params, 'lm_head': lm_head})
  return head_lib.Head(
    params=params,
    spec=_spec(graphs, config, module.dtype, layout, amounts),
  )
