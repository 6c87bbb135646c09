"""The ways of decoding that are tried, and the plan that follows from them."""

from collections.abc import Mapping
from collections.abc import Sequence
import sys
from typing import Any
from typing import NamedTuple

import numpy as np

import specdec
from specdec import arguments as arguments_lib
from specdec.models.lab import machine
from specdec.models.text import plan as plan_lib
from specdec.models.text import settings as settings_lib

PLAIN = 'plain'

_SMALL = {'num_nodes': 8, 'width': 2, 'branching': 2, 'rounds': 4}
_LARGE = {'num_nodes': 32, 'width': 8, 'branching': 4, 'rounds': 4}
_TAIL = 256  # Tokens of a long prompt that the draft reads.
_OF_TAIL = {'draft_prompt': _TAIL}
_CHAIN = {'num_draft_tokens': 4}
_TABLE = {'num_nodes': 8, 'width': 4, 'branching': 4, 'capacity': 128}

# Name, method and options, in the order in which they are tried: the time
# budget may end before the last. Capacities hold all candidate tokens; a larger
# array takes longer to sort.
_CANDIDATES: tuple[tuple[str, str, Mapping[str, int]], ...] = (
  (PLAIN, PLAIN, {}),
  ('staged N=8', 'staged', _SMALL),
  ('lookup N=8', 'lookup', _TABLE),
  (f'staged N=8, {_TAIL} of the prompt', 'staged', _SMALL | _OF_TAIL),
  ('chain 4', 'chain', _CHAIN),
  (f'chain 4, {_TAIL} of the prompt', 'chain', _CHAIN | _OF_TAIL),
  ('tree N=8', 'tree', _SMALL | {'capacity': 32}),
  ('ngram+lookup N=8', 'ngram+lookup', _TABLE),
  ('chain 2', 'chain', {'num_draft_tokens': 2}),
  ('staged N=32', 'staged', _LARGE),
  ('chain 1', 'chain', {'num_draft_tokens': 1}),
  ('tree N=32', 'tree', _LARGE | {'capacity': 128}),
  ('chain 6', 'chain', {'num_draft_tokens': 6}),
  ('ngram N=8', 'ngram', _TABLE),
)

# The least relative error of a time, and that of a time of one sample, or that
# is predicted.
_NOISE, _UNKNOWN = 0.03, 0.15


def list_candidates(
  base: settings_lib.DraftSettings, *, has_draft: bool, longest: int
) -> list[plan_lib.Candidate]:
  """The candidates in the order in which they are tried, plain decoding first.

  `base` has the settings that the candidates do not vary. If it names an inner
  drafter, candidates with other inner drafters are left out; if it says how
  much of a prompt the draft reads, those whose draft reads the end are. So are
  these if the `longest` sample is no longer: nobody knows what they gain then.
  """
  methods = {
    PLAIN,
    *(settings_lib.INNERS[1:] if base.inner is None else [base.inner]),
  }
  if has_draft:
    methods |= {'chain', 'tree'}
    methods |= {'staged'} if base.inner != 'none' else set()
  return [
    plan_lib.Candidate(
      name=name,
      method=method,
      drafting=settings_lib.with_options(base, {**options, 'topology': None}),
    )
    for name, method, options in _CANDIDATES
    if method in methods
    and (
      'draft_prompt' not in options
      or (base.draft_prompt is None and options['draft_prompt'] < longest)
    )
  ]


class Sample(NamedTuple):
  """A batch of prompts, and the tokens with which the target continues them."""

  prompts: list[list[int]]
  new: list[list[int]]

  @property
  def texts(self) -> list[list[int]]:
    pairs = zip(self.prompts, self.new, strict=True)
    return [[*prompt, *new] for prompt, new in pairs]

  @property
  def length(self) -> int:
    """The padded length of the prompts."""
    return arguments_lib.padded_length(max(map(len, self.prompts)))


class Decoded(NamedTuple):
  """A decode of a sample, without reading the prompts."""

  length: int  # See `Sample`.
  seconds: float
  tokens: int


class Tried(NamedTuple):
  """A candidate that replayed the samples, and its decodes with the target.

  The counts and the time are those of all replays (`bench.replay`), without
  reading prompts.
  """

  candidate: plan_lib.Candidate
  drafter: specdec.Drafter
  tokens: int  # Emitted tokens of all rows.
  forwards: int  # Target forwards, summed over the rows that were not done.
  steps: int  # Batched target forwards.
  seconds: float
  decodes: list[Decoded]

  @property
  def num_nodes(self) -> int:
    """N of the trees; 1 for plain decoding."""
    return self.drafter.shape.num_nodes

  @property
  def block_efficiency(self) -> float:
    """Tokens per target forward."""
    return self.tokens / max(self.forwards, 1)

  @property
  def drafting_seconds(self) -> float:
    """Seconds per step of everything but the target."""
    return self.seconds / max(self.steps, 1)

  def step_seconds(self, costs: machine.StepCosts) -> float:
    """Predicted seconds of one step."""
    return self.drafting_seconds + costs.of_nodes(self.num_nodes)

  def tokens_per_second(self, costs: machine.StepCosts) -> float:
    """Predicted tokens per second after the prompt, all rows together."""
    return self.tokens / max(self.steps, 1) / self.step_seconds(costs)

  @property
  def reads(self) -> int:
    """How many tokens of a prompt the draft reads at most."""
    one = self.candidate
    return (one.drafting.draft_prompt or sys.maxsize) if one.uses_draft else 0


