"""Predicted speed of speculative decoding.

A step runs some draft forwards in sequence and a target forward over N nodes of
every row. It emits tau tokens per row (the block efficiency):

    speedup = tau * plain / (draft forwards * draft + target over N)

Where N tokens cost the target as much as one token, this is theorem 3.8 of
Leviathan et al. (arXiv 2211.17192).
"""

from collections.abc import Sequence
import dataclasses
import functools

from specdec.models.lab.bench import optimal
from specdec.models.lab.cost_model import forward as forward_lib
from specdec.tree import topology as topology_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
  """The models and the machine of a prediction."""

  target: forward_lib.ModelShape  #: The model that verifies.
  #: None if drafting costs nothing (n-grams).
  draft: forward_lib.ModelShape | None
  hardware: forward_lib.Hardware  #: The machine that runs both.


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
  rank (`optimal.acceptance_by_rank`). A chain of n tokens with
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
  """Predicted time of a step at one batch size and context."""

  tokens: float  #: Emitted per row and step.
  seconds: float  #: Per step.
  plain_seconds: float  #: Per step of plain decoding.

  @property
  def speedup(self) -> float:
    """Speed relative to plain decoding of the same batch."""
    return self.tokens * self.plain_seconds / self.seconds

  @property
  def latency(self) -> float:
    """Seconds per token of a row."""
    return self.seconds / self.tokens


def predict(
  deployment: Deployment,
  step: SpeculativeStep,
  *,
  batch_size: int = 1,
  context: float = 0,
) -> Prediction:
  """Predicts the time of a step and of plain decoding.

  B (`batch_size`) rows do not wait for each other, each emits tau on average;
  `context` is the number of tokens in the cache of each row. Of several devices
  each runs the whole draft if that is faster than to share it.

  Raises:
    ValueError: a size is out of range, or a dtype has no peak rate.
  """
  cost = functools.partial(
    forward_lib.forward_cost, batch_size=batch_size, context=context
  )
  hardware = deployment.hardware
  verify = cost(deployment.target, num_tokens=step.num_nodes)
  seconds = verify.seconds(hardware)
  if deployment.draft and step.draft_forwards:
    drafting = cost(deployment.draft, num_tokens=step.draft_width)
    alone = dataclasses.replace(hardware, devices=1)
    seconds += step.draft_forwards * min(
      drafting.seconds(hardware), drafting.seconds(alone)
    )
  return Prediction(
    tokens=step.tokens,
    seconds=seconds,
    plain_seconds=cost(deployment.target).seconds(hardware),
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
