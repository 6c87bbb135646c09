"""Finds out how to decode fastest on this machine; what scripts/tune.py calls.

The target decodes the sample prompts once. From then on drafters are tried by
replaying these texts (`specdec.replay`), which needs no target, and what the
target takes is added from a measurement (`specdec.step_costs`). The fastest few
are decoded for real before one is chosen.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

from models.text.drafters import DraftSettings
from models.text.drafters import make_drafter
from models.text.pair import Pair
from models.text.plan import Context
from models.text.plan import Plan
from models.tune.candidates import Candidate
from models.tune.candidates import MAX_DEPTH
from models.tune.candidates import Search
import specdec
from specdec.checks import check_sampling
from specdec.checks import padded_shape
from specdec.study import planning
from specdec.study import timing as benchmarking
from specdec.study.costs import measure_step_costs
from specdec.study.replay import next_token_ranks
from specdec.study.replay import stand_in

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""V is measured for so many nodes, and drawn through in between."""

_REPEATS = 3  # of each decode; the median counts
_MARGIN = 0.03  # by which speculation must win
_CONFIRMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
  """Texts that the target said.

  Attributes:
    batches: prompts, B each, as token ids.
    new: what the target went on with.
    key: of the decode.
    sampling: likewise.
    max_new_tokens: likewise.
    eos_ids: likewise.
  """

  batches: list[list[list[int]]]
  new: list[list[list[int]]]
  key: jax.Array
  sampling: specdec.Sampling
  max_new_tokens: int
  eos_ids: tuple[int, ...]

  def decode(
    self,
    target: specdec.LanguageModel,
    drafter: specdec.Drafter | None,
    batch: Sequence[Sequence[int]],
    limit: int,
  ) -> specdec.Generation:
    """As they were decoded."""
    return specdec.generate(
      target,
      self.key,
      batch,
      drafter=drafter,
      max_new_tokens=limit,
      room_for_new_tokens=self.max_new_tokens,
      sampling=self.sampling,
      eos_ids=self.eos_ids,
    )

  def texts(self, batch: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts and what followed."""
    new = self.new[self.batches.index([list(one) for one in batch])]
    return [[*one, *more] for one, more in zip(batch, new, strict=True)]


def sample_batches(
  prompts: Sequence[Sequence[int]], batch_size: int
) -> list[list[list[int]]]:
  """Full batches of prompts that share a program.

  Prompts are padded to powers of two, and every padded length is a program. So
  those of the commonest padded length count; if they do not fill the last
  batch, some count twice.

  Args:
    prompts: token ids.
    batch_size: B.
  """
  slots = [padded_shape([prompt], 1)[0] for prompt in prompts]
  common = max(sorted(set(slots)), key=slots.count)
  usable = [
    list(one)
    for one, size in zip(prompts, slots, strict=True)
    if size == common
  ]
  num_batches = -(-len(usable) // batch_size)
  again = itertools.cycle(usable)
  return [list(itertools.islice(again, batch_size)) for _ in range(num_batches)]


def _sample(pair: Pair, samples: Samples) -> Samples:
  """With what the target says."""
  new = [
    samples.decode(pair.target, None, batch, samples.max_new_tokens).tokens
    for batch in samples.batches
  ]
  if not any(map(len, itertools.chain(*new))):
    raise ValueError('the target ends all sample prompts at once; give others')
  return dataclasses.replace(samples, new=new)


def _measure(
  arms: Mapping[str, benchmarking.Arm], samples: Samples
) -> dict[str, tuple[float, list[specdec.Generation]]]:
  """Seconds of all batches, and what was generated, by arm; interleaved."""
  results = benchmarking.measure(
    arms, samples.batches * _REPEATS, max_new_tokens=samples.max_new_tokens
  )
  count = len(samples.batches)
  return {
    name: (
      sum(
        float(np.median([one.seconds for one in found[batch::count]]))
        for batch in range(count)
      ),
      [one.generation for one in found[:count]],
    )
    for name, found in results.items()
  }


def _try(pair: Pair, samples: Samples, candidate: Candidate) -> planning.Trial:
  """Replays the samples."""
  drafter = make_drafter(candidate.method, pair, candidate.drafting)
  decode = lambda batch, limit: samples.decode(
    stand_in(pair.target.spec, samples.texts(batch)),
    drafter,
    batch,
    limit,
  )
  seconds, generations = _measure({candidate.name: decode}, samples)[
    candidate.name
  ]
  stats = [one.stats for one in generations]
  return planning.Trial(
    num_nodes=1 if drafter is None else drafter.config.num_nodes,
    tokens=sum(one['new_tokens'] for one in stats),
    forwards=sum(one['target_forwards'] for one in stats),
    steps=sum(one['reads']['target']['forwards'] for one in stats),
    prompts=len(samples.batches),
    seconds=seconds,
  )


def _ranks(pair: Pair, samples: Samples) -> np.ndarray:
  """Of all new tokens among the draft's guesses; see `next_token_ranks`."""
  assert pair.draft is not None
  definition = pair.draft.spec
  found = []
  for batch in samples.batches:
    texts = samples.texts(batch)
    length = padded_shape(batch, samples.max_new_tokens)
    tokens = np.zeros((len(batch), sum(length)), np.int32)
    for row, text in enumerate(texts):
      tokens[row, : len(text)] = text
    ranks = next_token_ranks(
      pair.draft,
      tokens[:, : definition.max_positions],
      specdec.row_keys(samples.key, len(batch)),
      check_sampling(samples.sampling, len(batch), definition.vocab_size),
    )
    found += [
      row[len(prompt) - 1 : len(text) - 1]
      for row, prompt, text in zip(
        jax.device_get(ranks), batch, texts, strict=True
      )
    ]
  return np.concatenate(found)


def _decode(
  pair: Pair, samples: Samples, candidates: Mapping[str, Candidate]
) -> dict[str, float]:
  """Tokens per second with the target, by name; interleaved."""

  def arm(candidate):
    drafter = make_drafter(candidate.method, pair, candidate.drafting)
    return lambda batch, limit: samples.decode(
      pair.target, drafter, batch, limit
    )

  results = _measure(
    {name: arm(candidate) for name, candidate in candidates.items()}, samples
  )
  return {
    name: sum(one.stats['new_tokens'] for one in generations) / seconds
    for name, (seconds, generations) in results.items()
  }


def make_plan(
  pair: Pair,
  prompts: Sequence[str],
  *,
  context: Context,
  sampling: specdec.Sampling,
  drafting: DraftSettings = DraftSettings(),
  seed: int = 0,
  max_new_tokens: int = 128,
  node_counts: Sequence[int] = NODE_COUNTS,
  confirmed: int = _CONFIRMED,
  report: Callable[[str], None] = lambda line: None,
) -> Plan:
  """Measures, tries, and chooses.

  Args:
    pair: the models.
    prompts: samples of what will be asked; see `sample_batches`.
    context: what the plan is for; its batch size is the one that is measured.
    sampling: likewise, of all rows.
    drafting: what the search does not vary is taken from here.
    seed: of the sampling.
    max_new_tokens: per row.
    node_counts: N that V is measured for, up to where no tree could pay; no
      larger trees are tried.
    confirmed: how many of the fastest are decoded with the target before one is
      chosen; 0 trusts the predictions.
    report: told what goes on, line by line.

  Raises:
    ValueError: bad input; says what.
  """
  batch_size = context.batch_size
  if max_new_tokens < 16:
    raise ValueError(
      f'max_new_tokens must be at least 16 to plan, got {max_new_tokens}'
    )
  samples = Samples(
    batches=sample_batches([pair.encode(one) for one in prompts], batch_size),
    new=[],
    key=jax.random.key(seed),
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    eos_ids=pair.eos_ids,
  )
  report(
    f'decoding {len(samples.batches)} batches of {batch_size} with the target'
  )
  samples = _sample(pair, samples)
  slots, room = padded_shape(samples.batches[0], max_new_tokens)
  lengths = [len(prompt) for batch in samples.batches for prompt in batch]
  report(f'timing the target over {", ".join(map(str, node_counts))} nodes')
  costs = measure_step_costs(
    pair.target,
    samples.texts(samples.batches[0]),
    prompt_slots=slots,
    max_new_tokens=room,
    context=int(np.mean(lengths)) + max_new_tokens // 2,
    sampling=sampling,
    node_counts=node_counts,
    most_tokens=1 + max(MAX_DEPTH, drafting.tree.max_depth),
  )
  report(
    'milliseconds: '
    + ', '.join(f'{n}: {1e3 * v:.2f}' for n, v in costs.verification.items())
  )

  def evaluate(candidate: Candidate) -> planning.Trial:
    trial = _try(pair, samples, candidate)
    report(
      f'{candidate.name}: {trial.tokens_per_second(search.costs):.1f} tokens/s,'
      f' block efficiency {trial.block_efficiency:.2f}'
    )
    return trial

  def measure(candidate: Candidate) -> float:
    report(f'decoding with {candidate.name}, to see what predictions leave out')
    return _decode(pair, samples, {candidate.name: candidate})[candidate.name]

  search = Search(
    costs=costs,
    evaluate=evaluate,
    measure=measure,
    base=drafting,
    node_counts=tuple(n for n in costs.verification if n > 1),
  )
  search.run(
    has_draft=pair.draft is not None, ranks=lambda: _ranks(pair, samples)
  )
  rates = search.rates
  ranking = sorted(rates, key=rates.__getitem__, reverse=True)
  finalists = _finalists(ranking, search.candidates)[:confirmed]
  measured: dict[str, float] = {}
  if finalists and confirmed:
    report(f'decoding with {", ".join(finalists)} and plain')
    measured = _decode(
      pair,
      samples,
      {name: search.candidates[name] for name in (planning.PLAIN, *finalists)},
    )
  # Either alone has misled: the machine drifts, and parts are not the whole.
  accounts = (measured, rates) if measured else (rates,)
  choice = planning.choose(*accounts, margin=_MARGIN)
  chosen, trial = search.candidates[choice], search.trials[choice]
  figures = [_figures(name, search, measured.get(name)) for name in ranking]
  is_plain = choice == planning.PLAIN
  return Plan(
    method=chosen.method,
    drafting=chosen.drafting,
    min_block_efficiency=(
      1.0 if is_plain else trial.min_block_efficiency(search.costs)
    ),
    context=context,
    candidates=tuple(figures),
  )


def _finalists(
  ranking: Sequence[str], candidates: Mapping[str, Candidate]
) -> list[str]:
  """The best of each method but plain: what is near it is hardly better."""
  found: dict[tuple[str, bool], str] = {}
  for name in ranking:
    one = candidates[name]
    is_fixed = one.drafting.tree.topology is not None
    if name != planning.PLAIN:
      found.setdefault((one.method, is_fixed), name)
  return list(found.values())


def _figures(
  name: str, search: Search, measured: float | None
) -> dict[str, Any]:
  trial, costs = search.trials[name], search.costs
  return {
    'name': name,
    'tokens_per_second': trial.tokens_per_second(costs),
    'measured': measured,
    'block_efficiency': trial.block_efficiency,
    'min_block_efficiency': trial.min_block_efficiency(costs),
    'drafting_milliseconds': 1e3 * trial.seconds / max(trial.steps, 1),
    'verification_milliseconds': 1e3 * costs.of_nodes(trial.num_nodes),
  }
