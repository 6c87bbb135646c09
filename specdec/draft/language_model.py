"""A language model as a scorer, which reads a whole text or only its end."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import arguments as arguments_lib
from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import ranking as ranking_lib
from specdec.tree import tree as tree_lib

# The most text and nodes that are read at once. On two cores eight rows of a
# draft of 0.5 billion parameters in four bits take 23 ms, two rows 15 ms.
_MOST_ROWS = 8

# The largest C: differences between C and a length stay within 32 bits.
LARGEST_TAIL = 2**20


def scores_of(
  scores: model_lib.NodeScores,
  tree: tree_lib.TokenTree,
  ctx: context_lib.StepContext,
  config: drafter_lib.StageConfig,
  proposed: jax.Array | None = None,
) -> drafter_lib.Scores:
  """The scores of nodes by the logits of a forward; see `Scorer.score`.

  `proposed`: see `model.LanguageModel`.
  """
  nodes = scores.nodes
  logits = ctx.adjusted(scores.logits, tree, nodes)
  noise = ctx.randomness.noise.at(jax.vmap(tree_lib.pick)(tree.depth, nodes))
  branching = min(config.branching, logits.shape[-1])
  ranking = ranking_lib.rank_logits(
    logits, noise, ctx.sampling, config.calibration, branching, proposed
  )
  if ctx.rule.children == sampling_lib.BEST:
    tokens, log_probs = ranking.tokens, ranking.best_log_probs
    drawn_from = jnp.zeros((*nodes.shape, 0))
  else:
    tokens, log_probs, drawn_from = ranking_lib.draw_children(
      logits,
      nodes,
      ctx.randomness.draft_keys,
      ctx.sampling,
      branching,
      children=ctx.rule.children,
    )
  return drafter_lib.Scores(
    nodes=nodes,
    tokens=tokens,
    cond_log_probs=log_probs,
    sources=jnp.zeros_like(tokens),
    log_prob_of=ranking.log_prob_of,
    slots_read=scores.slots_read,
    drawn_from=drawn_from,
  )


class LanguageModelScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """A language model with its own cache; see `Scorer`."""

  #: A language model with the target's vocabulary.
  model: model_lib.LanguageModel
  #: The name of the stage; static.
  name: str = flax.struct.field(pytree_node=False, default='draft')

  @property
  def facts(self) -> drafter_lib.ScorerFacts:
    return drafter_lib.ScorerFacts.of_network(
      self.model, self.name, needs_ancestors=True
    )

  def forward_width(
    self, width: int, max_depth: int, *, has_inner: bool
  ) -> int:
    """Room for W nodes, and for an accepted path and the root if need be."""
    lacks = max_depth if has_inner else 1
    return max(width, min(lacks + 1, _MOST_ROWS))

  def start(
    self, texts: carried_lib.Texts, num_scored: int
  ) -> model_lib.ModelState:
    return model_lib.start(self.model, texts, window_size=num_scored)

  def restart(
    self, state: model_lib.ModelState, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[model_lib.ModelState, jax.Array]:
    del num_scored
    return model_lib.restart(self.model, state, texts)

  def score(
    self,
    state: model_lib.ModelState,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, model_lib.ModelState]:
    """One forward over missing text and nodes, as far as they fit."""
    scores, state = model_lib.forward_text_and_nodes(
      self.model, state, tree, nodes, ctx, num_nodes=max(config.width, 2)
    )
    proposed = self.model.proposed
    return scores_of(scores, tree, ctx, config, proposed), state

  def keep(
    self, state: model_lib.ModelState, added: carried_lib.Added
  ) -> model_lib.ModelState:
    return model_lib.keep(state, added)


class TailState(model_lib.NetworkState):
  """State of a draft model whose text begins later than the target's.

  `model` is the state of a model that has only this text.
  """

  skipped: jax.Array  #: `[B]` int32, tokens before the first that it reads.


def _from(tokens: jax.Array, skipped: jax.Array) -> jax.Array:
  """`tokens [B, T]` from `skipped [B]` on, then anything."""
  return jax.vmap(jnp.roll)(tokens, -skipped)


class PromptTailScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """A language model that reads at most the last C tokens of new text.

  A draft of a third of the target's size reads a prompt in a third of the
  target's time. Drafting a short answer saves less than that. Positions are
  counted from the first token that is read, as if it began the text. A prompt
  that `Slots` read in parts of at most C tokens is read whole.

  Raises:
    ValueError: C is not an integer, or out of range.
  """

  scorer: LanguageModelScorer  #: The model's scorer.
  num_tokens: int = flax.struct.field(pytree_node=False)  #: C; static.

  @property
  def facts(self) -> drafter_lib.ScorerFacts:
    return self.scorer.facts

  def __post_init__(self) -> None:
    arguments_lib.check_count('num_tokens', self.num_tokens, LARGEST_TAIL)

  def forward_width(
    self, width: int, max_depth: int, *, has_inner: bool
  ) -> int:
    return self.scorer.forward_width(width, max_depth, has_inner=has_inner)

  def start(self, texts: carried_lib.Texts, num_scored: int) -> TailState:
    """Prefills the ends of the texts."""
    skipped = self._first_of(texts.length)
    tail = texts.replace(
      tokens=_from(texts.tokens, skipped)[:, : self.num_tokens],
      length=texts.length - skipped,
    )
    return TailState(self.scorer.start(tail, num_scored), skipped)

  def _first_of(self, length: jax.Array) -> jax.Array:
    """`[B]` int32, where the last C tokens before the root begin."""
    return jnp.maximum(length - 1 - self.num_tokens, 0)

  def restart(
    self, state: TailState, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[TailState, jax.Array]:
    """Feeds the missing text; the last C tokens if it had less of them."""
    assert texts.kept is not None
    end = jnp.minimum(state.cache.length + state.skipped, texts.kept)
    first = self._first_of(texts.length)
    restarts = (texts.length > 0) & ((end < first) | (state.skipped > first))
    skipped = jnp.where(restarts, first, state.skipped)
    tail = texts.replace(
      tokens=_from(texts.tokens, skipped),
      length=texts.length - skipped,
      kept=jnp.where(restarts, 0, texts.kept - skipped),
    )
    model, forwards = self.scorer.restart(state.model, tail, num_scored)
    return TailState(model, skipped), forwards

  def score(
    self,
    state: TailState,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, TailState]:
    tail = ctx.replace(
      tokens=_from(ctx.tokens, state.skipped), length=ctx.length - state.skipped
    )
    scores, model = self.scorer.score(state.model, tree, nodes, tail, config)
    return scores, state.replace(model=model)

  def keep(self, state: TailState, added: carried_lib.Added) -> TailState:
    return state.replace(model=self.scorer.keep(state.model, added))
