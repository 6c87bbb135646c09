"""Growth of trees, against a best-first search on lists in plain Python."""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp
from list_trees import child
from list_trees import find
from list_trees import from_arrays
from list_trees import Node
from list_trees import ranking
from list_trees import up
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import candidates
import tiny_models

from models.table import table_model
from specdec import Drafter
from specdec import generate
from specdec import Sampling
from specdec import staged
from specdec import TreeConfig
from specdec.drafter import Step
from specdec.growth import commit_stages
from specdec.growth import grow
from specdec.growth import init_stages
from specdec.masks import causal_mask
from specdec.ranking import IMPOSSIBLE
from specdec.topology import chain
from specdec.topology import from_paths
from specdec.topology import k_ary
from specdec.tree import init_tree
from specdec.tree import NO_NODE
from specdec.tree import ROOT

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
  config: TreeConfig
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


def _ranked(stage, step, row, nodes, node):
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
  if cost == 0 and config.min_gain == 0:
    return any(map(any, can_grow))
  for row in np.flatnonzero(step.active):
    nodes = rows[row]
    gain += _slow_gain(stage, row, nodes, can_grow[row])
    expected = sum(sorted(_probs(nodes))[::-1][: config.num_nodes])
    price += max(cost * expected / (1 + rounds_done * cost), config.min_gain)
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
    edge = edges.get(index, node.edge)
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
  ranked = {node: _ranked(stage, step, row, nodes, node) for node in picked}
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
      fits = len(nodes) < CAPACITIES[-1]
      if ranked[node][token] < -1e29 or not fits:
        continue
      if find(nodes, node, token) == NO_NODE:
        nodes.append(child(nodes, node, token, ranked[node][token], label))
  return nodes


# Of the tree being grown; a stack, as the stages inside share it.
CAPACITIES: list[int] = []


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
def _grown(drafter, tokens, length, active, noise, sampling):
  """Trees and counters of a first step."""
  stages = init_stages(drafter, tokens, length, num_slots=TEXT_SLOTS)
  return _grown_from(drafter, stages, tokens, length, active, noise, sampling)


def _grown_from(drafter, stages, tokens, length, active, noise, sampling):
  capacity = drafter.config.capacity
  root = tokens[jnp.arange(length.shape[0]), length - 1]
  return grow(
    drafter,
    stages,
    jax.vmap(init_tree, (0, None))(root, capacity),
    Step(
      tokens=tokens,
      length=length,
      active=active,
      noise=noise,
      sampling=sampling,
      target_bytes=TARGET_BYTES,
    ),
    closed=jnp.zeros((length.shape[0], capacity), bool),
  )


def _texts(rng, vocab_size=VOCAB_SIZE):
  return [
    rng.integers(vocab_size, size=length).tolist()
    for length in rng.integers(1, 9, size=BATCH_SIZE)
  ]


def _noise(rng, max_depth, temperature, vocab_size=VOCAB_SIZE):
  noise = rng.gumbel(size=(BATCH_SIZE, max_depth + 1, vocab_size))
  return (noise * (temperature > 0)).astype(np.float32)


def _row(batch, row):
  return jax.tree.map(lambda leaf: leaf[row], batch)


def _run(drafter, step, sampling=None):
  """Lists of nodes, and forwards by stage."""
  tokens = np.zeros((BATCH_SIZE, TEXT_SLOTS), np.int32)
  for row, text in enumerate(step.texts):
    tokens[row, : len(text)] = text
  length = np.array([len(text) for text in step.texts], np.int32)
  if sampling is None:
    sampling = Sampling(temperature=step.temperature)
  stages, tree = jax.device_get(
    _grown(
      drafter, tokens, length, step.active, step.noise, sampling.validated()
    )
  )
  for stage in stages.stages:
    np.testing.assert_array_equal(
      stage.counters.row_forwards, stage.counters.forwards * step.active
    )
  lists = [from_arrays(_row(tree, row)) for row in range(BATCH_SIZE)]
  for nodes in lists:
    _assert_well_formed(nodes, step.max_depth)
  return lists, [int(stage.counters.forwards) for stage in stages.stages]


