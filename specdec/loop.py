"""The decode loop: one jitted `lax.while_loop` of steps, prompt to last token.

With a guard (`specdec.guard`) it is a loop of two, of speculative and of plain
steps, which take turns.

`decode` is all of it. `start` and `advance` are its two halves, for callers who
want to look in between: to stream, or to stop early. `advance_recorded` is one
step, for those who want to see its tree (`specdec.tracing`).
"""

import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec.draft.drafter import Drafter
from specdec.draft.drafter import StageCounters
from specdec.draft.language_model import prefill
from specdec.draft.stages import catch_up_stages
from specdec.draft.stages import init_stages
from specdec.fallback import init_guard
from specdec.model import Model
from specdec.repetition import init_seen
from specdec.statistics import Counters
from specdec.statistics import init_counters
from specdec.step import DecodeConfig
from specdec.step import DecodeState
from specdec.step import make_step
from specdec.step import Request
from specdec.step import StepRecord
from specdec.verify.accept import LIMIT
from specdec.verify.accept import RUNNING
from specdec.verify.rejection import BEST

ALL_STEPS = np.iinfo(np.int32).max


"""As `num_steps` of `advance`: until all rows are done."""


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
    plain_steps: `[]` int32, steps in which the guard saw to it that nothing was
      drafted; None without a guard.
  """

  tokens: jax.Array
  length: jax.Array
  reason: jax.Array
  origins: jax.Array
  log_probs: jax.Array | None
  counters: Counters
  stage_counters: tuple[StageCounters, ...]
  plain_steps: jax.Array | None


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
    guard=None
    if drafter is None or request.break_even is None
    else init_guard(),
  )


def _advance(target, drafter, request, state, num_steps, *, config):
  speculate = make_step(target, drafter, request, config)
  plain = make_step(target, None, request, config)

  def goes_on(carry):
    steps_done, state = carry
    return ~jnp.all(state.done) & (steps_done < num_steps)

  def repeat(step, carry, while_=lambda state: True):
    return lax.while_loop(
      lambda carry: goes_on(carry) & while_(carry[1]),
      lambda carry: (carry[0] + 1, step(carry[1])[0]),
      carry,
    )

  def alternate(carry):
    """Speculates while it pays, then goes on plainly for a while."""
    steps_done, state = carry
    # Of a text of length 0 nothing is missing.
    wanted = jnp.where(state.guard.speculating, state.length, 0)
    stages = catch_up_stages(drafter, state.stages, state.tokens, wanted)
    carry = steps_done, state.replace(stages=stages)
    carry = repeat(speculate, carry, lambda state: state.guard.speculating)
    return repeat(plain, carry, lambda state: ~state.guard.speculating)

  carry = (jnp.zeros((), jnp.int32), state)
  if state.guard is None:
    return repeat(speculate, carry)[1]
  return lax.while_loop(goes_on, alternate, carry)[1]


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


@functools.partial(
  jax.jit,
  static_argnames=('speculate', 'config'),
  donate_argnames=('state',),
)
def advance_recorded(
  target: Model,
  drafter: Drafter | None,
  request: Request,
  state: DecodeState,
  *,
  speculate: bool,
  config: DecodeConfig,
) -> tuple[DecodeState, StepRecord]:
  """One step, and what it looked at; see `advance`.

  Args:
    target: as for `start`.
    drafter: likewise.
    request: likewise.
    state: consumed, as by `advance`.
    speculate: what `state.guard.speculating` is; true if there is no guard.
    config: as for `start`.

  Returns:
    The state that `advance` gives with one step, and the record.
  """
  if not speculate:
    return make_step(target, None, request, config)(state)
  stages = state.stages
  if state.guard is not None and drafter is not None and stages is not None:
    stages = catch_up_stages(drafter, stages, state.tokens, state.length)
    state = state.replace(stages=stages)
  return make_step(target, drafter, request, config)(state)


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
    plain_steps=None if state.guard is None else state.guard.plain_steps,
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
