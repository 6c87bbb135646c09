"""Finds the fastest way to decode on this machine, by decoding.

The target decodes sample prompts in each way of a fixed list, in turns with
plain decoding. The faster half of the ways decodes other samples, and so on
until the time is spent. That is done for each of a few padded lengths of
prompts, which get equal shares of the time.

A way's speed counts the prompt: new tokens over the time of reading and
decoding. Samples differ, and so does the machine from minute to minute, so what
is compared is the time of plain decoding of the same sample just before or
after, over the way's own time.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
import time
from typing import Any
from typing import NamedTuple

import jax

import specdec
from specdec import arguments as arguments_lib
from specdec.models.lab import task as task_lib
from specdec.models.text import chat_template
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib

PLAN_SECONDS = 300.0

_SECONDS_PER_LENGTH, _MOST_LENGTHS = 60.0, 4
_FIRST_ROUND = 0.7  # Its end, as a share of the time of a length.
_LEAST_TOKENS = 16  # Limits below these are too short to plan.

PLAIN = 'plain'

_SMALL = {'num_nodes': 8, 'width': 2, 'branching': 2, 'rounds': 4}
_LARGE = {'num_nodes': 32, 'width': 8, 'branching': 4, 'rounds': 4}
_TABLE = {'num_nodes': 8, 'width': 4, 'branching': 4, 'capacity': 128}
_TAIL = 256  # Tokens of a long prompt that the draft reads.

# Name, method and options, in the order in which they are tried: the time may
# be spent before the last. Capacities hold all candidate tokens; a larger array
# takes longer to sort.
_CANDIDATES: tuple[tuple[str, str, dict[str, int]], ...] = (
  ('staged N=8', 'staged', _SMALL),
  ('lookup N=8', 'lookup', _TABLE),
  (
    f'staged N=8, {_TAIL} of the prompt',
    'staged',
    _SMALL | {'draft_prompt': _TAIL},
  ),
  ('chain 4', 'chain', {'num_draft_tokens': 4}),
  ('tree N=8', 'tree', _SMALL | {'capacity': 32}),
  ('chain 2', 'chain', {'num_draft_tokens': 2}),
  ('ngram+lookup N=8', 'ngram+lookup', _TABLE),
  ('staged N=32', 'staged', _LARGE),
)


class Run(NamedTuple):
  """A decode of a batch of prompts, perhaps cut short."""

  reading: float  # Seconds in which the prompts were read.
  decoding: float  # Seconds after that.
  tokens: int  # New tokens of all rows.
  steps: int  # Target forwards after the prompt, counted once for all rows.
  expected: int  # New tokens if it had not been cut short.

  def seconds(self, tokens: int) -> float:
    """The time of reading and of new tokens at the speed of this run."""
    return self.reading + tokens * self.decoding / self.tokens


@dataclasses.dataclass(frozen=True)
class Trial:
  """A candidate, and its runs, each with a run of plain decoding."""

  name: str
  method: str
  drafting: settings_lib.DraftSettings
  drafter: specdec.Drafter
  pairs: list[tuple[Run, Run]]  # Plain decoding, then the candidate.

  @property
  def speed(self) -> float:
    """The speed over plain decoding, the prompt counted."""
    plain, drafted = (
      sum(pair[arm].seconds(pair[0].expected) for pair in self.pairs)
      for arm in (0, 1)
    )
    return plain / drafted


def break_even(trials: Sequence[Trial]) -> float:
  """The time of a step of a way, at all lengths, in plain steps."""
  pairs = [pair for trial in trials for pair in trial.pairs]
  plain, drafted = (
    sum(pair[arm].decoding for pair in pairs)
    / sum(pair[arm].steps for pair in pairs)
    for arm in (0, 1)
  )
  return drafted / plain


def list_candidates(
  base: settings_lib.DraftSettings, *, has_draft: bool, length: int
) -> list[tuple[str, str, settings_lib.DraftSettings]]:
  """Name, method and settings in the order in which they are tried.

  `base` has the settings that candidates do not vary. If it names an inner
  drafter, candidates with other inner drafters are left out. Candidates whose
  draft reads the end of a prompt are left out where `length` is no longer, or
  if `base` says how much the draft reads.
  """
  methods = {*(settings_lib.INNERS[1:] if base.inner is None else [base.inner])}
  if has_draft:
    methods |= {'chain', 'tree'}
    methods |= {'staged'} if base.inner != 'none' else set()
  return [
    (
      name,
      method,
      settings_lib.with_options(base, {**options, 'topology': None}),
    )
    for name, method, options in _CANDIDATES
    if method in methods
    and (
      'draft_prompt' not in options
      or (base.draft_prompt is None and options['draft_prompt'] < length)
    )
  ]


def sample_batches(
  prompts: Sequence[Sequence[int]], batch_size: int, num_lengths: int
) -> dict[int, list[list[list[int]]]]:
  """Full batches of prompts (token ids) by padded length.

  Prompts are padded to powers of two, and each padded length is a program. Only
  the most frequent lengths are used, the most frequent first; some prompts are
  repeated where they do not fill the last batch.
  """
  by_length: dict[int, list[list[int]]] = {}
  for prompt in sorted(prompts, key=len):
    length = arguments_lib.padded_length(len(prompt))
    by_length.setdefault(length, []).append(list(prompt))
  frequent = sorted(by_length, key=lambda n: len(by_length[n]), reverse=True)
  batches = {}
  for length in frequent[:num_lengths]:
    usable = by_length[length]
    cycle, starts = itertools.cycle(usable), range(0, len(usable), batch_size)
    batches[length] = [[*itertools.islice(cycle, batch_size)] for _ in starts]
  return batches


@dataclasses.dataclass(frozen=True)
class Search:
  """The arguments that all runs share.

  `options` are arguments of `specdec.generate`; `clock` returns seconds.
  """

  pair: pair_lib.Pair
  options: dict[str, Any]
  key: jax.Array
  drafting: settings_lib.DraftSettings
  clock: Callable[[], float]
  report: Callable[[str], None]

  def run(
    self,
    drafter: specdec.Drafter,
    prompts: list[list[int]],
    *,
    limit: int,
    end: float,
  ) -> Run:
    """Decodes a batch, cut short at the time `end` after some steps."""
    checks, room = itertools.count(), self.options['room_for_new_tokens']
    start = self.clock()
    decoding = specdec.Decoding(
      self.pair.target,
      self.key,
      prompts,
      drafter=drafter,
      max_new_tokens=limit,
      **self.options,
    )
    decoding.step(0)  # Waits until the prompts are read; compiles.
    read = self.clock()
    decoding.run(lambda: next(checks) > 0 and self.clock() >= end)
    decoded = self.clock()
    result = decoding.result()
    # An unfinished text would have gone on to the limit.
    ends = zip(result.tokens, result.finish_reasons, strict=True)
    expected = sum(len(new) if why == 'eos' else room for new, why in ends)
    return Run(
      reading=read - start,
      decoding=decoded - read,
      tokens=result.stats.new_tokens,
      steps=result.stats.reads['target']['forwards'],
      expected=expected,
    )


def _first_round(
  search: Search,
  length: int,
  prompts: list[list[int]],
  trials: list[Trial],
  *,
  first_end: float,
  end: float,
) -> None:
  """Adds the candidates of a length, each with a run of a quarter's tokens."""
  limit = max(search.options['room_for_new_tokens'] // 4, _LEAST_TOKENS)
  search.run(specdec.PLAIN, prompts, limit=0, end=end)  # compiles
  has_draft = search.pair.drafting_model is not None
  for name, method, drafting in list_candidates(
    search.drafting, has_draft=has_draft, length=length
  ):
    if trials and search.clock() >= first_end:
      search.report('out of time; other ways are left out')
      return
    try:
      drafter = drafters.make_drafter(method, search.pair, drafting)
    except ValueError as error:  # such as an n-gram with another tokenizer
      search.report(f'{name} is left out: {error}')
      continue
    search.run(drafter, prompts, limit=0, end=end)  # compiles
    plain = search.run(specdec.PLAIN, prompts, limit=limit, end=end)
    if not plain.tokens:
      search.report('the target ends all sample prompts at once')
      return
    drafted = search.run(drafter, prompts, limit=limit, end=end)
    trials.append(Trial(name, method, drafting, drafter, [(plain, drafted)]))
    search.report(f'{length} tokens, {name}: {trials[-1].speed:.2f}x')


def _try_length(
  search: Search,
  length: int,
  batches: list[list[list[int]]],
  trials: list[Trial],
  end: float,
) -> None:
  """Tries the ways at a length until the time `end`."""
  start, room = search.clock(), search.options['room_for_new_tokens']
  first_end = start + _FIRST_ROUND * (end - start)
  _first_round(search, length, batches[0], trials, first_end=first_end, end=end)
  alive = sorted(trials, key=lambda trial: trial.speed, reverse=True)
  for prompts in itertools.cycle([*batches[1:], batches[0]]):
    alive = alive[: (len(alive) + 1) // 2]
    if not alive or search.clock() >= end:
      return
    plain = search.run(specdec.PLAIN, prompts, limit=room, end=end)
    for trial in alive:
      if search.clock() >= end:
        return
      drafted = search.run(trial.drafter, prompts, limit=room, end=end)
      if plain.tokens and drafted.tokens:
        trial.pairs.append((plain, drafted))
    alive.sort(key=lambda trial: trial.speed, reverse=True)
    speeds = ', '.join(f'{trial.name} {trial.speed:.2f}x' for trial in alive)
    search.report(f'{length} tokens: {speeds}')


def plan_of(
  trials: dict[int, list[Trial]],
  drafting: settings_lib.DraftSettings,
  context: plan_lib.Context,
) -> plan_lib.Plan:
  """The fastest way of each length, and plain decoding.

  Only ways with the most runs count; the others were dropped before.
  """
  ways: dict[str, list[Trial]] = {}
  speeds: dict[str, dict[int, float]] = {PLAIN: {}}
  for length, tried in trials.items():
    most = max(len(trial.pairs) for trial in tried)
    best = max(
      (trial for trial in tried if len(trial.pairs) == most),
      key=lambda trial: trial.speed,
    )
    plain = [pair[0] for pair in best.pairs]
    tokens = sum(run.expected for run in plain)
    per_second = tokens / sum(run.seconds(run.expected) for run in plain)
    speeds[PLAIN][length] = per_second
    if best.speed > 1:
      ways.setdefault(best.name, []).append(best)
      speeds.setdefault(best.name, {})[length] = best.speed * per_second
  plain_way = plan_lib.Way(
    name=PLAIN,
    method=PLAIN,
    drafting=drafting,  # Its store gets what is decoded plainly, too.
    break_even=1.0,
    tokens_per_second=speeds[PLAIN],
  )
  drafted = [
    plan_lib.Way(
      name=name,
      method=won[0].method,
      drafting=won[0].drafting,
      break_even=break_even(won),
      tokens_per_second=speeds[name],
    )
    for name, won in ways.items()
  ]
  return plan_lib.Plan(
    ways=(plain_way, *drafted), context=context, usual_length=next(iter(trials))
  )


def _try_all(
  search: Search, batches: dict[int, list[list[list[int]]]], seconds: float
) -> dict[int, list[Trial]]:
  """The trials of each length, which get equal shares of the time."""
  start, trials = search.clock(), dict[int, list[Trial]]()
  try:
    for place, (length, of_length) in enumerate(batches.items(), 1):
      trials[length] = []
      end = start + seconds * place / len(batches)
      _try_length(search, length, of_length, trials[length], end)
  except KeyboardInterrupt:
    if not any(trials.values()):
      raise
    search.report('interrupted; the plan is made from what is known so far')
  return {length: tried for length, tried in trials.items() if tried}


def make_plan(
  pair: pair_lib.Pair,
  prompts: Sequence[chat_template.Prompt],
  task: task_lib.Task,
  *,
  context: plan_lib.Context,
  plan_seconds: float = PLAN_SECONDS,
  clock: Callable[[], float] = time.perf_counter,
  report: Callable[[str], None] = lambda line: None,
) -> plan_lib.Plan:
  """Tries the candidates, and makes a plan of the fastest.

  Args:
    pair: the models of the task.
    prompts: samples of what will be decoded, see `sample_batches`.
    task: what the plan is for; the candidates vary some of its settings.
    context: what the plan depends on.
    plan_seconds: the time, which a compilation that has begun may exceed.
    clock: returns seconds.
    report: called with each line of progress.

  Raises:
    ValueError: an argument cannot be used.
    KeyboardInterrupt: the user interrupts before any way was tried.
  """
  if task.max_new_tokens < _LEAST_TOKENS:
    raise ValueError(
      f'max_new_tokens must be at least {_LEAST_TOKENS} to plan, got'
      f' {task.max_new_tokens}'
    )
  if not plan_seconds > 0:
    raise ValueError(f'plan_seconds must be positive, got {plan_seconds}')
  start = clock()
  search = Search(
    pair=pair,
    options={
      'room_for_new_tokens': task.max_new_tokens,
      'sampling': task.sampling,
      'eos_ids': pair.eos_ids,
    },
    key=jax.random.key(task.seed),
    drafting=task.drafting,
    clock=clock,
    report=lambda line: report(f'{clock() - start:.0f} s: {line}'),
  )
  num_lengths = int(plan_seconds // _SECONDS_PER_LENGTH)
  num_lengths = min(max(num_lengths, 1), _MOST_LENGTHS)
  batches = sample_batches(pair.ids_of(prompts), task.batch_size, num_lengths)
  trials = _try_all(search, batches, plan_seconds)
  if not trials:
    raise ValueError(
      'nothing was measured: the target ends all sample prompts at once, or'
      ' nothing drafts; give other prompts, a draft or another inner drafter'
    )
  return plan_of(trials, task.drafting, context)
