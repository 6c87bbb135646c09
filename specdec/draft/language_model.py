"""A language model as a scorer: one forward over context and ancestors."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec.context import StepContext
from specdec.draft.drafter import Scorer
from specdec.draft.drafter import Scores
from specdec.draft.drafter import StageConfig
from specdec.draft.ranking import draw_children
from specdec.draft.ranking import rank_logits
from specdec.model import commit
from specdec.model import forward_nodes
from specdec.model import LanguageModel
from specdec.model import ModelState
from specdec.model import prefill
from specdec.model import read_text
from specdec.sampling import BEST
from specdec.sampling import WITH_REPLACEMENT
from specdec.tree.tree import pick
from specdec.tree.tree import TokenTree


class LanguageModelScorer(flax.struct.PyTreeNode, Scorer):
  """A language model with its own cache; see `Scorer`."""

  model: LanguageModel  #: A language model with the target's vocabulary.
  #: The name of the stage; static.
  name: str = flax.struct.field(pytree_node=False, default='draft')

  needs_ancestors = True
  can_draw = True

  labels = property(lambda self: (self.name,))
  vocab_size = property(lambda self: self.model.spec.vocab_size)
  max_positions = property(lambda self: self.model.spec.max_positions)
  bytes_per_slot = property(lambda self: self.model.spec.cache_bytes_per_slot)
  models = property(lambda self: (self.model,))

  def bytes_per_forward(self, width: int) -> int:
    """Bytes of the weights, however many nodes there are."""
    del width
    return self.model.spec.weight_bytes

  def init(
    self,
    prompt: jax.Array,
    prompt_length: jax.Array,
    *,
    num_slots: int,
    num_scored: int,
  ) -> ModelState:
    """Prefills the prompts."""
    return prefill(
      self.model,
      prompt,
      prompt_length - 1,
      num_slots=num_slots,
      window_size=num_scored,
    )

  def catch_up(
    self,
    state: ModelState,
    tokens: jax.Array,
    length: jax.Array,
    kept: jax.Array,
    *,
    num_scored: int,
  ) -> tuple[ModelState, jax.Array]:
    """Feeds the missing text, see `specdec.model.read_text`."""
    del num_scored
    return read_text(self.model, state, tokens, length, kept)

  def score(
    self,
    state: ModelState,
    tree: TokenTree,
    nodes: jax.Array,
    ctx: StepContext,
    config: StageConfig,
  ) -> tuple[Scores, ModelState]:
    """One forward over missing text and nodes, as far as they fit."""
    found, state = forward_nodes(
      self.model, state, tree, nodes, ctx, may_lag=True
    )
    nodes = found.nodes
    logits = ctx.adjusted(found.logits, tree, nodes)
    noise = ctx.randomness.noise_at(jax.vmap(pick)(tree.depth, nodes))
    branching = min(config.branching, self.vocab_size)
    ranking = rank_logits(
      logits, noise, ctx.sampling, config.calibration, branching
    )
    if ctx.rule.children == BEST:
      tokens, log_probs = ranking.tokens, ranking.best_log_probs
      drawn_from = jnp.zeros((*nodes.shape, 0))
    else:
      tokens, log_probs, drawn_from = draw_children(
        logits,
        nodes,
        ctx.randomness.draft_keys,
        ctx.sampling,
        branching,
        replacement=ctx.rule.children == WITH_REPLACEMENT,
      )
    scores = Scores(
      nodes=nodes,
      tokens=tokens,
      cond_log_probs=log_probs,
      sources=jnp.zeros_like(tokens),
      log_prob_of=ranking.log_prob_of,
      slots_read=found.slots_read,
      drawn_from=drawn_from,
    )
    return scores, state

  def commit(
    self, state: ModelState, path: jax.Array, num_kept: jax.Array
  ) -> ModelState:
    """Keeps the entries of accepted nodes, see `specdec.model.commit`."""
    return commit(state, path, num_kept)
