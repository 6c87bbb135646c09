"""The model contract, and what decoding does with a model: target and drafts.

A model's cache holds the text up to some point. After it comes a window for the
nodes of the current step, in the order in which they are scored:

    slot      ...  4    5    6    7    8    9
              text a    b  | n0   n2   n1   .
                   |    missing   nodes of the tree, n0 is the root
                   length

*Missing text* is text before the root that is not in this model's cache: tokens
that were accepted but never scored by this model. In a chain whose tokens were
all accepted it is the last token, the classic off-by-one of the field. Where
another stage drafts too, it may be more. Missing text takes the place of nodes
in the next forward. The target scores every node that it accepts, so it misses
nothing.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec.tree import tree as tree_lib

# Tokens that one forward of `restart` reads at least.
_READ_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkSpec:
  """Facts of a network with a cache; hashable, so static under `jit`."""

  #: `(batch_size, num_slots) -> KVCache`, empty.
  init_cache: Callable[[int, int], cache_lib.KVCache]
  vocab_size: int  #: V.
  max_positions: int  #: The length of the context.
  #: Bytes of weights that one forward reads from memory. Where that depends on
  #: the tokens (a mixture of experts), those for one token.
  weight_bytes: int
  cache_bytes_per_slot: int  #: Bytes read per row, forward and visible slot.
  #: Bytes of the states of recurrent layers per row.
  state_bytes: int = 0
  #: The slots of a decode are a multiple of it.
  slot_multiple: int = 1
  #: The number of parameters that each position is multiplied with.
  parameters: int = 0
  #: Fixes the devices of the arrays of a pytree that is carried from program to
  #: program; their first axis, if any, is B.
  place: Callable[[Any], Any] = lambda tree: tree
  #: The number of devices that rows are divided among, where the number of rows
  #: is a multiple of it, and that each row of the cache is divided among.
  row_shards: int = 1
  slot_shards: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(NetworkSpec):
  """A language model as pure functions; hashable, so static under `jit`."""

  #: `(params, tokens [B, L], positions [B, L], mask [B, L, S], cache) ->
  #: (logits [B, L, V] float32, cache)`. Writes its L entries to the cache and
  #: attends only where the mask is true. Positions and mask are arguments, so
  #: prefill, a chain, a tree and plain decoding are the same forward. Positions
  #: beyond the context must not give NaN: padding has them.
  apply: Callable[..., tuple[jax.Array, cache_lib.KVCache]]
  #: The hidden states that its cache keeps, keys of `KVCache.hidden`.
  hidden: tuple[int, ...] = ()


class Network(flax.struct.PyTreeNode):
  """A network with its weights: a pytree whose structure is static."""

  params: Any  #: Any pytree of arrays.
  #: The functions that use them; static.
  spec: NetworkSpec = flax.struct.field(pytree_node=False)

  def read(
    self,
    hidden: carried_lib.HiddenStates,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> cache_lib.KVCache:
    """Writes text to the cache; heads make entries of the target's `hidden`."""
    raise NotImplementedError


