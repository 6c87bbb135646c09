"""A language model as a scorer: one forward over context and ancestors.

The model's cache holds the text up to some point, then a window for what is
scored in the current step, in the order in which it is scored:

    slot      ...  4    5    6    7    8    9
              text a    b  | n0   n2   n1   .
                   |    missing   nodes of the tree, n0 is the root
                   length

Missing is the text before the root that the cache lacks: what was accepted, but
never scored by this model. In a chain whose tokens were all accepted that is
the last of them, the classic off-by-one of the field; where another stage
guesses too, it may be more. It takes the place of nodes in the next forward.
"""

import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.cache import causal_mask
from specdec.cache import keep
from specdec.cache import KVCache
from specdec.cache import window_mask
from specdec.draft.drafter import Scores
from specdec.draft.drafter import Step
from specdec.draft.drafter import TreeConfig
from specdec.draft.ranking import draw_children
from specdec.draft.ranking import IMPOSSIBLE
from specdec.draft.ranking import normalise
from specdec.draft.ranking import rank_logits
from specdec.model import Model
from specdec.repetition import seen_by_nodes
from specdec.sampling import adjust_logits
from specdec.tree.tree import ancestor_mask
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import TokenTree


class ModelState(flax.struct.PyTreeNode):
  """Carried from forward to forward.

  Attributes:
    cache: `length` is that of the text it held when the step began.
    text: `[B]` int32, tokens of the text at the start of the window.
    window: `[B, T]` int32, the node in each of the window's slots; `NO_NODE`
      for text, padding and slots not yet used.
    used: `[]` int32, slots of the window in use.
  """

  cache: KVCache
  text: jax.Array
  window: jax.Array
  used: jax.Array


def prefill(
  model: Model, prompt: jax.Array, num_cached: jax.Array, num_slots: int
) -> KVCache:
  """A cache of each row's first `num_cached` tokens; logits are not computed.

  (Nobody asks for them, so XLA removes the head.) Padding is fed too: no real
  token can see it, and its slots are beyond `num_cached`.
  """
  batch_size, length = prompt.shape
  cache = model.definition.init_cache(batch_size, num_slots)
  positions = jnp.broadcast_to(jnp.arange(length), prompt.shape)
  mask = causal_mask(cache.length, length, num_slots)
  _, cache = model.apply(prompt, positions, mask, cache)
  return cache.replace(length=num_cached)


def _pick(array: jax.Array, index: jax.Array) -> jax.Array:
  """`array [B, n, ...]` at `index [B, m]`, or at its nearest entry.

  (To count negative indices from the end, as is the default, takes a kernel.)
  """
  pick = functools.partial(jnp.take, axis=0, mode='clip')
  return jax.vmap(pick)(array, index)


