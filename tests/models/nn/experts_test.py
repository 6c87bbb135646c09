"""Experts: blocks of tokens; `hub_test` has whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models.nn import mixtral


@pytest.mark.parametrize(
  ('block', 'computed'),
  [(3, [3] * (3 + 2 + 0 + 2)), (128, [8] * 3)],
)
def test_as_many_blocks_are_computed_as_there_are_rows_for(
  block, computed, monkeypatch
):
  block_size = lambda num_tokens, *_: min(num_tokens, block)
  monkeypatch.setattr(mixtral, '_block_size', block_size)
  blocks = []

  def counted(weights, x):
    jax.debug.callback(lambda: blocks.append(x.shape[0]))
    return x @ weights

  weights = [(1 + number) * jnp.eye(6) for number in range(4)]
  x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)
  # Rows of the experts: 8, 4, 0, 4.
  chosen = jnp.array([[0, 1]] * 4 + [[0, 3]] * 4)
  routing = mixtral.Routing(chosen, jnp.full((8, 2), 0.5))
  result = jax.jit(lambda: mixtral.mix(counted, weights, x, routing))()
  factors = 0.5 * (1 + chosen).sum(axis=1, keepdims=True)
  np.testing.assert_allclose(result, x * factors, rtol=1e-5)
  jax.effects_barrier()
  assert blocks == computed
