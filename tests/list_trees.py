"""Token trees as lists, and how they grow in a first step, in plain Python."""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import tiny_drafters

import specdec
from specdec import adjusters as adjusters_lib
from specdec import arguments as arguments_lib
from specdec import carried as carried_lib
from specdec import context as context_lib
from specdec import hosts
from specdec import randomness as randomness_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import growth
from specdec.models.nn import table_model
from specdec.tree import tree as tree_lib
from specdec.verify import accept

CAPACITY = 14
NUM_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Node:
  """One node of a tree that is a list."""

  token: int
  parent: int = tree_lib.NO_NODE
  depth: int = 0
  cond_log_prob: float = 0.0
  log_prob: float = 0.0
  origin: int = 0


def child(nodes, parent, token, cond_log_prob, origin) -> Node:
  """A new one, in float32 as the arrays."""
  above = nodes[parent]
  total = float(np.float32(above.log_prob) + np.float32(cond_log_prob))
  return Node(token, parent, above.depth + 1, cond_log_prob, total, origin)


def random_edge(rng, ties: bool) -> float:
  """With ties, also of a child with its parent."""
  if ties:
    return float(rng.choice([0.0, -0.5, -1.0]))
  return float(np.float32(-rng.exponential()))


def random_tree(rng, ties=False) -> list[Node]:
  """Deep and broad ones; siblings have different tokens."""
  size = int(rng.integers(1, CAPACITY + 1))
  nodes = [Node(int(rng.integers(NUM_TOKENS)))]
  reach = rng.choice([1, 3, CAPACITY])
  while len(nodes) < size:
    parent = int(rng.integers(max(0, len(nodes) - reach), len(nodes)))
    token = int(rng.integers(NUM_TOKENS))
    if find(nodes, parent, token) == tree_lib.NO_NODE:
      edge, origin = random_edge(rng, ties), int(rng.integers(1, 4))
      nodes.append(child(nodes, parent, token, edge, origin))
    else:
      reach = CAPACITY
  return nodes


def find(nodes, parent, token) -> int:
  """The index of the child of a node with a token."""
  for index, node in enumerate(nodes):
    if (
      parent != tree_lib.NO_NODE
      and node.parent == parent
      and node.token == token
    ):
      return index
  return tree_lib.NO_NODE


def up(nodes, index) -> list[int]:
  """The node and its ancestors."""
  walk = []
  while index != tree_lib.NO_NODE:
    walk.append(index)
    index = nodes[index].parent
  return walk


def to_arrays(nodes, capacity=CAPACITY) -> tree_lib.TokenTree:
  """The list as arrays."""
  unused = Node(0, log_prob=-np.inf)
  padded = [*nodes, *[unused] * (capacity - len(nodes))]
  columns = {
    field.name: jnp.array(
      [getattr(node, field.name) for node in padded],
      jnp.float32 if field.type is float else jnp.int32,
    )
    for field in dataclasses.fields(Node)
  }
  return tree_lib.TokenTree(size=jnp.asarray(len(nodes), jnp.int32), **columns)


def from_arrays(tree: tree_lib.TokenTree) -> list[Node]:
  """The used entries of the arrays as a list."""
  names = [field.name for field in dataclasses.fields(Node)]
  used = slice(int(tree.size))
  columns = [np.asarray(getattr(tree, name))[used].tolist() for name in names]
  return [Node(*row) for row in zip(*columns, strict=True)]


