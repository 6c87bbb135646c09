"""The kernels that grow trees on GPUs, interpreted, against the steps."""

import functools
import types

import jax
from jax.experimental.pallas import triton
import jax.extend.core
import jax.numpy as jnp
from list_growth import assert_equal_trees
from list_growth import grown
from list_growth import model_stage
from list_growth import random_step
from list_growth import random_table
from list_growth import run
from list_growth import run_slowly
from list_growth import slow_model
from list_growth import slow_proposer
from list_growth import SMALL
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


def _random_growing(rng, capacity, ties, outermost=False):
  """Trees of several sizes, marked at random."""
  trees = [to_arrays(random_tree(rng, ties), capacity) for _ in range(_ROWS)]
  flags = lambda: jnp.array(rng.random((_ROWS, capacity)) < 0.4)
  return Growing(
    tree=_stack(trees),
    scored=flags(),
    closed=None if outermost else flags(),
  )


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
    growing = _random_growing(rng, capacity, False, outermost=seed % 2 == 0)
    # The deepest nodes can have no children.
    static['max_depth'] = int(growing.tree.depth.max())
    scores = _random_scores(rng, growing, width, branching)
    if seed % 3 == 0:
      scores = scores.replace(sources=None)
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
  [
    (CAPACITY, 3, 6, True),
    (CAPACITY + 2, 1, 1, False),
    (40, 20, 30, False),
    (CAPACITY, CAPACITY + 6, CAPACITY, True),
  ],
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
    growing = _random_growing(rng, capacity, ties, outermost=seed % 2 == 0)
    # What is impossible is neither scored nor counted.
    tree = growing.tree
    impossible = jnp.array(rng.random(tree.token.shape) < 0.1)
    log_prob = jnp.where(impossible, -jnp.inf, tree.log_prob)
    growing = growing.replace(tree=tree.replace(log_prob=log_prob))
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


@pytest.fixture(name='calls')
def _by_kernels(monkeypatch):
  """Every stage grows by the kernels; names of those that were called."""
  calls = set()

  def interpreted(name, *args, **static):
    calls.add(name)
    return getattr(gpu_growth, name)(*args, **static, interpret=True)

  for module, name in ((extension, 'extend'), (outlook, 'look_ahead')):
    kernel = functools.partial(interpreted, name)
    monkeypatch.setattr(module, '_in_steps', kernel)
  grown.clear_cache()
  yield calls
  grown.clear_cache()


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_growth_by_kernels_is_a_best_first_search(calls, temperature):
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
  assert calls == {'extend', 'look_ahead'}


def _races(jaxpr, shared, since):
  """Arrays read and written, in either order, with no barrier in between.

  Args:
    jaxpr: of a kernel or of a part of it.
    shared: names of arrays by their references.
    since: the last barrier, what has been read and written, as pairs of a name
      and whether it was written; changed.
  """
  races = []
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    refs = [shared[one] for one in equation.invars if _is_key(one, shared)]
    if name == 'debug_barrier_p':
      since.clear()
    elif refs and not any(_parts(equation)):
      writes = name in ('masked_swap', 'swap')
      assert writes or name in ('masked_load', 'load', 'get'), name
      races += [ref for ref in refs if (ref, not writes) in since]
      since.update((ref, writes) for ref in refs)
    for part, operands in _parts(equation):
      inside = {
        variable: shared[operand]
        for variable, operand in zip(part.invars, operands, strict=True)
        if _is_key(operand, shared)
      }
      # Twice, since what a round of a loop wrote the next may read.
      for _ in range(2):
        races += _races(part, inside, since)
  return races


def _is_key(variable, shared):
  return isinstance(variable, jax.extend.core.Var) and variable in shared


def _parts(equation):
  """Jaxprs within, each with its operands."""
  params = equation.params
  if equation.primitive.name == 'while':
    constants = params['body_nconsts']
    start = params['cond_nconsts']
    operands = equation.invars[start:]
    assert len(operands) >= constants
    yield params['body_jaxpr'].jaxpr, operands
  elif 'jaxpr' in params:
    inner = params['jaxpr']
    yield getattr(inner, 'jaxpr', inner), equation.invars


def _races_of_extending():
  rng = np.random.default_rng(0)
  growing = _random_growing(rng, CAPACITY, ties=False)
  scores = _random_scores(rng, growing, 3, 3)
  static = {'label': 1, 'max_depth': 4, 'rescores': True}
  extend = functools.partial(gpu_growth.extend.__wrapped__, **static)
  (call,) = (
    equation
    for equation in jax.make_jaxpr(extend)(growing, scores).eqns
    if equation.primitive.name == 'pallas_call'
  )
  kernel = call.params['jaxpr']
  outputs = jax.tree.leaves_with_path((growing.tree, growing.scored))
  references = kernel.invars[-len(outputs) :]
  shared = {
    reference: jax.tree_util.keystr(path)
    for reference, (path, _) in zip(references, outputs, strict=True)
  }
  # Of the edges each thread has its own.
  return {race for race in _races(kernel, shared, set()) if 'edge' not in race}


def test_threads_wait_for_each_other():
  assert not _races_of_extending()


def test_without_barriers_they_would_not(monkeypatch):
  monkeypatch.setattr(triton, 'debug_barrier', lambda: None)
  races = _races_of_extending()
  assert any('log_prob' in race for race in races)
  assert any('size' in race for race in races)


def test_what_the_kernels_serve():
  assert gpu_growth.fits(1024, 16, 8)
  assert not gpu_growth.fits(1025, 16, 8)
  assert gpu_growth.fits(64, 256, 16)
  assert not gpu_growth.fits(64, 256, 17)
  assert not gpu_growth.fits(64, 257)


@pytest.mark.parametrize(
  ('backend', 'capability', 'expected'),
  [('gpu', '7.5', False), ('gpu', '8.0', True), ('cpu', '', True)],
)
def test_old_gpus_do_without(monkeypatch, backend, capability, expected):
  device = types.SimpleNamespace(compute_capability=capability)
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  assert gpu_growth.fits(512, 16, 8) == expected
