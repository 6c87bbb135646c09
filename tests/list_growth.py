"""Trees as they grow in a first step, as lists in plain Python."""

from collections.abc import Sequence
import dataclasses
import math

import jax
import list_trees
import numpy as np
import tiny_drafters

import specdec
from specdec import arguments as arguments_lib
from specdec import carried as carried_lib
from specdec import hosts
from specdec.draft import growth
from specdec.draft import stages as stages_lib
from specdec.models.nn import table_model

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
  stages = stages_lib.start(drafter, texts)
  return grown_from(drafter, stages, tokens, length, *rest)


def grown_from(drafter, stages, tokens, length, active, noise, sampling):
  ctx = list_trees.match_context(
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
  return stages_lib.keep(drafter, stages, added, count > 0)


def lists_of(tree):
  """The trees of a batch as lists of nodes."""
  return [
    list_trees.from_arrays(
      jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], tree)
    )
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


def assert_equal_trees(found, expected):
  exact = lambda nodes: [(one.token, one.parent, one.origin) for one in nodes]
  logs = lambda nodes: [(one.cond_log_prob, one.log_prob) for one in nodes]
  for one, other in zip(found, expected, strict=True):
    assert exact(one) == exact(other)
    np.testing.assert_allclose(logs(one), logs(other), rtol=1e-4, atol=1e-4)


def random_step(seed, max_depth, temperature, vocab_size=VOCAB_SIZE, **kw):
  rng = np.random.default_rng(seed)
  texts = [
    rng.integers(vocab_size, size=length).tolist()
    for length in rng.integers(1, 9, size=BATCH_SIZE)
  ]
  noise = rng.gumbel(size=(BATCH_SIZE, max_depth + 1, vocab_size))
  noise = (noise * (temperature > 0)).astype(np.float32)
  return Step(texts, noise, temperature=temperature, **kw)
