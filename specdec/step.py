"""One step of decoding, for every row at once.

    grow     a tree of guesses below the last token (none, for plain decoding)
    verify   its best nodes in one target forward
    accept   as far as the target agrees, plus its own bonus token

Rows advance by their own counts. A plain step is this with a tree that is just
its root.
"""

from collections.abc import Callable
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specdec.cache import KVCache
from specdec.draft.drafter import Drafter
from specdec.draft.drafter import StageState
from specdec.draft.drafter import Step
from specdec.draft.growth import grow
from specdec.draft.ranking import Draws
from specdec.draft.stages import commit_stages
from specdec.fallback import after_plain_step
from specdec.fallback import after_speculative_step
from specdec.fallback import GuardState
from specdec.model import Model
from specdec.repetition import add_seen
from specdec.repetition import seen_by_nodes
from specdec.sampling import adjust_logits
from specdec.sampling import DRAFTING
from specdec.sampling import position_noise
from specdec.sampling import Sampling
from specdec.sampling import step_keys
from specdec.statistics import count_step
from specdec.statistics import Counters
from specdec.tree.tree import init_tree
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import select_best
from specdec.tree.tree import TokenTree
from specdec.verify.accept import along_path
from specdec.verify.accept import commit
from specdec.verify.accept import count_emitted
from specdec.verify.accept import count_valid
from specdec.verify.accept import emitted_origins
from specdec.verify.accept import RUNNING
from specdec.verify.accept import score_nodes
from specdec.verify.accept import Verdict
from specdec.verify.block import verify_block
from specdec.verify.match import match
from specdec.verify.rejection import BEST
from specdec.verify.rejection import CHILDREN
from specdec.verify.rejection import reject
from specdec.verify.rejection import WITH_REPLACEMENT
from specdec.verify.stop_strings import StopTable

RULES = ('match', 'rejection', 'block')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """What is static about a decode: changing it recompiles.

  Attributes:
    max_new_tokens: room in the buffers. The limit itself is dynamic and may be
      anything up to this.
    eos_ids: tokens that end a row; the emitted text includes them.
    verify: one of `RULES`, see `specdec.verification`.
    children: one of `rejection.CHILDREN`; how children come about where the
      rule is not `match`, which wants the best ones.
    log_probs: whether to compute those of the emitted tokens.

  Raises:
    ValueError: the rule or the children are not known, or do not go together.
  """

  max_new_tokens: int = 128
  eos_ids: tuple[int, ...] = ()
  verify: str = 'match'
  children: str = BEST
  log_probs: bool = False

  def __post_init__(self):
    for name, known in (('verify', RULES), ('children', CHILDREN)):
      if getattr(self, name) not in known:
        raise ValueError(
          f'{name} must be one of {known}, got {getattr(self, name)!r}'
        )
    if self.verify == 'match' and self.children != BEST:
      raise ValueError(
        f'verify=match wants the best children, got children={self.children};'
        ' choose verify=rejection to draw them'
      )


class Request(flax.struct.PyTreeNode):
  """What to decode: a batch of prompts, all of it dynamic.

  Attributes:
    prompt: `[B, P]` int32, padded at the end with any valid token.
    prompt_length: `[B]` int32, at least 1.
    limit: `[B]` int32, new tokens per row, at most
      `DecodeConfig.max_new_tokens`.
    row_keys: `[B]` keys, one per row; consumed.
    sampling: validated.
    stop: stop strings, or None.
    break_even: `[]` float32, how many plain steps a speculative one takes;
      decoding goes on plainly while speculation does not emit that many tokens,
      see `specdec.guard`. None: speculation always.
  """

  prompt: jax.Array
  prompt_length: jax.Array
  limit: jax.Array
  row_keys: jax.Array
  sampling: Sampling
  stop: StopTable | None = None
  break_even: jax.Array | None = None


