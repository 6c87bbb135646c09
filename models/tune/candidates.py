"""Ways of decoding that are worth a try, found with few tries.

Every try compiles a program, so no grid is searched in full: each method climbs
(`specdec.planning.climb`) from where it usually does well.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

import numpy as np

from models.text.drafters import DraftSettings
from models.text.drafters import INNERS
from specdec.draft.drafter import TreeConfig
from specdec.study.planning import climb
from specdec.study.planning import PLAIN
from specdec.study.planning import StepCosts
from specdec.study.planning import Trial
from specdec.tree.optimal import acceptance_by_rank
from specdec.tree.optimal import fastest_tree

_CHAINS = (1, 2, 3, 4, 6, 8)
_ROUNDS = (1, 2, 3, 4, 6)
# Nodes per draft forward, and children of each.
_SHAPES = ((2, 2), (4, 4), (8, 4), (16, 8))
_MAX_BRANCHING = 8

MAX_DEPTH = 12
"""Of fixed trees, chains are shorter; `max_depth` holds for grown ones."""

# Of a better neighbour: timings are noisy, and every step compiles.
_CLIMB_MARGIN = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """A way of decoding.

  Attributes:
    name: for people.
    method: one of `models.drafters.METHODS`.
    drafting: the settings.
  """

  name: str
  method: str
  drafting: DraftSettings


def _capacity(tree: TreeConfig, inner: TreeConfig | None) -> int:
  """Room for all guesses there can be, as far as the base has it.

  A smaller array is sorted faster.
  """
  guesses = 1 + tree.branching + (tree.rounds - 1) * tree.width * tree.branching
  if inner is not None:
    growths = tree.rounds + 1
    guesses += growths * inner.rounds * inner.width * inner.branching
  wanted = -(-max(guesses, tree.num_nodes) // 32) * 32
  return max(min(wanted, tree.capacity), tree.num_nodes)


@dataclasses.dataclass(kw_only=True)
class Search:
  """Tries candidates, and keeps what it found.

  Attributes:
    costs: of the target.
    evaluate: replays a candidate. ValueError: it cannot be had with this pair.
    measure: tokens per second of a candidate with the target.
    base: settings that are not varied.
    node_counts: N of trees to be tried, ascending.
    candidates: by name, so far.
    trials: likewise.
  """

  costs: StepCosts
  evaluate: Callable[[Candidate], Trial]
  measure: Callable[[Candidate], float]
  base: DraftSettings
  node_counts: tuple[int, ...]
  candidates: dict[str, Candidate] = dataclasses.field(default_factory=dict)
  trials: dict[str, Trial] = dataclasses.field(default_factory=dict)

  @property
  def rates(self) -> dict[str, float]:
    """Predicted tokens per second, by name."""
    return {
      name: trial.tokens_per_second(self.costs)
      for name, trial in self.trials.items()
    }

  def rate(self, candidate: Candidate) -> float:
    """Of a candidate, which is tried if it was not yet."""
    name = candidate.name
    if name not in self.trials:
      self.trials[name] = self.evaluate(candidate)
      self.candidates[name] = candidate
    return self.trials[name].tokens_per_second(self.costs)

  def run(self, *, has_draft: bool, ranks: Callable[[], np.ndarray]) -> None:
    """Tries all methods there are.

    Args:
      has_draft: whether there is a draft model.
      ranks: of known tokens among its guesses, see `replay.next_token_ranks`.
    """
    self.rate(Candidate(name=PLAIN, method='plain', drafting=self.base))
    self.search_alone()
    if not has_draft:
      self.calibrate()
      return
    forward, rest = self.search_chains()
    self.calibrate()
    self.search_fixed(ranks(), forward=forward, rest=rest)
    best = self.search_trees('tree', forward, start=None)
    self.search_trees('staged', forward, start=best)

  def calibrate(self) -> None:
    """Decodes with the best so far, to see what the predictions leave out."""
    rates = self.rates
    best = max(rates, key=rates.__getitem__)
    if best != PLAIN:
      rate = self.measure(self.candidates[best])
      interference = self.trials[best].interference(self.costs, rate)
      self.costs = dataclasses.replace(self.costs, interference=interference)

  def search_alone(self) -> None:
    """Tables and the text itself, without a draft."""
    inner = self.base.inner
    kinds = INNERS[1:] if inner is None else (inner,) if inner != 'none' else ()
    start = {'num_nodes': self._near(8), 'shape': 1}
    found = {}
    for kind in kinds:
      try:
        found[kind] = self.rate(self._tree(kind, start, None))
      except ValueError:  # the table has another vocabulary
        continue
    if found:
      best = max(found, key=found.__getitem__)
      self._climb(best, start, None)

  def search_chains(self) -> tuple[float, float]:
    """Chains; seconds of a draft forward, and of the rest of a step."""
    usable = [g for g in _CHAINS if g < self.node_counts[-1]]
    chain = lambda g: Candidate(
      name=f'chain {g}',
      method='chain',
      drafting=dataclasses.replace(self.base, num_draft_tokens=g),
    )
    climb(
      {'g': usable[min(2, len(usable) - 1)]},
      {'g': usable},
      lambda point: self.rate(chain(point['g'])),
      margin=_CLIMB_MARGIN,
    )
    lengths = [g for g in usable if f'chain {g}' in self.trials]
    if len(lengths) < 2:
      return 0.0, 0.0
    seconds = [
      trial.seconds / max(trial.steps, 1)
      for trial in (self.trials[f'chain {g}'] for g in lengths)
    ]
    forward, rest = np.polyfit(lengths, seconds, 1)
    return max(float(forward), 0.0), max(float(rest), 0.0)

  def search_fixed(
    self, ranks: np.ndarray, *, forward: float, rest: float
  ) -> None:
    """The tree of Sequoia's recurrence, if it is more than a chain tried."""
    topology = fastest_tree(
      acceptance_by_rank(ranks, _MAX_BRANCHING).tolist(),
      num_nodes=self.node_counts[-1],
      max_depth=MAX_DEPTH,
      seconds=lambda nodes, depth: (
        rest + depth * forward + self.costs.of_step(nodes)
        if depth
        else self.costs.plain_step
      ),
    )
    if topology is None:
      return
    self.rate(
      Candidate(
        name=f'fixed N={topology.num_nodes} depth={topology.depth}',
        method='tree',
        drafting=dataclasses.replace(
          self.base, tree=TreeConfig(topology=topology)
        ),
      )
    )

  def search_trees(
    self,
    method: str,
    forward: float,
    start: Mapping[str, int] | None,
  ) -> dict[str, int] | None:
    """Grown trees, from a point of the grid; the best of it.

    None if there is nobody to guess for the draft.
    """
    if method == 'staged' and self.base.inner == 'none':
      return None
    point = start or {'num_nodes': self._near(16), 'rounds': 2, 'shape': 1}
    return self._climb(method, point, forward)

  def _climb(self, method, start, forward):
    axes = {
      'num_nodes': self.node_counts,
      'rounds': tuple(range(len(_ROUNDS))),
      'shape': tuple(range(len(_SHAPES))),
    }
    return climb(
      start,
      {name: axes[name] for name in start},
      lambda point: self.rate(self._tree(method, point, forward)),
      margin=_CLIMB_MARGIN,
    )

  def _near(self, num_nodes: int) -> int:
    """The measured N that is closest."""
    return min(self.node_counts, key=lambda one: abs(one - num_nodes))

  def _tree(
    self, method: str, point: Mapping[str, int], forward: float | None
  ) -> Candidate:
    """A grown tree; one of a draft stops by what a forward takes."""
    base, num_nodes = self.base, point['num_nodes']
    width, branching = _SHAPES[point['shape']]
    changes = {'num_nodes': num_nodes, 'width': width, 'branching': branching}
    if 'rounds' in point:
      changes['rounds'] = _ROUNDS[point['rounds']]
    tree = dataclasses.replace(base.tree, topology=None, **changes)
    cost_ratio = base.tree.cost_ratio
    if forward is not None:
      ratio = forward / max(self.costs.of_nodes(num_nodes), 1e-9)
      cost_ratio = float(f'{ratio:.2g}')
    grown = tree
    if method in INNERS:
      grown = dataclasses.replace(tree, rounds=base.inner_rounds_alone)
    capacity = _capacity(grown, base.inner_tree if method == 'staged' else None)
    tree = dataclasses.replace(tree, capacity=capacity, cost_ratio=cost_ratio)
    size = f'N={num_nodes} W={width} K={branching}'
    rounds = f' R={tree.rounds}' if 'rounds' in point else ''
    return Candidate(
      name=f'{method} {size}{rounds}',
      method=method,
      drafting=dataclasses.replace(base, tree=tree),
    )
