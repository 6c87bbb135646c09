"""Best-first growth on lists in plain Python, and the real thing beside it."""

from collections.abc import Callable
import dataclasses
import math

import jax
from list_trees import child
from list_trees import find
from list_trees import from_arrays
from list_trees import Node
from list_trees import ranking
from list_trees import up
import numpy as np
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import Sampling
from specdec.checks import check_sampling
from specdec.context import StepContext
from specdec.draft.growth import grow
from specdec.draft.stages import init_stages
from specdec.sampling import Randomness
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import ROOT

VOCAB_SIZE = 7
TEXT_SLOTS = 32
BATCH_SIZE = 3
TARGET_BYTES = 1000
_EULER_GAMMA = 0.5772157


# The reference.


@dataclasses.dataclass
class SlowStage:
  """A stage whose scorer is a function from tokens to all logits.

  Attributes:
    logits: `(tokens) -> [V]`, of the next token.
    config: as of the drafter.
    inner: likewise.
    is_model: whether it is a language model, or says nothing about the tokens
      with probability 0.
    cost: of a forward, in target forwards.
    scored: nodes of each row.
    forwards: so far.
  """

  logits: Callable[[list[int]], np.ndarray]
  config: Settings
  inner: 'SlowStage | None' = None
  is_model: bool = True
  cost: float = 0.0
  scored: list[set[int]] = dataclasses.field(default_factory=list)
  forwards: int = 0


@dataclasses.dataclass(frozen=True)
class SlowStep:
  """What all stages know."""

  texts: list[list[int]]
  active: np.ndarray
  noise: np.ndarray
  temperature: float

  @property
  def max_depth(self) -> int:
    return self.noise.shape[1] - 1


def _log_softmax(scores):
  scores = np.asarray(scores, np.float64)
  return scores - np.logaddexp.reduce(scores)


def ranked_logits(stage, step, row, nodes, node):
  """The formula of `specdec.ranking` for all tokens after a node."""
  path = [nodes[index].token for index in reversed(up(nodes, node))]
  logits = stage.logits(step.texts[row] + path[1:])
  noise = step.noise[row, nodes[node].depth]
  temperature, b = step.temperature or 1.0, stage.config.calibration
  if stage.is_model:
    return _log_softmax(b * (logits / temperature + noise))
  # All other tokens are one more.
  rest = max(1 - np.exp(logits).sum(), 1e-6)
  others = math.log(rest) / temperature
  others += _EULER_GAMMA if step.temperature else 0.0
  scores = np.append(logits / temperature + noise, others)
  return _log_softmax(b * scores)[:-1]


def _probs(nodes):
  return [math.exp(node.log_prob) for node in nodes]


def _slow_gain(stage, row, nodes, can_grow):
  """Probability that children do not have yet, at the share they got so far."""
  prob = _probs(nodes)
  of_children = [
    min(
      prob[index],
      sum(
        prob[other] for other, node in enumerate(nodes) if node.parent == index
      ),
    )
    for index in range(len(nodes))
  ]
  scored = stage.scored[row]
  mass = sum(prob[index] for index in scored)
  share = sum(of_children[index] for index in scored) / mass if mass else 1.0
  return sum(
    max(share * prob[index] - of_children[index], 0)
    for index in ranking(nodes, can_grow, stage.config.width)
    if index != NO_NODE
  )


def _slow_pays(stage, rows, step, closed, rounds_done):
  config = stage.config
  cost = stage.cost if config.cost_ratio is None else config.cost_ratio
  gain = price = 0.0
  can_grow = [
    [
      step.active[row]
      and index not in stage.scored[row] | closed[row]
      and node.depth < step.max_depth
      for index, node in enumerate(nodes)
    ]
    for row, nodes in enumerate(rows)
  ]
  if cost == 0:
    return any(map(any, can_grow))
  for row in np.flatnonzero(step.active):
    nodes = rows[row]
    gain += _slow_gain(stage, row, nodes, can_grow[row])
    expected = sum(sorted(_probs(nodes))[::-1][: config.num_nodes])
    price += cost * expected / (1 + rounds_done * cost)
  begun = all(ROOT in stage.scored[row] for row in np.flatnonzero(step.active))
  return gain > price or not begun


