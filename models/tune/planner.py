"""Finds the fastest way to decode on this machine.

1. The target decodes the sample prompts plainly.
2. V(N), the time of a target forward over N nodes, is measured.
3. Each candidate of a fixed list replays these texts (`specdec.study.replay`),
   for which the target is not needed. Its counts and V(N) predict its speed.
4. The three candidates predicted to be fastest and plain decoding are decoded
   with the target, interleaved.
5. Of the candidates that beat plain decoding both as predicted and as measured
   the fastest is chosen; if there is none, plain decoding.

When the time budget is spent or the user interrupts, a plan is made from what
is known by then.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import time
from typing import Any

import jax
import numpy as np

from models.text.drafters import DraftSettings
from models.text.drafters import make_drafter
from models.text.drafters import with_options
from models.text.pair import Pair
from models.text.plan import Context
from models.text.plan import Plan
from models.tune.candidates import Candidate
from models.tune.candidates import list_candidates
from models.tune.candidates import PLAIN
import specdec
from specdec.checks import check_sampling
from specdec.checks import padded_shape
from specdec.study.costs import measure_step_costs
from specdec.study.costs import StepCosts
from specdec.study.costs import Trial
from specdec.study.replay import next_token_ranks
from specdec.study.replay import stand_in
from specdec.tree.optimal import acceptance_by_rank
from specdec.tree.optimal import fastest_tree

PLAN_SECONDS = 300.0
NODE_COUNTS = (1, 2, 4, 8, 16, 32)
"""The N for which V is measured; V is linear in between."""

# Where each part ends, as a share of the time budget. The rest is for what
# cannot be cut short: a compilation, or the steps that are running.
_SAMPLING_ENDS, _COSTS_END, _REPLAYS_END = 0.15, 0.35, 0.6
_COMPILING_ENDS, _DECODING_ENDS = 0.8, 0.92

_PASSES = 3  # over the samples, if there is time
_FINALISTS = 3
_MARGIN = 0.03  # by which speculation must win
_UNCONFIRMED_MARGIN = 0.15  # by which it must win where nothing was measured
_MOST_TOKENS = 8.0  # of a step, realistically
_LEAST_TOKENS = 16  # of a decode that is cut short
_LEAST_CHECKS = 2  # of the clock, after eight steps each
_MAX_BRANCHING, _MAX_DEPTH = 8, 8  # of the fixed tree


def choose(*accounts: Mapping[str, float], margin: float) -> str:
  """The fastest candidate, or plain decoding if no other is clearly faster.

  Args:
    *accounts: tokens per second by name, `PLAIN` included, from independent
      sources such as measured and predicted. The candidates are those of the
      first account, which also ranks them.
    margin: relative margin by which speculation must beat plain decoding in
      every account.

  Returns:
    A name; the first of equals.
  """
  first = accounts[0]
  winners = [
    name
    for name in first
    if all(rate[name] > (1.0 + margin) * rate[PLAIN] for rate in accounts)
  ]
  return max(winners, key=first.__getitem__, default=PLAIN)


def sample_batches(
  prompts: Sequence[Sequence[int]], batch_size: int
) -> list[list[list[int]]]:
  """Full batches of prompts that share a compiled program.

  Prompts are padded to powers of two, and each padded length is a program. Only
  prompts of the most frequent padded length are used; some are repeated where
  they do not fill the last batch.

  Args:
    prompts: token ids.
    batch_size: B.
  """
  slots = [padded_shape([prompt], 1)[0] for prompt in prompts]
  frequent = max(sorted(set(slots)), key=slots.count)
  usable = [
    list(prompt)
    for prompt, size in zip(prompts, slots, strict=True)
    if size == frequent
  ]
  num_batches = -(-len(usable) // batch_size)
  cycle = itertools.cycle(usable)
  return [list(itertools.islice(cycle, batch_size)) for _ in range(num_batches)]


@dataclasses.dataclass(frozen=True)
class _Sample:
  """A batch of prompts and the tokens with which the target continues them."""

  prompts: list[list[int]]
  new: list[list[int]]

  @property
  def texts(self) -> list[list[int]]:
    pairs = zip(self.prompts, self.new, strict=True)
    return [[*prompt, *new] for prompt, new in pairs]


@dataclasses.dataclass(kw_only=True)
class _Search:
  """What is known so far; a plan can be made from it at any time.

  Attributes:
    pair: the models.
    key: random key of all decodes.
    sampling: options of all rows.
    drafting: settings that the candidates do not vary.
    max_new_tokens: limit per row.
    seconds: the time budget.
    elapsed: returns the share of the time budget that is spent.
    report: called with each line of progress.
    samples: known texts.
    costs: V(N) of the target.
    tried: replayed candidates, by name.
    trials: their replays, by name.
    decoded: seconds and tokens of the decodes with the target, by name.
  """

  pair: Pair
  key: jax.Array
  sampling: specdec.Sampling
  drafting: DraftSettings
  max_new_tokens: int
  seconds: float
  elapsed: Callable[[], float]
  report: Callable[[str], None]
  samples: list[_Sample] = dataclasses.field(default_factory=list)
  costs: StepCosts = StepCosts(prompt=0.0, verification={1: 0.0})
  tried: dict[str, Candidate] = dataclasses.field(default_factory=dict)
  trials: dict[str, Trial] = dataclasses.field(default_factory=dict)
  decoded: dict[str, list[tuple[float, int]]] = dataclasses.field(
    default_factory=dict
  )

  @property
  def predicted(self) -> dict[str, float]:
    """Predicted tokens per second, by name, fastest first."""
    rates = {
      name: trial.tokens_per_second(self.costs)
      for name, trial in self.trials.items()
    }
    return dict(sorted(rates.items(), key=lambda item: -item[1]))

  @property
  def measured(self) -> dict[str, float]:
    """Tokens per second with the target, by name."""
    sums = {name: np.sum(runs, axis=0) for name, runs in self.decoded.items()}
    return {
      name: float(tokens / seconds) for name, (seconds, tokens) in sums.items()
    }

  def decode(
    self,
    target: specdec.Model,
    drafter: specdec.Drafter | None,
    prompts: list[list[int]],
    limits: list[int],
    *,
    until: float,
  ) -> tuple[float, specdec.Generation]:
    """Seconds and result of a decode, cut short at a share of the budget."""
    checks = itertools.count()
    start = time.perf_counter()
    generation = specdec.generate(
      target,
      self.key,
      prompts,
      drafter=drafter,
      max_new_tokens=limits,
      room_for_new_tokens=self.max_new_tokens,
      sampling=self.sampling,
      eos_ids=self.pair.eos_ids,
      should_stop=lambda: (
        next(checks) >= _LEAST_CHECKS and self.elapsed() > until
      ),
    )
    return time.perf_counter() - start, generation

  def run(self, batches: list[list[list[int]]]) -> None:
    """All parts but the choice."""
    self.decode_samples(batches)
    self.measure_costs()
    has_draft = self.pair.draft is not None
    candidates = list_candidates(self.drafting, has_draft=has_draft)
    for candidate in itertools.chain(candidates, self.fixed_trees()):
      if len(self.trials) > 1 and self.elapsed() > _REPLAYS_END:
        self.report('out of time for replays; the other candidates are left out')
        break
      self.replay(candidate)
    self.decode_finalists()

  def decode_samples(self, batches: list[list[list[int]]]) -> None:
    """Decodes the prompts plainly."""
    for batch in batches:
      if self.samples and self.elapsed() > _SAMPLING_ENDS:
        break
      limits = [self.max_new_tokens] * len(batch)
      seconds, generation = self.decode(
        self.pair.target, None, batch, limits, until=_SAMPLING_ENDS
      )
      self.samples.append(_Sample(batch, generation.tokens))
      self.report(
        f'sample batch {len(self.samples)} of {len(batches)}:'
        f' {generation.stats["new_tokens"]} tokens in {seconds:.1f} s'
      )
    if not any(any(sample.new) for sample in self.samples):
      raise ValueError(
        'the target ends all sample prompts at once; give other prompts'
      )

  def measure_costs(self) -> None:
    """Measures V(N) halfway through the texts."""
    first = self.samples[0]
    slots, room = padded_shape(first.prompts, self.max_new_tokens)
    halfway = [
      len(prompt) + len(new) // 2
      for sample in self.samples
      for prompt, new in zip(sample.prompts, sample.new, strict=True)
    ]
    self.costs = measure_step_costs(
      self.pair.target,
      first.texts,
      prompt_slots=slots,
      max_new_tokens=room,
      context=max(2, int(np.mean(halfway))),
      node_counts=NODE_COUNTS,
      num_steps=4,
      most_tokens=_MOST_TOKENS,
      is_late=lambda: self.elapsed() > _COSTS_END,
    )
    times = self.costs.verification.items()
    self.report(
      'milliseconds of a target forward by number of nodes: '
      + ', '.join(f'{size}: {1e3 * seconds:.2f}' for size, seconds in times)
    )

  def replay(self, candidate: Candidate) -> None:
    """Counts and times the decodes of a candidate, without the target."""
    try:
      drafter = make_drafter(candidate.method, self.pair, candidate.drafting)
    except ValueError as error:  # such as an n-gram with another tokenizer
      self.report(f'{candidate.name} is left out: {error}')
      return
    num_nodes = 1 if drafter is None else drafter.config.num_nodes
    if num_nodes > max(self.costs.verification):
      self.report(
        f'{candidate.name} is left out: V({num_nodes}) was not measured'
      )
      return
    seconds, stats = 0.0, []
    for sample in self.samples * _PASSES:
      if stats and self.elapsed() > _REPLAYS_END:
        break
      oracle = stand_in(self.pair.target.definition, sample.texts)
      arguments = oracle, drafter, sample.prompts
      if not stats:  # compiles
        self.decode(*arguments, [1] * len(sample.new), until=_REPLAYS_END)
      run = self.decode(
        *arguments, [len(new) for new in sample.new], until=_REPLAYS_END
      )
      seconds += run[0]
      stats.append(run[1].stats)
    trial = Trial(
      num_nodes=num_nodes,
      tokens=sum(counts['new_tokens'] for counts in stats),
      forwards=sum(counts['target_forwards'] for counts in stats),
      steps=sum(counts['reads']['target']['forwards'] for counts in stats),
      prompts=len(stats),
      seconds=seconds,
    )
    self.tried[candidate.name] = candidate
    self.trials[candidate.name] = trial
    self.report(
      f'{candidate.name}: {trial.tokens_per_second(self.costs):.1f} tokens/s'
      f' predicted, block efficiency {trial.block_efficiency:.2f}'
    )

  def fixed_trees(self) -> Iterator[Candidate]:
    """The best fixed tree, if it is predicted to be faster than plain."""
    chains = [one for one in self.tried.values() if one.method == 'chain']
    if not chains:
      return
    chain = self.trials[chains[0].name]
    # The rest of a step is small, and counted as drafting here.
    forward = chain.drafting_seconds / (chain.num_nodes - 1)
    plain = self.trials[PLAIN].step_seconds(self.costs)
    topology = fastest_tree(
      acceptance_by_rank(self.token_ranks(), _MAX_BRANCHING).tolist(),
      num_nodes=max(self.costs.verification),
      max_depth=_MAX_DEPTH,
      seconds=lambda nodes, depth: (
        depth * forward + self.costs.of_nodes(nodes) if depth else plain
      ),
    )
    if topology is not None:
      yield Candidate(
        name=f'fixed tree N={topology.num_nodes} depth={topology.depth}',
        method='tree',
        drafting=with_options(self.drafting, {'topology': topology}),
      )

  def token_ranks(self) -> np.ndarray:
    """Ranks of all new tokens among the predictions of the draft."""
    draft = self.pair.draft
    assert draft is not None
    found = []
    for sample in self.samples:
      texts, size = sample.texts, len(sample.texts)
      slots = sum(padded_shape(sample.prompts, self.max_new_tokens))
      tokens = np.zeros((size, slots), np.int32)
      for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
      ranks = next_token_ranks(
        draft,
        tokens[:, : draft.definition.max_positions],
        specdec.row_keys(self.key, size),
        check_sampling(self.sampling, size, draft.definition.vocab_size),
      )
      found += [
        row[len(prompt) - 1 : len(text) - 1]
        for row, prompt, text in zip(
          jax.device_get(ranks), sample.prompts, texts, strict=True
        )
      ]
    return np.concatenate(found)

  def decode_finalists(self) -> None:
    """Decodes plainly and with the fastest candidates, interleaved."""
    rates = self.predicted
    worthwhile = [
      name for name, rate in rates.items() if rate > (1 + _MARGIN) * rates[PLAIN]
    ]
    if not worthwhile:
      self.report('no candidate is predicted to be faster than plain decoding')
      return
    first, target = self.samples[0], self.pair.target
    drafters = {}
    for name in (PLAIN, *worthwhile[:_FINALISTS]):
      if len(drafters) > 1 and self.elapsed() > _COMPILING_ENDS:
        break
      self.report(f'compiling {name}')
      candidate = self.tried[name]
      drafters[name] = make_drafter(
        candidate.method, self.pair, candidate.drafting
      )
      limits = [1] * len(first.new)
      self.decode(
        target, drafters[name], first.prompts, limits, until=_DECODING_ENDS
      )
    # Tokens per row for which the time suffices in all of them.
    left = (_DECODING_ENDS - self.elapsed()) * self.seconds
    per_token = sum(len(first.new) / rates[name] for name in drafters)
    most = max(_LEAST_TOKENS, int(left / per_token))
    self.report(f'decoding with {", ".join(drafters)}')
    for index, sample in enumerate(self.samples * _PASSES):
      if index and self.elapsed() > _DECODING_ENDS:
        break
      limits = [min(len(new), most) for new in sample.new]
      for name in list(drafters)[:: 1 if index % 2 == 0 else -1]:
        seconds, generation = self.decode(
          target, drafters[name], sample.prompts, limits, until=_DECODING_ENDS
        )
        self.decoded.setdefault(name, []).append(
          (seconds, generation.stats['new_tokens'])
        )
    for name, rate in self.measured.items():
      self.report(f'{name}: {rate:.1f} tokens/s measured')

  def plan(self, context: Context) -> Plan:
    """The choice, from what is known so far; plain decoding must be tried."""
    predicted, measured = self.predicted, self.measured
    if len(measured) > 1:
      choice = choose(measured, predicted, margin=_MARGIN)
    else:
      choice = choose(predicted, margin=_UNCONFIRMED_MARGIN)
    plain = self.trials[PLAIN].step_seconds(self.costs)
    figures: dict[str, dict[str, Any]] = {}
    for name, rate in predicted.items():
      trial = self.trials[name]
      figures[name] = {
        'name': name,
        'tokens_per_second': rate,
        'measured': measured.get(name),
        'block_efficiency': trial.block_efficiency,
        'min_block_efficiency': trial.step_seconds(self.costs) / plain,
        'drafting_milliseconds': 1e3 * trial.drafting_seconds,
        'verification_milliseconds': 1e3 * self.costs.of_nodes(trial.num_nodes),
      }
    return Plan(
      method=self.tried[choice].method,
      drafting=self.tried[choice].drafting,
      min_block_efficiency=figures[choice]['min_block_efficiency'],
      context=context,
      candidates=tuple(figures.values()),
    )


def make_plan(
  pair: Pair,
  prompts: Sequence[str],
  *,
  context: Context,
  sampling: specdec.Sampling,
  drafting: DraftSettings = DraftSettings(),
  seed: int = 0,
  max_new_tokens: int = 128,
  plan_seconds: float = PLAN_SECONDS,
  clock: Callable[[], float] = time.monotonic,
  report: Callable[[str], None] = lambda line: None,
) -> Plan:
  """Measures, tries the candidates and chooses one.

  On KeyboardInterrupt the plan is made from the candidates tried so far.

  Args:
    pair: the models.
    prompts: samples of what will be decoded; see `sample_batches`.
    context: what the plan is for; its batch size is used.
    sampling: options of all rows.
    drafting: settings that the candidates do not vary.
    seed: random seed of the sampling.
    max_new_tokens: limit per row.
    plan_seconds: the time budget. It is exceeded by what cannot be cut short,
      and the smallest plan takes two compilations of the target.
    clock: returns the time in seconds.
    report: called with each line of progress.

  Raises:
    ValueError: an argument cannot be used.
    KeyboardInterrupt: the user interrupts before any drafter was tried.
  """
  if max_new_tokens < _LEAST_TOKENS:
    raise ValueError(
      f'max_new_tokens must be at least {_LEAST_TOKENS} to plan, got'
      f' {max_new_tokens}'
    )
  if not plan_seconds > 0:
    raise ValueError(f'plan_seconds must be positive, got {plan_seconds}')
  start = clock()
  search = _Search(
    pair=pair,
    key=jax.random.key(seed),
    sampling=sampling,
    drafting=drafting,
    max_new_tokens=max_new_tokens,
    seconds=plan_seconds,
    elapsed=lambda: (clock() - start) / plan_seconds,
    report=lambda line: report(f'{clock() - start:.0f} s: {line}'),
  )
  encoded = [pair.encode(prompt) for prompt in prompts]
  try:
    search.run(sample_batches(encoded, context.batch_size))
  except KeyboardInterrupt:
    if len(search.trials) < 2:
      raise
    search.report('interrupted; the plan is made from what is known so far')
  return search.plan(context)