class DecodeState(flax.struct.PyTreeNode):
  """Carried from step to step.

  Between steps the target cache holds all tokens but the last, the root.

  Attributes:
    tokens: `[B, T]` int32, prompt and new tokens of each row, then garbage.
    origins: `[B, T]` int32, see `DecodeResult`.
    log_probs: `[B, T]` float32, see `DecodeResult`; or None.
    length: `[B]` int32, how many tokens are valid.
    reason: `[B]` int32, why the row is done, see `verification.verdict`.
    stop: `[B]` state of each row's stop strings, or None.
    seen: `[B, V]` bool, tokens of the text; None without repetition penalty.
    target_cache: of the target.
    stages: of the drafter, or None.
    counters: so far.
    guard: whether speculation pays, or None if nobody asks.
  """

  tokens: jax.Array
  origins: jax.Array
  log_probs: jax.Array | None
  length: jax.Array
  reason: jax.Array
  stop: jax.Array | None
  seen: jax.Array | None
  target_cache: KVCache
  stages: StageState | None
  counters: Counters
  guard: GuardState | None

  @property
  def done(self) -> jax.Array:
    """`[B]` bool."""
    return self.reason != RUNNING


class StepRecord(flax.struct.PyTreeNode):
  """What a step looked at; nobody computes it who does not ask for it.

  Attributes:
    tree: `[B, N]` per field, what the target verified.
    path: `[B, D + 1]` int32, the accepted nodes, see `Verdict`.
    emitted: `[B]` int32, how many tokens; 0 for a row that was done.
  """

  tree: TokenTree
  path: jax.Array
  emitted: jax.Array


def _append(tokens, length, new, count):
  """Writes the first `count` of `new` `[B, n]` behind each row's tokens."""
  offsets = jnp.arange(new.shape[1])[None]
  kept = offsets < count[:, None]
  # Out of range, hence dropped.
  index = jnp.where(kept, length[:, None] + offsets, tokens.shape[1])
  rows = jnp.arange(tokens.shape[0])[:, None]
  return tokens.at[rows, index].set(new, mode='drop')


def _select(drafter: Drafter, tree: TokenTree) -> tuple[TokenTree, jax.Array]:
  """The nodes to verify, and where they were."""
  if drafter.config.topology is not None:  # all of them
    return tree, jnp.broadcast_to(jnp.arange(tree.capacity), tree.token.shape)
  return jax.vmap(select_best, (0, None))(tree, drafter.config.num_nodes)


def _log_probs(logits: jax.Array, verdict: Verdict) -> jax.Array:
  """Of each chosen token, `[B, D + 1]`; `logits [B, N, V]` as given."""
  log_probs = jax.nn.log_softmax(along_path(logits, verdict), axis=-1)
  chosen = verdict.chosen[..., None]
  return jnp.take_along_axis(log_probs, chosen, axis=-1)[..., 0]


