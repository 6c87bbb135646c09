"""Best-first growth on dicts in plain Python, and the real thing beside it.

A tree is `{path: (edge, sum of edges, origin)}`: a path is the tokens below the
root, the root itself `()`.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
from list_trees import from_arrays
from list_trees import match_context
from list_trees import up
import numpy as np
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import Sampling
from specdec.checks import check_sampling
from specdec.draft.growth import grow
from specdec.draft.stages import init_stages

VOCAB_SIZE = 7
TEXT_SLOTS = 32
BATCH_SIZE = 3
TARGET_BYTES = 40_000
_EULER_GAMMA = 0.5772157


@dataclasses.dataclass(frozen=True)
class Step:
  """What all stages know."""

  texts: list[list[int]]
  noise: np.ndarray  # `[B, D + 1, V]`
  active: Sequence[bool] = (True,) * BATCH_SIZE
  temperature: float = 0.0

  @property
  def max_depth(self) -> int:
    return self.noise.shape[1] - 1


# The reference, for rounds that cost nothing.


@dataclasses.dataclass
class SlowStage:
  """A stage whose scorer is a table."""

  table: np.ndarray  # `[V, V]` logits by the last token
  config: Settings
  inner: 'SlowStage | None' = None
  is_model: bool = True  # or it leaves out tokens of probability 0
  scored: list[set] = dataclasses.field(default_factory=list)  # by row
  forwards: int = 0  # so far


def _log_softmax(scores):
  scores = np.asarray(scores, np.float64)
  return scores - np.logaddexp.reduce(scores)


def ranked_logits(stage, step, row, path):
  """The formula of `specdec.ranking` for all tokens after a path."""
  logits = stage.table[[*step.texts[row], *path][-1]]
  noise = step.noise[row, len(path)]
  temperature, b = step.temperature or 1.0, stage.config.calibration
  if stage.is_model:
    return _log_softmax(b * (logits / temperature + noise))
  # All other tokens are one more.
  rest = max(1 - np.exp(logits).sum(), 1e-6)
  others = math.log(rest) / temperature
  others += _EULER_GAMMA if step.temperature else 0.0
  return _log_softmax(b * np.append(logits / temperature + noise, others))[:-1]


def _put(tree, path, edge, origin):
  # In float32 as the arrays, or other nodes would be the likeliest.
  total = np.float32(tree[path[:-1]][1]) + np.float32(edge)
  tree[path] = (float(edge), float(total), origin)


def _slow_score(stage, tree, step, row, closed, label, capacity):
  """One forward of one row."""
  scored = stage.scored[row]
  is_open = lambda path: path not in (scored if stage.is_model else known)
  known = scored | closed
  picked = sorted(filter(is_open, tree), key=lambda path: -tree[path][1])
  picked = picked[: stage.config.width]
  ranked = {path: ranked_logits(stage, step, row, path) for path in picked}
  scored |= set(picked)
  if stage.inner is not None:
    for path, (edge, _, origin) in tree.items():
      if path:
        above = path[:-1]
        if above in ranked and above not in closed:
          edge = ranked[above][path[-1]]
        _put(tree, path, edge, origin)
  for path in picked:
    if path in closed or len(path) == step.max_depth:
      continue
    best = np.argsort(-ranked[path], kind='stable')[: stage.config.branching]
    for token in best.tolist():
      edge, is_new = ranked[path][token], (*path, token) not in tree
      if edge > -1e29 and is_new and len(tree) < capacity:
        _put(tree, (*path, token), edge, label)


def _slow_grow(stage, trees, step, closed, label, capacity):
  """Grows all trees in place, except below paths that are `closed`."""
  stage.scored = stage.scored or [set() for _ in trees]

  def draft():
    if stage.inner is not None:
      both = [one | two for one, two in zip(closed, stage.scored, strict=True)]
      _slow_grow(stage.inner, trees, step, both, label + 1, capacity)

  can_grow = lambda row: (
    step.active[row]
    and any(
      len(path) < step.max_depth and path not in stage.scored[row] | closed[row]
      for path in trees[row]
    )
  )
  draft()
  for _ in range(stage.config.rounds):
    if not any(map(can_grow, range(len(trees)))):
      break
    stage.forwards += 1
    for row, tree in enumerate(trees):
      _slow_score(stage, tree, step, row, closed[row], label, capacity)
    draft()


def run_slowly(stage, step):
  """Trees, and forwards by stage."""
  trees = [{(): (0.0, 0.0, 0)} for _ in step.texts]
  nothing = [set() for _ in step.texts]
  _slow_grow(stage, trees, step, nothing, 1, stage.config.capacity)
  forwards = []
  while stage is not None:
    forwards.append(stage.forwards)
    stage = stage.inner
  return trees, forwards


# The real thing.


@jax.jit
def grown(drafter, tokens, length, *rest):
  """Trees and counters of a first step."""
  stages = init_stages(drafter, tokens, length, num_slots=TEXT_SLOTS)
  return grown_from(drafter, stages, tokens, length, *rest)


def grown_from(drafter, stages, tokens, length, active, noise, sampling):
  ctx = match_context(
    *(tokens, length, noise, sampling),
    active=active,
    shape=drafter.shape,
    target_bytes=TARGET_BYTES,
  )
  return grow(drafter.stages, stages, ctx.root_trees(), ctx)


def dicts_of(tree):
  """The trees of a batch as dicts, in the order of the nodes."""
  found = []
  for row in range(BATCH_SIZE):
    nodes = from_arrays(jax.tree.map(lambda leaf, row=row: leaf[row], tree))
    by_path = {}
    for index, node in enumerate(nodes):
      assert node.parent < index
      walk = [nodes[one] for one in reversed(up(nodes, index))]
      path = tuple(one.token for one in walk[1:])
      assert path not in by_path, 'a duplicate'
      assert node.depth == len(path)
      assert node.cond_log_prob <= 0
      assert node.log_prob <= nodes[max(node.parent, 0)].log_prob
      by_path[path] = (node.cond_log_prob, node.log_prob, node.origin)
    found.append(by_path)
  return found


def padded(texts):
  """`[B, TEXT_SLOTS]` tokens and `[B]` lengths."""
  tokens = np.zeros((BATCH_SIZE, TEXT_SLOTS), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  return tokens, np.array([*map(len, texts)], np.int32)


def run(drafter, step):
  """Trees as dicts, and forwards by stage."""
  tokens, length = padded(step.texts)
  active, num_tokens = np.array(step.active), step.noise.shape[2]
  sampling = Sampling(temperature=step.temperature)
  sampling = check_sampling(sampling, BATCH_SIZE, num_tokens)
  stages, tree = jax.device_get(
    grown(drafter, tokens, length, active, step.noise, sampling)
  )
  for stage in stages:
    np.testing.assert_array_equal(
      stage.counters.row_forwards, stage.counters.forwards * active
    )
  assert [text[-1] for text in step.texts] == tree.token[:, 0].tolist()
  assert tree.depth.max() <= step.max_depth
  return dicts_of(tree), [int(stage.counters.forwards) for stage in stages]


def assert_equal_trees(actual, expected):
  for one, other in zip(actual, expected, strict=True):
    assert list(one) == list(other)
    np.testing.assert_allclose(
      list(one.values()), list(other.values()), rtol=1e-4, atol=1e-4
    )


# Tables.

TREE = Settings(
  num_nodes=10, width=3, branching=3, rounds=3, capacity=40, cost_ratio=0
)
SMALL = Settings(width=3, branching=2, rounds=2, cost_ratio=0)
TINY = Settings(width=2, branching=2, rounds=1, cost_ratio=0)


def both(kind, table, config=TREE, name='draft', inner=None):
  """A stage that is a `model` or a `table`, and its reference."""
  if kind == 'model':
    model = table_model(table, max_positions=100)
    stage = tiny_drafters.model(model, config, name)
  else:
    exact = tiny_drafters.exact(table)
    stage = tiny_drafters.candidates(exact, config=config)
    table = np.asarray(exact.log_probs)
  return stage, SlowStage(table, config, inner, is_model=kind == 'model')


def random_table(seed):
  shape = (VOCAB_SIZE, VOCAB_SIZE)
  return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_step(seed, max_depth, temperature, vocab_size=VOCAB_SIZE, **kw):
  rng = np.random.default_rng(seed)
  texts = [
    rng.integers(vocab_size, size=length).tolist()
    for length in rng.integers(1, 9, size=BATCH_SIZE)
  ]
  noise = rng.gumbel(size=(BATCH_SIZE, max_depth + 1, vocab_size))
  noise = (noise * (temperature > 0)).astype(np.float32)
  return Step(texts, noise, temperature=temperature, **kw)