def _assert_well_formed(nodes, max_depth):
  seen = set()
  for index, node in enumerate(nodes[1:], start=1):
    parent = nodes[node.parent]
    assert node.parent < index
    assert node.depth == parent.depth + 1 <= max_depth
    assert node.edge <= 0
    assert node.log_prob <= parent.log_prob
    assert (node.parent, node.token) not in seen, 'a duplicate'
    seen.add((node.parent, node.token))


def _run_slowly(stage, step):
  rows = [[Node(text[-1])] for text in step.texts]
  CAPACITIES.append(stage.config.capacity)
  _slow_grow(stage, rows, step, [set() for _ in rows])
  CAPACITIES.pop()
  forwards = []
  while stage is not None:
    forwards.append(stage.forwards)
    stage = stage.inner
  return rows, forwards


def _assert_equal_trees(actual, expected):
  for one, other in zip(actual, expected, strict=True):
    discrete = lambda nodes: [
      (node.token, node.parent, node.depth, node.origin) for node in nodes
    ]
    assert discrete(one) == discrete(other)
    np.testing.assert_allclose(
      [(node.edge, node.log_prob) for node in one],
      [(node.edge, node.log_prob) for node in other],
      rtol=1e-4,
      atol=1e-4,
    )


# Tables.

TREE = TreeConfig(
  num_nodes=10, width=3, branching=3, rounds=3, capacity=40, cost_ratio=0
)
SMALL = TreeConfig(width=3, branching=2, rounds=2, cost_ratio=0)
TINY = TreeConfig(width=2, branching=2, rounds=1, cost_ratio=0)


def _table(seed, sharpness=2.0):
  rng = np.random.default_rng(seed)
  shape = (VOCAB_SIZE, VOCAB_SIZE)
  return (sharpness * rng.normal(size=shape)).astype(np.float32)


def _model(table, config=TREE, name='draft'):
  return tiny_drafters.model(
    table_model(table, max_positions=100), config, name
  )


def _slow_model(table, config=TREE, inner=None):
  return SlowStage(
    lambda tokens: table[tokens[-1]],
    config,
    inner,
    cost=table.nbytes / TARGET_BYTES,
  )


def _slow_proposer(table, config):
  log_probs = np.asarray(jax.nn.log_softmax(table))
  return SlowStage(lambda tokens: log_probs[tokens[-1]], config, is_model=False)


def _by_name(name, outer, middle, inner):
  """A drafter of tables and its reference."""
  proposer = lambda config: candidates(
    tiny_drafters.exact(inner), config=config
  )
  return {
    'model': lambda: (_model(outer), _slow_model(outer)),
    'model, model': lambda: (
      staged(_model(outer), _model(middle, SMALL, 'small')),
      _slow_model(outer, inner=_slow_model(middle, SMALL)),
    ),
    'model, table': lambda: (
      staged(_model(outer), proposer(SMALL)),
      _slow_model(outer, inner=_slow_proposer(inner, SMALL)),
    ),
    'model, model, table': lambda: (
      staged(
        staged(_model(outer), _model(middle, SMALL, 'small')), proposer(TINY)
      ),
      _slow_model(
        outer,
        inner=_slow_model(middle, SMALL, inner=_slow_proposer(inner, TINY)),
      ),
    ),
    'table': lambda: (proposer(TREE), _slow_proposer(inner, TREE)),
  }[name]()


def _with_config(stages, **kw):
  """The outermost stage of both, differently."""
  return tuple(
    one.replace(config=dataclasses.replace(one.config, **kw))
    if isinstance(one, Drafter)
    else dataclasses.replace(one, config=dataclasses.replace(one.config, **kw))
    for one in stages
  )


