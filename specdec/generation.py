"""The host boundary: lists of token ids in, lists out, bad input refused."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import Required
from typing import TypedDict
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from specdec.checks import check_break_even
from specdec.checks import check_drafter
from specdec.checks import check_ids
from specdec.checks import check_limits
from specdec.checks import check_names
from specdec.checks import check_prompts
from specdec.checks import check_rule
from specdec.checks import check_sampling
from specdec.checks import check_stop
from specdec.checks import pad
from specdec.checks import padded_room
from specdec.checks import row_keys
from specdec.draft.drafter import Drafter
from specdec.loop import advance
from specdec.loop import advance_recorded
from specdec.loop import ALL_STEPS
from specdec.loop import result_of
from specdec.loop import start
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.statistics import summarize
from specdec.step import DecodeConfig
from specdec.step import Request
from specdec.tracing.trace import Block
from specdec.tracing.trace import blocks_of
from specdec.tracing.trace import row_forwards
from specdec.tracing.trace import Trace
from specdec.verify.accept import EOS
from specdec.verify.accept import LIMIT
from specdec.verify.accept import NOT_FINITE
from specdec.verify.accept import RUNNING
from specdec.verify.accept import STOP
from specdec.verify.stop_strings import StopTable

# Between two looks at whether somebody wants to stop.
_STEPS_BETWEEN_CHECKS = 8

_FINISH_REASONS = {
  RUNNING: 'cancelled',
  LIMIT: 'length',
  EOS: 'eos',
  STOP: 'stop',
  NOT_FINITE: 'error',
}


class Options(TypedDict, total=False):
  """Keyword arguments of `generate` and `Decoding`.

  Attributes:
    max_new_tokens: the limit, one for all or one per row; 0 compiles, decodes
      nothing. Needed.
    room_for_new_tokens: size of the buffers, at least `max_new_tokens`, which
      is the default. Calls with one room share a program, whatever the limit.
    drafter: guesses for the target; None, the default, is plain decoding.
    sampling: how to choose tokens; greedy by default.
    eos_ids: tokens that end a row; none by default.
    stop: stop strings, from `specdec.stop.build_stop_table`.
    verify: `match` (the default), `rejection` or `block`; see
      `specdec.verification`.
    children: how the drafter comes by its guesses if they are not to match, one
      of `specdec.verification.rejection.CHILDREN`. By default they are drawn
      without replacement where the topology is fixed and the drafter has a
      distribution, and the best ones elsewhere.
    log_probs: whether to return those of the new tokens; by default not.
    break_even: how many plain steps a speculative one takes on this machine, as
      scripts/tune.py measures it. Decoding then goes on plainly wherever
      speculation emits fewer tokens per step than that; the tokens are the
      same. None, the default: it speculates throughout.
  """

  max_new_tokens: Required[int | Sequence[int]]
  room_for_new_tokens: int | None
  drafter: Drafter | None
  sampling: Sampling
  eos_ids: Sequence[int]
  stop: StopTable | None
  verify: str
  children: str | None
  log_probs: bool
  break_even: float | None


@dataclasses.dataclass(frozen=True)
class Generation:
  """What was generated.

  Attributes:
    tokens: the new ids of each row; if an EOS or a stop string ended it, that
      is included.
    origins: of each of them, an index of `labels`.
    labels: who may have proposed a token: `target`, whose own it is, then the
      proposers of each stage, from the outermost in.
    log_probs: of each of them in the target's own distribution, before bias,
      penalty, temperature and filters; None if they were not asked for.
    finish_reasons: of each row `length` (the limit), `eos`, `stop` (a stop
      string), `cancelled`, or `error`.
    errors: of each row, what is wrong with it, or None.
    stats: the figures of `specdec.statistics.summarize`.
  """

  tokens: list[list[int]]
  origins: list[list[int]]
  labels: tuple[str, ...]
  log_probs: list[list[float]] | None
  finish_reasons: list[str]
  errors: list[str | None]
  stats: dict[str, Any]


class Decoding:
  """A decode that can be watched, and stopped, while it goes on.

  For example::

      decoding = specdec.Decoding(target, key, prompts, max_new_tokens=64)
      for new_tokens in decoding:  # of each row, block by block
        ...
      generation = decoding.result()  # at any time

  Prompts are padded to powers of two and the room for new tokens to multiples
  of 64, so that few shapes are compiled and short prompts do not pay for the
  longest context.

  Args:
    target: the model whose output is kept exactly.
    rng_key: one key, which is folded with the row number, or `[B]` keys: a row
      with a given key has the same tokens in any batch.
    prompts: B lists of token ids, of any lengths, none empty.
    **options: see `Options`.

  Raises:
    TypeError: an argument is missing or not known.
    ValueError: an argument cannot be used; says which and why.
  """

  def __init__(
    self,
    target: Model,
    rng_key: jax.Array,
    prompts: Sequence[Sequence[int]],
    **options: Unpack[Options],
  ):
    check_names(options, Options.__annotations__)
    definition = target.definition
    drafter = options.get('drafter')
    eos_ids = options.get('eos_ids', ())
    stop = options.get('stop')
    verify = options.get('verify', 'match')
    prompts = check_prompts(prompts, definition.vocab_size)
    batch_size = len(prompts)
    if drafter is not None:
      check_drafter(target, drafter)
    if stop is not None:
      check_stop(stop, batch_size, definition.vocab_size)
    room = options.get('room_for_new_tokens')
    limits = check_limits(
      prompts, options['max_new_tokens'], room, definition.max_positions
    )
    padded, self._prompt_lengths = pad(prompts)
    self._target, self._drafter = target, drafter
    self._config = DecodeConfig(
      max_new_tokens=padded_room(limits.max() if room is None else room),
      eos_ids=tuple(check_ids('eos_ids', eos_ids, definition.vocab_size)),
      verify=verify,
      children=check_rule(verify, options.get('children'), drafter),
      log_probs=options.get('log_probs', False),
    )
    self._request = Request(
      prompt=jnp.asarray(padded),
      prompt_length=jnp.asarray(self._prompt_lengths),
      limit=jnp.asarray(limits),
      row_keys=row_keys(rng_key, batch_size),
      sampling=check_sampling(
        options.get('sampling', Sampling()), batch_size, definition.vocab_size
      ),
      stop=stop,
      break_even=check_break_even(options.get('break_even')),
    )
    self._state = start(target, drafter, self._request, config=self._config)
    self._ends = self._prompt_lengths
    self._reasons = np.where(limits > 0, RUNNING, LIMIT)

  @property
  def done(self) -> bool:
    """Whether all rows are."""
    return bool(np.all(self._reasons != RUNNING))

  @property
  def finish_reasons(self) -> list[str | None]:
    """Of each row, see `Generation`; None while it goes on."""
    return [
      None if reason == RUNNING else _FINISH_REASONS[int(reason)]
      for reason in self._reasons
    ]

  def step(self, num_steps: int = 1) -> list[list[int]]:
    """Some target forwards of all rows that go on; their new tokens."""
    self._state = advance(
      self._target,
      self._drafter,
      self._request,
      self._state,
      np.int32(num_steps),
      config=self._config,
    )
    return self._new_tokens()

  def step_recorded(self) -> list[Block | None]:
    """One target forward of all rows that go on, and what happened in it.

    The tokens are those of `step`. Compiles a program of its own.

    Returns:
      Of each row its block; None if it was done before.
    """
    guard = self._state.guard
    before = row_forwards(self._state, self._drafter)
    self._state, record = advance_recorded(
      self._target,
      self._drafter,
      self._request,
      self._state,
      speculate=guard is None or bool(guard.speculating),
      config=self._config,
    )
    after = row_forwards(self._state, self._drafter)
    starts = self._ends
    return blocks_of(record, starts, self._new_tokens(), before, after)

  def record(self) -> list[list[Block]]:
    """To the end by `step_recorded`; the blocks of each row."""
    rows: list[list[Block]] = [[] for _ in self._ends]
    while not self.done:
      for blocks, block in zip(rows, self.step_recorded(), strict=True):
        if block is not None:
          blocks.append(block)
    return rows

  def _new_tokens(self) -> list[list[int]]:
    """Of each row, since the last look."""
    tokens, ends, self._reasons = jax.device_get(
      (self._state.tokens, self._state.length, self._state.reason)
    )
    spans = zip(tokens, self._ends, ends, strict=True)
    new = [row[begin:end].tolist() for row, begin, end in spans]
    self._ends = ends
    return new

  def run(self, should_stop: Callable[[], bool] | None = None) -> None:
    """To the end, or until somebody wants to stop; see `generate`."""
    if should_stop is None:
      self.step(ALL_STEPS)
    else:
      while not (self.done or should_stop()):
        self.step(_STEPS_BETWEEN_CHECKS)

  def __iter__(self) -> Iterator[list[list[int]]]:
    """The new tokens of each row, one step after the other, until all end."""
    while not self.done:
      yield self.step()

  def result(self) -> Generation:
    """All new tokens so far, and the statistics."""
    result = result_of(self._state)
    starts = self._prompt_lengths
    tokens, origins, log_probs, ends, reasons = jax.device_get(
      (
        result.tokens,
        result.origins,
        result.log_probs,
        result.length,
        result.reason,
      )
    )
    spans = [slice(*span) for span in zip(starts, ends, strict=True)]
    cut = lambda array: [array[row, span] for row, span in enumerate(spans)]
    lists = lambda array: [row.tolist() for row in cut(array)]
    drafter = self._drafter
    return Generation(
      tokens=lists(tokens),
      origins=lists(origins),
      labels=('target', *(drafter.labels if drafter is not None else ())),
      log_probs=None if log_probs is None else lists(log_probs),
      finish_reasons=[_FINISH_REASONS[int(reason)] for reason in reasons],
      errors=[
        f'row {row}: the target gave logits that are not finite for position'
        f' {end} (new token {end - begin})'
        if reason == NOT_FINITE
        else None
        for row, (begin, end, reason) in enumerate(
          zip(starts, ends, reasons, strict=True)
        )
      ],
      stats=summarize(
        result.counters,
        result.stage_counters,
        np.concatenate(cut(origins)),
        starts,
        ends - starts,
        target=self._target.definition,
        drafter=drafter,
        plain_steps=result.plain_steps,
      ),
    )


def generate(
  target: Model,
  rng_key: jax.Array,
  prompts: Sequence[Sequence[int]],
  *,
  should_stop: Callable[[], bool] | None = None,
  **options: Unpack[Options],
) -> Generation:
  """Continues each prompt; the drafter changes the speed, never the tokens.

  Args:
    target: see `Decoding`.
    rng_key: likewise.
    prompts: likewise.
    should_stop: asked now and then, from this thread; if it says yes, rows that
      are not done are cancelled, and have the tokens they have.
    **options: see `Options`.

  Returns:
    The new tokens and the statistics.

  Raises:
    ValueError: an argument cannot be used; says which and why.
  """
  decoding = Decoding(target, rng_key, prompts, **options)
  decoding.run(should_stop)
  return decoding.result()


def trace(
  target: Model,
  rng_key: jax.Array,
  prompts: Sequence[Sequence[int]],
  **options: Unpack[Options],
) -> list[Trace]:
  """Decodes like `specdec.generate`, and tells what happened in every step.

  The tokens are the same. It is slower: every step returns to the host.

  Args:
    target: see `specdec.Decoding`.
    rng_key: likewise.
    prompts: likewise.
    **options: see `specdec.generation.Options`.

  Returns:
    Of each row its trace. Without a tokenizer the text of a token is its
    number; `models.Generator.trace` has the real ones.

  Raises:
    TypeError: an argument is missing or not known.
    ValueError: an argument cannot be used; says which and why.
  """
  decoding = Decoding(target, rng_key, prompts, **options)
  rows = decoding.record()
  result = decoding.result()
  traces = []
  for row, blocks in enumerate(rows):
    prompt = [int(token) for token in prompts[row]]
    ids = {token for one in blocks for token in (*one.tokens, *one.emitted)}
    traces.append(
      Trace(
        prompt=''.join(f'{token} ' for token in prompt),
        prompt_tokens=tuple(prompt),
        labels=result.labels,
        blocks=tuple(blocks),
        pieces=tuple(f'{token} ' for token in result.tokens[row]),
        texts={token: str(token) for token in sorted(ids)},
        finish_reason=result.finish_reasons[row],
        log_probs=None
        if result.log_probs is None
        else tuple(result.log_probs[row]),
      )
    )
  return traces