def _slow_guess(stage, rows, step, closed, label):
  if stage.inner is not None:
    both = [one | two for one, two in zip(closed, stage.scored, strict=True)]
    _slow_grow(stage.inner, rows, step, both, label + 1)


def _rescored(nodes, edges):
  """The list with some new edges."""
  new = nodes[:1]
  for index, node in enumerate(nodes[1:], start=1):
    edge = edges.get(index, node.cond_log_prob)
    new.append(child(new, node.parent, node.token, edge, node.origin))
  return new


def _slow_score(stage, nodes, step, row, closed, label):
  """One forward of one row; returns the new list."""
  config, scored = stage.config, stage.scored[row]
  is_open = [
    index not in scored and (stage.is_model or index not in closed)
    for index in range(len(nodes))
  ]
  # A language model takes two tokens at least.
  picked = ranking(nodes, is_open, max(config.width, 2))
  picked = [node for node in picked if node != NO_NODE]
  ranked = {
    node: ranked_logits(stage, step, row, nodes, node) for node in picked
  }
  scored |= set(picked)
  if stage.inner is not None:
    nodes = _rescored(
      nodes,
      {
        index: ranked[node.parent][node.token]
        for index, node in enumerate(nodes)
        if node.parent in ranked and node.parent not in closed
      },
    )
  else:
    nodes = list(nodes)
  for node in picked:
    if node in closed or nodes[node].depth == step.max_depth:
      continue
    best = np.argsort(-ranked[node], kind='stable')[: config.branching]
    for token in best.tolist():
      fits = len(nodes) < _CAPACITIES[-1]
      if ranked[node][token] < -1e29 or not fits:
        continue
      if find(nodes, node, token) == NO_NODE:
        nodes.append(child(nodes, node, token, ranked[node][token], label))
  return nodes


# Of the tree being grown; a stack, as the stages inside share it.
_CAPACITIES: list[int] = []


def _slow_grow(stage, rows, step, closed, label=1):
  """Grows the lists of all rows in place."""
  if not stage.scored:
    stage.scored = [set() for _ in rows]
  _slow_guess(stage, rows, step, closed, label)
  for rounds_done in range(stage.config.rounds):
    if not _slow_pays(stage, rows, step, closed, rounds_done):
      break
    stage.forwards += 1
    for row, nodes in enumerate(rows):
      rows[row] = _slow_score(stage, nodes, step, row, closed[row], label)
    _slow_guess(stage, rows, step, closed, label)


# The real thing.


@jax.jit
def grown(drafter, tokens, length, active, noise, sampling):
  """Trees and counters of a first step."""
  stages = init_stages(drafter, tokens, length, num_slots=TEXT_SLOTS)
  return grown_from(drafter, stages, tokens, length, active, noise, sampling)


def grown_from(drafter, stages, tokens, length, active, noise, sampling):
  ctx = StepContext(
    tokens=tokens,
    length=length,
    active=active,
    seen=None,
    sampling=sampling,
    randomness=Randomness(
      noise=noise, draft_keys=None, uniforms=None, residual_noise=None
    ),
    shape=drafter.shape,
    max_depth=noise.shape[1] - 1,
    target_bytes=TARGET_BYTES,
    shares_noise=True,
    children='best',
  )
  return grow(drafter.stages, stages, ctx.root_trees(), ctx)


def random_texts(rng, vocab_size=VOCAB_SIZE):
  return [
    rng.integers(vocab_size, size=length).tolist()
    for length in rng.integers(1, 9, size=BATCH_SIZE)
  ]


def random_noise(rng, max_depth, temperature, vocab_size=VOCAB_SIZE):
  noise = rng.gumbel(size=(BATCH_SIZE, max_depth + 1, vocab_size))
  return (noise * (temperature > 0)).astype(np.float32)


def row_of(batch, row):
  return jax.tree.map(lambda leaf: leaf[row], batch)


