"""Which way of decoding is fastest, from counts and costs; pure functions.

The counts are those of replays (`specdec.replay`), the costs those that
`specdec.step_costs` measured. A decode then takes

    replay                  all but the target: drafting, the loop, the host
    + prompts * prompt      the target reads a batch of prompts
    + steps * V(N)          the target verifies N nodes of each row
    + steps * interference  what draft and target cost each other
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import numpy as np

PLAIN = 'plain'
"""Name of plain decoding among the trials."""


@dataclasses.dataclass(frozen=True)
class StepCosts:
  """Seconds that the target takes, at one batch size, dtype and context.

  Attributes:
    prompt: to read a batch of prompts.
    verification: V, of one forward over N nodes of each row, cache included; by
      N. 1 is plain decoding and must be there.
    plain_step: of a whole step of plain decoding, V(1) and the rest.
    interference: by how much a speculative step is longer than its parts, which
      were measured apart: models drive each other out of a processor's caches.

  Raises:
    ValueError: there is no V(1).
  """

  prompt: float
  verification: Mapping[int, float]
  plain_step: float
  interference: float = 0.0

  def __post_init__(self):
    if 1 not in self.verification:
      raise ValueError('verification needs the cost of 1 node')

  def of_nodes(self, num_nodes: int) -> float:
    """V(N); in between, a straight line.

    Raises:
      ValueError: N is larger than any that was measured.
    """
    sizes = sorted(self.verification)
    if not 1 <= num_nodes <= sizes[-1]:
      raise ValueError(
        f'V was measured for 1 to {sizes[-1]} nodes, asked for {num_nodes}'
      )
    values = [self.verification[size] for size in sizes]
    return float(np.interp(num_nodes, sizes, values))

  def of_step(self, num_nodes: int) -> float:
    """V(N), and the interference of whoever drafts; ValueError as above."""
    interference = self.interference if num_nodes > 1 else 0.0
    return self.of_nodes(num_nodes) + interference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """What a replay of the sample texts counted.

  Attributes:
    num_nodes: N of the trees.
    tokens: emitted, all rows together.
    forwards: of the target, summed over rows that were not done.
    steps: batched target forwards.
    prompts: batches that were decoded.
    seconds: of the replay.
  """

  num_nodes: int
  tokens: int
  forwards: int
  steps: int
  prompts: int
  seconds: float

  @property
  def block_efficiency(self) -> float:
    """Tokens per target forward."""
    return self.tokens / max(self.forwards, 1)

  def predicted_seconds(self, costs: StepCosts) -> float:
    """What the same decodes take with the target."""
    verification = self.steps * costs.of_step(self.num_nodes)
    return self.seconds + self.prompts * costs.prompt + verification

  def tokens_per_second(self, costs: StepCosts) -> float:
    """Predicted, all rows together."""
    return self.tokens / self.predicted_seconds(costs)

  def min_block_efficiency(self, costs: StepCosts) -> float:
    """Seconds of a step over those of a plain step.

    With fewer tokens per step than that, plain decoding is faster.
    """
    drafting = self.seconds / max(self.steps, 1)
    return (drafting + costs.of_step(self.num_nodes)) / costs.plain_step

  def interference(self, costs: StepCosts, rate: float) -> float:
    """Seconds per step that predictions left out, see `StepCosts`.

    Args:
      costs: of the predictions.
      rate: tokens per second, measured.
    """
    costs = dataclasses.replace(costs, interference=0.0)
    excess = self.tokens / rate - self.predicted_seconds(costs)
    return max(excess, 0.0) / max(self.steps, 1)


def choose(*accounts: Mapping[str, float], margin: float) -> str:
  """The fastest, or plain decoding where that is as good.

  Args:
    *accounts: tokens per second by name, `PLAIN` among them, each found in its
      own way, such as measured and predicted. What is in the first is chosen
      from, by the first.
    margin: by what part another must be faster than plain decoding in every
      account.

  Returns:
    A name; of equals the first.
  """
  first = accounts[0]
  winners = [
    name
    for name in first
    if all(one[name] > (1.0 + margin) * one[PLAIN] for one in accounts)
  ]
  return max(winners, key=first.__getitem__, default=PLAIN)


def climb(
  start: Mapping[str, int],
  axes: Mapping[str, Sequence[int]],
  score: Callable[[dict[str, int]], float],
  *,
  margin: float = 0.0,
) -> dict[str, int]:
  """Coordinate ascent on a grid: few evaluations, no guarantee.

  One axis after the other, from the value at hand to its neighbours, on in a
  direction as long as that is better; until no axis brings anything.

  Args:
    start: a value of each axis.
    axes: the values of each, in order.
    score: larger is better; asked once per point.
    margin: by what part a neighbour must be better, scores being noisy.

  Returns:
    The best point that was met.

  Raises:
    ValueError: the start is not on the grid.
  """
  for name, values in axes.items():
    if start[name] not in values:
      raise ValueError(f'{name}={start[name]} is none of {tuple(values)}')
  known: dict[tuple[int, ...], float] = {}

  def ask(point: dict[str, int]) -> float:
    key = tuple(point[name] for name in axes)
    if key not in known:
      known[key] = score(dict(point))
    return known[key]

  def walk(point: dict[str, int], name: str, step: int) -> dict[str, int]:
    values = axes[name]
    place = values.index(point[name]) + step
    while 0 <= place < len(values):
      neighbour = point | {name: values[place]}
      if ask(neighbour) <= (1.0 + margin) * ask(point):
        break
      point, place = neighbour, place + step
    return point

  point, moved = dict(start), True
  while moved:
    before = point
    for name in axes:
      higher = walk(point, name, 1)
      point = walk(point, name, -1) if higher == point else higher
    moved = point != before
  return point
