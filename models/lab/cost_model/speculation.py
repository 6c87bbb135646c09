"""Predicted speed and traffic of speculative decoding.

A step runs some draft forwards in sequence and a target forward over N nodes of
every row. It emits tau tokens per row (the block efficiency):

    speedup = tau * plain / (draft forwards * draft + target over N)

Where N tokens cost the target as much as one token, this is theorem 3.8 of
Leviathan et al. (arXiv 2211.17192).
"""

from collections.abc import Sequence
import dataclasses
import functools

from models.lab.cost_model import forward as forward_lib
from models.lab.study import optimal
from specdec.tree import topology as topology_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
  """The models and the machine of a prediction."""

  target: forward_lib.ModelShape  #: The model that verifies.
  draft: (
    forward_lib.ModelShape | None
  )  #: None if drafting costs nothing (n-grams).
  hardware: forward_lib.Hardware  #: The machine that runs both.
  overlap: bool = True  #: See `ForwardCost.seconds`.

  def fits(self, *, batch_size: int, context: float) -> bool:
    """Whether weights and caches of both models fit the memory."""
    resident = sum(
      shape.parameters * shape.weight_bytes
      + batch_size * context * shape.kv_bytes_per_token
      for shape in (self.target, self.draft)
      if shape
    )
    return resident <= self.hardware.devices * self.hardware.memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeStep:
  """Work and yield of a decoding step per row; all values may be means.

  Raises:
    ValueError: a value is out of range.
  """

  num_nodes: float = 1  #: N, the root included; 1 for plain decoding.
  tokens: float = 1  #: tau, tokens emitted.
  draft_forwards: float = 0  #: Number of draft forwards, in sequence.
  draft_width: float = 1  #: Tokens per draft forward.

  def __post_init__(self):
    at_least_1 = (self.num_nodes, self.tokens, self.draft_width)
    if not (all(x >= 1 for x in at_least_1) and self.draft_forwards >= 0):
      raise ValueError(
        'num_nodes, tokens and draft_width must be at least 1 and'
        f' draft_forwards at least 0, got {self}'
      )


def tree_step(
  topology: topology_lib.Topology, acceptance: Sequence[float]
) -> SpeculativeStep:
  """The step of a fixed tree with one draft forward per level.

  `acceptance` is the probability that the target emits the candidate of each
  rank (`models.lab.study.optimal.acceptance_by_rank`). A chain of n tokens with
  acceptance a is `tree_step(chain(n), [a])`; it emits
  1 + a + ... + a^n = (1 - a^(n + 1)) / (1 - a) tokens.

  Raises:
    ValueError: the tree has more ranks than `acceptance`, or the probabilities
      are out of range.
  """
  if len(acceptance) < topology.branching:
    raise ValueError(
      f'acceptance has {len(acceptance)} ranks, but the tree has'
      f' {topology.branching}'
    )
  optimal.check_acceptance(acceptance)
  return SpeculativeStep(
    num_nodes=topology.num_nodes,
    tokens=optimal.expected_tokens(topology, acceptance),
    draft_forwards=topology.max_depth,
    draft_width=float((topology.schedule >= 0).sum()) / topology.max_depth,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """Predicted cost of a step at one batch size and context."""

  batch_size: int  #: B.
  tokens: float  #: Emitted per row and step.
  seconds: float  #: Per step.
  plain_seconds: float  #: Per step of plain decoding.
  flops: float  #: Per step, of all models.
  num_bytes: float  #: Moved per step, by all models.
  #: Bytes of weights and caches read per token, relative to plain decoding.
  relative_bandwidth: float

  @property
  def speedup(self) -> float:
    """Speed relative to plain decoding of the same batch."""
    return self.tokens * self.plain_seconds / self.seconds

  @property
  def latency(self) -> float:
    """Seconds per token of a row."""
    return self.seconds / self.tokens

  @property
  def throughput(self) -> float:
    """Tokens per second of all rows together."""
    return self.batch_size / self.latency

  @property
  def arithmetic_intensity(self) -> float:
    """FLOP per byte moved."""
    return self.flops / self.num_bytes


def predict(
  deployment: Deployment,
  step: SpeculativeStep,
  *,
  batch_size: int = 1,
  context: float = 0,
) -> Prediction:
  """Predicts time and traffic of a step and of plain decoding.

  B (`batch_size`) rows do not wait for each other, each emits tau on average;
  `context` is the number of tokens in the cache of each row. Of several devices
  each runs the whole draft if that is faster than to share it.

  Raises:
    ValueError: a size is out of range, or a dtype has no peak rate.
  """
  cost = functools.partial(
    forward_lib.forward_cost, batch_size=batch_size, context=context
  )
  plain = cost(deployment.target)
  verify = cost(deployment.target, num_tokens=step.num_nodes)
  forwards = [(1.0, verify)]
  hardware = deployment.hardware
  seconds = functools.partial(
    forward_lib.ForwardCost.seconds, overlap=deployment.overlap
  )
  step_seconds = seconds(verify, hardware)
  if deployment.draft and step.draft_forwards:
    drafting = cost(deployment.draft, num_tokens=step.draft_width)
    forwards.append((step.draft_forwards, drafting))
    alone = dataclasses.replace(hardware, devices=1)
    step_seconds += step.draft_forwards * min(
      seconds(drafting, hardware), seconds(drafting, alone)
    )
  read_bytes = sum(count * forward.read_bytes for count, forward in forwards)
  return Prediction(
    batch_size=batch_size,
    tokens=step.tokens,
    seconds=step_seconds,
    plain_seconds=seconds(plain, hardware),
    flops=sum(count * forward.flops for count, forward in forwards),
    num_bytes=sum(count * forward.num_bytes for count, forward in forwards),
    relative_bandwidth=read_bytes / step.tokens / plain.read_bytes,
  )


def break_even_batch_size(
  deployment: Deployment,
  step: SpeculativeStep,
  *,
  context: float = 0,
  limit: int = 1024,
) -> int | None:
  """The batch size from which on plain decoding is at least as fast.

  It is the last crossing of speedup 1, which a mixture of experts may cross
  several times; 1 if speculation is faster at no batch size, and None if it is
  still faster at `limit`, the largest that is tried.
  """
  for batch_size in range(limit, 0, -1):
    found = predict(deployment, step, batch_size=batch_size, context=context)
    if found.speedup > 1:
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
) -> topology_lib.Topology | None:
  """The fixed tree with the most predicted tokens per second.

  Arguments are those of `tree_step` and `predict`; `num_nodes` (root included)
  and `max_depth` are limits. With acceptance of one rank the tree is a chain.
  Returns None if plain decoding is faster.
  """

  def seconds(size: int, depth: int) -> float:
    # The draft does not score leaves, but their number is not known yet.
    width = max((size - 1) / depth, 1.0) if depth else 1.0
    step = SpeculativeStep(
      num_nodes=size, draft_forwards=depth, draft_width=width
    )
    found = predict(deployment, step, batch_size=batch_size, context=context)
    return found.seconds

  return optimal.fastest_tree(
    acceptance, num_nodes=num_nodes, max_depth=max_depth, seconds=seconds
  )