def make_step(
  target: Model,
  drafter: Drafter | None,
  request: Request,
  config: DecodeConfig,
) -> Callable[[DecodeState], tuple[DecodeState, StepRecord]]:
  """Makes the step that takes all rows on that are not done.

  Args:
    target: whose output is kept.
    drafter: guesses ahead; None is a plain step, whatever stages the state has.
    request: what is decoded.
    config: what is static about it.
  """
  max_depth = 0 if drafter is None else drafter.max_depth
  num_nodes = 1 if drafter is None else drafter.config.num_nodes
  vocab_size = target.definition.vocab_size
  sampling = request.sampling
  end = request.prompt_length + request.limit

  def propose(state: DecodeState, noise) -> tuple[StageState | None, TokenTree]:
    """The tree of guesses, as it is before some are selected."""
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    capacity = 1 if drafter is None else drafter.config.capacity
    tree = jax.vmap(init_tree, (0, None))(root[:, 0], capacity)
    if drafter is None or state.stages is None or max_depth == 0:
      return state.stages, tree
    draws = None
    if config.children != BEST:
      draws = Draws(
        keys=step_keys(request.row_keys, DRAFTING, state.length),
        replacement=config.children == WITH_REPLACEMENT,
      )
    step = Step(
      tokens=state.tokens,
      length=state.length,
      active=~state.done,
      noise=noise,
      draws=draws,
      seen=state.seen,
      sampling=sampling,
      target_bytes=target.definition.weight_bytes,
      max_depth=max_depth,
    )
    return grow(drafter, state.stages, tree, step)

  def settle(state: DecodeState, emitted) -> GuardState | None:
    """The guard, after so many tokens."""
    if state.guard is None or request.break_even is None:
      return None
    if drafter is None:
      return after_plain_step(state.guard, request.break_even)
    return after_speculative_step(
      state.guard, emitted, ~state.done, request.break_even
    )

  def judge(tree, logits, noise, proposals, length) -> Verdict:
    """By the rule of the config."""
    if config.verify == 'match':
      return match(tree, logits, noise, sampling)
    keys = request.row_keys
    if config.verify == 'block':
      return verify_block(tree, logits, proposals, keys, length, sampling)
    return reject(
      tree,
      logits,
      proposals,
      keys,
      length,
      sampling,
      max_depth=max_depth,
      children=config.children,
    )

  def step(state: DecodeState) -> tuple[DecodeState, StepRecord]:
    length = state.length
    noise = None
    if config.verify == 'match':
      positions = length[:, None] + jnp.arange(max_depth + 1)[None]
      noise = position_noise(request.row_keys, positions, vocab_size, sampling)
    stages, grown = propose(state, noise)
    tree, nodes = (grown, None) if drafter is None else _select(drafter, grown)
    logits, cache = score_nodes(target, state.target_cache, tree, max_depth)
    seen = None
    if state.seen is not None:
      everything = jnp.broadcast_to(jnp.arange(num_nodes), tree.token.shape)
      seen = seen_by_nodes(tree, everything, state.seen, max_depth)
    verdict = judge(
      tree,
      adjust_logits(logits, sampling, seen),
      noise,
      None if drafter is None or stages is None else stages.proposals,
      length,
    )
    is_stop, stop_states = jnp.zeros(verdict.chosen.shape, bool), None
    if request.stop is not None and state.stop is not None:
      is_stop, stop_states = request.stop.follow(state.stop, verdict.chosen)
    emitted, reason = count_emitted(
      verdict,
      jnp.isin(verdict.chosen, jnp.array(config.eos_ids, jnp.int32)),
      is_stop,
      count_valid(logits, verdict),
      jnp.where(state.done, 0, end - length),
    )
    if drafter is not None and stages is not None and nodes is not None:
      path = jnp.where(
        verdict.path >= 0,
        jnp.take_along_axis(nodes, jnp.maximum(verdict.path, 0), axis=1),
        NO_NODE,
      )
      stages = commit_stages(drafter, stages, path, emitted - 1)
    append = lambda array, new: _append(array, length, new, emitted)
    state = DecodeState(
      tokens=append(state.tokens, verdict.chosen),
      origins=append(state.origins, emitted_origins(tree, verdict)),
      log_probs=None
      if state.log_probs is None
      else append(state.log_probs, _log_probs(logits, verdict)),
      length=length + emitted,
      reason=jnp.where(state.done, state.reason, reason),
      stop=None
      if stop_states is None
      else jnp.take_along_axis(stop_states, emitted[:, None], axis=1)[:, 0],
      seen=None
      if state.seen is None
      else add_seen(state.seen, verdict.chosen, emitted),
      target_cache=commit(cache, verdict, emitted, num_nodes),
      stages=stages,
      counters=count_step(
        state.counters, length, tree.size, emitted, ~state.done
      ),
      guard=settle(state, emitted),
    )
    return state, StepRecord(tree=tree, path=verdict.path, emitted=emitted)

  return step
