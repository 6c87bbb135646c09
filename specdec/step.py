"""One step of decoding, for every row at once.

    grow     a tree of candidates below the last token (none in plain decoding)
    verify   its best nodes in one target forward
    accept   as far as the target agrees, plus its own bonus token

Rows advance by their own counts. A plain step is this with a tree that is just
its root.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import adjusters as adjusters_lib
from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec import fallback as fallback_lib
from specdec import model as model_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec import statistics as statistics_lib
from specdec import watchers as watchers_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import growth
from specdec.tree import tree as tree_lib
from specdec.verify import accept


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """Static settings of a decode: changing one recompiles."""

  #: Room in the buffers; the limit itself is dynamic and at most this.
  max_new_tokens: int = 128
  #: The rule of verification, see `specdec.verify`.
  rule: accept.Rule = dataclasses.field(default_factory=accept.MatchRule)
  #: Whether plain steps may come between speculative ones, see
  #: `specdec.fallback`.
  fallback: bool = False
  #: Whether `Request.break_even` asks for them, and not the caller alone.
  has_break_even: bool = False


class Request(flax.struct.PyTreeNode):
  """A batch of prompts to decode; all of it is dynamic."""

  prompt: jax.Array  #: `[B, P]` int32, padded at the end with any valid token.
  prompt_length: jax.Array  #: `[B]` int32, at least 1.
  #: `[B]` int32, new tokens per row, at most `DecodeConfig.max_new_tokens`.
  limit: jax.Array
  row_keys: jax.Array  #: `[B]` keys, one per row; consumed.
  #: The parameters. A repetition penalty needs `RepetitionPenalty` among the
  #: adjusters.
  sampling: sampling_lib.SamplingParams
  adjusters: tuple[adjusters_lib.Adjuster, ...] = ()  #: In their order.
  watchers: tuple[watchers_lib.Watcher, ...] = ()  #: See `specdec.watchers`.
  #: `[]` float32, the time of a speculative step in plain ones: decoding goes
  #: on plainly while speculation emits fewer tokens per step; used if
  #: `DecodeConfig.fallback` is set, see `specdec.fallback`.
  break_even: jax.typing.ArrayLike = 0.0


class DecodeState(flax.struct.PyTreeNode):
  """State of a decode, carried from step to step.

  Between steps the target's cache holds all tokens but the last, the root.
  """

  #: `[B, T]` int32, prompt and new tokens of each row, then garbage.
  tokens: jax.Array
  origins: jax.Array  #: `[B, T]` int32, see `DecodeResult`.
  length: jax.Array  #: `[B]` int32, the number of valid tokens.
  reason: jax.Array  #: `[B]` int32, why the row is done, see `verify.accept`.
  target: model_lib.ModelState  #: The state of the target.
  #: The states of the drafter's stages.
  stages: tuple[drafter_lib.StageState, ...]
  adjusters: tuple[Any, ...]  #: The states of the request's adjusters.
  watchers: tuple[Any, ...]  #: The states of the request's watchers.
  counters: statistics_lib.Counters  #: The counters so far.
  fallback: fallback_lib.FallbackState  #: The account of the fallback.

  @property
  def done(self) -> jax.Array:
    """`[B]` bool."""
    return self.reason != accept.RUNNING


class StepRecord(flax.struct.PyTreeNode):
  """Trace data of a step; XLA removes it where it is not returned."""

  tree: tree_lib.TokenTree  #: `[B, M]` per field.
  #: `[B, N]` int32, the verified nodes; `NO_NODE` for entries without.
  nodes: jax.Array
  path: jax.Array  #: `[B, D + 1]` int32, the accepted nodes, then `NO_NODE`.
  #: `[B]` int32, the number of tokens; 0 for a row that was done.
  emitted: jax.Array


def step_context(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: Request,
  state: DecodeState,
  config: DecodeConfig,
) -> context_lib.StepContext:
  """The context of the step to come; see `step`."""
  rule, sampling = config.rule, request.sampling
  return context_lib.StepContext(
    tokens=state.tokens,
    length=state.length,
    active=~state.done,
    sampling=sampling,
    randomness=randomness_lib.step_randomness(
      request.row_keys,
      state.length,
      sampling.is_stochastic & rule.shares_noise,
      max_depth=drafter.max_depth,
      num_nodes=drafter.shape.num_nodes,
      vocab_size=target.spec.vocab_size,
      # Look-ups want it of few tokens, and a step may verify the root alone.
      wants_all=rule.shares_noise
      and not sampling.has_filters
      and not drafter.looks_up,
    ),
    shape=drafter.shape,
    max_depth=drafter.max_depth,
    target_bytes=target.spec.weight_bytes,
    rule=rule,
    adjusters=request.adjusters,
    adjuster_states=state.adjusters,
    # A longer path than this tree has may have been accepted before.
    hidden=carried_lib.before_root(
      state.target.cache,
      state.length,
      state.counters.emitted_histogram.shape[1],
    ),
  )


def step(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: Request,
  state: DecodeState,
  config: DecodeConfig,
) -> tuple[DecodeState, StepRecord]:
  """Takes one step for all rows that are not done; see `loop.decode`.

  A row that is done is computed with the others, but emits and keeps nothing.
  The drafter `PLAIN` makes it a plain step, whatever stages the state has.
  """
  ctx = step_context(target, drafter, request, state, config)
  tree = ctx.root_trees()
  stages, tree = growth.grow(drafter.stages, state.stages, tree, ctx)
  nodes = drafter.shape.select(tree)
  verify = functools.partial(
    _verify, target, drafter, request, config, ctx, (stages, tree)
  )
  if config.has_break_even and drafter.looks_up:
    pays = state.fallback.speculating & fallback_lib.tree_pays(
      tree, nodes, ctx.active, request.break_even
    )
    nodes = jnp.where(pays | (nodes == tree_lib.ROOT), nodes, tree_lib.NO_NODE)
    state, path, emitted = _all_or_root(verify, state, nodes, pays)
  else:
    state, path, emitted = verify(state, nodes)
  return state, StepRecord(tree=tree, nodes=nodes, path=path, emitted=emitted)


# The state, and `path` and `emitted` of the record.
_Verified = tuple[DecodeState, jax.Array, jax.Array]


def _all_or_root(
  verify: Callable[[DecodeState, jax.Array], _Verified],
  state: DecodeState,
  nodes: jax.Array,
  verifies_all: jax.Array,
) -> _Verified:
  """Verifies all of `nodes [B, N]`, or only the first of each row, its root.

  `verifies_all` is `[]` bool. These are loops of at most one round, because a
  conditional of XLA would copy the caches.
  """
  _, *shapes = jax.eval_shape(verify, state, nodes)
  path, emitted = (jnp.zeros(shape.shape, shape.dtype) for shape in shapes)

  def once(
    chosen: jax.Array, nodes: jax.Array, verified: _Verified
  ) -> _Verified:
    return lax.while_loop(
      lambda carry: carry[0],
      lambda carry: (jnp.zeros((), bool), verify(carry[1][0], nodes)),
      (chosen, verified),
    )[1]

  verified = once(verifies_all, nodes, (state, path, emitted))
  return once(~verifies_all, nodes[:, :1], verified)


def _verify(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: Request,
  config: DecodeConfig,
  ctx: context_lib.StepContext,
  grown: tuple[tuple[drafter_lib.StageState, ...], tree_lib.TokenTree],
  state: DecodeState,
  nodes: jax.Array,
) -> _Verified:
  """The rest of a step: the target's forward over nodes, and what follows.

  `grown` are the stages and the trees after growth; `nodes [B, N]` are chosen
  from the trees, the root first.
  """
  stages, tree = grown
  # The window is empty, and may be larger than these nodes need: a root alone
  # has nothing to move in it.
  window = state.target.window[:, : nodes.shape[1]]
  before = state.target.replace(window=window)
  scores, target_state = model_lib.forward_nodes(
    target, before, tree, nodes, ctx, may_lag=False
  )
  logits = ctx.adjusted(scores.logits, tree, nodes)
  nothing = jnp.zeros((*tree.token.shape, 0))
  drawn_from = stages[0].drawn_from if drafter.stages else nothing
  verdict = config.rule(
    tree, nodes, logits, drawn_from, ctx.randomness, ctx.sampling
  )
  ends, watched = watchers_lib.observe(
    request.watchers,
    state.watchers,
    watchers_lib.Observation(verdict=verdict, logits=scores.logits),
  )
  room = request.prompt_length + request.limit - ctx.length
  valid = accept.count_valid(logits, verdict)
  emitted, reason = accept.count_emitted(
    verdict, ends, valid, jnp.where(ctx.active, room, 0)
  )
  path = verdict.path(nodes)
  added = carried_lib.Added(path, verdict.chosen, emitted, ctx.length)
  tokens = jax.vmap(tree_lib.pick)(tree.token, nodes)
  is_node = (nodes >= 0) & ctx.active[:, None]
  seen = carried_lib.Verified(jnp.where(is_node, tokens, -1), scores.logits)
  if drafter.stages:
    origins = accept.emitted_origins(tree, nodes, verdict)
    appended = added.append(
      (state.tokens, state.origins), (verdict.chosen, origins)
    )
  else:  # After the text are zeros, which mean the target's own.
    appended = *added.append((state.tokens,), (verdict.chosen,)), state.origins
  state = DecodeState(
    tokens=appended[0],
    origins=appended[1],
    length=ctx.length + emitted,
    reason=jnp.where(ctx.active, reason, state.reason),
    # An array that changes costs a GPU a kernel, so arrays that last for one
    # step are passed on as they came in.
    target=state.target.replace(
      cache=model_lib.keep(target_state, added).cache
    ),
    stages=drafter_lib.keep(
      drafter, state.stages, stages, seen, added, ctx.active
    ),
    adjusters=adjusters_lib.keep(
      request.adjusters, state.adjusters, tree, added
    ),
    watchers=watchers_lib.keep(request.watchers, watched, added),
    counters=statistics_lib.count_step(state.counters, nodes, emitted, ctx),
    fallback=_account(state.fallback, nodes, emitted, ctx, request, config),
  )
  return state, path, emitted


def _account(
  fallback: fallback_lib.FallbackState,
  nodes: jax.Array,
  emitted: jax.Array,
  ctx: context_lib.StepContext,
  request: Request,
  config: DecodeConfig,
) -> fallback_lib.FallbackState:
  """The account of the fallback after a step that verified `nodes [B, N]`."""
  if not config.fallback:
    return fallback
  if nodes.shape[1] == 1:
    # The stages do not read what `PLAIN` decodes; its trees have no depth.
    return fallback_lib.after_plain_step(
      fallback, request.break_even, stages_lag=ctx.max_depth == 0
    )
  return fallback_lib.after_speculative_step(
    fallback, emitted, ctx.active, request.break_even
  )
