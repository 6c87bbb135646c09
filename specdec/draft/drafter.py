"""What a drafter is made of: a scorer, how it grows the tree, who helps it.

A scorer knows how likely tokens are to follow a node. There is one loop that
grows a tree with a scorer (`specdec.growth`), so a new way of guessing is a new
scorer and nothing else. Staged speculation (Spector and Re, arXiv 2308.04623,
section 3.2) is a drafter with another one inside, which guesses for it:

    Drafter(draft model, inner=Drafter(smaller model, inner=Drafter(n-gram)))
"""

import dataclasses
import math
import numbers
from typing import Any
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specdec.draft.ranking import Draws
from specdec.sampling import Sampling
from specdec.tree.topology import Topology
from specdec.tree.tree import TokenTree


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


class Step(flax.struct.PyTreeNode):
  """What all stages know about one step of a decode.

  Attributes:
    tokens: `[B, T]` int32, the text so far.
    length: `[B]` int32, its lengths; the root is the token before.
    active: `[B]` bool, rows that are not done.
    noise: `[B, D + 1, V]` float32; entry d is of the position that follows
      nodes of depth d. The same that the target will use; None if the target
      verifies by rejection.
    sampling: validated; the target's.
    target_bytes: read by one target forward; static.
    max_depth: D, no node is deeper; static.
    draws: how to draw children; None if they are the best ones.
    seen: `[B, V]` bool, tokens of the text; None if there is no repetition
      penalty.
  """

  tokens: jax.Array
  length: jax.Array
  active: jax.Array
  noise: jax.Array | None
  sampling: Sampling
  target_bytes: int = flax.struct.field(pytree_node=False)
  max_depth: int = flax.struct.field(pytree_node=False)
  draws: Draws | None = None
  seen: jax.Array | None = None


class Scores(flax.struct.PyTreeNode):
  """What a scorer says about W nodes; see `specdec.ranking`.

  Attributes:
    nodes: `[B, W]` int32, those that were scored; `NO_NODE` for the others.
    tokens: `[B, W, K]` int32, the likeliest tokens to follow, best first and
      distinct.
    edges: `[B, W, K]` float32, their log-probabilities, at most 0;
      `ranking.IMPOSSIBLE` for entries that are no guess.
    sources: `[B, W, K]` int32, indices of the scorer's `labels`; None if it has
      only one.
    given: `[B, M]` float32, the log-probability of every node that is a child
      of one of the W; arbitrary, but at most 0, for the others.
    slots_read: `[B]` int32, visible cache slots.
    drawn_from: `[B, W, V]` float32, the distributions that `tokens` were drawn
      from, None if they were not.
  """

  nodes: jax.Array
  tokens: jax.Array
  edges: jax.Array
  sources: jax.Array | None
  given: jax.Array
  slots_read: jax.Array
  drawn_from: jax.Array | None = None

  def origins(self, label: int) -> jax.Array:
    """`[B, W, K]` int32, who proposes; `label` is that of the first source."""
    if self.sources is None:
      return jnp.full(self.tokens.shape, label)
    return label + self.sources


