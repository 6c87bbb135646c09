"""The kernels that grow trees on GPUs, interpreted, against the steps."""

import functools

import jax
import jax.numpy as jnp
from list_growth import assert_equal_trees
from list_growth import BATCH_SIZE
from list_growth import grown
from list_growth import model_stage
from list_growth import random_step
from list_growth import random_table
from list_growth import run
from list_growth import run_slowly
from list_growth import slow_model
from list_growth import slow_proposer
from list_growth import SMALL
from list_growth import TREE
from list_trees import CAPACITY
from list_trees import NUM_TOKENS
from list_trees import random_tree
from list_trees import to_arrays
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import candidates

from specdec import extension
from specdec import gpu_growth
from specdec import outlook
from specdec import staged
from specdec.drafter import Scores
from specdec.extension import Growing
from specdec.outlook import Reach
from specdec.ranking import IMPOSSIBLE
from specdec.tree import NO_NODE

_ROWS = 3


def _stack(rows):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def _random_growing(rng, capacity, ties):
  """Trees of several sizes, marked at random."""
  trees = [to_arrays(random_tree(rng, ties), capacity) for _ in range(_ROWS)]
  flags = lambda: jnp.array(rng.random((_ROWS, capacity)) < 0.4)
  return Growing(tree=_stack(trees), scored=flags(), closed=flags())


def _random_scores(rng, growing, width, branching):
  """Of distinct nodes, some missing; some guesses are in the tree already."""
  nodes = np.full((_ROWS, width), NO_NODE, np.int32)
  for row, size in enumerate(np.asarray(growing.tree.size)):
    number = min(width, int(rng.integers(1, size + 1)))
    nodes[row, rng.permutation(width)[:number]] = rng.permutation(size)[:number]
  shape = (_ROWS, width, branching)
  tokens = np.argsort(rng.random((*shape[:2], NUM_TOKENS)), axis=2)
  edges = -rng.exponential(size=shape)
  capacity = growing.tree.capacity
  return Scores(
    nodes=jnp.array(nodes),
    tokens=jnp.array(tokens[:, :, :branching], jnp.int32),
    edges=jnp.array(
      np.where(rng.random(shape) < 0.2, IMPOSSIBLE, edges), jnp.float32
    ),
    sources=jnp.array(rng.integers(2, size=shape), jnp.int32),
    given=jnp.array(-rng.exponential(size=(_ROWS, capacity)), jnp.float32),
    slots_read=None,
  )


@pytest.mark.parametrize('rescores', [True, False])
@pytest.mark.parametrize(
  ('capacity', 'width', 'branching'),
  [(CAPACITY, 3, 3), (CAPACITY + 2, 1, 1), (40, 4, 4), (64, 5, 2)],
)
def test_extending_is_the_same(capacity, width, branching, rescores):
  static: dict[str, int] = {'label': 2, 'rescores': rescores}
  grew = full = 0
  for seed in range(8):
    rng = np.random.default_rng(seed)
    growing = _random_growing(rng, capacity, ties=False)
    # The deepest nodes can have no children.
    static['max_depth'] = int(growing.tree.depth.max())
    scores = _random_scores(rng, growing, width, branching)
    actual = gpu_growth.extend(growing, scores, **static, interpret=True)
    expected = extension._in_steps(growing, scores, **static)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    grew += int((expected.tree.size > growing.tree.size).sum())
    full += int((expected.tree.size == capacity).sum())
  assert grew > 8
  assert full or capacity > CAPACITY


@pytest.mark.parametrize('ties', [True, False])
@pytest.mark.parametrize(
  ('capacity', 'width', 'num_nodes', 'needs_ancestors'),
  [(CAPACITY, 3, 6, True), (CAPACITY + 2, 1, 1, False), (40, 20, 30, False)],
)
def test_looking_ahead_is_the_same(
  capacity, width, num_nodes, needs_ancestors, ties
):
  static = {
    'width': width,
    'num_nodes': num_nodes,
    'needs_ancestors': needs_ancestors,
  }
  gains = set()
  for seed in range(8):
    rng = np.random.default_rng(seed)
    growing = _random_growing(rng, capacity, ties)
    reach = Reach(
      depth=jnp.array([2, -1, 5], jnp.int32),
      active=jnp.array([True, True, seed % 2 == 0]),
      max_depth=4,
    )
    actual = gpu_growth.look_ahead(growing, reach, **static, interpret=True)
    expected = outlook._in_steps(growing, reach, **static)
    np.testing.assert_array_equal(actual.nodes, expected.nodes)
    np.testing.assert_array_equal(actual.can_grow, expected.can_grow)
    np.testing.assert_allclose(actual.gain, expected.gain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual.expected, expected.expected, rtol=1e-5)
    gains |= {float(gain) for gain in expected.gain}
  assert len(gains) > 2


@pytest.fixture(name='by_kernels')
def _by_kernels(monkeypatch):
  """Every stage grows by the kernels."""
  interpreted = functools.partial(functools.partial, interpret=True)
  monkeypatch.setattr(extension, '_in_steps', interpreted(gpu_growth.extend))
  monkeypatch.setattr(outlook, '_in_steps', interpreted(gpu_growth.look_ahead))
  grown.clear_cache()
  yield
  grown.clear_cache()


@pytest.mark.usefixtures('by_kernels')
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_growth_by_kernels_is_a_best_first_search(temperature):
  outer, inner = random_table(0), random_table(1)
  drafter = staged(
    model_stage(outer), candidates(tiny_drafters.exact(inner), config=SMALL)
  )
  slow = slow_model(outer, inner=slow_proposer(inner, SMALL))
  step = random_step(3, drafter.max_depth, temperature, (True, False, True))
  trees, forwards = run(drafter, step)
  slow_trees, slow_forwards = run_slowly(slow, step)
  assert_equal_trees(trees, slow_trees)
  assert forwards == slow_forwards
  assert max(map(len, trees)) > 12
  assert len(trees) == BATCH_SIZE
  assert TREE.capacity >= max(map(len, trees))


def test_what_the_kernels_serve():
  assert gpu_growth.fits(512, 16, 8)
  assert gpu_growth.fits(16384, 16)
  assert not gpu_growth.fits(16385, 16)
  assert not gpu_growth.fits(16384, 17)
  assert gpu_growth.fits(64, 512, 32)
  assert not gpu_growth.fits(64, 512, 33)
