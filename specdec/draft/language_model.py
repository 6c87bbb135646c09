"""A language model as a scorer: one forward over context and ancestors."""

import flax.struct
import jax
import jax.numpy as jnp

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
    """The facts of the model."""
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
    """Prefills the texts."""
    return model_lib.start(self.model, texts, window_size=num_scored)

  def restart(
    self, state: model_lib.ModelState, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[model_lib.ModelState, jax.Array]:
    """Feeds the missing text, see `specdec.model.restart`."""
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
    """Keeps the entries of accepted nodes, see `specdec.model.keep`."""
    return model_lib.keep(state, added)