def _step(seed, max_depth, temperature, active=(True,) * BATCH_SIZE):
  rng = np.random.default_rng(seed)
  return SlowStep(
    texts=_texts(rng),
    active=np.array(active),
    noise=_noise(rng, max_depth, temperature),
    temperature=temperature,
  )


def _assert_equals_reference(name, seed, temperature, active=None, **config):
  """Returns the trees, and the forwards of each stage."""
  tables = [_table(3 * seed + index) for index in range(3)]
  if name == 'model, model, table':
    # Of three stages two are alike now and then.
    tables[2] = tables[seed % 2]
  drafter, slow = _with_config(_by_name(name, *tables), **config)
  active = (True,) * BATCH_SIZE if active is None else active
  step = _step(seed, drafter.max_depth, temperature, active)
  trees, forwards = _run(drafter, step)
  slow_trees, slow_forwards = _run_slowly(slow, step)
  _assert_equal_trees(trees, slow_trees)
  assert forwards == slow_forwards
  return trees, forwards


@pytest.mark.parametrize(
  'name',
  ['model', 'table', 'model, model', 'model, table', 'model, model, table'],
)
def test_growth_is_a_best_first_search(name):
  sizes = set()
  for temperature in (0.0, 1.0, 0.6):
    for seed in range(4):
      trees, _ = _assert_equals_reference(name, seed, temperature)
      sizes |= {len(nodes) for nodes in trees}
  assert max(sizes) > 12


@pytest.mark.parametrize(
  ('name', 'config'),
  [
    # Full after a round or two: what is guessed later is dropped.
    ('model, table', {'num_nodes': 6, 'capacity': 11}),
    # Reached before the rounds are over.
    ('model, table', {'max_depth': 3, 'branching': 2}),
    # One node wide, which in a forward is two.
    ('model', {'width': 1, 'branching': 1, 'rounds': 5}),
    # More than there are.
    ('model', {'branching': VOCAB_SIZE + 5, 'width': 60, 'capacity': 50}),
    ('model', {'calibration': 2.5}),
    ('table', {'calibration': 0.5}),
  ],
)
def test_so_it_is_with_other_settings(name, config):
  for temperature in (0.0, 1.0):
    for seed in range(3):
      trees, _ = _assert_equals_reference(name, seed, temperature, **config)
      largest = max(map(len, trees))
      assert largest <= config.get('capacity', TREE.capacity)
      if config.get('capacity') == 11:
        assert largest == 11


@pytest.mark.parametrize(
  ('name', 'config'),
  [
    ('model', {'cost_ratio': 0.15, 'rounds': 6}),
    ('model', {'cost_ratio': None, 'rounds': 6}),
    ('model, table', {'cost_ratio': 0.1, 'rounds': 4, 'min_gain': 0.2}),
  ],
)
def test_it_stops_where_the_reference_does(name, config):
  """Which depends on the rows that are active, all together."""
  stops = set()
  for temperature in (0.0, 1.0):
    for seed in range(4):
      for active in ((True, True, True), (True, False, False)):
        _, forwards = _assert_equals_reference(
          name, seed, temperature, active, **config
        )
        stops.add(forwards[0])
  assert len(stops) >= 2, 'it should not always stop at the same round'


def test_a_higher_exponent_grows_deeper_trees():
  table = _table(0)
  step = _step(0, 3, 1.0)
  depths = []
  for calibration in (0.3, 1.0, 4.0):
    config = dataclasses.replace(TREE, calibration=calibration)
    slow, _ = _run_slowly(_slow_model(table, config), step)
    depths.append(
      np.mean(
        [
          nodes[node].depth
          for nodes in slow
          for node in ranking(nodes, [True] * len(nodes), 10)
          if node != NO_NODE
        ]
      )
    )
  assert depths == sorted(depths)
  assert depths[0] < depths[2]


