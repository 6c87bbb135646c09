"""The host boundary: lists of token ids in, lists out, bad input refused."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec import hosts
from specdec import loop
from specdec import model as model_lib
from specdec import statistics as statistics_lib
from specdec import step as step_lib
from specdec import watchers as watchers_lib
from specdec.draft import drafter as drafter_lib
from specdec.verify import accept

# Between two calls of `should_stop`.
_STEPS_BETWEEN_CHECKS = 8

_FINISH_REASONS = {
  accept.RUNNING: 'cancelled',
  accept.LIMIT: 'length',
  accept.EOS: 'eos',
  accept.STOP: 'stop',
  accept.NOT_FINITE: 'error',
}


@dataclasses.dataclass(frozen=True)
class Generation:
  """The result of a decode."""

  #: The new ids of each row, with the EOS or stop string that ended it.
  tokens: list[list[int]]
  origins: list[list[int]]  #: The source of each token, an index of `labels`.
  #: The sources of tokens: `target`, then the stages, outermost first.
  labels: tuple[str, ...]
  #: The log-probability of each token in the target's own distribution, before
  #: bias, penalty, temperature and filters; None if they were not requested.
  log_probs: list[list[float]] | None
  #: For each row `length` (the limit), `eos`, `stop` (a stop string),
  #: `cancelled`, or `error`.
  finish_reasons: list[str]
  errors: list[str | None]  #: For each row an error message, or None.
  stats: statistics_lib.Statistics  #: The figures of the decode.


def generation_of(
  result: loop.DecodeResult,
  starts: np.ndarray,
  *,
  request: step_lib.Request,
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
) -> Generation:
  """The result as lists; `starts [B]` are where new tokens begin."""
  log_probs = watchers_lib.log_probs(request.watchers, result.watchers)
  tokens, origins, log_probs, ends, reasons = hosts.read(
    (result.tokens, result.origins, log_probs, result.length, result.reason)
  )
  spans = [slice(*span) for span in zip(starts, ends, strict=True)]
  cut = lambda array: [array[row, span] for row, span in enumerate(spans)]
  lists = lambda array: [row.tolist() for row in cut(array)]
  excludes = any(adjuster.excludes for adjuster in request.adjusters)
  hint = ', or constraint and bias exclude all tokens' if excludes else ''
  return Generation(
    tokens=lists(tokens),
    origins=lists(origins),
    labels=('target', *drafter.labels),
    log_probs=None if log_probs is None else lists(log_probs),
    finish_reasons=[_FINISH_REASONS[int(reason)] for reason in reasons],
    errors=[
      f'row {row}: the target gave logits that are not finite for position'
      f' {end} (new token {end - begin}){hint}'
      if reason == accept.NOT_FINITE
      else None
      for row, (begin, end, reason) in enumerate(
        zip(starts, ends, reasons, strict=True)
      )
    ],
    stats=statistics_lib.summarize(
      (result.counters, result.stage_counters, result.plain_steps),
      np.concatenate(cut(origins)),
      starts,
      ends - starts,
      target=target.spec,
      drafter=drafter,
    ),
  )


def _row_forwards(
  state: step_lib.DecodeState, drafter: drafter_lib.Drafter
) -> dict[str, np.ndarray]:
  """The number of forwards of each row so far, `[B]`, by stage."""
  counted = {'target': state.counters.target_forwards} | {
    stage.name: stage_state.counters.row_forwards
    for stage, stage_state in zip(drafter.stages, state.stages, strict=True)
  }
  # Separately: `read` of the mapping would sort it by name.
  return {name: hosts.read(rows) for name, rows in counted.items()}


@dataclasses.dataclass(frozen=True)
class RecordedStep:
  """One step of a decode with its tree, see `specdec.tracing`."""

  record: step_lib.StepRecord  #: The tree and the accepted path of each row.
  starts: np.ndarray  #: `[B]`, the tokens of each text before the step.
  new_tokens: list[list[int]]  #: By row.
  #: The forwards of each row in the step, `[B]`, by stage; the target first.
  forwards: dict[str, np.ndarray]


@decode_options.documented(decode_options.Options)
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

  It takes the arguments of `generate`.

  Raises:
    ValueError: an argument cannot be used; gives the reason.
  """

  def __init__(
    self,
    target: model_lib.LanguageModel,
    rng_key: jax.Array,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    room_for_new_tokens: int | None = None,
    drafter: drafter_lib.Drafter = drafter_lib.PLAIN,
    **options: Unpack[decode_options.Options],
  ):
    spec = target.spec
    prompts = arguments_lib.to_prompts(prompts, spec.vocab_size)
    limits, room = arguments_lib.to_limits(
      prompts, max_new_tokens, room_for_new_tokens, spec.max_positions
    )
    padded, lengths = arguments_lib.pad(prompts)
    self._target, self._drafter = target, drafter
    self._request, self._config = decode_options.prepare(
      target,
      drafter,
      rng_key,
      decode_options.Prompts(padded, lengths, limits, room),
      options,
    )
    self._state = loop.start(
      target, drafter, self._request, config=self._config
    )
    self._begin(prompts, lengths, limits, num_kept=np.zeros_like(limits))

  def _begin(
    self,
    prompts: list[list[int]],
    lengths: np.ndarray,
    limits: np.ndarray,
    *,
    num_kept: np.ndarray,
  ) -> None:
    """Sets what is known on the host before the first step."""
    #: The ids of each prompt.
    self.prompts: list[list[int]] = prompts
    self._prompt_lengths, self._ends = lengths, lengths
    self._reasons = np.where(limits > 0, accept.RUNNING, accept.LIMIT)
    #: By row, the tokens of its prompt that `extend` did not read again.
    self.num_kept: list[int] = num_kept.tolist()

  @property
  def done(self) -> bool:
    """Whether all rows have ended."""
    return bool(np.all(self._reasons != accept.RUNNING))

  @property
  def finish_reasons(self) -> list[str | None]:
    """By row, see `Generation`; None for a row that has not ended."""
    return [
      None if reason == accept.RUNNING else _FINISH_REASONS[int(reason)]
      for reason in self._reasons
    ]

  def extend(
    self,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sections: Sequence[int] | None = None,
  ) -> None:
    """Goes on from other prompts, such as the next turn of a conversation.

    The tokens that a prompt has in common with the text of its row so far,
    prompt and new tokens, are not read again. Everything else is as if a decode
    of these prompts began. The only program that is compiled for them is the
    one that reads.

    Args:
      prompts: one per row.
      max_new_tokens: the limit, one for all rows or one per row. With it, a
        prompt must fit into the buffers: the prompts that the decode began
        with, padded, and `room_for_new_tokens`.
      sections: in which the new texts begin, see `stop_strings.StopTable`.
        None: as the old texts.

    Raises:
      ValueError: an argument cannot be used; nothing has changed then.
    """
    spec, (num_rows, num_slots) = self._target.spec, self._state.tokens.shape
    prompts = arguments_lib.to_prompts(prompts, spec.vocab_size)
    if len(prompts) != num_rows:
      raise ValueError(
        f'prompts must be one per row ({num_rows}), got {len(prompts)}'
      )
    limits, _ = arguments_lib.to_limits(
      prompts, max_new_tokens, None, spec.max_positions
    )
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
      if len(prompt) + limit > num_slots:
        raise ValueError(
          f'prompt {row} of {len(prompt)} tokens and max_new_tokens={limit}'
          f' exceed the {num_slots} slots of this decode; begin another, with a'
          ' larger room_for_new_tokens'
        )
    tokens, lengths = arguments_lib.pad(prompts, num_slots)
    self._request = self._request.replace(
      prompt_length=jnp.asarray(lengths), limit=jnp.asarray(limits)
    )
    if sections is not None:
      watchers = watchers_lib.in_sections(self._request.watchers, sections)
      self._request = self._request.replace(watchers=watchers)
    self._state, kept = loop.extend(
      self._target, self._drafter, self._request, self._state, tokens
    )
    self._begin(prompts, lengths, limits, num_kept=hosts.read(kept))

  def step(self, num_steps: int = 1) -> list[list[int]]:
    """Takes some steps of all rows that have not ended; their new tokens."""
    self._state = loop.advance(
      self._target,
      self._drafter,
      self._request,
      self._state,
      np.int32(num_steps),
      np.int32(len(self._ends)),
      config=self._config,
    )
    return self._new_tokens()

  def step_recorded(self) -> RecordedStep:
    """Takes one step of all rows that have not ended, and records its tree.

    The tokens are the same as by `step`. It compiles a program of its own.
    """
    before, starts = _row_forwards(self._state, self._drafter), self._ends
    self._state, record = loop.advance_recorded(
      self._target,
      self._drafter,
      self._request,
      self._state,
      speculate=bool(self._state.fallback.speculating | self._drafter.looks_up),
      config=self._config,
    )
    after = _row_forwards(self._state, self._drafter)
    forwards = {name: after[name] - before[name] for name in after}
    return RecordedStep(record, starts, self._new_tokens(), forwards)

  def _new_tokens(self) -> list[list[int]]:
    """The new tokens of each row since the last look."""
    tokens, ends, self._reasons = hosts.read(
      (self._state.tokens, self._state.length, self._state.reason)
    )
    spans = zip(tokens, self._ends, ends, strict=True)
    new = [row[begin:end].tolist() for row, begin, end in spans]
    self._ends = ends
    return new

  def run(self, should_stop: Callable[[], bool] | None = None) -> None:
    """Decodes to the end, or until `should_stop` returns true."""
    if should_stop is None:
      self.step(loop.ALL_STEPS)
    else:
      while not (self.done or should_stop()):
        self.step(_STEPS_BETWEEN_CHECKS)

  def __iter__(self) -> Iterator[list[list[int]]]:
    """Yields the new tokens of each row, step by step, until all have ended."""
    while not self.done:
      yield self.step()

  def result(self) -> Generation:
    """All new tokens so far, and the statistics."""
    return generation_of(
      loop.result_of(self._state),
      self._prompt_lengths,
      request=self._request,
      target=self._target,
      drafter=self._drafter,
    )


