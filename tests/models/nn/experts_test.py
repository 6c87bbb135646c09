"""Experts: routing and the grouped product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models.nn import experts as experts_lib

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
def test_values_are_those_of_brute_force(
  num_tokens, num_experts, count, block, monkeypatch
):
  _use_blocks_of(block, monkeypatch)
  weights, x, logits = _inputs(num_tokens, num_experts)
  combines = functools.partial(experts_lib.mix, _expert), _by_brute_force

  @jax.jit
  def run():
    routing = experts_lib.route(logits, count, renormalize=True)
    return [combine(weights, x, routing) for combine in combines]

  np.testing.assert_allclose(*run(), rtol=1e-4, atol=1e-5)


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
  routing = experts_lib.Routing(chosen, jnp.full((8, 2), 0.5))
  jax.block_until_ready(
    jax.jit(lambda: experts_lib.mix(counted, weights, x, routing))()
  )
  jax.effects_barrier()
  assert blocks == computed