class LanguageModelScorer(flax.struct.PyTreeNode):
  """See `specdec.drafter.Scorer`.

  Attributes:
    model: a language model with the target's vocabulary.
    name: of the stage; static.
  """

  model: Model
  name: str = flax.struct.field(pytree_node=False, default='draft')

  needs_ancestors = True
  can_draw = True

  @property
  def labels(self) -> tuple[str, ...]:
    """The model alone."""
    return (self.name,)

  @property
  def vocab_size(self) -> int:
    """Of the model."""
    return self.model.definition.vocab_size

  @property
  def max_positions(self) -> int:
    """Of the model."""
    return self.model.definition.max_positions

  @property
  def bytes_per_slot(self) -> int:
    """Of the cache."""
    return self.model.definition.cache_bytes_per_slot

  def bytes_per_forward(self, width: int) -> int:
    """The weights, however many nodes there are."""
    del width
    return self.model.definition.weight_bytes

  def init(
    self,
    prompt: jax.Array,
    prompt_length: jax.Array,
    *,
    num_slots: int,
    num_scored: int,
  ) -> ModelState:
    """Prefills the prompt."""
    batch_size = prompt.shape[0]
    return ModelState(
      cache=prefill(
        self.model, prompt, prompt_length - 1, num_slots + num_scored
      ),
      text=jnp.zeros(batch_size, jnp.int32),
      window=jnp.full((batch_size, num_scored), NO_NODE, jnp.int32),
      used=jnp.zeros((), jnp.int32),
    )

  def catch_up(
    self, state: ModelState, tokens: jax.Array, length: jax.Array
  ) -> tuple[ModelState, jax.Array]:
    """Feeds what is missing of the text but for its last token, the root.

    In chunks of the window's size, for which there is room behind any text.
    """
    size = state.window.shape[1]
    end = jnp.minimum(length - 1, self.max_positions)

    def feed(carry):
      forwards, cache = carry
      start = cache.length
      positions = start[:, None] + jnp.arange(size)[None]
      _, fed = self.model.apply(
        _pick(tokens, positions),
        positions,
        causal_mask(start, size, cache.num_slots),
        cache,
      )
      length = jnp.maximum(start, jnp.minimum(end, start + size))
      return forwards + 1, fed.replace(length=length)

    forwards, cache = lax.while_loop(
      lambda carry: jnp.any(carry[1].length < end),
      feed,
      (jnp.zeros((), jnp.int32), state.cache),
    )
    return state.replace(cache=cache), forwards

  def score(
    self,
    state: ModelState,
    tree: TokenTree,
    step: Step,
    nodes: jax.Array,
    config: TreeConfig,
  ) -> tuple[Scores, ModelState]:
    """One forward over what is missing and the nodes, as far as they fit."""
    length = state.cache.length
    known = length + state.text
    place = jnp.arange(nodes.shape[1])[None]
    missing = jnp.minimum(step.length - 1 - known, nodes.shape[1])[:, None]
    is_text = place < missing
    nodes = jnp.take_along_axis(nodes, jnp.maximum(place - missing, 0), axis=1)
    nodes = jnp.where(is_text, NO_NODE, nodes)
    start = jnp.zeros((), state.used.dtype)
    window = lax.dynamic_update_slice(state.window, nodes, (start, state.used))
    text = state.text + missing[:, 0]

    depth = _pick(tree.depth, nodes)
    text_position = known[:, None] + place
    position = (step.length - 1)[:, None] + depth
    slot = jnp.arange(window.shape[1])[None, None]
    before = (state.text[:, None] + place + 1)[:, :, None]
    of_text = jnp.where(
      is_text[:, :, None], slot < before, slot < text[:, None, None]
    )
    of_path = jax.vmap(ancestor_mask, (0, 0, 0, None))(
      tree.parent, nodes, window, step.max_depth
    )
    logits, cache = self.model.apply(
      jnp.where(
        is_text, _pick(step.tokens, text_position), _pick(tree.token, nodes)
      ),
      jnp.where(is_text, text_position, position),
      window_mask(length, of_text | of_path, state.cache.num_slots),
      state.cache.replace(length=length + state.used),
    )

    seen = None
    if step.seen is not None:
      seen = seen_by_nodes(tree, nodes, step.seen, step.max_depth)
    logits = adjust_logits(logits, step.sampling, seen)
    noise = None if step.noise is None else _pick(step.noise, depth)
    branching = min(config.branching, self.vocab_size)
    ranking = rank_logits(
      logits, noise, step.sampling, config.calibration, branching
    )
    if step.draws is None:
      tokens, edges = ranking.tokens, ranking.log_probs(ranking.best)
      drawn_from = None
    else:
      tokens, edges, drawn_from = draw_children(
        logits, nodes, step.draws, step.sampling, branching
      )
    scores = Scores(
      nodes=nodes,
      tokens=tokens.astype(jnp.int32),
      edges=jnp.where(edges > IMPOSSIBLE / 2, edges, IMPOSSIBLE),
      sources=None,
      drawn_from=drawn_from,
      given=jax.vmap(_given)(tree, nodes, ranking),
      slots_read=length + text + jnp.sum(window >= 0, axis=1),
    )
    return scores, ModelState(
      cache=cache.replace(length=length),
      text=text,
      window=window,
      used=state.used + nodes.shape[1],
    )

  def commit(
    self, state: ModelState, path: jax.Array, num_kept: jax.Array
  ) -> ModelState:
    """Keeps the entries of the accepted nodes, as far as they were scored."""
    in_slot = path[:, :, None] == state.window[:, None]
    in_slot &= (path >= 0)[:, :, None]
    scored = jnp.any(in_slot, axis=2)
    num_scored = jnp.sum(jnp.cumprod(scored.astype(jnp.int32), axis=1), axis=1)
    length = state.cache.length
    cache = keep(
      state.cache,
      length + state.text,
      jnp.argmax(in_slot, axis=2),
      jnp.minimum(num_scored, num_kept + 1),  # the root too
      window=state.window.shape[1],
    )
    return ModelState(
      cache=cache,
      text=jnp.zeros_like(state.text),
      window=jnp.full_like(state.window, NO_NODE),
      used=jnp.zeros_like(state.used),
    )


def _given(tree, nodes, ranking):
  """The numbers of children in the tree; unbatched."""
  of_parent = (tree.parent[:, None] == nodes[None]) & (nodes >= 0)[None]
  parent = jnp.argmax(of_parent, axis=1)
  scores = ranking.scores[parent, tree.token]
  return normalise(scores, ranking.log_total[parent, 0])