def stack(items):
  """A batch of rows."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *items)


def match_context(
  tokens, length, noise, sampling, seen=None, **kw
) -> context_lib.StepContext:
  """Context of a step, by default of match verification.

  `noise`: `[B, D + 1, V]`; `seen`: `[B, V]`, for a repetition penalty.
  """
  kw = {
    'active': length > 0,
    'rule': accept.MatchRule(),
    'target_bytes': 1,
  } | kw
  if seen is not None:
    penalty = adjusters_lib.RepetitionPenalty(seen.shape[1])
    kw |= {'adjusters': (penalty,), 'adjuster_states': (seen,)}
  return context_lib.StepContext(
    tokens=tokens,
    length=length,
    sampling=sampling,
    randomness=randomness_lib.Randomness(
      noise=randomness_lib.noise_table(noise),
      draft_keys=None,
      uniforms=None,
      residual_noise=None,
    ),
    max_depth=noise.shape[1] - 1,
    **kw,
  )


# Growth.

VOCAB_SIZE = 7
TEXT_SLOTS = 32
BATCH_SIZE = 3
_TARGET_BYTES = 40_000
_EULER_GAMMA = 0.5772157


@dataclasses.dataclass(frozen=True)
class Step:
  """Inputs that all stages share."""

  texts: list[list[int]]
  noise: np.ndarray  # `[B, D + 1, V]`
  active: Sequence[bool] = (True,) * BATCH_SIZE
  temperature: float = 0.0


@dataclasses.dataclass(frozen=True)
class TableStage:
  """A stage whose scorer says what a table of logits says, `[V, V]`."""

  table: np.ndarray
  config: tiny_drafters.Settings
  is_model: bool = True  # or it leaves out tokens of probability 0
  name: str = 'model 0'

  def drafter(self) -> specdec.Drafter:
    if self.is_model:
      model = table_model.table_model(self.table, max_positions=100)
      return tiny_drafters.model(model, self.config, self.name)
    exact = tiny_drafters.exact(self.table)
    return tiny_drafters.candidates(exact, config=self.config)

  def log_probs(self, step: Step, row: int, path: Sequence[int]) -> np.ndarray:
    """`[V]`, of all tokens after a path below the root."""
    logits = self.table[[*step.texts[row], *path][-1]]
    noise = step.noise[row, len(path)]
    temperature, b = step.temperature or 1.0, self.config.calibration
    if self.is_model:
      return _log_softmax(b * (logits / temperature + noise))
    logits = _log_softmax(logits)
    # All other tokens are one more.
    rest = max(1 - np.exp(logits).sum(), 1e-6)
    others = math.log(rest) / temperature
    others += _EULER_GAMMA if step.temperature else 0.0
    scores = np.append(logits / temperature + noise, others)
    return _log_softmax(b * scores)[:-1]


def _log_softmax(scores):
  scores = np.asarray(scores, np.float64)
  return scores - np.logaddexp.reduce(scores)


@jax.jit
def grown(drafter, tokens, length, *rest):
  """States and trees after a first step."""
  texts = carried_lib.Texts(tokens, length, TEXT_SLOTS)
  stages = drafter_lib.start(drafter, texts)
  return grown_from(drafter, stages, tokens, length, *rest)


def grown_from(drafter, stages, tokens, length, active, noise, sampling):
  ctx = match_context(
    tokens,
    length,
    noise,
    sampling,
    active=active,
    shape=drafter.shape,
    target_bytes=_TARGET_BYTES,
  )
  return growth.grow(drafter.stages, stages, ctx.root_trees(), ctx)


@jax.jit
def kept(drafter, stages, path, count):
  """States after a step that keeps the first `count [B]` nodes of a path."""
  added = carried_lib.Added(path, path, count, 0 * count)
  return drafter_lib.keep(drafter, stages, stages, None, added, count > 0)


def lists_of(tree):
  """The trees of a batch as lists of nodes."""
  return [
    from_arrays(jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], tree))
    for row in range(BATCH_SIZE)
  ]


def padded(texts):
  """`[B, TEXT_SLOTS]` tokens and `[B]` lengths."""
  tokens = np.zeros((BATCH_SIZE, TEXT_SLOTS), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  return tokens, np.array([*map(len, texts)], np.int32)


def run(drafter, step):
  """Trees as lists; which nodes were scored, and forwards, by stage."""
  active, num_tokens = np.array(step.active), step.noise.shape[2]
  sampling = specdec.Sampling(temperature=step.temperature)
  sampling = arguments_lib.to_params(sampling, BATCH_SIZE, num_tokens)
  stages, tree = hosts.read(
    grown(drafter, *padded(step.texts), active, step.noise, sampling)
  )
  counted = [stage.counted[:, 0].tolist() for stage in stages]
  # Rows share their forwards.
  assert all(len(set(of_rows)) == 1 for of_rows in counted)
  forwards = [of_rows[0] for of_rows in counted]
  return lists_of(tree), [stage.scored for stage in stages], forwards


def assert_equal_trees(lists, expected):
  exact = lambda nodes: [
    (node.token, node.parent, node.origin) for node in nodes
  ]
  logs = lambda nodes: [(node.cond_log_prob, node.log_prob) for node in nodes]
  for nodes, other in zip(lists, expected, strict=True):
    assert exact(nodes) == exact(other)
    np.testing.assert_allclose(logs(nodes), logs(other), rtol=1e-4, atol=1e-4)


def random_step(seed, max_depth, temperature, vocab_size=VOCAB_SIZE, **kw):
  rng = np.random.default_rng(seed)
  texts = [
    rng.integers(vocab_size, size=length).tolist()
    for length in rng.integers(1, 9, size=BATCH_SIZE)
  ]
  noise = rng.gumbel(size=(BATCH_SIZE, max_depth + 1, vocab_size))
  noise = (noise * (temperature > 0)).astype(np.float32)
  return Step(texts, noise, temperature=temperature, **kw)
