"""Drafters: stages, each of a scorer and the settings of its growth.

A scorer estimates how likely tokens are to follow a node. One loop grows a tree
with any scorer (`specdec.draft.growth`), so a new way of drafting is a new
scorer and nothing else. In staged speculation (Spector and Re, arXiv
2308.04623, section 3.2) every stage drafts for the one before it:

    Drafter((Stage(draft model), Stage(smaller model), Stage(n-gram)))

Plain decoding is the drafter without stages, `PLAIN`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec import model as model_lib
from specdec import total as total_lib
from specdec.tree import topology as topology_lib
from specdec.tree import tree as tree_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
  """Settings of one stage; hashable, so static under `jit`.

  Raises:
    ValueError: a value is out of range; names it.
  """

  #: W, nodes that the stage scores in one forward.
  width: int = topology_lib.setting(
    8, 'nodes per forward of the stage', high=topology_lib.LARGEST_TREE
  )
  #: K, children that a scored node gets from the stage.
  branching: int = topology_lib.setting(
    4, 'children per node', high=topology_lib.LARGEST_TREE
  )
  #: The largest number of forwards per growth; without an inner stage each goes
  #: one level deeper.
  rounds: int = topology_lib.setting(
    4,
    'forwards of the stage per tree, at most',
    high=topology_lib.LARGEST_DEPTH,
  )
  #: Exponent of the stage's probabilities. Above 1 the stage is trusted more
  #: than its own probabilities say, and the tree grows deep; below 1, broad.
  calibration: float = topology_lib.setting(
    1.0, 'exponent of the probabilities of the stage', low=1e-30
  )
  #: Cost of one forward of the stage, in target forwards. Growth stops when
  #: another round is expected to bring fewer accepted tokens than the same time
  #: spent at the rate so far. None: the ratio of the bytes that the two read.
  #: 0: all rounds, as long as there is anything to score.
  cost_ratio: float | None = topology_lib.setting(
    None,
    'cost of a forward of the stage in target forwards, for stopping early; 0:'
    ' never stop; default: by the bytes they read',
    low=0,
  )

  def __post_init__(self) -> None:
    topology_lib.check_settings(self)


@dataclasses.dataclass(frozen=True)
class Scores:
  """Estimates of a scorer about W nodes; see `specdec.draft.ranking`."""

  #: `[B, W]` int32, those that were scored; `NO_NODE` for the others.
  nodes: jax.Array
  #: `[B, W, K]` int32, the tokens of the K children, best first and distinct;
  #: if they are drawn, in the order of the draws, with replacement repeated.
  tokens: jax.Array
  #: `[B, W, K]` float32, their log-probabilities, at most 0;
  #: `sampling.EXCLUDED` for entries that are no candidates.
  cond_log_probs: jax.Array
  sources: jax.Array  #: `[B, W, K]` int32, indices of the scorer's labels.
  #: `(index [B, M], tokens [B, M]) -> [B, M]` float32, the log-probability, at
  #: most 0, of any token after the node at an index of W. Asked only for
  #: children that another stage drafted.
  log_prob_of: Callable[[jax.Array, jax.Array], jax.Array]
  slots_read: jax.Array  #: `[B]` int32, visible cache slots.
  #: `[B, W, V]` float32, the distributions that `tokens` were drawn from; of
  #: size 0 if they were not drawn.
  drawn_from: jax.Array
  #: `[]` int32, the forwards that it took; 0 if all was looked up.
  forwards: jax.typing.ArrayLike = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorerFacts:
  """The properties, needs and costs of a scorer; nothing in it is traced."""

  #: Names of the sources of its candidates, for the origin of tokens.
  labels: tuple[str, ...]
  #: The networks that it runs.
  networks: tuple[model_lib.Network, ...] = ()
  vocab_size: int | None = None  #: V, or None if it has none of its own.
  #: The longest context, or None if there is no limit.
  max_positions: int | None = None
  #: Whether a node can be scored only after its ancestors.
  needs_ancestors: bool = False
  #: Whether a node can be scored only in a forward after its parent's.
  needs_parents: bool = False
  #: The target's hidden states that it reads, keys of `KVCache.hidden`.
  hidden: tuple[int, ...] = ()
  #: Whether it has a distribution to draw children from, or only the best.
  can_draw: bool = False
  #: Bytes read from memory per visible cache slot, per forward however many
  #: nodes it scores, and per node.
  bytes_per_slot: int = 0
  state_bytes: int = 0  #: Bytes of recurrent states per row.
  bytes_per_forward: int = 0
  bytes_per_node: int = 0

  @classmethod
  def of_network(
    cls, network: model_lib.Network, name: str, **more: Any
  ) -> 'ScorerFacts':
    """The facts of a stage that runs one network; `more` are other fields.

    A forward reads all weights, however many nodes there are.
    """
    spec = network.spec
    return cls(
      labels=(name,),
      networks=(network,),
      vocab_size=spec.vocab_size,
      max_positions=spec.max_positions,
      can_draw=True,
      bytes_per_slot=spec.cache_bytes_per_slot,
      state_bytes=spec.state_bytes,
      bytes_per_forward=spec.weight_bytes,
      **more,
    )

  def bytes_of(self, width: int) -> int:
    """Bytes read from memory by scoring `width` nodes, the cache apart."""
    return self.bytes_per_forward + width * self.bytes_per_node


class Scorer:
  """Base of scorers: batched pure functions, and a pytree of what they need.

  A subclass has `facts` and `score`; with a state also `start`, `restart`,
  `observe` and `keep` (`specdec.carried`).
  """

  @property
  def facts(self) -> ScorerFacts:
    """The facts of the scorer."""
    raise NotImplementedError

  def least_width(self, max_depth: int, has_inner: bool) -> int:
    """How many tokens of text and nodes one forward reads at least.

    By default 2, so that an unread token and a node fit.

    Args:
      max_depth: D.
      has_inner: whether inner stages draft for it. Then it may lack more than
        one token of the text, as not every accepted node was scored.
    """
    del max_depth, has_inner
    return 2

  def start(self, texts: carried_lib.Texts, num_scored: int) -> Any:
    """The state before the first step; by default there is none.

    The scorer knows all of each text except the last token, the root.
    `num_scored` are the most nodes that are scored in one step.
    """
    del texts, num_scored
    return ()

  def restart(
    self, state: Any, texts: carried_lib.Texts, num_scored: int
  ) -> tuple[Any, jax.typing.ArrayLike]:
    """Between steps: takes in text that the scorer has not seen.

    By default `start` makes a new state.

    Returns:
      The state, and the number of forwards that it took.
    """
    if not jax.tree.leaves(state):
      return state, 0
    missing = jnp.any(texts.length > 0)
    state = lax.cond(
      missing, lambda: self.start(texts, num_scored), lambda: state
    )
    return state, missing.astype(jnp.int32)

  def score(
    self,
    state: Any,
    tree: tree_lib.TokenTree,
    nodes: jax.Array,
    ctx: context_lib.StepContext,
    config: StageConfig,
  ) -> tuple[Scores, Any]:
    """One forward.

    Args:
      state: the state before.
      tree: `[B, M]` per field.
      nodes: `[B, W]` int32; `NO_NODE` where there is nothing to score. A
        scorer that cannot take all W nodes must take a prefix of them.
      ctx: of the step.
      config: of the stage; `branching` is K.
    """
    raise NotImplementedError

  def observe(self, state: Any, seen: carried_lib.Verified) -> Any:
    """Learns from a verification; by default the state stays as it is."""
    del seen
    return state

  def keep(self, state: Any, added: carried_lib.Added) -> Any:
    """Ends a step; by default the state stays as it is."""
    del added
    return state


class Stage(flax.struct.PyTreeNode):
  """One level of drafting: a `Scorer`, and how it grows the tree (static)."""

  scorer: Scorer
  config: StageConfig = flax.struct.field(
    pytree_node=False, default=StageConfig()
  )

  @property
  def name(self) -> str:
    """The labels of its scorer, joined."""
    return '+'.join(self.scorer.facts.labels)

  def forward_width(self, max_depth: int, has_inner: bool) -> int:
    """How many tokens of text and nodes one forward reads."""
    least = self.scorer.least_width(max_depth, has_inner)
    return max(self.config.width, least)


class Drafter(flax.struct.PyTreeNode):
  """All stages of drafting, and the shape of the tree that they grow.

  Raises:
    ValueError: stages and shape do not go together.
  """

  #: Outermost first: each drafts for the one before it, the first for the
  #: target. Without stages decoding is plain.
  stages: tuple[Stage, ...]
  #: The shape of the tree; static.
  shape: topology_lib.TreeShape | topology_lib.Topology = flax.struct.field(
    pytree_node=False, default=topology_lib.TreeShape()
  )

  def __post_init__(self) -> None:
    if not self.stages and self.shape.num_nodes > 1:
      raise ValueError(
        'a drafter without stages drafts nothing; use specdec.PLAIN for plain'
        ' decoding'
      )
    if isinstance(self.shape, topology_lib.Topology) and len(self.stages) > 1:
      raise ValueError(
        'a fixed topology leaves no room for the candidates of an inner stage;'
        ' use one of the two'
      )
    if isinstance(self.shape, topology_lib.Topology):
      width, children = self.shape.schedule.shape[1], self.shape.branching
      config = self.stages[0].config
      if config.width < width or config.branching != children:
        raise ValueError(
          f'the topology needs a stage of width={width} and'
          f' branching={children}, got {config}; use specdec.fixed_drafter'
        )

  @property
  def labels(self) -> tuple[str, ...]:
    """Sources of candidates; origin i of a node is entry i - 1."""
    return tuple(
      label for stage in self.stages for label in stage.scorer.facts.labels
    )

  @property
  def looks_up(self) -> bool:
    """Whether it drafts by look-ups alone, without a network."""
    networks = [stage.scorer.facts.networks for stage in self.stages]
    return bool(networks) and not any(networks)

  @property
  def max_depth(self) -> int:
    """D of the trees that it grows."""
    reach = 0
    for stage in reversed(self.stages):
      # Inner stages draft before the first round and after each.
      reach += stage.config.rounds * (1 + reach)
    return min(self.shape.max_depth, reach, self.shape.num_nodes - 1)


PLAIN = Drafter(
  stages=(), shape=topology_lib.TreeShape(num_nodes=1, capacity=1)
)
"""Plain decoding: nothing is drafted, every tree is just its root."""


def fixed_drafter(
  scorer: Scorer, topology: topology_lib.Topology, *, calibration: float = 1.0
) -> Drafter:
  """A drafter of one stage that fills a fixed topology.

  The topology sets the width, the children per node and the rounds.
  """
  config = StageConfig(
    width=topology.schedule.shape[1],
    branching=topology.branching,
    rounds=topology.max_depth,
    calibration=calibration,
  )
  return Drafter((Stage(scorer, config),), topology)


def staged(*drafters: Drafter) -> Drafter:
  """The stages of several drafters one after another, in the first's shape.

  Each drafter saves forwards of the one before it.
  """
  stages = tuple(stage for drafter in drafters for stage in drafter.stages)
  return drafters[0].replace(stages=stages)


# The states of the stages, at the start and from step to step.


class StageCounters(flax.struct.PyTreeNode):
  """Counters of a stage."""

  forwards: total_lib.Total  #: `[]`, batched forwards.
  row_forwards: total_lib.Total  #: `[B]`, those in which the row was not done.
  slots_read: total_lib.Total  #: `[B]`, visible cache slots, summed over these.

  @classmethod
  def zeros(cls, batch_size: int) -> 'StageCounters':
    """Counters of zero."""
    of_rows = total_lib.Total.zeros(batch_size)
    return cls(total_lib.Total.zeros(), of_rows, of_rows)


class StageState(flax.struct.PyTreeNode):
  """State of one stage, carried from step to step."""

  scorer: Any  #: The state of the scorer.
  scored: jax.Array  #: `[B, M]` bool, nodes that it has scored in this step.
  #: `[B, M, V]` float32, the distributions that the children of each node were
  #: drawn from in this step; of size 0 if none are drawn.
  drawn_from: jax.Array
  #: `[B, 2]` int32, forwards and visible cache slots of this step.
  counted: jax.Array
  counters: StageCounters  #: The counters of the steps before.


def _num_scored(drafter: Drafter) -> list[int]:
  """The most nodes that each stage scores in one step."""
  sizes, growths = [], 1
  for index, stage in enumerate(drafter.stages):
    forwards = growths * stage.config.rounds
    has_inner = index + 1 < len(drafter.stages)
    width = stage.forward_width(drafter.max_depth, has_inner)
    # A whole path must fit when it is committed.
    sizes.append(max(forwards * width, drafter.max_depth + 1))
    growths += forwards  # before each growth and after each forward
  return sizes


def start(
  drafter: Drafter, texts: carried_lib.Texts, drawn_size: int = 0
) -> tuple[StageState, ...]:
  """The states of all stages before the first step; see `Scorer.start`.

  `drawn_size` is V if children are drawn, else 0.
  """
  batch_size, capacity = texts.tokens.shape[0], drafter.shape.capacity

  def of_stage(stage: Stage, num_scored: int) -> StageState:
    return StageState(
      scorer=stage.scorer.start(texts, num_scored),
      scored=jnp.zeros((batch_size, capacity), bool),
      drawn_from=jnp.zeros((batch_size, capacity, drawn_size)),
      counted=jnp.zeros((batch_size, 2), jnp.int32),
      counters=StageCounters.zeros(batch_size),
    )

  return tuple(map(of_stage, drafter.stages, _num_scored(drafter)))


def restart(
  drafter: Drafter,
  states: tuple[StageState, ...],
  texts: carried_lib.Texts,
) -> tuple[StageState, ...]:
  """`Scorer.restart` of all stages; rows of length 0 have nothing to read."""

  def of_stage(stage: Stage, state: StageState, num_scored: int) -> StageState:
    scorer, forwards = stage.scorer.restart(state.scorer, texts, num_scored)
    counters = state.counters.replace(
      forwards=state.counters.forwards + forwards,
      row_forwards=state.counters.row_forwards
      + jnp.where(texts.length > 0, forwards, 0),
    )
    return state.replace(scorer=scorer, counters=counters)

  return tuple(map(of_stage, drafter.stages, states, _num_scored(drafter)))


def keep(
  drafter: Drafter,
  before: tuple[StageState, ...],
  states: tuple[StageState, ...],
  seen: carried_lib.Verified,
  added: carried_lib.Added,
  active: jax.Array,
) -> tuple[StageState, ...]:
  """`Scorer.observe` and `Scorer.keep` of all stages that the drafter has.

  `active [B]` bool are the rows that are not done. The states of stages that
  the drafter does not have stay as they are: a plain step between speculative
  ones. Fields that last for one step are passed on as they were `before` it,
  because an array that changes costs a GPU a kernel.
  """

  def of_stage(stage: Stage, old: StageState, state: StageState) -> StageState:
    of_rows = jnp.where(active[:, None], state.counted, 0)
    counters = state.counters
    counters = StageCounters(
      forwards=counters.forwards + state.counted[0, 0],
      row_forwards=counters.row_forwards + of_rows[:, 0],
      slots_read=counters.slots_read + of_rows[:, 1],
    )
    scorer = stage.scorer.observe(state.scorer, seen)
    scorer = stage.scorer.keep(scorer, added)
    return old.replace(scorer=scorer, counters=counters)

  kept = tuple(map(of_stage, drafter.stages, before, states))
  return kept + states[len(kept) :]