# GPT-2, whose logits depend on position and on all of the text.


@jax.jit
def _last_logits(model, tokens, length):
  mask = causal_mask(jnp.zeros(1, jnp.int32), TEXT_SLOTS, TEXT_SLOTS)
  positions = jnp.arange(TEXT_SLOTS)[None]
  return model.apply(tokens, positions, mask, None)[0][0, length - 1]


def _gpt2_logits(model):
  def logits(tokens):
    padded = np.zeros((1, TEXT_SLOTS), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_last_logits(model, padded, len(tokens)), np.float64)

  return logits


def test_gpt2_sees_the_text_and_the_path_and_nothing_else():
  outer, inner = tiny_models.gpt2(), tiny_models.draft('similar')
  drafter = staged(
    tiny_drafters.model(outer, TREE), tiny_drafters.model(inner, TINY, 'small')
  )
  vocab_size = tiny_models.VOCAB_SIZE
  for temperature in (0.0, 1.0):
    slow = SlowStage(
      _gpt2_logits(outer), TREE, SlowStage(_gpt2_logits(inner), TINY)
    )
    rng = np.random.default_rng(1)
    step = SlowStep(
      texts=_texts(rng, vocab_size),
      active=np.ones(BATCH_SIZE, bool),
      noise=_noise(rng, drafter.max_depth, temperature, vocab_size),
      temperature=temperature,
    )
    trees, forwards = _run(drafter, step)
    slow_trees, slow_forwards = _run_slowly(slow, step)
    _assert_equal_trees(trees, slow_trees)
    assert forwards == slow_forwards == [3, 4]
    assert max(len(nodes) for nodes in trees) > 20


