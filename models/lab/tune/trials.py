"""Candidates that were tried, and the plan that follows from them."""

from collections.abc import Mapping
from collections.abc import Sequence
import sys
from typing import Any
from typing import NamedTuple

import numpy as np

from models.lab import machine
from models.lab.bench import replay
from models.lab.tune import candidate_methods
from models.text import plan as plan_lib
import specdec
from specdec import padding

_UNCONFIRMED_MARGIN = 0.15  # by which it must win where nothing was measured


class Sample(NamedTuple):
  """A batch of prompts, and the tokens with which the target continues them."""

  prompts: list[list[int]]
  new: list[list[int]]

  @property
  def texts(self) -> list[list[int]]:
    pairs = zip(self.prompts, self.new, strict=True)
    return [[*prompt, *new] for prompt, new in pairs]


class Samples(NamedTuple):
  """All samples, and what their plain decodes say."""

  batches: list[Sample]
  limit: int  # The most new tokens of a row.
  reading: float  # Seconds of reading a batch of prompts, the least measured.
  ends_per_token: float  # See `plan_lib.Plan`.

  @property
  def longest(self) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt) for one in self.batches for prompt in one.prompts)


class Tried(NamedTuple):
  """A candidate that was replayed; `decodes` are seconds and tokens."""

  candidate: plan_lib.Candidate
  drafter: specdec.Drafter
  trial: replay.Trial
  decodes: list[tuple[float, int]]


def predicted(
  tried: Mapping[str, Tried], costs: machine.StepCosts
) -> dict[str, float]:
  """Predicted tokens per second, by name, fastest first."""
  rates = {
    name: found.trial.tokens_per_second(costs) for name, found in tried.items()
  }
  return dict(sorted(rates.items(), key=lambda item: -item[1]))


def measured(tried: Mapping[str, Tried]) -> dict[str, float]:
  """Tokens per second with the target, by name."""
  totals = {
    name: np.sum(found.decodes, axis=0)
    for name, found in tried.items()
    if found.decodes
  }
  return {n: float(tokens / time) for n, (time, tokens) in totals.items()}


def clearly_faster(*accounts: Mapping[str, float], margin: float) -> list[str]:
  """The candidates that beat plain decoding, fastest first.

  Args:
    *accounts: tokens per second by name, `PLAIN` included, from independent
      sources such as measured and predicted. The first ranks its candidates.
    margin: relative margin by which speculation must beat plain decoding in
      every account.
  """
  first = accounts[0]
  wins = lambda name: all(
    rates[name] > (1.0 + margin) * rates[candidate_methods.PLAIN]
    for rates in accounts
  )
  return sorted(filter(wins, first), key=first.__getitem__, reverse=True)


def by_reading(names: Sequence[str], tried: Mapping[str, Tried]) -> list[str]:
  """The first of the candidates whose drafts read as much of a prompt."""
  first = dict[int, str]()
  for name in names:
    reads = tried[name].candidate.draft_reads(sys.maxsize)
    first.setdefault(reads, name)
  return list(first.values())


def draft_token_seconds(tried: Mapping[str, Tried], length: int) -> float:
  """The time in which a draft reads a token of prompts of a padded length."""
  plain = tried[candidate_methods.PLAIN].trial.reading
  found = [
    (one.trial.reading - plain) / one.candidate.draft_reads(length)
    for one in tried.values()
    if one.candidate.uses_draft
  ]
  return max(float(np.median(found or [0.0])), 0.0)


def plan_of(
  tried: Mapping[str, Tried],
  samples: Samples,
  costs: machine.StepCosts,
  context: plan_lib.Context,
) -> plan_lib.Plan:
  """The plan, from what is known so far; plain decoding must be tried."""
  rates, known = predicted(tried, costs), measured(tried)
  accounts, margin = [rates], _UNCONFIRMED_MARGIN
  if len(known) > 1:
    accounts, margin = [known, rates], plan_lib.MARGIN
  plain = tried[candidate_methods.PLAIN].trial.step_seconds(costs)
  figures: dict[str, dict[str, Any]] = {
    name: {
      'name': name,
      'tokens_per_second': rate,
      'measured': known.get(name),
      'block_efficiency': trial.block_efficiency,
      'min_block_efficiency': trial.step_seconds(costs) / plain,
      'drafting_milliseconds': 1e3 * trial.drafting_seconds,
      'verification_milliseconds': 1e3 * costs.of_nodes(trial.num_nodes),
    }
    for name, rate in rates.items()
    for trial in [tried[name].trial]
  }
  faster = clearly_faster(*accounts, margin=margin)
  length = padding.padded_length(samples.longest)
  return plan_lib.Plan(
    ways=tuple(
      plan_lib.Way(
        **vars(tried[name].candidate),
        min_block_efficiency=figures[name]['min_block_efficiency'],
        new_token_seconds=context.batch_size / accounts[0][name],
      )
      for name in (candidate_methods.PLAIN, *by_reading(faster, tried))
    ),
    context=context,
    prompt_token_seconds=samples.reading / length,
    draft_token_seconds=draft_token_seconds(tried, length),
    ends_per_token=samples.ends_per_token,
    prompt_length=samples.longest,
    new_tokens=samples.limit,
    candidates=tuple(figures.values()),
  )