class LanguageModel(Network):
  """A language model with its weights."""

  spec: ModelSpec = flax.struct.field(pytree_node=False)
  #: `[N]` int32, ascending: the tokens that a draft proposes; the logits of all
  #: others are -inf. None: all.
  proposed: jax.Array | None = None

  def apply(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """One forward, see `ModelSpec.apply`."""
    with jax.named_scope('forward'):  # the name in profiles and compiled text
      return self.spec.apply(self.params, tokens, positions, mask, cache)

  def read(
    self,
    hidden: carried_lib.HiddenStates,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> cache_lib.KVCache:
    """`apply` without logits: XLA removes what computes them."""
    del hidden
    return self.apply(tokens, positions, mask, cache)[1]

  def logits(self, tokens: jax.Array) -> jax.Array:
    """`[B, L, V]` float32 logits after each of `tokens [B, L]`, causally."""
    return self.causal(tokens, self.spec.init_cache(*tokens.shape))[0]

  def causal(
    self, tokens: jax.Array, cache: cache_lib.KVCache
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """The logits of `logits`, and the empty `cache` with the tokens."""
    return self.apply(tokens, *_causal(tokens, cache), cache)


def _causal(
  tokens: jax.Array, cache: cache_lib.KVCache
) -> tuple[jax.Array, jax.Array]:
  """Positions and mask of `tokens [B, L]` that an empty cache is to hold."""
  positions = jnp.arange(tokens.shape[1])[None]
  mask = cache_lib.causal_mask(cache.length, tokens.shape[1], cache.num_slots)
  return jnp.broadcast_to(positions, tokens.shape), mask


class ModelState(flax.struct.PyTreeNode):
  """State of a model, carried from forward to forward."""

  #: Its `length` is the length of the text it held when the step began.
  cache: cache_lib.KVCache
  #: `[B]` int32, slots of the window that hold text, at its start.
  num_text: jax.Array
  #: `[B, T]` int32, the node in each slot of the window; `NO_NODE` for text,
  #: padding and unused slots.
  window: jax.Array
  used: jax.Array  #: `[]` int32, slots of the window in use.


class NetworkState(flax.struct.PyTreeNode):
  """State of a scorer: the state of its network, and more."""

  model: ModelState  #: The state of the network.

  @property
  def cache(self) -> cache_lib.KVCache:
    """The cache of the network."""
    return self.model.cache


def start(
  network: Network, texts: carried_lib.Texts, *, window_size: int
) -> ModelState:
  """The state of a network that has read the texts, all but their last tokens.

  Padding is fed, too: no token of a text can see it, and its slots come after
  the text. Nothing is computed if P is 0. `window_size` are slots for what is
  scored in one step.
  """
  spec, tokens = network.spec, texts.tokens
  batch_size = tokens.shape[0]
  num_slots = texts.num_slots + window_size
  num_slots += -num_slots % spec.slot_multiple
  cache = spec.init_cache(batch_size, num_slots)
  if cache.recurrent:
    # Their states cannot go back, so the last chunk needs room after the text.
    size = max(window_size, _READ_SIZE)
    cache = spec.init_cache(batch_size, texts.num_slots + size)
    cache = cache_lib.with_window(cache, window_size)
    if tokens.shape[1]:
      cache, _ = _read_on(network, cache, texts, size)
  else:
    if tokens.shape[1]:
      cache = network.read(texts.hidden, tokens, *_causal(tokens, cache), cache)
    cache = cache_lib.advance(cache, texts.length - 1)
  return ModelState(
    cache=cache,
    num_text=jnp.zeros(batch_size, jnp.int32),
    window=jnp.full((batch_size, window_size), tree_lib.NO_NODE, jnp.int32),
    used=jnp.zeros((), jnp.int32),
  )


class NodeScores(NamedTuple):
  """The result of one forward over nodes."""

  nodes: jax.Array  # [B, W] int32, those scored; NO_NODE for the others
  logits: jax.Array  # [B, W, V] float32
  slots_read: jax.Array  # [B] int32, visible cache slots


class NodeForward(NamedTuple):
  """The arguments of a forward over missing text and nodes, and its nodes."""

  tokens: jax.Array  # [B, W] int32
  positions: jax.Array  # [B, W] int32
  mask: jax.Array  # [B, W, S] bool
  cache: cache_lib.KVCache  # its `start` is set
  nodes: jax.Array  # [B, W] int32, after the rows of text; else NO_NODE
  slots_read: jax.Array  # [B] int32, visible cache slots
  after: ModelState  # its cache is still the old one

  def next_state(self, cache: cache_lib.KVCache) -> ModelState:
    """The state after the forward, which wrote to the cache."""
    return self.after.replace(cache=cache.replace(start=None))


def plan_forward(
  state: ModelState,
  tree: tree_lib.TokenTree,
  nodes: jax.Array,
  ctx: context_lib.StepContext,
  *,
  may_lag: bool,
) -> NodeForward:
  """The forward over the missing text and the nodes, as far as they fit.

  Every node sees the text and its own ancestors.

  Args:
    state: of the model; its cache has W unused slots in the window.
    tree: `[B, M]` per field.
    nodes: `[B, W]` int32, ancestors first; `NO_NODE` where there is nothing to
      score. Missing text takes their places, and pushes out the last of them.
    ctx: of the step.
    may_lag: whether text may be missing; static. If not, as for the target,
      nothing is computed for it.
  """
  at = jax.vmap(tree_lib.pick)
  length, num_text = state.cache.length, state.num_text
  if may_lag:
    index = jnp.arange(nodes.shape[1])[None]
    num_read = length + num_text
    missing = jnp.minimum(ctx.length - 1 - num_read, nodes.shape[1])[:, None]
    is_text = index < missing
    nodes = jnp.take_along_axis(nodes, jnp.maximum(index - missing, 0), axis=1)
    nodes = jnp.where(is_text, tree_lib.NO_NODE, nodes)
    num_text = num_text + missing[:, 0]
  zero = jnp.zeros((), state.used.dtype)
  window = lax.dynamic_update_slice(state.window, nodes, (zero, state.used))
  sees = jax.vmap(tree_lib.ancestor_mask, (0, 0, 0, None))(
    tree.parent, nodes, window, ctx.max_depth
  )
  tokens = at(tree.token, nodes)
  positions = (ctx.length - 1)[:, None] + at(tree.depth, nodes)
  if may_lag:
    slot = jnp.arange(window.shape[1])[None, None]
    before = state.num_text[:, None]
    num_seen = jnp.where(is_text, before + index + 1, before + missing)
    sees |= slot < num_seen[:, :, None]
    at_text = num_read[:, None] + index
    tokens = jnp.where(is_text, at(ctx.tokens, at_text), tokens)
    positions = jnp.where(is_text, at_text, positions)
  return NodeForward(
    tokens=tokens,
    positions=positions,
    mask=state.cache.ops.mask(length, sees, state.cache.num_slots),
    cache=state.cache.replace(start=length + state.used),
    nodes=nodes,
    slots_read=length + num_text + jnp.sum(window >= 0, axis=1),
    after=ModelState(
      cache=state.cache,
      num_text=num_text,
      window=window,
      used=state.used + nodes.shape[1],
    ),
  )


def forward_nodes(
  model: LanguageModel,
  state: ModelState,
  tree: tree_lib.TokenTree,
  nodes: jax.Array,
  ctx: context_lib.StepContext,
  *,
  may_lag: bool,
) -> tuple[NodeScores, ModelState]:
  """One forward over the missing text and the nodes, see `plan_forward`.

  Serves the target and drafting models alike.
  """
  planned = plan_forward(state, tree, nodes, ctx, may_lag=may_lag)
  logits, cache = model.apply(
    planned.tokens, planned.positions, planned.mask, planned.cache
  )
  scores = NodeScores(
    nodes=planned.nodes, logits=logits, slots_read=planned.slots_read
  )
  return scores, planned.next_state(cache)


def nodes_after_text(
  nodes: jax.Array, num_text: jax.Array, num_nodes: int
) -> tuple[jax.Array, jax.Array]:
  """The first rows of a forward after its text.

  Args:
    nodes: `[B, R]` int32, of its rows.
    num_text: `[B]` int32, rows of text.
    num_nodes: n, how many rows.

  Returns:
    `[B, n]` int32 indices of rows, and their nodes, `NO_NODE` beyond the last.
  """
  index = num_text[:, None] + jnp.arange(num_nodes)[None]
  picked = jax.vmap(tree_lib.pick)(nodes, index)
  return index, jnp.where(index < nodes.shape[1], picked, tree_lib.NO_NODE)


def forward_text_and_nodes(
  model: LanguageModel,
  state: ModelState,
  tree: tree_lib.TokenTree,
  nodes: jax.Array,
  ctx: context_lib.StepContext,
  *,
  num_nodes: int,
) -> tuple[NodeScores, ModelState]:
  """One forward of a drafting model over missing text and nodes.

  Args:
    model: the model.
    state: its state.
    tree: `[B, M]` per field.
    nodes: `[B, R]` int32; those beyond the first n are `NO_NODE`, room for
      text. On CPU, where rows take time, the room is left out if less than n
      tokens are missing, so that the root fits without it.
    ctx: of the step.
    num_nodes: n, the most nodes that are scored, at least 2.

  Returns:
    The scores of n nodes, and the state after the forward.
  """
  few = nodes[:, :num_nodes]
  forward_of_few = lambda: forward_nodes(
    model, state, tree, few, ctx, may_lag=True
  )
  if few.shape == nodes.shape:
    return forward_of_few()

  def forward_of_all() -> tuple[NodeScores, ModelState]:
    scores, after = forward_nodes(model, state, tree, nodes, ctx, may_lag=True)
    num_text = after.num_text - state.num_text
    index, scored = nodes_after_text(scores.nodes, num_text, num_nodes)
    logits = jax.vmap(tree_lib.pick)(scores.logits, index)
    return scores._replace(nodes=scored, logits=logits), after

  missing = ctx.length - 1 - state.cache.length - state.num_text
  has_room = lax.platform_dependent(
    jnp.all((missing < num_nodes) | ~ctx.active),
    cpu=lambda has_room: has_room,
    default=jnp.zeros_like,
  )
  return lax.cond(has_room, forward_of_few, forward_of_all)


def keep(state: ModelState, added: carried_lib.Added) -> ModelState:
  """Ends a step: keeps the entries of the accepted nodes that were scored."""
  if state.window.shape[1] == 1:  # the root alone, which is in place
    cache = cache_lib.advance(state.cache, added.count)
    return state.replace(cache=cache, used=jnp.zeros_like(state.used))
  path = added.path
  in_slot = path[:, :, None] == state.window[:, None]
  in_slot &= (path >= 0)[:, :, None]
  scored = jnp.any(in_slot, axis=2)
  num_scored = tree_lib.count_leading(scored)
  cache = cache_lib.keep(
    state.cache,
    state.num_text,
    jnp.argmax(in_slot, axis=2),
    jnp.minimum(num_scored, added.count),
    window=state.window.shape[1],
  )
  return ModelState(
    cache=cache,
    num_text=jnp.zeros_like(state.num_text),
    window=jnp.full_like(state.window, tree_lib.NO_NODE),
    used=jnp.zeros_like(state.used),
  )


def restart(
  network: Network, state: ModelState, texts: carried_lib.Texts
) -> tuple[ModelState, jax.Array]:
  """Between steps: feeds the text that the cache lacks, all but the root.

  It is fed in chunks of one size, so that one program reads texts of all
  lengths. Returns the state, and the number of forwards, `[]` int32.
  """
  assert texts.kept is not None
  cache = cache_lib.rewind(state.cache, texts.kept)
  size = min(max(state.window.shape[1], _READ_SIZE), cache.num_slots)
  cache, forwards = _read_on(network, cache, texts, size)
  return state.replace(cache=cache), forwards


def _read_on(
  network: Network,
  cache: cache_lib.KVCache,
  texts: carried_lib.Texts,
  size: int,
) -> tuple[cache_lib.KVCache, jax.Array]:
  """Reads what the cache lacks of texts in chunks; see `restart`."""
  num_slots = cache.num_slots
  end = jnp.minimum(texts.length - 1, network.spec.max_positions)
  at = jax.vmap(tree_lib.pick)
  windows = {layer.num_slots for layer in cache.recurrent.values()}

  def feed(
    carry: tuple[jax.Array, cache_lib.KVCache],
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    forwards, cache = carry
    # The last chunk of a text that fills the cache begins within what was read.
    begun = cache
    if not cache.recurrent:
      begun = cache_lib.rewind(cache, num_slots - size)
    start = begun.length
    positions = start[:, None] + jnp.arange(size)[None]
    mask = cache_lib.causal_mask(start, size, num_slots)
    tokens = at(texts.tokens, positions)
    fed = network.read(texts.hidden, tokens, positions, mask, begun)
    length = jnp.maximum(cache.length, jnp.minimum(end, start + size))
    read_on = cache_lib.advance(fed, length - start)
    for window in windows:  # One, if there are recurrent layers.
      read_on = cache_lib.with_window(read_on, window)
    return forwards + 1, read_on

  forwards, cache = lax.while_loop(
    lambda carry: jnp.any(carry[1].length < end),
    feed,
    (jnp.zeros((), jnp.int32), cache),
  )
  return cache_lib.mark(cache), forwards