def test_growth_after_a_step_is_growth_after_a_prefill():
  """Also where the draft has yet to read what it did not guess itself."""
  rng = np.random.default_rng(2)
  vocab_size = tiny_models.VOCAB_SIZE
  drafter = tiny_drafters.model(
    tiny_models.draft('similar'), TreeConfig(topology=k_ary(2, 2))
  )
  tokens = np.zeros((BATCH_SIZE, TEXT_SLOTS), np.int32)
  length = np.array([4, 1, 9], np.int32)
  for row, size in enumerate(length):
    tokens[row, :size] = rng.integers(vocab_size, size=size)
  active = np.ones(BATCH_SIZE, bool)
  noise = _noise(rng, 2, 1.0, vocab_size)
  sampling = tiny_models.sampling(1.0, 0.0, 1.0).validated()
  commit = jax.jit(commit_stages)
  stages, tree = _grown(drafter, tokens, length, active, noise, sampling)
  grow_again = jax.jit(_grown_from)
  for leaf in (3, 4, 5, 6):
    # To a leaf, which no draft has scored, and a bonus token.
    path = np.array([[0, (leaf - 1) // 2, leaf]] * BATCH_SIZE, np.int32)
    stages = commit(drafter, stages, path, np.full(BATCH_SIZE, 2, np.int32))
    for row in range(BATCH_SIZE):
      new = [*np.asarray(tree.token[row])[path[row, 1:]], rng.integers(9)]
      tokens[row, length[row] : length[row] + 3] = new
    length = length + 3
    stages, tree = grow_again(
      drafter, stages, tokens, length, active, noise, sampling
    )
    _, expected = _grown(drafter, tokens, length, active, noise, sampling)
    _assert_equal_trees(
      [from_arrays(_row(tree, row)) for row in range(BATCH_SIZE)],
      [from_arrays(_row(expected, row)) for row in range(BATCH_SIZE)],
    )


# Fixed shapes.


@pytest.mark.parametrize(
  'topology',
  [
    chain(3),
    k_ary(3, 2),
    from_paths([(1,), (0,), (3,), (1, 2), (1, 0), (1, 2, 4), (3, 0)]),
  ],
)
@pytest.mark.parametrize('is_model', [True, False])
def test_fixed_shapes_are_filled_by_rank(topology, is_model):
  config = TreeConfig(topology=topology, calibration=1.5)
  for temperature in (0.0, 1.0):
    table = _table(5)
    if is_model:
      drafter, slow = _model(table, config), _slow_model(table, config)
    else:
      drafter = candidates(tiny_drafters.exact(table), config=config)
      slow = _slow_proposer(table, config)
    step = _step(5, topology.depth, temperature)
    trees, forwards = _run(drafter, step)
    assert forwards == [topology.depth]
    for row, nodes in enumerate(trees):
      expected = [Node(step.texts[row][-1])]
      index = {(): ROOT}
      for path in topology.paths:
        parent = index[path[:-1]]
        ranked = _ranked(slow, step, row, expected, parent)
        token = int(np.argsort(-ranked, kind='stable')[path[-1]])
        index[path] = len(expected)
        expected.append(child(expected, parent, token, ranked[token], 1))
      _assert_equal_trees([nodes], [expected])


# The rule by which growth stops, by hand. After every token there is one that
# follows with probability p; a chain of guesses has 1, p, p^2, p^3 and so on.


def _chain_table(p):
  rest = np.full((VOCAB_SIZE, VOCAB_SIZE), (1 - p) / (VOCAB_SIZE - 1))
  rows = np.arange(VOCAB_SIZE)
  rest[rows, (rows + 1) % VOCAB_SIZE] = p
  return np.log(rest).astype(np.float32)


def _forwards(probs, config, active=None):
  """Of a batch of chains; a token of row i is followed as in its table."""
  active = np.ones(BATCH_SIZE, bool) if active is None else np.array(active)
  # One table holds them all, each on tokens of its own.
  size = 10
  table = np.full((3 * size, 3 * size), -30.0, np.float32)
  for row, p in enumerate(probs):
    for place in range(size):
      here = size * row + place
      others = (1 - p) / (size - 1)
      table[here, size * row : size * (row + 1)] = np.log(others)
      table[here, size * row + (place + 1) % size] = np.log(p)
  step = SlowStep(
    texts=[[0], [size], [2 * size]],
    active=active,
    noise=np.zeros((3, config.rounds + 1, 3 * size), np.float32),
    temperature=0.0,
  )
  return _run(_model(table, config), step)[1][0]


def _chains(**kw):
  kw = {
    'num_nodes': 8,
    'width': 2,
    'branching': 1,
    'rounds': 5,
    'cost_ratio': 0,
  } | kw
  return TreeConfig(**kw)


def test_without_a_cost_all_rounds_are_done():
  assert _forwards((0.9, 0.3, 0.1), _chains()) == 5


def test_until_there_is_nothing_to_score():
  """Nodes of the greatest depth need no children."""
  step = _step(0, 2, 0.0)
  config = _chains(max_depth=2)
  assert _run(_model(_table(0), config), step)[1] == [2]


@pytest.mark.parametrize(
  ('min_gain', 'p', 'expected'),
  [
    # Scoring the node at depth d adds its probability p^d times the share p
    # that the only child gets: 0.81, 0.729, 0.656, 0.590 after 1, 2, 3, 4.
    (0.85, 0.9, 1),
    (0.70, 0.9, 3),
    (0.55, 0.9, 5),
  ],
)
def test_the_least_gain(min_gain, p, expected):
  # min_gain is of the batch's mean.
  assert _forwards((p, p, p), _chains(min_gain=min_gain)) == expected


@pytest.mark.parametrize(
  ('cost_ratio', 'num_nodes', 'expected'),
  [
    # p = 0.5. The gains after 1, 2, 3 rounds are 0.25, 0.125, 0.0625. The price
    # is the 1.5, 1.75, 1.875 tokens expected so far, times c / (1 + rounds c).
    (0.25, 8, 1),  # 0.300
    (0.19, 8, 2),  # 0.239, 0.241
    (0.095, 8, 2),  # 0.130, 0.140
    (0.08, 8, 3),  # 0.111, 0.121, 0.121
    # Of two nodes that are verified no more than 1.5 tokens are expected.
    (0.095, 2, 3),  # 0.130, 0.120, 0.111
  ],
)
def test_the_price_of_a_round(cost_ratio, num_nodes, expected):
  config = _chains(cost_ratio=cost_ratio, num_nodes=num_nodes)
  assert _forwards((0.5, 0.5, 0.5), config) == expected


def test_rows_that_are_done_have_no_say():
  config = _chains(min_gain=0.4)
  assert _forwards((0.9, 0.1, 0.1), config) == 1
  assert _forwards((0.9, 0.1, 0.1), config, (True, False, False)) == 5
  assert _forwards((0.9, 0.1, 0.1), config, (False, True, True)) == 1
  assert _forwards((0.9, 0.9, 0.1), config) > 1


def test_rows_that_are_done_have_no_say_without_a_cost_either():
  """Only the second row has something to score after the root."""
  log_probs = np.full((VOCAB_SIZE, 1), IMPOSSIBLE, np.float32)
  log_probs[3:] = -0.1
  tokens = jnp.full((VOCAB_SIZE, 1), 3)
  proposer = tiny_drafters.BigramTable(tokens, jnp.asarray(log_probs))
  config = _chains(rounds=4)
  for active, expected in (
    ((True, True, False), 4),
    ((True, False, True), 1),
  ):
    step = SlowStep(
      texts=[[0], [3], [1]],
      active=np.array(active),
      noise=np.zeros((3, 5, VOCAB_SIZE), np.float32),
      temperature=0.0,
    )
    assert _run(candidates(proposer, config=config), step)[1] == [expected]


def test_the_cost_follows_from_bytes():
  """If none is given; here 30 x 30 x 4 bytes for a target of 1000."""
  by_bytes = _forwards((0.5, 0.5, 0.5), _chains(cost_ratio=None))
  assert by_bytes == _forwards((0.5, 0.5, 0.5), _chains(cost_ratio=3.6))
  assert by_bytes == 1


# Stages.


def _depth(nodes):
  return max(node.depth for node in nodes)


def test_a_perfect_inner_drafter_multiplies_the_depth():
  """Three levels guessed and one of its own: four per forward of the draft."""
  table = _chain_table(0.9)
  config = _chains(width=4, rounds=2, capacity=24, num_nodes=20)
  alone, forwards = _run(_model(table, config), _step(0, 11, 0.0))
  assert forwards == [2]
  assert {_depth(nodes) for nodes in alone} == {2}
  inner = _model(table, _chains(width=2, rounds=3), 'small')
  drafter = staged(_model(table, config), inner)
  assert drafter.max_depth == 11
  both, forwards = _run(drafter, _step(0, 11, 0.0))
  # Before the first forward and after each of the two.
  assert forwards == [2, 9]
  assert {_depth(nodes) for nodes in both} == {11}
  # What was guessed after the last forward is in the tree as well.
  for nodes in both:
    np.testing.assert_allclose(
      [node.log_prob for node in nodes],
      [node.depth * np.log(0.9) for node in nodes],
      rtol=1e-4,
    )
    origins = {node.depth: node.origin for node in nodes[1:]}
    assert origins == {depth: 2 - (depth in (4, 8)) for depth in range(1, 12)}


def test_with_a_perfect_inner_drafter_the_tree_is_at_least_as_good():
  """In a third of the forwards."""
  path = lambda nodes, index: tuple(
    nodes[one].token for one in reversed(up(nodes, index))
  )
  paths = lambda nodes: {
    path(nodes, index): node.log_prob for index, node in enumerate(nodes)
  }
  roomy = dataclasses.replace(TREE, capacity=120)
  once = dataclasses.replace(roomy, rounds=1)
  for temperature in (0.0, 1.0):
    for seed in range(3):
      table = _table(seed)
      step = _step(seed, 7, temperature)
      alone, forwards = _run(_model(table, roomy), step)
      assert forwards == [3]
      drafter = staged(_model(table, once), _model(table, roomy, 'small'))
      both, forwards = _run(drafter, step)
      assert forwards == [1, 6]
      for one, other in zip(alone, both, strict=True):
        found = paths(other)
        for tokens, log_prob in paths(one).items():
          np.testing.assert_allclose(found[tokens], log_prob, atol=1e-4)


def test_an_inner_drafter_without_guesses_changes_nothing():
  nothing = candidates(tiny_drafters.empty(VOCAB_SIZE, 3), config=SMALL)
  table = _table(4)
  for temperature in (0.0, 1.0):
    drafter = staged(_model(table), nothing)
    step = _step(4, drafter.max_depth, temperature)
    both, forwards = _run(drafter, step)
    # The stage alone cannot reach as deep, but here it need not.
    alone = _run_slowly(_slow_model(table), step)
    _assert_equal_trees(both, alone[0])
    assert forwards[0] == alone[1][0] == 3


def test_what_the_draft_scored_has_the_numbers_of_the_draft():
  """Though a stage inside was sure of something else."""
  table, wrong = _chain_table(0.9), np.roll(_chain_table(0.99), 2, axis=1)
  roomy = dataclasses.replace(TREE, capacity=120)
  drafter = staged(
    _model(table, roomy),
    candidates(tiny_drafters.exact(wrong), config=TINY),
  )
  trees, _ = _run(drafter, _step(1, drafter.max_depth, 0.0))
  for nodes in trees:
    first = {node.token: node for node in nodes if node.parent == ROOT}
    right = (nodes[ROOT].token + 1) % VOCAB_SIZE
    for token, node in first.items():
      p = 0.9 if token == right else 0.1 / (VOCAB_SIZE - 1)
      np.testing.assert_allclose(node.log_prob, np.log(p), rtol=1e-4)
    assert first[(nodes[ROOT].token + 3) % VOCAB_SIZE].origin == 2
    assert first[right].origin == 1


def test_a_perfect_inner_drafter_saves_forwards_of_a_decode():
  """By the factor that it is designed to: the levels guessed, and one."""
  rng = np.random.default_rng(0)
  target = _table(0)
  draft = target + 0.1 * rng.normal(size=target.shape).astype(np.float32)
  config = TreeConfig(
    num_nodes=16, width=6, branching=3, rounds=6, capacity=64, cost_ratio=0
  )
  few = dataclasses.replace(config, rounds=2)
  inner = candidates(
    tiny_drafters.exact(draft),
    config=dataclasses.replace(config, width=8, rounds=2),
  )
  drafters = {
    'deep': _model(draft, config),
    'shallow': _model(draft, few),
    'staged': staged(_model(draft, few), inner),
  }
  for temperature in (0.0, 1.0):
    stats = {
      name: generate(
        table_model(target, max_positions=200),
        jax.random.key(0),
        [[0], [1, 2]],
        max_new_tokens=60,
        drafter=drafter,
        sampling=Sampling(temperature=temperature),
      ).stats
      for name, drafter in drafters.items()
    }
    efficiency = {name: one['block_efficiency'] for name, one in stats.items()}
    per_token = {
      name: one['stage_forwards']['draft'] / one['new_tokens']
      for name, one in stats.items()
    }
    # As deep a tree, in a third of the forwards.
    assert efficiency['staged'] >= 0.95 * efficiency['deep']
    assert efficiency['staged'] > 1.3 * efficiency['shallow']
    assert per_token['staged'] < 0.4 * per_token['deep']
    assert per_token['staged'] < 0.8 * per_token['shallow']
