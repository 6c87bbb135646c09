"""What speculation gains: tokens per step against the cost of a step.

A step is some draft forwards, one after the other, and one forward of the
target over N nodes of every row. It emits tau tokens per row (block
efficiency), plain decoding one:

    speedup = tau * plain / (draft forwards * draft + target over N + overhead)

(Leviathan et al., arXiv 2211.17192, theorem 3.8, whose formula is this one
where N tokens cost the target what one does.)
"""

from collections.abc import Sequence
import dataclasses

from specdec.cost_model.forward import forward_cost
from specdec.cost_model.forward import forward_seconds
from specdec.cost_model.hardware import Hardware
from specdec.cost_model.shapes import ModelShape
from specdec.tree import optimal as sequoia
from specdec.tree.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
  """Who decodes on what.

  Attributes:
    target: verifies.
    draft: drafts; None if who drafts costs nothing beside the target (n-grams,
      prompt lookup).
    hardware: of both.
    overlap: see `forward_seconds`.
    step_overhead: seconds that a step of speculation takes besides its
      forwards: growing trees, the host.
  """

  target: ModelShape
  draft: ModelShape | None
  hardware: Hardware
  overlap: bool = True
  step_overhead: float = 0.0

  def resident_bytes(self, *, batch_size: int, context: float) -> float:
    """Weights and caches of both models."""
    models = [self.target] + ([self.draft] if self.draft else [])
    return sum(
      one.parameters * one.weight_bytes
      + batch_size * context * one.kv_bytes_per_token
      for one in models
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """What a step of decoding does for each row; may be means, as counted.

  Attributes:
    num_nodes: N, verified, the root included; 1 is plain decoding.
    tokens: tau, emitted.
    draft_forwards: one after the other.
    draft_width: tokens of each of them.

  Raises:
    ValueError: a value is out of range.
  """

  num_nodes: float = 1
  tokens: float = 1
  draft_forwards: float = 0
  draft_width: float = 1

  def __post_init__(self):
    if not (
      self.num_nodes >= 1
      and self.tokens >= 1
      and self.draft_forwards >= 0
      and self.draft_width >= 1
    ):
      raise ValueError(
        'num_nodes, tokens and draft_width must be at least 1, draft_forwards'
        f' at least 0, got {self}'
      )


def tree_step(topology: Topology, acceptance: Sequence[float]) -> Step:
  """The step of a fixed tree, one draft forward per level.

  A chain of n tokens of acceptance a is `tree_step(topology.chain(n), [a])`; it
  emits 1 + a + ... + a^n = (1 - a^(n + 1)) / (1 - a).

  Args:
    topology: of the tree.
    acceptance: by rank, see `specdec.sequoia.best_trees`, which takes
      `sequoia.acceptance_by_rank(replay.next_token_ranks(...), K)`.

  Raises:
    ValueError: the tree has guesses of more ranks than there are chances, or
      these are out of range.
  """
  if len(acceptance) < topology.branching:
    raise ValueError(
      f'acceptance has {len(acceptance)} ranks, the tree {topology.branching}'
    )
  sequoia.check_acceptance(acceptance)
  return Step(
    num_nodes=topology.num_nodes,
    tokens=sequoia.expected_tokens(topology, acceptance),
    draft_forwards=topology.depth,
    draft_width=float((topology.schedule >= 0).sum()) / topology.depth,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """Of a step at one batch size and context.

  Attributes:
    batch_size: B.
    tokens: per row and step.
    seconds: of a step.
    plain_seconds: of a step of plain decoding.
    flops: of a step, all models.
    bytes: likewise.
    read_bytes: likewise, of weights and caches alone.
    plain_read_bytes: of a step of plain decoding.
  """

  batch_size: int
  tokens: float
  seconds: float
  plain_seconds: float
  flops: float
  bytes: float
  read_bytes: float
  plain_read_bytes: float

  @property
  def speedup(self) -> float:
    """Over plain decoding of the same batch."""
    return self.tokens * self.plain_seconds / self.seconds

  @property
  def latency(self) -> float:
    """Seconds per token of a row."""
    return self.seconds / self.tokens

  @property
  def throughput(self) -> float:
    """Tokens per second, all rows together."""
    return self.batch_size / self.latency

  @property
  def relative_bandwidth(self) -> float:
    """Bytes read per token over plain decoding's, see `specdec.statistics`."""
    return self.read_bytes / self.tokens / self.plain_read_bytes

  @property
  def arithmetic_intensity(self) -> float:
    """FLOP per byte."""
    return self.flops / self.bytes


def _step_seconds(
  deployment: Deployment, step: Step, batch_size: int, context: float
) -> float:
  one = lambda shape, tokens: forward_seconds(
    shape,
    deployment.hardware,
    batch_size=batch_size,
    num_tokens=tokens,
    context=context,
    overlap=deployment.overlap,
  )
  seconds = one(deployment.target, step.num_nodes)
  if deployment.draft is not None and step.draft_forwards:
    seconds += step.draft_forwards * one(deployment.draft, step.draft_width)
  # Plain decoding has nothing to grow.
  return seconds + (deployment.step_overhead if step.num_nodes > 1 else 0.0)


def predict(
  deployment: Deployment,
  step: Step,
  *,
  batch_size: int = 1,
  context: float = 0,
) -> Prediction:
  """Time and traffic of a step, beside plain decoding.

  Args:
    deployment: models and machine.
    step: what it does; `Step()` is plain decoding.
    batch_size: B; rows do not wait for each other, each emits tau on average.
    context: tokens in each row's cache.

  Raises:
    ValueError: see `forward_seconds`.
  """
  count = lambda shape, tokens: forward_cost(
    shape, batch_size=batch_size, num_tokens=tokens, context=context
  )
  forwards = [(1.0, count(deployment.target, step.num_nodes))]
  if deployment.draft is not None and step.draft_forwards:
    drafting = count(deployment.draft, step.draft_width)
    forwards.append((step.draft_forwards, drafting))
  return Prediction(
    batch_size=batch_size,
    tokens=step.tokens,
    seconds=_step_seconds(deployment, step, batch_size, context),
    plain_seconds=_step_seconds(deployment, Step(), batch_size, context),
    flops=sum(times * cost.flops for times, cost in forwards),
    bytes=sum(times * cost.bytes for times, cost in forwards),
    read_bytes=sum(times * cost.read_bytes for times, cost in forwards),
    plain_read_bytes=count(deployment.target, 1).read_bytes,
  )


def break_even_batch_size(
  deployment: Deployment, step: Step, *, context: float = 0, limit: int = 1024
) -> int | None:
  """From which batch size on plain decoding is at least as fast.

  With experts the speedup need not fall steadily: it may be below 1, rise above
  it and fall again. What counts is the last crossing.

  Args:
    deployment: models and machine.
    step: what it does.
    context: tokens in each row's cache.
    limit: the largest batch size that is looked at.

  Returns:
    1 if speculation pays nowhere, None if it still pays at the limit.
  """
  for batch_size in range(limit, 0, -1):
    predicted = predict(
      deployment, step, batch_size=batch_size, context=context
    )
    if predicted.speedup > 1:
      return None if batch_size == limit else batch_size + 1
  return 1


def best_tree(
  deployment: Deployment,
  acceptance: Sequence[float],
  *,
  num_nodes: int,
  max_depth: int,
  batch_size: int = 1,
  context: float = 0,
) -> Topology | None:
  """The fixed tree that is fastest here (`specdec.sequoia.fastest_tree`).

  Chances of one rank give a chain, whose depth is the best draft length.

  Args:
    deployment: models and machine.
    acceptance: by rank, see `specdec.sequoia.best_trees`.
    num_nodes: N, the largest, root included.
    max_depth: D, the deepest.
    batch_size: B.
    context: tokens in each row's cache.

  Returns:
    The shape; None if plain decoding is faster.

  Raises:
    ValueError: see `specdec.sequoia.best_trees` and `forward_seconds`.
  """

  def seconds(size: int, depth: int) -> float:
    # Leaves are not drafted from; how many there are, is not known yet.
    width = max((size - 1) / depth, 1.0) if depth else 1.0
    step = Step(num_nodes=size, draft_forwards=depth, draft_width=width)
    return _step_seconds(deployment, step, batch_size, context)

  return sequoia.fastest_tree(
    acceptance, num_nodes=num_nodes, max_depth=max_depth, seconds=seconds
  )
