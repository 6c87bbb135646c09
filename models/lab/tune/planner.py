"""Finds the fastest way to decode on this machine.

1. The target decodes sample prompts plainly, those of the usual padded length
   and of the next most frequent one.
2. V(N), the time of a target forward over N nodes, is measured.
3. So is how long target and draft read prompts of several lengths.
4. Each candidate of a fixed list replays the usual samples (see `replay`), for
   which the target is not needed. Its counts and V(N) predict its speed.
5. Plain decoding and the candidates that are predicted to be fastest, one that
   drafts from all of a prompt, from its end, and without a draft model, are
   decoded with the target, interleaved, at both lengths. They are the ways of
   the plan, among which a request chooses (`plan.choose`); those
   that are nowhere faster after the prompt are left out.

When the time budget is spent or the user interrupts, a plan is made from what
is known by then.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import sys
import time
from typing import Any

import jax
import numpy as np

import specdec
from specdec import arguments as arguments_lib
from specdec import statistics as statistics_lib
from specdec.models.lab import machine
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import exactness
from specdec.models.lab.bench import optimal
from specdec.models.lab.bench import replay
from specdec.models.lab.tune import trials
from specdec.models.text import chat_template
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib

PLAN_SECONDS = 300.0
NODE_COUNTS = (1, 2, 4, 8, 16, 32)
"""The N for which V is measured; V is linear in between."""

_LENGTHS = (64, 256, 1024, 2048)  # of prompts whose reading is timed

# Where each part ends, as a share of the time budget. The rest is for what
# cannot be cut short: a compilation, or the steps that are running.
_SAMPLING_ENDS, _COSTS_END, _READING_ENDS = 0.12, 0.27, 0.37
_REPLAYS_END, _COMPILING_ENDS, _DECODING_ENDS = 0.5, 0.72, 0.92

_MOST_TOKENS = 8.0  # of a step, realistically
_LEAST_TOKENS = 16  # of a decode that is cut short
_LEAST_CHECKS = 2  # of the clock, after eight steps each
_MAX_BRANCHING, _MAX_DEPTH = 8, 8  # of the fixed tree


def sample_batches(
  prompts: Sequence[Sequence[int]], batch_size: int
) -> list[list[list[int]]]:
  """Full batches of prompts (token ids) of two padded lengths, in turns.

  Prompts are padded to powers of two, and each padded length is a program. Only
  prompts of the two most frequent padded lengths are used, the most frequent
  first; some are repeated where they do not fill the last batch.
  """
  by_length: dict[int, list[list[int]]] = {}
  for prompt in sorted(prompts, key=len):
    length = arguments_lib.padded_length(len(prompt))
    by_length.setdefault(length, []).append(list(prompt))
  batches = []
  for usable in sorted(by_length.values(), key=len, reverse=True)[:2]:
    cycle, starts = itertools.cycle(usable), range(0, len(usable), batch_size)
    batches.append([[*itertools.islice(cycle, batch_size)] for _ in starts])
  in_turns = itertools.zip_longest(*batches)
  return [batch for turn in in_turns for batch in turn if batch]


@dataclasses.dataclass(frozen=True)
class _Search:
  """The arguments that all steps of a search share.

  `options` are arguments of `specdec.generate`, and `seconds_left` returns the
  seconds until a share of the budget is spent.
  """

  pair: pair_lib.Pair
  options: dict[str, Any]
  key: jax.Array
  drafting: settings_lib.DraftSettings
  seconds_left: Callable[[float], float]
  report: Callable[[str], None]

  def is_late(self, share: float) -> bool:
    return self.seconds_left(share) <= 0

  def decode(
    self,
    target: specdec.LanguageModel,
    drafter: specdec.Drafter,
    sample: trials.Sample,
    share: float,
    limit: int = sys.maxsize,
  ) -> tuple[float, specdec.Generation]:
    """A decode, cut short when a share is spent, and its seconds."""
    checks = itertools.count()
    is_late = lambda: next(checks) >= _LEAST_CHECKS and self.is_late(share)
    decoding = specdec.Decoding(
      target,
      self.key,
      sample.prompts,
      drafter=drafter,
      max_new_tokens=[min(len(new), limit) for new in sample.new],
      **self.options,
    )
    decoding.step(0)  # Waits until the prompts are read; compiles.
    read = time.perf_counter()
    decoding.run(is_late)
    return time.perf_counter() - read, decoding.result()


def _decode_samples(
  search: _Search, batches: list[list[list[int]]]
) -> trials.Samples:
  """Decodes the prompts plainly."""
  room, target = search.options['room_for_new_tokens'], search.pair.target
  samples, ends = list[trials.Sample](), 0
  for batch in batches:
    if samples and search.is_late(_SAMPLING_ENDS):
      break
    any_text = trials.Sample(batch, [[0] * room for _ in batch])
    seconds, generation = search.decode(
      target, specdec.PLAIN, any_text, _SAMPLING_ENDS
    )
    samples.append(trials.Sample(batch, generation.tokens))
    ends += generation.finish_reasons.count('eos')
    search.report(
      f'sample batch {len(samples)} of {len(batches)}, {any_text.length} slots:'
      f' {generation.stats.new_tokens} tokens in {seconds:.1f} s'
    )
  count = lambda some: sum(len(new) for sample in some for new in sample.new)
  found = trials.Samples(samples, room, ends / max(count(samples), 1))
  if not count(found.usual):
    raise ValueError(
      'the target ends all sample prompts of the usual length at once; give'
      ' other prompts'
    )
  return found


def _measure_costs(search: _Search, first: trials.Sample) -> machine.StepCosts:
  """Measures V(N) halfway through the first texts."""
  slots, room = arguments_lib.padded_shape(
    first.prompts, search.options['room_for_new_tokens']
  )
  halfway = np.mean([*map(len, first.prompts), *map(len, first.texts)])
  costs = machine.measure_step_costs(
    search.pair.target,
    first.texts,
    prompt_slots=slots,
    max_new_tokens=room,
    context=max(2, int(halfway)),
    node_counts=NODE_COUNTS,
    effort=machine.Effort(
      num_steps=4,
      most_tokens=_MOST_TOKENS,
      is_late=lambda: search.is_late(_COSTS_END),
    ),
  )
  times = costs.verification.items()
  listed = ', '.join(f'{size}: {1e3 * seconds:.2f}' for size, seconds in times)
  search.report(
    f'milliseconds of a target forward by number of nodes: {listed}'
  )
  return costs


def _measure_reading(
  search: _Search, first: trials.Sample
) -> dict[int, tuple[float, float]]:
  """The seconds in which target and draft read prompts, by padded length."""
  target, drafter = search.pair.target, specdec.PLAIN
  if search.pair.drafting_model is not None:
    options = {'num_draft_tokens': 1, 'draft_prompt': None, 'topology': None}
    drafting = settings_lib.with_options(search.drafting, options)
    drafter = drafters.make_drafter('chain', search.pair, drafting)
  room = search.options['room_for_new_tokens']

  def seconds(
    one: specdec.LanguageModel, its_drafter: specdec.Drafter
  ) -> float:
    start = time.perf_counter()
    specdec.Decoding(
      one,
      search.key,
      prompts,
      drafter=its_drafter,
      max_new_tokens=0,
      **search.options,
    ).result()
    return time.perf_counter() - start

  reading, last = dict[int, tuple[float, float]](), 0.0
  for length in sorted({first.length, *_LENGTHS}):
    size = length * 3 // 4  # The rest is padding.
    if reading and (
      size + room > target.spec.max_positions
      or search.seconds_left(_READING_ENDS) < 4 * last
    ):
      break
    prompts = [np.resize(one, size).tolist() for one in first.prompts]
    start = time.perf_counter()
    arms = (
      (target, specdec.PLAIN),
      (replay.oracle_target(target, prompts), drafter),
    )
    for arm in arms:  # compiles
      seconds(*arm)
    of_target, of_draft = (seconds(*arm) for arm in arms)
    by_draft = f', by a draft in {of_draft:.2f} s' if drafter.stages else ''
    search.report(f'{length} tokens are read in {of_target:.2f} s{by_draft}')
    reading[length] = of_target, of_draft if drafter.stages else 0.0
    last = time.perf_counter() - start
  return reading


def _replay(
  search: _Search,
  candidate: plan_lib.Candidate,
  samples: list[trials.Sample],
  costs: machine.StepCosts,
) -> trials.Tried | None:
  """Counts and times the decodes of a candidate, without the target."""
  name = candidate.name
  try:
    drafter = drafters.make_drafter(
      candidate.method, search.pair, candidate.drafting
    )
  except ValueError as error:  # such as an n-gram with another tokenizer
    search.report(f'{name} is left out: {error}')
    return None
  num_nodes = drafter.shape.num_nodes
  if num_nodes > max(costs.verification):
    search.report(f'{name} is left out: V({num_nodes}) was not measured')
    return None
  stats, seconds = list[statistics_lib.Statistics](), 0.0
  for sample in samples:
    if stats and search.is_late(_REPLAYS_END):
      break
    oracle = replay.oracle_target(search.pair.target, sample.texts)
    taken, found = search.decode(oracle, drafter, sample, _REPLAYS_END)
    seconds += taken
    stats.append(found.stats)
  return trials.Tried(
    candidate,
    drafter,
    tokens=sum(counts.new_tokens for counts in stats),
    forwards=sum(counts.target_forwards for counts in stats),
    steps=sum(counts.reads['target']['forwards'] for counts in stats),
    seconds=seconds,
    decodes=[],
  )


def _replay_all(
  search: _Search,
  tried: dict[str, trials.Tried],
  samples: trials.Samples,
  costs: machine.StepCosts,
) -> None:
  """Adds the candidates to `tried`, by name, plain decoding first."""
  listed = trials.list_candidates(
    search.drafting,
    has_draft=search.pair.drafting_model is not None,
    longest=max(sample.length for sample in samples.batches),
  )
  for candidate in itertools.chain(
    listed, _fixed_trees(search, tried, samples.usual, costs)
  ):
    if len(tried) > 1 and search.is_late(_REPLAYS_END):
      search.report('out of time for replays; other candidates are left out')
      break
    if found := _replay(search, candidate, samples.usual, costs):
      tried[candidate.name] = found
      search.report(
        f'{candidate.name}:'
        f' {found.tokens_per_second(costs):.1f} tokens/s predicted,'
        f' block efficiency {found.block_efficiency:.2f}'
      )


def _fixed_trees(
  search: _Search,
  tried: Mapping[str, trials.Tried],
  samples: list[trials.Sample],
  costs: machine.StepCosts,
) -> Iterator[plan_lib.Candidate]:
  """The best fixed tree, if it is predicted to be faster than plain.

  The time of a forward of the draft is that of the first chain in `tried`.
  """
  chains = (
    found for found in tried.values() if found.candidate.method == 'chain'
  )
  first = next(chains, None)
  if first is None or search.pair.draft is None:
    return  # A head cannot be asked for ranks without its target.
  # The rest of a step is small and is counted as drafting.
  forward = first.drafting_seconds / (first.num_nodes - 1)
  plain = tried[trials.PLAIN].step_seconds(costs)
  ranks = _token_ranks(search, samples)
  topology = optimal.fastest_tree(
    optimal.acceptance_by_rank(ranks, _MAX_BRANCHING).tolist(),
    num_nodes=max(costs.verification),
    max_depth=_MAX_DEPTH,
    seconds=lambda nodes, depth: (
      depth * forward + costs.of_nodes(nodes) if depth else plain
    ),
  )
  if topology is not None:
    yield plan_lib.Candidate(
      name=f'fixed tree N={topology.num_nodes} depth={topology.max_depth}',
      method='tree',
      drafting=settings_lib.with_options(
        search.drafting, {'topology': topology}
      ),
    )


def _token_ranks(search: _Search, samples: list[trials.Sample]) -> np.ndarray:
  """Ranks of the new tokens of all texts among the draft's predictions."""
  draft, ranks = search.pair.draft, []
  assert draft is not None
  vocab_size = draft.spec.vocab_size
  params = arguments_lib.to_params(search.options['sampling'], 1, vocab_size)
  for prompts, texts in ((s.prompts, s.texts) for s in samples):
    keys = arguments_lib.row_keys(search.key, len(texts))
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
      tokens = exactness.padded(text)[:, : draft.spec.max_positions]
      found = replay.next_token_ranks(
        draft, tokens, keys[row : row + 1], params
      )
      ranks.append(np.asarray(found)[0, len(prompt) - 1 : len(text) - 1])
  return np.concatenate(ranks)


