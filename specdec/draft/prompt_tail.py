"""A draft model that reads the end of a prompt only."""

import flax.struct
import jax
import jax.numpy as jnp

from specdec import cache as cache_lib
from specdec import checks as checks_lib
from specdec import context as context_lib
from specdec import hidden as hidden_lib
from specdec import model as model_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import language_model
from specdec.tree import tree as tree_lib

# The largest C: differences of it and lengths stay within 32 bits.
LARGEST_TAIL = 2**20


class TailState(flax.struct.PyTreeNode):
  """State of a draft model whose text begins later than the target's."""

  model: model_lib.ModelState  #: As of a language model that has this text.
  skipped: jax.Array  #: `[B]` int32, tokens before the first that it reads.

  @property
  def cache(self) -> cache_lib.KVCache:
    """That of the model."""
    return self.model.cache


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
    ValueError: C is no integer, or out of range.
  """

  scorer: language_model.LanguageModelScorer  #: That of the model.
  num_tokens: int = flax.struct.field(pytree_node=False)  #: C; static.

  needs_ancestors = True
  can_draw = True

  labels = property(lambda self: self.scorer.labels)
  vocab_size = property(lambda self: self.scorer.vocab_size)
  max_positions = property(lambda self: self.scorer.max_positions)
  bytes_per_slot = property(lambda self: self.scorer.bytes_per_slot)
  models = property(lambda self: self.scorer.models)

  def __post_init__(self) -> None:
    checks_lib.check_count('num_tokens', self.num_tokens, LARGEST_TAIL)

  def bytes_per_forward(self, width: int) -> int:
    """As of the model."""
    return self.scorer.bytes_per_forward(width)

  def forward_width(
    self, width: int, max_depth: int, *, has_inner: bool
  ) -> int:
    """As of the model."""
    return self.scorer.forward_width(width, max_depth, has_inner=has_inner)

  def init(
    self,
    prompt: jax.Array,
    prompt_length: jax.Array,
    *,
    num_slots: int,
    num_scored: int,
    hidden: hidden_lib.HiddenStates,
  ) -> TailState:
    """Prefills the ends of the prompts."""
    skipped = self._first_of(prompt_length)
    model = self.scorer.init(
      _from(prompt, skipped)[:, : self.num_tokens],
      prompt_length - skipped,
      num_slots=num_slots,
      num_scored=num_scored,
      hidden=hidden,
    )
    return TailState(model, skipped)

  def _first_of(self, length: jax.Array) -> jax.Array:
    """`[B]` int32, where the last C tokens before the root begin."""
    return jnp.maximum(length - 1 - self.num_tokens, 0)

  def catch_up(
    self,
    state: TailState,
    tokens: jax.Array,
    length: jax.Array,
    kept: jax.Array,
    *,
    num_scored: int,
    hidden: hidden_lib.HiddenStates,
  ) -> tuple[TailState, jax.Array]:
    """Feeds the missing text; the last C tokens if it had less of them."""
    known = jnp.minimum(state.cache.length + state.skipped, kept)
    first = self._first_of(length)
    anew = (length > 0) & ((known < first) | (state.skipped > first))
    skipped = jnp.where(anew, first, state.skipped)
    model, forwards = self.scorer.catch_up(
      state.model,
      _from(tokens, skipped),
      length - skipped,
      jnp.where(anew, 0, kept - skipped),
      num_scored=num_scored,
      hidden=hidden,
    )
    return TailState(model, skipped), forwards

  def score(
    self,
    state: TailState,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: drafter_lib.StageConfig,
  ) -> tuple[drafter_lib.Scores, TailState]:
    """One forward, as of a language model that has the shorter text."""
    own = ctx.replace(
      tokens=_from(ctx.tokens, state.skipped), length=ctx.length - state.skipped
    )
    scores, model = self.scorer.score(state.model, tree, nodes, own, config)
    return scores, state.replace(model=model)

  def commit(
    self, state: TailState, path: jax.Array, num_kept: jax.Array
  ) -> TailState:
    """As of a language model."""
    return state.replace(model=self.scorer.commit(state.model, path, num_kept))
