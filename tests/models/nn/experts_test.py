"""Experts: routing, the grouped product and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.nn import experts as experts_lib

_WIDTH = 6


def _expert(weights, x):
  first, second = weights
  return jnp.tanh(x @ first) @ second


def _inputs(num_tokens, num_experts, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  weights = [(draw(_WIDTH, 5), draw(5, _WIDTH)) for _ in range(num_experts)]
  return weights, draw(num_tokens, _WIDTH), draw(num_tokens, num_experts)


def _by_brute_force(weights, x, routing):
  everything = jnp.stack([_expert(one, x) for one in weights], axis=1)
  rows = jnp.arange(x.shape[0])[:, None]
  chosen = jnp.zeros(everything.shape[:2])
  chosen = chosen.at[rows, routing.experts].set(routing.weights)
  return jnp.sum(everything * chosen[..., None], axis=1)


def _use_blocks_of(size, monkeypatch):
  block_size = lambda num_tokens, *_: min(num_tokens, size)
  monkeypatch.setattr(experts_lib, '_block_size', block_size)


def test_blocks_are_about_the_share_of_an_expert():
  sizes = {1: 1, 40: 16, 80: 32, 256: 64, 4096: 128}
  assert {size: experts_lib._block_size(size, 2, 8) for size in sizes} == sizes


@pytest.mark.parametrize(
  ('num_tokens', 'num_experts', 'count', 'block'),
  [(1, 3, 2, 128), (11, 3, 2, 3), (5, 2, 2, 1), (7, 3, 1, 2)],
)
def test_values_and_gradients_are_those_of_brute_force(
  num_tokens, num_experts, count, block, monkeypatch
):
  _use_blocks_of(block, monkeypatch)
  weights, x, logits = _inputs(num_tokens, num_experts)

  def total(combine, weights, x, logits):
    routing = experts_lib.route(logits, count, renormalize=True)
    return jnp.sum(jnp.sin(combine(weights, x, routing)))

  def run(combine):
    of = functools.partial(total, combine)
    return jax.value_and_grad(of, (0, 1, 2))(weights, x, logits)

  combines = functools.partial(experts_lib.mix, _expert), _by_brute_force
  actual, expected = jax.jit(lambda: [*map(run, combines)])()
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, actual, expected)
  assert all(np.any(one != 0) for one in jax.tree.leaves(expected[1])[-2:])


@pytest.mark.parametrize(
  ('block', 'computed'),
  [(3, [3] * (3 + 2 + 0 + 2)), (128, [8] * 3)],
)
def test_as_many_blocks_are_computed_as_there_are_rows_for(
  block, computed, monkeypatch
):
  _use_blocks_of(block, monkeypatch)
  blocks = []

  def counted(weights, x):
    jax.debug.callback(lambda: blocks.append(x.shape[0]))
    return _expert(weights, x)

  weights, x, _ = _inputs(8, 4)
  # Rows of the experts: 8, 4, 0, 4.
  chosen = jnp.array([[0, 1]] * 4 + [[0, 3]] * 4)
  routing = experts_lib.Routing(
    chosen, jnp.full((8, 2), 0.5), jnp.zeros((8, 4))
  )
  jax.block_until_ready(
    jax.jit(lambda: experts_lib.mix(counted, weights, x, routing))()
  )
  jax.effects_barrier()
  assert blocks == computed


def test_balance_by_hand():
  for experts, first, expected in (
    *(([0, 1], [0.5, 0.5], 1.0), ([0, 0], [0.9, 0.7], 2 * 0.8)),
    # Choices 3 : 1 of two, probabilities 0.6 : 0.4 on average.
    ([0, 0, 0, 1], [0.9, 0.7, 0.6, 0.2], 2 * (0.75 * 0.6 + 0.25 * 0.4)),
  ):
    probs = np.stack([first, 1 - np.array(first)], 1).astype(np.float32)
    chosen = np.array(experts)[:, None]
    routing = experts_lib.Routing(chosen, probs[:, :1], probs)
    assert jax.jit(experts_lib.balance_loss)(routing) == pytest.approx(expected)