class Scorer(Protocol):
  """Pure functions, and a pytree of what they need; batched.

  Attributes:
    labels: names of those who propose, for the origin of tokens.
    vocab_size: V, or None if it has none of its own.
    max_positions: the longest context, or None if there is no limit.
    needs_ancestors: whether a node can be scored only after its ancestors.
    can_draw: whether it has a distribution to draw children from; one that has
      not, always proposes the best.
    bytes_per_slot: read from memory per visible cache slot.
  """

  labels: tuple[str, ...]
  vocab_size: int | None
  max_positions: int | None
  needs_ancestors: bool
  can_draw: bool
  bytes_per_slot: int

  def bytes_per_forward(self, width: int) -> int:
    """Read from memory by scoring `width` nodes, cache apart."""

  def init(
    self,
    prompt: jax.Array,
    prompt_length: jax.Array,
    *,
    num_slots: int,
    num_scored: int,
  ) -> Any:
    """The state before the first step.

    All of each prompt is known to it but the last token, the root.

    Args:
      prompt: `[B, P]` int32.
      prompt_length: `[B]` int32.
      num_slots: the longest text.
      num_scored: room for what is scored in one step.
    """

  def catch_up(
    self, state: Any, tokens: jax.Array, length: jax.Array
  ) -> tuple[Any, jax.typing.ArrayLike]:
    """Between steps: takes in text that was decoded without the scorer.

    Args:
      state: as it is.
      tokens: `[B, T]` int32, the texts.
      length: `[B]` int32, of the texts.

    Returns:
      The state, and how many forwards it took.
    """

  def score(
    self,
    state: Any,
    tree: TokenTree,
    step: Step,
    nodes: jax.Array,
    config: TreeConfig,
  ) -> tuple[Scores, Any]:
    """One forward.

    Args:
      state: as it is.
      tree: `[B, M]` per field.
      step: see `Step`.
      nodes: `[B, W]` int32; `NO_NODE` where there is nothing to score. Those in
        front come first if the scorer has no time for all.
      config: of the stage; `branching` is K.
    """

  def commit(self, state: Any, path: jax.Array, num_kept: jax.Array) -> Any:
    """Ends a step.

    Args:
      state: as it is.
      path: `[B, D + 1]` int32, the accepted node of each depth, then `NO_NODE`.
      num_kept: `[B]` int32, how many of them, the root not counted, are now
        part of the text; -1 for a row that is done and stays as it is.
    """


class Drafter(flax.struct.PyTreeNode):
  """One stage of drafting, with the stages inside it.

  Attributes:
    scorer: see `Scorer`.
    config: how it grows the tree; static.
    inner: guesses for it, or None.

  Raises:
    ValueError: the topology is fixed and there is an inner stage.
  """

  scorer: Any
  config: TreeConfig = flax.struct.field(pytree_node=False)
  inner: 'Drafter | None' = None

  def __post_init__(self):
    if self.inner is not None and self.config.topology is not None:
      raise ValueError(
        'a fixed topology leaves no room for the guesses of an inner stage;'
        ' use one of the two'
      )
    if self.inner is not None and self.inner.config.topology is not None:
      raise ValueError('only the outermost stage can have a fixed topology')

  @property
  def stages(self) -> tuple['Drafter', ...]:
    """Itself and those inside, from the outermost in."""
    return (self, *(self.inner.stages if self.inner is not None else ()))

  @property
  def name(self) -> str:
    """Of this stage."""
    return '+'.join(self.scorer.labels)

  @property
  def labels(self) -> tuple[str, ...]:
    """Who can propose a token; origin i of a node is entry i - 1."""
    return tuple(label for one in self.stages for label in one.scorer.labels)

  @property
  def max_depth(self) -> int:
    """D of the trees that it grows."""
    deepest = self.config.num_nodes - 1
    return min(self.config.max_depth, self._reach, deepest)

  @property
  def _reach(self) -> int:
    """How deep its rounds can go."""
    inner = 0 if self.inner is None else self.inner._reach
    return self.config.rounds * (1 + inner) + inner


class StageCounters(flax.struct.PyTreeNode):
  """What a stage counts; int32.

  Attributes:
    forwards: `[]`, batched ones.
    row_forwards: `[B]`, those in which the row was not done.
    slots_read: `[B]`, visible cache slots, summed over these.
  """

  forwards: jax.Array
  row_forwards: jax.Array
  slots_read: jax.Array


class StageState(flax.struct.PyTreeNode):
  """What one stage carries from step to step.

  Attributes:
    scorer: of the scorer.
    scored: `[B, M]` bool, nodes it has scored in this step.
    proposals: `[B, M, V]` float32, the distributions that the children of each
      node were drawn from in this step; None if none is.
    counters: so far.
    inner: of the stage inside, or None.
  """

  scorer: Any
  scored: jax.Array
  proposals: jax.Array | None
  counters: StageCounters
  inner: 'StageState | None'

  @property
  def stages(self) -> tuple['StageState', ...]:
    """Itself and those inside, from the outermost in."""
    return (self, *(self.inner.stages if self.inner is not None else ()))


def staged(draft: Drafter, inner: Drafter) -> Drafter:
  """The draft, its forwards made fewer by another drafter's guesses.

  What the draft has inside already is staged on the new one in turn, so that
  `staged(staged(a, b), c)` and `staged(a, staged(b, c))` are the same.
  """
  if draft.inner is not None:
    inner = staged(draft.inner, inner)
  return draft.replace(inner=inner)
