"""A drafting head as a scorer: a small network that reads the target's states.

A head reads for every token its embedding and the state before it: of text the
target's own hidden states, of a drafted token the state that the head computed
for the token before it (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840).

    text               a     b     root
    state before it    0    h(a)   h(b)           of the target, fused
    state it gives     .     .      s0
    node below root                      x        reads s0, gives s1
    node below x                           y      reads s1

So a node is scored in a later forward than its parent. After a step the head
keeps no entry of a drafted token: in the first forward of the next step it
reads the accepted tokens again, as text with the target's states ("draft
extend"), together with the new root.
"""

from collections.abc import Callable
import dataclasses

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec import model as model_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import language_model
from specdec.tree import tree as tree_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec(model_lib.NetworkSpec):
  """A drafting head as pure functions; hashable, so static under `jit`."""

  #: `(params, tokens [B, L], positions [B, L], mask [B, L, S], cache, states
  #: [B, L, H]) -> (states [B, L, H] float32, cache)`: from the states before
  #: the tokens those that they give.
  apply: Callable[..., tuple[jax.Array, cache_lib.KVCache]]
  #: `(params, *states [B, L, width]) -> [B, L, H] float32`, the state before a
  #: token from the target's hidden states.
  fuse: Callable[..., jax.Array]
  #: `(params, states [B, L, H]) -> [B, L, V] float32`.
  logits: Callable[..., jax.Array]
  reads: tuple[int, ...]  #: The target's hidden states, keys of its cache.
  target_width: int  #: Their width.
  width: int  #: H.


class Head(model_lib.Network):
  """A drafting head with its weights."""

  spec: HeadSpec = flax.struct.field(pytree_node=False)

  def forward(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
    states: jax.Array,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """One forward, see `HeadSpec.apply`.

    Nothing comes before the first token of a text. Heads are trained without a
    row for it, so none sees that row here.
    """
    is_first = (jnp.arange(mask.shape[2]) == 0)[None, None]
    mask = jnp.where((positions == 0)[:, :, None], is_first, mask & ~is_first)
    with jax.named_scope('forward'):
      return self.spec.apply(
        self.params, tokens, positions, mask, cache, states
      )

  def read(
    self,
    hidden: carried_lib.HiddenStates,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> cache_lib.KVCache:
    before = hidden.at(positions - 1, self.spec.reads)
    states = self.spec.fuse(self.params, *before)
    return self.forward(tokens, positions, mask, cache, states)[1]


class HeadState(model_lib.NetworkState):
  """State of a head, carried from forward to forward."""

  states: jax.Array  #: `[B, T, H]` float32, given by what the window holds.


class HeadScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """A drafting head; see `Scorer`."""

  head: Head  #: A head for the target.
  #: The name of the stage; static.
  name: str = flax.struct.field(pytree_node=False, default='head')

  @property
  def facts(self) -> drafter_lib.ScorerFacts:
    """A node is scored in a later forward than its parent."""
    return drafter_lib.ScorerFacts.of_network(
      self.head,
      self.name,
      needs_ancestors=True,
      needs_parents=True,
      hidden=self.head.spec.reads,
    )

  def least_width(self, max_depth: int, has_inner: bool) -> int:
    """Room for a whole accepted path and the root."""
    del has_inner
    return max_depth + 1

  def start(self, texts: carried_lib.Texts, num_scored: int) -> HeadState:
    head = self.head
    state = model_lib.start(head, texts, window_size=num_scored)
    shape = (texts.tokens.shape[0], num_scored, head.spec.width)
    return HeadState(state, jnp.zeros(shape))

  def restart(
    self, state: HeadState, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[HeadState, jax.Array]:
    del num_scored
    read, forwards = model_lib.restart(self.head, state.model, texts)
    return state.replace(model=read), forwards

  def score(
    self,
    state: HeadState,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, HeadState]:
    """One forward over missing text and nodes, as far as they fit.

    Only the W nodes go through the output matrix, not the text.
    """
    planned = model_lib.plan_forward(
      state.model, tree, nodes, ctx, may_lag=True
    )
    num_text = planned.after.num_text - state.model.num_text
    before = self._states_before(state, tree, planned, num_text, ctx)
    given, cache = self.head.forward(
      planned.tokens, planned.positions, planned.mask, planned.cache, before
    )
    # Masked values are multiplied by zero, and NaN would remain.
    given = jnp.where(jnp.isfinite(given), given, 0.0)
    start = (jnp.zeros((), jnp.int32), state.model.used, 0)
    after = HeadState(
      planned.next_state(cache),
      lax.dynamic_update_slice(state.states, given, start),
    )
    index, nodes = model_lib.nodes_after_text(
      planned.nodes, num_text, config.width
    )
    rows = jax.vmap(tree_lib.pick)(given, index)
    scores = model_lib.NodeScores(
      nodes=nodes,
      logits=self.head.spec.logits(self.head.params, rows),
      slots_read=planned.slots_read,
    )
    return language_model.scores_of(scores, tree, ctx, config), after

  def _states_before(
    self,
    state: HeadState,
    tree: tree_lib.TokenTree,
    planned: model_lib.NodeForward,
    num_text: jax.Array,
    ctx: context_lib.StepContext,
  ) -> jax.Array:
    """`[B, W, H]`, the states before the rows of a forward.

    Text and root have the target's, fused; other nodes have what their parents
    gave.
    """
    shape = (*planned.nodes.shape, self.head.spec.width)
    at_text = jnp.any(planned.nodes == tree_lib.ROOT) | jnp.any(num_text > 0)
    before = ctx.hidden.at(planned.positions - 1, self.head.spec.reads)
    fused = lax.cond(  # In the first forward of a step only.
      at_text,
      lambda: self.head.spec.fuse(self.head.params, *before),
      lambda: jnp.zeros(shape),
    )
    parent = jax.vmap(tree_lib.pick)(tree.parent, planned.nodes)
    below_root = (planned.nodes >= 0) & (parent >= 0)
    in_slot = planned.after.window[:, None] == parent[:, :, None]
    in_slot &= below_root[:, :, None]
    # A product with zeros and ones, which is exact: XLA's CPU backend would
    # copy an array that is gathered from and then written to.
    of_parent = jnp.einsum(
      'bwt,bth->bwh',
      in_slot.astype(state.states.dtype),
      state.states,
      precision=lax.Precision.HIGHEST,
    )
    return jnp.where(below_root[:, :, None], of_parent, fused)

  def keep(self, state: HeadState, added: carried_lib.Added) -> HeadState:
    """Keeps the entries of text and root alone.

    The keys of drafted tokens are made of the head's own states; with them in
    place of the target's, fewer tokens are accepted.
    """
    path = added.path
    root = jnp.where(jnp.arange(path.shape[1])[None] == 0, path, -1)
    model = model_lib.keep(state.model, added.replace(path=root))
    return state.replace(model=model)