def run(drafter, step, sampling=None):
  """Lists of nodes, and forwards by stage."""
  tokens = np.zeros((BATCH_SIZE, TEXT_SLOTS), np.int32)
  for row, text in enumerate(step.texts):
    tokens[row, : len(text)] = text
  length = np.array([len(text) for text in step.texts], np.int32)
  if sampling is None:
    sampling = Sampling(temperature=step.temperature)
  vocab_size = step.noise.shape[2]
  sampling = check_sampling(sampling, BATCH_SIZE, vocab_size)
  stages, tree = jax.device_get(
    grown(drafter, tokens, length, step.active, step.noise, sampling)
  )
  for stage in stages:
    np.testing.assert_array_equal(
      stage.counters.row_forwards, stage.counters.forwards * step.active
    )
  lists = [from_arrays(row_of(tree, row)) for row in range(BATCH_SIZE)]
  for nodes in lists:
    _assert_well_formed(nodes, step.max_depth)
  return lists, [int(stage.counters.forwards) for stage in stages]


def _assert_well_formed(nodes, max_depth):
  seen = set()
  for index, node in enumerate(nodes[1:], start=1):
    parent = nodes[node.parent]
    assert node.parent < index
    assert node.depth == parent.depth + 1 <= max_depth
    assert node.cond_log_prob <= 0
    assert node.log_prob <= parent.log_prob
    assert (node.parent, node.token) not in seen, 'a duplicate'
    seen.add((node.parent, node.token))


def run_slowly(stage, step):
  rows = [[Node(text[-1])] for text in step.texts]
  _CAPACITIES.append(stage.config.capacity)
  _slow_grow(stage, rows, step, [set() for _ in rows])
  _CAPACITIES.pop()
  forwards = []
  while stage is not None:
    forwards.append(stage.forwards)
    stage = stage.inner
  return rows, forwards


def assert_equal_trees(actual, expected):
  for one, other in zip(actual, expected, strict=True):
    discrete = lambda nodes: [
      (node.token, node.parent, node.depth, node.origin) for node in nodes
    ]
    assert discrete(one) == discrete(other)
    np.testing.assert_allclose(
      [(node.cond_log_prob, node.log_prob) for node in one],
      [(node.cond_log_prob, node.log_prob) for node in other],
      rtol=1e-4,
      atol=1e-4,
    )


# Tables.

TREE = Settings(
  num_nodes=10, width=3, branching=3, rounds=3, capacity=40, cost_ratio=0
)
SMALL = Settings(width=3, branching=2, rounds=2, cost_ratio=0)
TINY = Settings(width=2, branching=2, rounds=1, cost_ratio=0)


def random_table(seed, sharpness=2.0):
  rng = np.random.default_rng(seed)
  shape = (VOCAB_SIZE, VOCAB_SIZE)
  return (sharpness * rng.normal(size=shape)).astype(np.float32)


def model_stage(table, config=TREE, name='draft'):
  return tiny_drafters.model(
    table_model(table, max_positions=100), config, name
  )


def slow_model(table, config=TREE, inner=None):
  return SlowStage(
    lambda tokens: table[tokens[-1]],
    config,
    inner,
    cost=table.nbytes / TARGET_BYTES,
  )


def slow_proposer(table, config):
  log_probs = np.asarray(jax.nn.log_softmax(table))
  return SlowStage(lambda tokens: log_probs[tokens[-1]], config, is_model=False)


def random_step(seed, max_depth, temperature, active=(True,) * BATCH_SIZE):
  rng = np.random.default_rng(seed)
  return SlowStep(
    texts=random_texts(rng),
    active=np.array(active),
    noise=random_noise(rng, max_depth, temperature),
    temperature=temperature,
  )


def chain_config(**kw) -> Settings:
  """One guess after every node, and five rounds that cost nothing."""
  kw = {
    'num_nodes': 8,
    'width': 2,
    'branching': 1,
    'rounds': 5,
    'cost_ratio': 0,
  } | kw
  return Settings(**kw)
