"""The decode loop: one jitted `lax.while_loop`, prompt to last token.

Each step, for every row at once:

    grow     a tree of guesses below the last token (none, for plain decoding)
    verify   its best nodes in one target forward
    accept   as far as the target agrees, plus its own bonus token

Rows advance by their own counts. Plain decoding is this loop with a tree that
is just its root.

`decode` is all of it. `start` and `advance` are its two halves, for callers who
want to look in between: to stream, or to stop early.
"""

import dataclasses
import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.cache import KVCache
from specdec.drafter import Drafter
from specdec.drafter import StageCounters
from specdec.drafter import StageState
from specdec.drafter import Step
from specdec.drawing import Draws
from specdec.growth import commit_stages
from specdec.growth import grow
from specdec.growth import init_stages
from specdec.model import Model
from specdec.repetition import add_seen
from specdec.repetition import init_seen
from specdec.repetition import seen_by_nodes
from specdec.sampling import adjust_logits
from specdec.sampling import DRAFTING
from specdec.sampling import position_noise
from specdec.sampling import Sampling
from specdec.sampling import step_keys
from specdec.scorers.language_model import prefill
from specdec.statistics import count_step
from specdec.statistics import Counters
from specdec.statistics import init_counters
from specdec.stop import StopTable
from specdec.tree import init_tree
from specdec.tree import NO_NODE
from specdec.tree import select_best
from specdec.tree import TokenTree
from specdec.verification.block import verify_block
from specdec.verification.match import match
from specdec.verification.rejection import BEST
from specdec.verification.rejection import CHILDREN
from specdec.verification.rejection import reject
from specdec.verification.rejection import WITH_REPLACEMENT
from specdec.verification.verdict import along_path
from specdec.verification.verdict import commit
from specdec.verification.verdict import count_emitted
from specdec.verification.verdict import count_valid
from specdec.verification.verdict import emitted_origins
from specdec.verification.verdict import LIMIT
from specdec.verification.verdict import RUNNING
from specdec.verification.verdict import score_nodes
from specdec.verification.verdict import Verdict

RULES = ('match', 'rejection', 'block')

