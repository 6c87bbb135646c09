"""A drafting head as a scorer: a small network that reads the target's states.

A head reads for every token its embedding and the state before it: of text the
target's own hidden states, of a drafted token the state that the head computed
for the token before it (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840).

    text               a     b     root
    state before it    0    h(a)   h(b)           of the target, fused
    state it gives     .     .      s0
    node below root                      x        reads s0, gives s1
    node below x                           y      reads s1

So a node is scored in a forward after that of its parent. After a step the head
keeps no entry of a drafted token: in the first forward of the next step it
reads the accepted tokens anew, as text with the target's states ("draft
extend"), together with the new root.
"""

from collections.abc import Callable
import dataclasses

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import context as context_lib
from specdec import hidden as hidden_lib
from specdec import model as model_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import language_model
from specdec.tree import tree as tree_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec(model_lib.ModelSpec):
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


class Head(model_lib.LanguageModel):
  """A drafting head with its weights."""

  spec: HeadSpec = flax.struct.field(pytree_node=False)

  def apply(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """Logits with states of zeros: what a forward costs can be measured."""
    states = jnp.zeros((*tokens.shape, self.spec.width))
    states, cache = self.forward(tokens, positions, mask, cache, states)
    return self.spec.logits(self.params, states), cache

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


class _Reader(Head):
  """A head as a language model that reads text, without logits."""

  hidden: hidden_lib.HiddenStates

  def apply(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    before = self.hidden.before(positions, self.spec.reads)
    states = self.spec.fuse(self.params, *before)
    return self.forward(tokens, positions, mask, cache, states)


class HeadState(flax.struct.PyTreeNode):
  """State of a head, carried from forward to forward."""

  model: model_lib.ModelState  #: As of a language model.
  states: jax.Array  #: `[B, T, H]` float32, given by what the window holds.

  @property
  def cache(self) -> cache_lib.KVCache:
    """That of the head."""
    return self.model.cache


class HeadScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """A drafting head; see `Scorer`."""

  head: Head  #: A head for the target.
  #: The name of the stage; static.
  name: str = flax.struct.field(pytree_node=False, default='head')

  needs_ancestors = True
  needs_parents = True
  can_draw = True

  labels = property(lambda self: (self.name,))
  models = property(lambda self: (self.head,))
  hidden = property(lambda self: self.head.spec.reads)
  vocab_size = property(lambda self: self.head.spec.vocab_size)
  max_positions = property(lambda self: self.head.spec.max_positions)
  bytes_per_slot = property(lambda self: self.head.spec.cache_bytes_per_slot)

  def bytes_per_forward(self, width: int) -> int:
    """Bytes of the weights, however many nodes there are."""
    del width
    return self.head.spec.weight_bytes

  def forward_width(
    self, width: int, max_depth: int, *, has_inner: bool
  ) -> int:
    """Room for a whole accepted path and the root, or for W nodes."""
    del has_inner
    return max(width, max_depth + 1)

  def init(
    self,
    prompt: jax.Array,
    prompt_length: jax.Array,
    *,
    num_slots: int,
    num_scored: int,
    hidden: hidden_lib.HiddenStates,
  ) -> HeadState:
    """Reads the prompts with the states of the target."""
    state = model_lib.prefill(
      self._reader(hidden),
      prompt,
      prompt_length - 1,
      num_slots=num_slots,
      window_size=num_scored,
    )
    shape = (prompt.shape[0], num_scored, self.head.spec.width)
    return HeadState(state, jnp.zeros(shape))

  def _reader(self, hidden: hidden_lib.HiddenStates) -> _Reader:
    return _Reader(self.head.params, self.head.spec, hidden)

  def catch_up(
    self,
    state: HeadState,
    tokens: jax.Array,
    length: jax.Array,
    kept: jax.Array,
    *,
    num_scored: int,
    hidden: hidden_lib.HiddenStates,
  ) -> tuple[HeadState, jax.Array]:
    """Reads the missing text, see `specdec.model.read_text`."""
    del num_scored
    read, forwards = model_lib.read_text(
      self._reader(hidden), state.model, tokens, length, kept
    )
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
    # What is masked is multiplied by zero, and NaN would remain.
    given = jnp.where(jnp.isfinite(given), given, 0.0)
    start = (jnp.zeros((), jnp.int32), state.model.used, 0)
    after = HeadState(
      planned.next_state(cache),
      lax.dynamic_update_slice(state.states, given, start),
    )
    index, scored = model_lib.behind_text(planned.nodes, num_text, config.width)
    rows = jax.vmap(tree_lib.pick)(given, index)
    found = model_lib.NodeScores(
      nodes=scored,
      logits=self.head.spec.logits(self.head.params, rows),
      slots_read=planned.slots_read,
    )
    return language_model.scores_of(found, tree, ctx, config), after

  def _states_before(
    self,
    state: HeadState,
    tree: tree_lib.TokenTree,
    planned: model_lib.NodeForward,
    num_text: jax.Array,
    ctx: context_lib.StepContext,
  ) -> jax.Array:
    """`[B, W, H]`, the states before the rows of a forward.

    Those of text and root are the target's, fused; those of other nodes were
    given by their parents.
    """
    shape = (*planned.nodes.shape, self.head.spec.width)
    at_text = jnp.any(planned.nodes == tree_lib.ROOT) | jnp.any(num_text > 0)
    before = ctx.hidden.before(planned.positions, self.hidden)
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

  def commit(
    self, state: HeadState, path: jax.Array, num_kept: jax.Array
  ) -> HeadState:
    """Keeps the entries of text and root alone.

    Those of drafted tokens have keys made of the head's own states; with them
    in place of the target's, fewer tokens are accepted.
    """
    root = jnp.where(jnp.arange(path.shape[1])[None] == 0, path, -1)
    return state.replace(model=model_lib.commit(state.model, root, num_kept))