def _decode_finalists(
  search: _Search,
  tried: Mapping[str, trials.Tried],
  samples: list[trials.Sample],
  costs: machine.StepCosts,
) -> None:
  """Decodes with the target, interleaved, what may become ways of the plan."""
  finalists = trials.fastest_by_reading(tried, costs)
  target, ready = search.pair.target, dict[int, list[trials.Tried]]()
  for sample in samples:
    if sample.length in ready:
      continue
    for found in finalists:
      if sum(map(len, ready.values())) > 1 and search.is_late(_COMPILING_ENDS):
        break
      search.report(f'compiling {found.candidate.name}, {sample.length} slots')
      search.decode(target, found.drafter, sample, _DECODING_ENDS, 0)
      ready.setdefault(sample.length, []).append(found)
  search.report('decoding with the target, interleaved')
  for index, sample in enumerate(samples):
    if index and search.is_late(_DECODING_ENDS):
      break
    in_turn = ready.get(sample.length, [])
    for found in in_turn[:: 1 if index % 2 == 0 else -1]:
      seconds, generation = search.decode(
        target, found.drafter, sample, _DECODING_ENDS
      )
      if tokens := generation.stats.new_tokens:
        found.decodes.append(trials.Decoded(sample.length, seconds, tokens))


def make_plan(
  pair: pair_lib.Pair,
  prompts: Sequence[chat_template.Prompt],
  task: task_lib.Task,
  *,
  context: plan_lib.Context,
  plan_seconds: float = PLAN_SECONDS,
  clock: Callable[[], float] = time.monotonic,
  report: Callable[[str], None] = lambda line: None,
) -> plan_lib.Plan:
  """Measures and tries the candidates; see the module.

  Args:
    pair: the models of the task.
    prompts: samples of what will be decoded, see `sample_batches`.
    task: what the plan is for; the candidates vary some of its settings.
    context: what the plan depends on.
    plan_seconds: the time budget, which a compilation that has begun may
      exceed.
    clock: returns seconds.
    report: called with each line of progress.

  Raises:
    ValueError: an argument cannot be used.
    KeyboardInterrupt: the user interrupts before any drafter was tried.
  """
  if task.max_new_tokens < _LEAST_TOKENS:
    least = f'max_new_tokens must be at least {_LEAST_TOKENS} to plan'
    raise ValueError(f'{least}, got {task.max_new_tokens}')
  if not plan_seconds > 0:
    raise ValueError(f'plan_seconds must be positive, got {plan_seconds}')
  start = clock()
  search = _Search(
    pair=pair,
    options={
      'room_for_new_tokens': task.max_new_tokens,
      'sampling': task.sampling,
      'eos_ids': pair.eos_ids,
    },
    key=jax.random.key(task.seed),
    drafting=task.drafting,
    seconds_left=lambda share: share * plan_seconds - (clock() - start),
    report=lambda line: report(f'{clock() - start:.0f} s: {line}'),
  )
  batches = sample_batches(pair.ids_of(prompts), task.batch_size)
  tried: dict[str, trials.Tried] = {}
  try:
    samples = _decode_samples(search, batches)
    costs = _measure_costs(search, samples.batches[0])
    reading = _measure_reading(search, samples.batches[0])
    _replay_all(search, tried, samples, costs)
    _decode_finalists(search, tried, samples.batches, costs)
  except KeyboardInterrupt:
    if len(tried) < 2:
      raise
    report('interrupted; the plan is made from what is known so far')
  return trials.plan_of(tried, samples, costs, reading, context)