ALL_STEPS = np.iinfo(np.int32).max
"""As `num_steps` of `advance`: until all rows are done."""


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
  """

  prompt: jax.Array
  prompt_length: jax.Array
  limit: jax.Array
  row_keys: jax.Array
  sampling: Sampling
  stop: StopTable | None = None


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

  @property
  def done(self) -> jax.Array:
    """`[B]` bool."""
    return self.reason != RUNNING


class DecodeResult(flax.struct.PyTreeNode):
  """What a decode returns.

  Attributes:
    tokens: `[B, T]` int32, prompt and new tokens of each row, then garbage.
    length: `[B]` int32, how many of them are valid.
    reason: `[B]` int32, why each row ended, see `verification.verdict`.
    origins: `[B, T]` int32, who proposed each new token: 0 nobody, the target
      found it itself; i the i-th of `Drafter.labels`.
    log_probs: `[B, T]` float32, of each new token in the distribution that the
      target gave, before bias, penalty, temperature and filters; None if they
      were not asked for.
    counters: see `specdec.statistics`.
    stage_counters: of each stage, from the outermost in.
  """

  tokens: jax.Array
  length: jax.Array
  reason: jax.Array
  origins: jax.Array
  log_probs: jax.Array | None
  counters: Counters
  stage_counters: tuple[StageCounters, ...]


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


def _start(target, drafter, request, *, config):
  batch_size, prompt_bucket = request.prompt.shape
  max_depth = 0 if drafter is None else drafter.max_depth
  num_nodes = 1 if drafter is None else drafter.config.num_nodes
  vocab_size = target.definition.vocab_size
  text_slots = prompt_bucket + config.max_new_tokens
  padding = ((0, 0), (0, config.max_new_tokens))
  tokens = jnp.pad(jnp.asarray(request.prompt), padding)
  penalty = request.sampling.repetition_penalty
  return DecodeState(
    tokens=tokens,
    origins=jnp.zeros_like(tokens),
    log_probs=jnp.zeros(tokens.shape) if config.log_probs else None,
    length=request.prompt_length,
    reason=jnp.where(request.limit <= 0, LIMIT, RUNNING),
    stop=None if request.stop is None else request.stop.start,
    seen=None
    if penalty is None
    else init_seen(request.prompt, request.prompt_length, vocab_size),
    # Rows that are done go on verifying until all are: one tree more.
    target_cache=prefill(
      target, request.prompt, request.prompt_length - 1, text_slots + num_nodes
    ),
    stages=None
    if drafter is None
    else init_stages(
      drafter,
      request.prompt,
      request.prompt_length,
      num_slots=text_slots,
      drawn_from=None if config.children == BEST else vocab_size,
    ),
    counters=init_counters(batch_size, max_depth),
  )


def _advance(target, drafter, request, state, num_steps, *, config):
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
    return grow(
      drafter,
      state.stages,
      tree,
      step,
      closed=jnp.zeros(tree.token.shape, bool),
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

  def step(carry):
    steps_done, state = carry
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
      None if stages is None else stages.proposals,
      length,
    )
    is_stop, stop_states = jnp.zeros(verdict.chosen.shape, bool), None
    if request.stop is not None:
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
    return steps_done + 1, DecodeState(
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
    )

  def goes_on(carry):
    steps_done, state = carry
    return ~jnp.all(state.done) & (steps_done < num_steps)

  carry = (jnp.zeros((), jnp.int32), state)
  return lax.while_loop(goes_on, step, carry)[1]


@functools.partial(jax.jit, static_argnames='config')
def start(
  target: Model,
  drafter: Drafter | None,
  request: Request,
  *,
  config: DecodeConfig,
) -> DecodeState:
  """The state before the first step, prompts in the caches; see `decode`."""
  return _start(target, drafter, request, config=config)


@functools.partial(
  jax.jit, static_argnames='config', donate_argnames=('state',)
)
def advance(
  target: Model,
  drafter: Drafter | None,
  request: Request,
  state: DecodeState,
  num_steps: jax.typing.ArrayLike,
  *,
  config: DecodeConfig,
) -> DecodeState:
  """Some steps of all rows that are not done; see `decode`.

  Args:
    target: as for `start`.
    drafter: likewise.
    request: likewise.
    state: from `start` or `advance`; consumed, its buffers are used again.
    num_steps: at most so many.
    config: as for `start`.
  """
  return _advance(target, drafter, request, state, num_steps, config=config)


def result_of(state: DecodeState) -> DecodeResult:
  """What has been decoded so far."""
  stages = state.stages.stages if state.stages is not None else ()
  return DecodeResult(
    tokens=state.tokens,
    length=state.length,
    reason=state.reason,
    origins=state.origins,
    log_probs=state.log_probs,
    counters=state.counters,
    stage_counters=tuple(stage.counters for stage in stages),
  )


@functools.partial(jax.jit, static_argnames='config')
def decode(
  target: Model,
  drafter: Drafter | None,
  request: Request,
  *,
  config: DecodeConfig,
) -> DecodeResult:
  """Decodes a batch; the pure function under `specdec.generate`.

  Arguments are trusted: `specdec.generate` checks them, and pads prompts to
  buckets so that few shapes are compiled.

  Args:
    target: the model whose output is kept exactly.
    drafter: guesses ahead; None is plain decoding.
    request: see `Request`.
    config: see `DecodeConfig`.

  Returns:
    Tokens, lengths and counters. With equal requests and `verify='match'`,
    every drafter gives equal tokens; with the other rules, tokens of equal law.
  """
  state = _start(target, drafter, request, config=config)
  return result_of(
    _advance(target, drafter, request, state, ALL_STEPS, config=config)
  )