class Samples(NamedTuple):
  """All samples, the first of the usual length, and what their decodes say."""

  batches: list[Sample]
  limit: int  # The most new tokens of a row.
  ends_per_token: float  # See `plan_lib.Plan`.

  @property
  def usual(self) -> list[Sample]:
    """The samples of the usual padded length."""
    return [one for one in self.batches if one.length == self.batches[0].length]


def fastest_by_reading(
  tried: Mapping[str, Tried], costs: machine.StepCosts
) -> list[Tried]:
  """Plain decoding, and the fastest of those that read as much of a prompt.

  That is as predicted, and so is their order.
  """
  first = {-1: tried[PLAIN]}
  rate = lambda one: one.tokens_per_second(costs)
  for found in sorted(tried.values(), key=rate, reverse=True):
    if found is not first[-1]:
      first.setdefault(found.reads, found)
  return [*first.values()]


def reading_seconds(
  found: Tried, reading: Mapping[int, tuple[float, float]]
) -> dict[int, float]:
  """The time in which target and draft read a prompt, by padded length."""
  of_draft = {0: 0.0} | {
    length: draft for length, (_, draft) in reading.items()
  }
  return {
    length: target + plan_lib.seconds_at(of_draft, min(length, found.reads))
    for length, (target, _) in reading.items()
  }


def token_seconds(
  decodes: Sequence[Decoded], *, careful: bool
) -> dict[int, float]:
  """Seconds per token by padded length of the prompt.

  They are those of all samples of a length. If `careful`, their standard error
  is added, and for prompts of twice the longest length and more they are those
  of the slowest sample.
  """
  found, slowest = dict[int, float](), 0.0
  for length in sorted({one.length for one in decodes}):
    own = [one[1:] for one in decodes if one.length == length]
    seconds, tokens = np.array(own).T
    mean, count = seconds.sum() / tokens.sum(), len(own)
    error = _UNKNOWN
    if count > 1:
      spread = np.linalg.norm(seconds - mean * tokens) / seconds.sum()
      error = max(np.sqrt(count / (count - 1)) * spread, _NOISE)
    found[length] = float(mean * (1 + error * careful))
    slowest = max(slowest, found[length], *(seconds / tokens).tolist())
  return found | ({2 * max(found): slowest} if careful and found else {})


def _figures(
  found: Tried, plain: Tried, costs: machine.StepCosts, usual: int
) -> dict[str, Any]:
  """The figures of a candidate in a plan."""
  plain_step = plain.step_seconds(costs)
  measured = token_seconds(found.decodes, careful=False).get(usual)
  return {
    'name': found.candidate.name,
    'tokens_per_second': found.tokens_per_second(costs),
    'measured': measured and 1 / measured,
    'block_efficiency': found.block_efficiency,
    'min_block_efficiency': found.step_seconds(costs) / plain_step,
    'drafting_milliseconds': 1e3 * found.drafting_seconds,
    'verification_milliseconds': 1e3 * costs.of_nodes(found.num_nodes),
  }


def plan_of(
  tried: Mapping[str, Tried],
  samples: Samples,
  costs: machine.StepCosts,
  reading: Mapping[int, tuple[float, float]],
  context: plan_lib.Context,
) -> plan_lib.Plan:
  """The plan, from what is known so far; plain decoding must be tried."""
  usual = samples.batches[0].length
  plain = tried[PLAIN]
  figures = [_figures(one, plain, costs, usual) for one in tried.values()]
  figures.sort(key=lambda one: one['tokens_per_second'], reverse=True)
  is_measured = sum(bool(found.decodes) for found in tried.values()) > 1
  ways = list[plan_lib.Way]()
  for found in fastest_by_reading(tried, costs):
    decodes = found.decodes
    if not is_measured:
      decodes = [Decoded(usual, 1 / found.tokens_per_second(costs), 1)]
    seconds = token_seconds(decodes, careful=bool(ways))
    way = plan_lib.Way(
      **vars(found.candidate),
      min_block_efficiency=found.step_seconds(costs)
      / plain.step_seconds(costs),
      reading_seconds=reading_seconds(found, reading),
      new_token_seconds={n: context.batch_size * seconds[n] for n in seconds},
    )
    if not ways or any(
      own < plan_lib.seconds_at(ways[0].new_token_seconds, length)
      for length, own in way.new_token_seconds.items()
    ):
      ways.append(way)
  return plan_lib.Plan(
    ways=tuple(ways),
    context=context,
    ends_per_token=samples.ends_per_token,
    prompt_length=max(len(one) for s in samples.usual for one in s.prompts),
    new_tokens=samples.limit,
    candidates=tuple(figures),
  )
