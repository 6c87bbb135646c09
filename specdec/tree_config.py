"""How a tree of guesses grows: the settings of one stage."""

import dataclasses
import math
import numbers

from specdec.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
  """Settings of one stage; hashable, so static under `jit`.

  The tree is shared by all stages, so its size is set by the outermost one:
  `num_nodes`, `capacity` and `max_depth` of inner stages are not looked at.

  Attributes:
    num_nodes: N, verified by the target, the root included; 1 verifies no
      guess at all.
    width: W, nodes that the stage scores in one forward.
    branching: K, children that a scored node gets from the stage.
    rounds: forwards per growth, at most; without an inner stage each goes one
      level deeper.
    max_depth: D, of the deepest node.
    capacity: M, nodes that the tree can hold while it grows; guesses beyond it
      are dropped, whoever makes them. Where an inner stage guesses a lot, leave
      room for the `rounds * width * branching` of this one.
    calibration: exponent of the stage's probabilities. Above 1 the stage is
      trusted more than its own probabilities say, and the tree grows deep;
      below 1, broad.
    cost_ratio: what one of the stage's forwards costs, in target forwards.
      Growth stops when another round is expected to bring fewer accepted tokens
      than the same time spent at the rate so far. None: the ratio of the bytes
      that the two read. 0: all rounds, as long as there is anything to score.
    min_gain: growth stops in any case when another round is expected to bring
      fewer accepted tokens than this.
    topology: a fixed shape instead of the likeliest one. It sets `num_nodes`,
      `width`, `branching`, `rounds`, `max_depth` and `capacity`; there is no
      stopping early, and no inner stage.

  Raises:
    ValueError: a value is out of range; says which.
  """

  num_nodes: int = 32
  width: int = 8
  branching: int = 4
  rounds: int = 4
  max_depth: int = 16
  capacity: int = 256
  calibration: float = 1.0
  cost_ratio: float | None = None
  min_gain: float = 0.0
  topology: Topology | None = None

  def __post_init__(self):
    shape = self.topology
    if shape is not None:
      fixed = {
        'num_nodes': shape.num_nodes,
        'width': shape.schedule.shape[1],
        'branching': shape.branching,
        'rounds': shape.depth,
        'max_depth': shape.depth,
        'capacity': shape.num_nodes,
      }
      for name, value in fixed.items():
        object.__setattr__(self, name, value)
    for name in (
      'num_nodes',
      'width',
      'branching',
      'rounds',
      'max_depth',
      'capacity',
    ):
      value = getattr(self, name)
      is_integer = isinstance(value, numbers.Integral)
      if not is_integer or isinstance(value, bool) or value < 1:
        raise ValueError(
          f'{name} must be an integer of at least 1, got {value}'
        )
    if self.capacity < self.num_nodes:
      raise ValueError(
        f'capacity must be at least num_nodes={self.num_nodes}, got'
        f' {self.capacity}'
      )
    if not 0 < self.calibration < math.inf:
      raise ValueError(f'calibration must be positive, got {self.calibration}')
    if not 0 <= self.min_gain < math.inf:
      raise ValueError(f'min_gain must be at least 0, got {self.min_gain}')
    if self.cost_ratio is not None and not 0 <= self.cost_ratio < math.inf:
      raise ValueError(
        f'cost_ratio must be at least 0 or None, got {self.cost_ratio}'
      )