@decode_options.documented(decode_options.Options)
def generate(
  target: model_lib.LanguageModel,
  rng_key: jax.Array,
  prompts: Sequence[Sequence[int]],
  *,
  max_new_tokens: int | Sequence[int],
  room_for_new_tokens: int | None = None,
  drafter: drafter_lib.Drafter = drafter_lib.PLAIN,
  should_stop: Callable[[], bool] | None = None,
  **options: Unpack[decode_options.Options],
) -> Generation:
  """Continues each prompt; the drafter changes the speed, not the output.

  With `verify='match'` plain decoding gives the same tokens, and a row's tokens
  depend on its key alone. The other rules keep the distribution.

  Args:
    target: the model whose output is kept exactly.
    rng_key: one key, or one per row `[B]`.
    prompts: B lists of token ids, of any lengths, none empty.
    max_new_tokens: the limit, one for all or one per row.
    room_for_new_tokens: size of the buffers; calls of one size share a program.
    drafter: drafts for the target; `PLAIN` is plain decoding.
    should_stop: called now and then; true cancels the rows that are not done.

  Returns:
    The new tokens and the statistics.

  Raises:
    ValueError: an argument cannot be used; gives the reason.
  """
  decoding = Decoding(
    target,
    rng_key,
    prompts,
    max_new_tokens=max_new_tokens,
    room_for_new_tokens=room_for_new_tokens,
    drafter=drafter,
    **options,
  )
  decoding.run(should_stop)
  return decoding.result()
