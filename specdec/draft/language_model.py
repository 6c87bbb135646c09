"""A language model as a scorer, which reads a whole text or only its end."""

from typing import Any

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


class TextState(model_lib.NetworkState):
  """State of a draft model, whose text may begin later than the target's."""

  #: `[B]` int32, tokens before the first that it reads; None: it reads all.
  skipped: jax.Array | None = None


def _from(of: Any, skipped: jax.Array | None) -> Any:
  """Texts, or the context of a step, from `skipped [B]` on."""
  if skipped is None:
    return of
  tokens = jax.vmap(jnp.roll)(of.tokens, -skipped)
  return of.replace(tokens=tokens, length=of.length - skipped)


class LanguageModelScorer(flax.struct.PyTreeNode, drafter_lib.Scorer):
  """A language model with its own cache; see `Scorer`.

  Raises:
    ValueError: C is not an integer, or out of range.
  """

  #: A language model with the target's vocabulary.
  model: model_lib.LanguageModel
  #: The name of the stage; static.
  name: str = flax.struct.field(pytree_node=False, default='draft')
  #: C, the most tokens of new text that it reads, the last ones; static. None:
  #: all. A draft of a third of the target's size reads a prompt in a third of
  #: the target's time. Drafting a short answer saves less than that. Positions
  #: are counted from the first token that is read, as if it began the text. A
  #: prompt that `Slots` read in parts of at most C tokens is read whole.
  most_tokens: int | None = flax.struct.field(pytree_node=False, default=None)

  def __post_init__(self) -> None:
    if self.most_tokens is not None:
      arguments_lib.check_count('most_tokens', self.most_tokens, LARGEST_TAIL)

  @property
  def facts(self) -> drafter_lib.ScorerFacts:
    return drafter_lib.ScorerFacts.of_network(
      self.model, self.name, needs_ancestors=True
    )

  def least_width(self, max_depth: int, has_inner: bool) -> int:
    """Room for an accepted path and the root if need be."""
    lacks = max_depth if has_inner else 1
    return min(lacks + 1, _MOST_ROWS)

  def start(self, texts: carried_lib.Texts, num_scored: int) -> TextState:
    """Prefills the texts, or their ends."""
    skipped = self._first_of(texts.length)
    texts = _from(texts, skipped)
    texts = texts.replace(tokens=texts.tokens[:, : self.most_tokens])
    model = model_lib.start(self.model, texts, window_size=num_scored)
    return TextState(model, skipped)

  def _first_of(self, length: jax.Array) -> jax.Array | None:
    """`[B]` int32, where the last C tokens before the root begin."""
    if self.most_tokens is None:
      return None
    return jnp.maximum(length - 1 - self.most_tokens, 0)

  def restart(
    self, state: TextState, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[TextState, jax.Array]:
    """Feeds the missing text; the last C tokens if it had less of them."""
    del num_scored
    first, skipped = self._first_of(texts.length), state.skipped
    if first is not None and skipped is not None:
      assert texts.kept is not None
      end = jnp.minimum(state.cache.length + skipped, texts.kept)
      restarts = (texts.length > 0) & ((end < first) | (skipped > first))
      skipped = jnp.where(restarts, first, skipped)
      kept = jnp.where(restarts, 0, texts.kept - skipped)
      texts = _from(texts, skipped).replace(kept=kept)
    model, forwards = model_lib.restart(self.model, state.model, texts)
    return TextState(model, skipped), forwards

  def score(
    self,
    state: TextState,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, TextState]:
    """One forward over missing text and nodes, as far as they fit."""
    ctx = _from(ctx, state.skipped)
    scores, model = model_lib.forward_text_and_nodes(
      self.model, state.model, tree, nodes, ctx, num_nodes=max(config.width, 2)
    )
    scored = scores_of(scores, tree, ctx, config, self.model.proposed)
    return scored, state.replace(model=model)

  def keep(self, state: TextState, added: carried_lib.Added) -> TextState:
    return state.replace(model=model_lib.keep(state.model, added))
