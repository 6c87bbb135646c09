"""A block drafter as a scorer: one forward per step proposes for all depths.

The network reads the root and mask tokens, a block of R rows, and gives scores
`U_d` of all tokens for every depth d of the tree (DFlash). Text enters it as
keys and values that are made of the target's hidden states, without a forward
over tokens:

    text             a     b     |  root  mask  mask
    read             f(a)  f(b)  |  R rows, which see the text and each other
    gives                        |  U_1   U_2   U_3

The scores of a node's children are the scores of their depth, plus a term that
depends on the node's own token, if the network has one: the Markov term of
DSpark (arXiv 2607.05147) or the edge score of DFlash 2. So siblings have
children of their own, and the tree over a block takes no further forward. Of
each depth only the C best tokens are candidates; a drawn child is drawn from
the distribution over these, given its parent.

In the first round of a step the text that was added since is read, then the
block; later rounds look up what that forward gave.
"""

from collections.abc import Callable
import dataclasses

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import best as best_lib
from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec.draft import candidates as candidates_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import ranking as ranking_lib
from specdec.tree import tree as tree_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSpec(model_lib.NetworkSpec):
  """A block drafter as pure functions; hashable, so static under `jit`."""

  #: `(params, states, positions [B, L], cache) -> cache`: writes the keys and
  #: values of L tokens of text. `states` are the target's hidden states at
  #: these tokens, `[B, L, width]` for each of `reads`.
  read: Callable[..., cache_lib.KVCache]
  #: `(params, tokens [B, R], positions [B, R], mask [B, R, S], cache) ->
  #: (logits [B, D, O] float32, states [B, D, H] float32, cache)`: one forward
  #: over a block, whose rows see the text and each other.
  propose: Callable[..., tuple[jax.Array, jax.Array, cache_lib.KVCache]]
  #: `(params, states [B, W, H], parents [B, W], tokens [B, W, C]) ->
  #: [B, W, C] float32`, what is added to the scores of tokens that follow some
  #: parents; None: nothing. The states belong to the depth of the tokens.
  edges: Callable[..., jax.Array] | None = None
  #: `(params, states [B, W, H], parents [B, W]) -> [B, W] float32`, the
  #: probability that the target accepts one of the children; None: unknown.
  confidence: Callable[..., jax.Array] | None = None
  reads: tuple[int, ...]  #: The target's hidden states, keys of its cache.
  block_size: int  #: R.
  depth: int  #: D, how many tokens it drafts: R, or R - 1.
  width: int  #: H.
  mask_token: int  #: The token in all rows of a block except the first.
  #: The most tokens of a depth that it was trained to rate; None: all.
  num_candidates: int | None = None
  num_outputs: int  #: O, how many tokens it may draft.
  #: `params -> [O] int32`, the tokens that it may draft; None: all, in order.
  outputs: Callable[..., jax.Array] | None = None


class BlockDrafter(model_lib.Network):
  """A block drafter with its weights."""

  spec: BlockSpec = flax.struct.field(pytree_node=False)

  def read(
    self,
    hidden: carried_lib.HiddenStates,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: cache_lib.KVCache,
  ) -> cache_lib.KVCache:
    del tokens, mask
    states = hidden.at(positions, self.spec.reads)
    return self.spec.read(self.params, states, positions, cache)


class BlockState(model_lib.NetworkState):
  """State of a block drafter. Its cache holds text; no window is used."""

  #: `[B, D, C]` int32 and float32, the candidates of each depth in this step,
  #: and their scores.
  tokens: jax.Array
  scores: jax.Array
  states: jax.Array  #: `[B, D, H]` float32, of each depth in this step.


class BlockScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """A block drafter; see `Scorer`."""

  drafter: BlockDrafter  #: A block drafter for the target.
  #: C, candidates of each depth; static.
  num_candidates: int = flax.struct.field(pytree_node=False, default=64)
  #: The name of the stage; static.
  name: str = flax.struct.field(pytree_node=False, default='block')

  @property
  def facts(self) -> drafter_lib.ScorerFacts:
    """A node can be scored in any round, whatever was scored before."""
    return drafter_lib.ScorerFacts.of_network(
      self.drafter, self.name, hidden=self.drafter.spec.reads
    )

  def least_width(self, max_depth: int, has_inner: bool) -> int:
    """A node alone: the text is not read in the places of nodes."""
    del max_depth, has_inner
    return 1

  def start(self, texts: carried_lib.Texts, num_scored: int) -> BlockState:
    spec = self.drafter.spec
    rows = texts.tokens.shape[0]
    window_size = max(num_scored, spec.block_size)
    model = model_lib.start(self.drafter, texts, window_size=window_size)
    most = spec.num_candidates or spec.num_outputs
    size = min(self.num_candidates, most, spec.num_outputs)
    return BlockState(
      model=model,
      tokens=jnp.zeros((rows, spec.depth, size), jnp.int32),
      scores=jnp.zeros((rows, spec.depth, size)),
      states=jnp.zeros((rows, spec.depth, spec.width)),
    )

  def restart(
    self, state: BlockState, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[BlockState, jax.Array]:
    del num_scored
    model, forwards = model_lib.restart(self.drafter, state.model, texts)
    return state.replace(model=model), forwards

  def score(
    self,
    state: BlockState,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, BlockState]:
    """One forward in the first round of a step, look-ups in all others."""
    is_first = jnp.any(nodes == tree_lib.ROOT)
    state = lax.cond(is_first, lambda: self._forward(state, ctx), lambda: state)
    pick = jax.vmap(tree_lib.pick)
    parents, depth = pick(tree.token, nodes), pick(tree.depth, nodes)
    tokens, log_probs = self._children(state, parents, depth, ctx.sampling)
    log_probs = ctx.adjusted_few(log_probs, tree, nodes, tokens)
    kept = sampling_lib.keep(log_probs, ctx.sampling)
    noise = ctx.randomness.noise.at(depth).of_tokens(tokens)
    ranked = jax.nn.log_softmax(
      config.calibration * (kept.filtered() + noise), axis=-1
    )
    if self.drafter.spec.confidence is not None:
      accepted = self.drafter.spec.confidence(
        self.drafter.params, pick(state.states, depth), parents
      )
      ranked = ranked + jnp.log(jnp.clip(accepted, 1e-6, 1.0))[..., None]
    drafts = (nodes >= 0) & (depth < self.drafter.spec.depth)
    drafts &= sampling_lib.is_usable(log_probs)
    ranked = jnp.where(
      drafts[..., None], jnp.minimum(ranked, 0.0), sampling_lib.EXCLUDED
    )
    scores = candidates_lib.scores_of_few(
      nodes, tokens, ranked, config.branching
    )
    scores = dataclasses.replace(
      scores,
      forwards=is_first.astype(jnp.int32),
      slots_read=jnp.where(is_first, state.cache.length, 0),
    )
    if ctx.rule.children != sampling_lib.BEST:
      drawable = jnp.where(drafts[..., None], log_probs, sampling_lib.EXCLUDED)
      scores = self._drawn(scores, tokens, drawable, ctx, config)
    return scores, state

  def _forward(
    self, state: BlockState, ctx: context_lib.StepContext
  ) -> BlockState:
    """Reads the text that was added, and the block that begins at the root."""
    spec, cache = self.drafter.spec, state.cache
    missing = ctx.length - 1 - cache.length
    # As many as any step may have added.
    new = cache.length[:, None] + jnp.arange(ctx.hidden.num_positions)[None]
    read = self.drafter.read(ctx.hidden, new, new, new, cache)
    cache = cache_lib.advance(read, missing)
    root = jax.vmap(tree_lib.pick)(ctx.tokens, (ctx.length - 1)[:, None])
    block = (ctx.length.shape[0], spec.block_size)
    is_root = jnp.arange(spec.block_size)[None] == 0
    tokens = jnp.where(is_root, root, spec.mask_token)
    positions = (ctx.length - 1)[:, None] + jnp.arange(spec.block_size)[None]
    sees = jnp.ones((*block, spec.block_size), bool)
    mask = cache.ops.mask(cache.length, sees, cache.num_slots)
    with jax.named_scope('forward'):
      logits, states, cache = spec.propose(
        self.drafter.params, tokens, positions, mask, cache
      )
    scores, best = best_lib.top_k(logits, state.tokens.shape[2])
    if spec.outputs is not None:
      best = spec.outputs(self.drafter.params)[best]
    return BlockState(
      model=state.model.replace(cache=cache),
      tokens=best.astype(jnp.int32),
      scores=scores,
      states=states,
    )

  def _children(
    self,
    state: BlockState,
    parents: jax.Array,
    depth: jax.Array,
    sampling: sampling_lib.SamplingParams,
  ) -> tuple[jax.Array, jax.Array]:
    """`[B, W, C]` tokens after `parents [B, W]` and their log-probabilities.

    The parents are at `depth [B, W]`; the probabilities add up to 1.
    """
    pick = jax.vmap(tree_lib.pick)
    tokens, scores = pick(state.tokens, depth), pick(state.scores, depth)
    if self.drafter.spec.edges is not None:
      scores = scores + self.drafter.spec.edges(
        self.drafter.params, pick(state.states, depth), parents, tokens
      )
    if (bias := sampling.logit_bias) is not None:
      bias = jnp.broadcast_to(bias, (tokens.shape[0], bias.shape[-1]))
      scores = scores + pick(bias, tokens)
    return tokens, sampling_lib.log_softmax(scores)

  def _drawn(
    self,
    scores: drafter_lib.Scores,
    tokens: jax.Array,
    log_probs: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> drafter_lib.Scores:
    """Children that are drawn among the candidates; see `draw_children`."""
    nodes = scores.nodes
    places, drawn_log_probs, drawn_from = ranking_lib.draw_children(
      log_probs,
      nodes,
      ctx.randomness.draft_keys,
      ctx.sampling,
      min(config.branching, tokens.shape[2]),
      children=ctx.rule.children,
    )
    empty = jnp.zeros((*nodes.shape, self.drafter.spec.vocab_size))
    put = jax.vmap(jax.vmap(lambda row, at, probs: row.at[at].set(probs)))
    return dataclasses.replace(
      scores,
      tokens=jnp.take_along_axis(tokens, places, axis=-1),
      cond_log_probs=drawn_log_probs,
      sources=jnp.zeros_like(places),
      drawn_from=put(empty, tokens, drawn_from),
    )
