"""The decode loop: one jitted `lax.while_loop` of steps, prompt to last token.

With the fallback (`specdec.fallback`) two loops take turns in it: one of
speculative steps, one of plain steps. Where drafting costs nothing, each step
of one loop chooses.

`decode` is all of it. `start` and `advance` are its two halves, for callers who
look in between: to stream, or to stop early. `extend` goes on from another
text, as the next turn of a conversation does; `insert` gives one row to another
prompt, while the others go on (`specdec.slots`), and `end_row` ends one.
`advance_recorded` is one step that returns its tree, too (`specdec.tracing`).
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from specdec import adjusters as adjusters_lib
from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import fallback as fallback_lib
from specdec import mappings
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec import statistics as statistics_lib
from specdec import step as step_lib
from specdec import total as total_lib
from specdec.draft import drafter as drafter_lib
from specdec.tree import tree as tree_lib
from specdec.verify import accept

ALL_STEPS = np.iinfo(np.int32).max
"""`num_steps` of `advance` for decoding until all rows are done."""


class DecodeResult(flax.struct.PyTreeNode):
  """Result of a decode."""

  #: `[B, T]` int32, prompt and new tokens of each row, then garbage.
  tokens: jax.Array
  length: jax.Array  #: `[B]` int32, the number of valid tokens.
  reason: jax.Array  #: `[B]` int32, why each row ended, see `verify.accept`.
  #: `[B, T]` int32, the source of each new token: 0 the target itself; i the
  #: i-th of `Drafter.labels`.
  origins: jax.Array
  watchers: tuple[Any, ...]  #: The states of the request's watchers.
  counters: statistics_lib.Counters  #: See `specdec.statistics`.
  #: For each stage, outermost first.
  stage_counters: tuple[drafter_lib.StageCounters, ...]
  #: `[]`, steps in which the fallback drafted nothing.
  plain_steps: total_lib.Total


def _reason(request: step_lib.Request) -> jax.Array:
  """Why rows are done before the first step."""
  # Not weakly typed, or the second `advance` would compile again.
  return jnp.where(request.limit <= 0, accept.LIMIT, accept.RUNNING).astype(
    jnp.int32
  )


def _caught_up(
  drafter: drafter_lib.Drafter, state: step_lib.DecodeState
) -> step_lib.DecodeState:
  """The stages read what plain steps decoded, unless the next one is plain."""
  fallback = state.fallback
  reads = fallback.stages_lag & (fallback.speculating | drafter.looks_up)
  texts = carried_lib.Texts(
    tokens=state.tokens,
    length=jnp.where(reads, state.length, 0),
    num_slots=state.tokens.shape[1],
    kept=state.length,
    hidden=carried_lib.of_text(state.target.cache),
  )
  return state.replace(
    stages=drafter_lib.restart(drafter, state.stages, texts),
    fallback=fallback.replace(stages_lag=fallback.stages_lag & ~reads),
  )


# Steps done, and the state.
_Carry = tuple[jax.Array, step_lib.DecodeState]


@mappings.jit(static_argnames='config')
def start(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: step_lib.Request,
  *,
  config: step_lib.DecodeConfig,
) -> step_lib.DecodeState:
  """The state before the first step, prompts in the caches; see `decode`."""
  batch_size, prompt_bucket = request.prompt.shape
  num_slots = prompt_bucket + config.max_new_tokens
  padding = ((0, 0), (0, config.max_new_tokens))
  tokens = jnp.pad(jnp.asarray(request.prompt), padding)
  draws = config.rule.children != sampling_lib.BEST
  if jax.dtypes.canonicalize_dtype(int) != jnp.int32:
    raise ValueError(
      'jax_enable_x64 is on, but decoding has types of 32 bits; switch it off,'
      ' or decode within jax.enable_x64(False)'
    )
  penalizes = request.sampling.repetition_penalty is not None
  if penalizes and not any(
    isinstance(adjuster, adjusters_lib.RepetitionPenalty)
    for adjuster in request.adjusters
  ):
    raise ValueError(
      'repetition_penalty needs RepetitionPenalty among the adjusters'
    )
  texts = carried_lib.Texts(request.prompt, request.prompt_length, num_slots)
  # Rows that are done are computed until the batch ends, so the cache has N
  # slots more than tokens.
  read = model_lib.start(target, texts, window_size=drafter.shape.num_nodes)
  texts = texts.replace(hidden=carried_lib.of_text(read.cache))
  state = step_lib.DecodeState(
    tokens=tokens,
    origins=jnp.zeros_like(tokens),
    length=request.prompt_length,
    reason=_reason(request),
    target=read,
    stages=drafter_lib.start(
      drafter, texts, target.spec.vocab_size if draws else 0
    ),
    adjusters=carried_lib.start(request.adjusters, texts),
    watchers=carried_lib.start(request.watchers, texts),
    counters=statistics_lib.init_counters(batch_size, drafter.max_depth),
    fallback=fallback_lib.init_fallback(),
  )
  return target.spec.place(state)


@mappings.jit(static_argnames='config', donate_argnames=('state',))
def advance(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: step_lib.Request,
  state: step_lib.DecodeState,
  num_steps: jax.typing.ArrayLike,
  num_done: jax.typing.ArrayLike,
  *,
  config: step_lib.DecodeConfig,
) -> step_lib.DecodeState:
  """Steps of all rows that are not done; see `decode`.

  At most `num_steps`, and none once `num_done` rows or more are done. The
  state, from `start` or `advance`, is consumed: its buffers are used again.
  """

  def goes_on(carry: _Carry) -> jax.Array:
    steps_done, state = carry
    return (jnp.sum(state.done) < num_done) & (steps_done < num_steps)

  def repeat(
    drafter: drafter_lib.Drafter,
    carry: _Carry,
    while_: Callable[[_Carry], jax.Array] = goes_on,
  ) -> _Carry:
    def take(carry: _Carry) -> _Carry:
      steps_done, state = carry
      state, _ = step_lib.step(target, drafter, request, state, config)
      return steps_done + 1, state

    return lax.while_loop(while_, take, carry)

  def alternate(carry: _Carry) -> _Carry:
    """Speculates while it pays, then goes on plainly for a while."""
    pays = lambda carry: carry[1].fallback.speculating
    steps_done, state = carry
    carry = repeat(
      drafter,
      (steps_done, _caught_up(drafter, state)),
      lambda carry: goes_on(carry) & pays(carry),
    )
    return repeat(
      drafter_lib.PLAIN, carry, lambda carry: goes_on(carry) & ~pays(carry)
    )

  carry = (jnp.zeros((), jnp.int32), state)
  # A plain drafter has nothing to fall back from.
  if not (config.fallback and drafter.stages):
    steps_done, state = repeat(drafter, carry)
  elif drafter.looks_up or not config.has_break_even:
    # Each step decides for itself, or all speculate.
    steps_done, state = repeat(drafter, (carry[0], _caught_up(drafter, state)))
  else:
    steps_done, state = lax.while_loop(goes_on, alternate, carry)
  counters = state.counters.with_steps(steps_done)
  return target.spec.place(state.replace(counters=counters))


def _restarted(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: step_lib.Request,
  state: step_lib.DecodeState,
  tokens: jax.Array,
  kept: jax.Array,
) -> step_lib.DecodeState:
  """The state of rows with other texts; their first `kept` tokens were read.

  Adjusters, watchers and fallback do not change.
  """
  length, (num_rows, num_slots) = request.prompt_length, tokens.shape
  texts = carried_lib.Texts(tokens, length, num_slots, kept)
  read, _ = model_lib.restart(target, state.target, texts)
  texts = texts.replace(hidden=carried_lib.of_text(read.cache))
  stages = drafter_lib.restart(drafter, state.stages, texts)
  counters = drafter_lib.StageCounters.zeros(num_rows)
  depth = state.counters.emitted_histogram.shape[1] - 1
  return state.replace(
    tokens=tokens,
    origins=jnp.zeros_like(tokens),
    length=length,
    reason=_reason(request),
    target=read,
    stages=tuple(stage.replace(counters=counters) for stage in stages),
    counters=statistics_lib.init_counters(num_rows, depth),
  )


@mappings.jit(donate_argnames=('state',))
def extend(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: step_lib.Request,
  state: step_lib.DecodeState,
  tokens: jax.Array,
) -> tuple[step_lib.DecodeState, jax.Array]:
  """The state before the first step after other texts, such as longer ones.

  Neither target nor stages read again what these texts have in common with the
  old ones. Decoding goes on by `advance`, with the same program. Counters,
  adjusters, watchers and limits start again.

  Args:
    target: the target of the state.
    drafter: its drafter.
    request: its request, except that `prompt_length` are the lengths of
      the texts, and `limit` the new tokens after them.
    state: from `start`, `advance` or `extend`; consumed.
    tokens: `[B, T]` int32, the texts, of the shape of `DecodeState.tokens`;
      padded at the end with any valid token. `length + limit <= T` must hold.

  Returns:
    The state, and the tokens of each text that the target did not read again,
    `[B]` int32.
  """
  length = request.prompt_length
  num_equal = tree_lib.count_leading(tokens == state.tokens)
  # The last token is the root, which the caches do not hold.
  kept = jnp.minimum(num_equal, jnp.minimum(state.length, length) - 1)
  usable = cache_lib.usable(state.target.cache, kept)
  state = _restarted(target, drafter, request, state, tokens, kept)
  texts = carried_lib.Texts(tokens, length, tokens.shape[1])
  state = state.replace(
    adjusters=carried_lib.start(request.adjusters, texts),
    watchers=carried_lib.start(request.watchers, texts),
    # The account of how well the drafter does is kept.
    fallback=state.fallback.replace(
      plain_steps=total_lib.Total.zeros(), stages_lag=jnp.zeros((), bool)
    ),
  )
  return target.spec.place(state), usable


def _row(tree: Any, row: jax.Array) -> Any:
  """A row of a state; its scalars belong to all rows."""
  take = lambda array: lax.dynamic_slice_in_dim(array, row, 1, axis=0)
  return jax.tree.map(lambda array: take(array) if array.ndim else array, tree)


def _with_row(
  tree: Any, row: jax.Array, values: Any, *, takes_scalars: bool = False
) -> Any:
  """A state with the values of a row, which `_row` took."""
  put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, row, axis=0)
  choose = lambda old, new: new if takes_scalars else old
  return jax.tree.map(
    lambda old, new: (put if old.ndim else choose)(old, new), tree, values
  )


# The fields of a request that `insert` changes.
_ROW_FIELDS = ('prompt_length', 'limit', 'row_keys', 'sampling')


def place_request(
  target: model_lib.LanguageModel, request: step_lib.Request
) -> step_lib.Request:
  """The request as `insert` returns it, so that it is compiled only once."""
  rows = {name: getattr(request, name) for name in _ROW_FIELDS}
  return request.replace(**target.spec.place(rows))


@mappings.jit(donate_argnames=('state',))
def insert(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: step_lib.Request,
  state: step_lib.DecodeState,
  row: jax.Array,
  new: step_lib.Request,
  kept: jax.Array,
) -> tuple[step_lib.Request, step_lib.DecodeState]:
  """The state with another text in one row; the other rows stay as they are.

  A long text may be read in parts, between steps. Every call then has the text
  so far, and only the last call has a limit above 0.

  Args:
    target: as in `start`.
    drafter: as in `start`.
    request: the state's request, with a `logit_bias` per row if there is one.
    state: from `start`, `advance` or `insert`; consumed.
    row: `[]` int32.
    new: the request of the row, a batch of one. Its prompt is `[1, T]`, as
      long as `DecodeState.tokens`; its adjusters, watchers and break-even are
      not used.
    kept: `[]` int32, the tokens of the text that the row has read already: with
      which its last text begins, or which were there in earlier calls.

  Returns:
    The request and the state, which go together.
  """
  tokens = new.prompt
  inserted = _restarted(
    target, drafter, new, _row(state, row), tokens, kept[None]
  )
  # For all rows, because an adjuster or a watcher may have data of its own for
  # each of them.
  num_rows, num_slots = state.tokens.shape
  texts = carried_lib.Texts(
    tokens=jnp.broadcast_to(tokens, state.tokens.shape),
    length=jnp.broadcast_to(new.prompt_length, num_rows),
    num_slots=num_slots,
  )
  inserted = inserted.replace(
    adjusters=_row(carried_lib.start(request.adjusters, texts), row),
    watchers=_row(carried_lib.start(request.watchers, texts), row),
  )
  request = request.replace(
    **{
      name: _with_row(getattr(request, name), row, getattr(new, name))
      for name in _ROW_FIELDS
    }
  )
  state = _with_row(state, row, inserted)
  return place_request(target, request), target.spec.place(state)


@mappings.jit(donate_argnames=('state',))
def end_row(
  target: model_lib.LanguageModel, state: step_lib.DecodeState, row: jax.Array
) -> step_lib.DecodeState:
  """The state in which a row is done, wherever its text is.

  The `state`, from `start`, `advance` or `insert`, is consumed.
  """
  reason = state.reason.at[row].set(accept.LIMIT)
  return target.spec.place(state.replace(reason=reason))


@mappings.jit()
def take_row(
  request: step_lib.Request, state: step_lib.DecodeState, row: jax.Array
) -> tuple[step_lib.Request, step_lib.DecodeState]:
  """The request and the state of one row, which `advance` decodes alone.

  Adjusters and watchers must have nothing but arrays with an axis of rows.
  """
  return _row(request, row), _row(state, row)


@mappings.jit(donate_argnames=('state',))
def put_row(
  state: step_lib.DecodeState, row: jax.Array, alone: step_lib.DecodeState
) -> step_lib.DecodeState:
  """The state of all rows after one of them, from `take_row`, was decoded."""
  return _with_row(state, row, alone, takes_scalars=True)


@mappings.jit(
  static_argnames=('speculate', 'config'), donate_argnames=('state',)
)
def advance_recorded(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: step_lib.Request,
  state: step_lib.DecodeState,
  *,
  speculate: bool,
  config: step_lib.DecodeConfig,
) -> tuple[step_lib.DecodeState, step_lib.StepRecord]:
  """`advance` by one step, and its trace data.

  `speculate` is the value of `state.fallback.speculating`, or True if the
  drafter looks up.
  """
  if speculate and config.fallback:
    state = _caught_up(drafter, state)
  chosen = drafter if speculate else drafter_lib.PLAIN
  state, record = step_lib.step(target, chosen, request, state, config)
  state = state.replace(counters=state.counters.with_steps(1))
  return target.spec.place(state), record


def result_of(state: step_lib.DecodeState) -> DecodeResult:
  """The result of what has been decoded so far."""
  return DecodeResult(
    tokens=state.tokens,
    length=state.length,
    reason=state.reason,
    origins=state.origins,
    watchers=state.watchers,
    counters=state.counters,
    stage_counters=tuple(stage.counters for stage in state.stages),
    plain_steps=state.fallback.plain_steps,
  )


@mappings.jit(static_argnames='config')
def decode(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  request: step_lib.Request,
  *,
  config: step_lib.DecodeConfig,
) -> DecodeResult:
  """Decodes a batch; the pure function under `specdec.generate`.

  Arguments are not checked: `specdec.generate` does that, and pads prompts so
  that few shapes are compiled. For equal requests and the rule `MatchRule`,
  every drafter gives the target's tokens exactly; under the other rules, tokens
  of the target's distribution. `PLAIN` is plain decoding.
  """
  # Both bodies are parts of one program.
  state = start.__wrapped__(target, drafter, request, config=config)
  num_rows = request.prompt.shape[0]
  state = advance.__wrapped__(
    target, drafter, request, state, ALL_STEPS, num_rows, config=config
  )
  return result_of(state)
