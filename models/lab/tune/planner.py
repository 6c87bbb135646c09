"""Finds the fastest way to decode on this machine.

1. The target decodes the sample prompts plainly.
2. V(N), the time of a target forward over N nodes, is measured.
3. Each candidate of a fixed list replays these texts (see `replay`), for which
   the target is not needed. Its counts and V(N) predict its speed after the
   prompt. How long the draft takes to read a prompt is measured.
4. Plain decoding, the three candidates predicted to be fastest, and the fastest
   whose draft reads less of a prompt, or nothing, are decoded with the target,
   interleaved.
5. The ways of the plan are plain decoding and, of the candidates that beat it
   after the prompt both as predicted and as measured, the fastest of those that
   read the same share of a prompt. A request chooses among them
   (`models.text.plan.choose`).

When the time budget is spent or the user interrupts, a plan is made from what
is known by then.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import sys
import time
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from models.lab import machine
from models.lab import task as task_lib
from models.lab.bench import exactness
from models.lab.bench import optimal
from models.lab.bench import replay
from models.lab.tune import candidate_methods
from models.lab.tune import trials
from models.text import chat_template
from models.text import drafters
from models.text import pair as pair_lib
from models.text import plan as plan_lib
from models.text import settings as settings_lib
import specdec
from specdec import arguments as arguments_lib
from specdec import padding
from specdec import sampling_arguments

PLAN_SECONDS = 300.0
NODE_COUNTS = (1, 2, 4, 8, 16, 32)
"""The N for which V is measured; V is linear in between."""

# Where each part ends, as a share of the time budget. The rest is for what
# cannot be cut short: a compilation, or the steps that are running.
_SAMPLING_ENDS, _COSTS_END, _REPLAYS_END = 0.15, 0.35, 0.6
_COMPILING_ENDS, _DECODING_ENDS = 0.8, 0.92

_PASSES = 3  # over the samples, if there is time
_FINALISTS = 3
_MOST_TOKENS = 8.0  # of a step, realistically
_LEAST_TOKENS = 16  # of a decode that is cut short
_LEAST_CHECKS = 2  # of the clock, after eight steps each
_MAX_BRANCHING, _MAX_DEPTH = 8, 8  # of the fixed tree


def sample_batches(
  prompts: Sequence[Sequence[int]], batch_size: int
) -> list[list[list[int]]]:
  """Full batches of prompts (token ids) that share a compiled program.

  Prompts are padded to powers of two, and each padded length is a program. Only
  prompts of the most frequent padded length are used; some are repeated where
  they do not fill the last batch.
  """
  slots = [padding.padded_shape([prompt], 1)[0] for prompt in prompts]
  frequent = max(sorted(set(slots)), key=slots.count)
  usable = itertools.compress(prompts, (size == frequent for size in slots))
  cycle = itertools.cycle(map(list, usable))
  starts = range(0, slots.count(frequent), batch_size)
  return [list(itertools.islice(cycle, batch_size)) for _ in starts]


class _Decode(NamedTuple):
  """A timed decode: seconds of reading the prompts, then of decoding."""

  reading: float
  seconds: float
  generation: specdec.Generation


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
  ) -> _Decode:
    """A decode, cut short when a share is spent."""
    checks = itertools.count()
    is_late = lambda: next(checks) >= _LEAST_CHECKS and self.is_late(share)
    start = time.perf_counter()
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
    seconds = time.perf_counter() - read
    return _Decode(read - start, seconds, decoding.result())


def _decode_samples(
  search: _Search, batches: list[list[list[int]]]
) -> trials.Samples:
  """Decodes the prompts plainly."""
  room, target = search.options['room_for_new_tokens'], search.pair.target
  make = lambda batch: trials.Sample(batch, [[0] * room for _ in batch])
  any_texts = [*map(make, batches)]
  decode = functools.partial(search.decode, target, specdec.PLAIN)
  decode(any_texts[0], _SAMPLING_ENDS, 0)  # compiles
  samples, readings, ends = list[trials.Sample](), list[float](), 0
  for any_text in any_texts:
    if samples and search.is_late(_SAMPLING_ENDS):
      break
    reading, seconds, generation = decode(any_text, _SAMPLING_ENDS)
    samples.append(trials.Sample(any_text.prompts, generation.tokens))
    readings.append(reading)
    ends += generation.finish_reasons.count('eos')
    search.report(
      f'sample batch {len(samples)} of {len(batches)}: prompts in'
      f' {reading:.1f} s, {generation.stats.new_tokens} tokens in'
      f' {seconds:.1f} s'
    )
  tokens = sum(len(new) for sample in samples for new in sample.new)
  if not tokens:
    raise ValueError(
      'the target ends all sample prompts at once; give other prompts'
    )
  return trials.Samples(
    batches=samples,
    limit=room,
    reading=min(readings),
    ends_per_token=ends / tokens,
  )


def _measure_costs(search: _Search, first: trials.Sample) -> machine.StepCosts:
  """Measures V(N) halfway through the first texts."""
  slots, room = padding.padded_shape(
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
  decodes = list[_Decode]()
  for sample in samples * _PASSES:
    if decodes and search.is_late(_REPLAYS_END):
      break
    oracle = replay.oracle_target(search.pair.target, sample.texts)
    if not decodes:  # compiles
      search.decode(oracle, drafter, sample, _REPLAYS_END, 0)
    decodes.append(search.decode(oracle, drafter, sample, _REPLAYS_END))
  stats = [found.generation.stats for found in decodes]
  trial = replay.Trial(
    num_nodes=num_nodes,
    tokens=sum(counts.new_tokens for counts in stats),
    forwards=sum(counts.target_forwards for counts in stats),
    steps=sum(counts.reads['target']['forwards'] for counts in stats),
    seconds=sum(found.seconds for found in decodes),
    reading=min(found.reading for found in decodes),
  )
  return trials.Tried(candidate, drafter, trial, [])


def _replay_all(
  search: _Search,
  tried: dict[str, trials.Tried],
  samples: trials.Samples,
  costs: machine.StepCosts,
) -> None:
  """Adds the candidates to `tried`, by name, plain decoding first."""
  has_draft = search.pair.drafting_model is not None
  listed = candidate_methods.list_candidates(
    search.drafting, has_draft=has_draft, prompt_tokens=samples.longest
  )
  for candidate in itertools.chain(
    listed,
    _fixed_trees(search, tried, samples.batches, costs),
  ):
    if len(tried) > 1 and search.is_late(_REPLAYS_END):
      search.report('out of time for replays; other candidates are left out')
      break
    if found := _replay(search, candidate, samples.batches, costs):
      tried[candidate.name] = found
      search.report(
        f'{candidate.name}:'
        f' {found.trial.tokens_per_second(costs):.1f} tokens/s predicted,'
        f' block efficiency {found.trial.block_efficiency:.2f}'
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
  forward = first.trial.drafting_seconds / (first.trial.num_nodes - 1)
  plain = tried[candidate_methods.PLAIN].trial.step_seconds(costs)
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
  params = sampling_arguments.to_params(
    search.options['sampling'], 1, vocab_size
  )
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
  samples: trials.Samples,
  costs: machine.StepCosts,
) -> None:
  """Decodes plainly and with the fastest candidates, interleaved."""
  rates, target = trials.predicted(tried, costs), search.pair.target
  faster = trials.clearly_faster(rates, margin=plan_lib.MARGIN)
  if not faster:
    search.report('no candidate is predicted to be faster than plain decoding')
    return
  first, finalists = samples.batches[0], list[trials.Tried]()
  chosen = [*faster[:_FINALISTS], *trials.by_reading(faster, tried)]
  for name in dict.fromkeys([candidate_methods.PLAIN, *chosen]):
    if len(finalists) > 1 and search.is_late(_COMPILING_ENDS):
      break
    search.report(f'compiling {name}')
    finalists.append(tried[name])
    search.decode(target, finalists[-1].drafter, first, _DECODING_ENDS, 0)
  # Tokens per row for which the time suffices.
  names = [finalist.candidate.name for finalist in finalists]
  per_token = len(first.new) * sum(1 / rates[name] for name in names)
  seconds = search.seconds_left(_DECODING_ENDS) - samples.reading * len(names)
  limit = max(int(seconds / per_token), _LEAST_TOKENS)
  search.report('decoding with the target, interleaved')
  for index, sample in enumerate(samples.batches * _PASSES):
    if index and search.is_late(_DECODING_ENDS):
      break
    for finalist in finalists[:: 1 if index % 2 == 0 else -1]:
      _, seconds, generation = search.decode(
        target, finalist.drafter, sample, _DECODING_ENDS, limit
      )
      finalist.decodes.append((seconds, generation.stats.new_tokens))
  for name, rate in trials.measured(tried).items():
    search.report(f'{name}: {rate:.1f} tokens/s measured')


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
    _replay_all(search, tried, samples, costs)
    _decode_finalists(search, tried, samples, costs)
  except KeyboardInterrupt:
    if len(tried) < 2:
      raise
    report('interrupted; the plan is made from what is known so far')
  return trials.plan_of(tried, samples, costs, context)
