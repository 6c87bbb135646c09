"""Experts: how many blocks of tokens are computed.

That their values are right, `families_test` and `hub_test` say.
"""

import jax
import jax.numpy as jnp
import pytest

from specdec.models.nn import experts as experts_lib


def test_blocks_are_about_the_share_of_an_expert():
  sizes = {1: 1, 40: 16, 80: 32, 256: 64, 4096: 128}
  assert {size: experts_lib._block_size(size, 2, 8) for size in sizes} == sizes


@pytest.mark.parametrize(
  ('block', 'computed'),
  [(3, [3] * (3 + 2 + 0 + 2)), (128, [8] * 3)],
)
def test_as_many_blocks_are_computed_as_there_are_rows_for(
  block, computed, monkeypatch
):
  block_size = lambda num_tokens, *_: min(num_tokens, block)
  monkeypatch.setattr(experts_lib, '_block_size', block_size)
  blocks = []

  def counted(weights, x):
    jax.debug.callback(lambda: blocks.append(x.shape[0]))
    return x @ weights

  weights, x = [jnp.ones((6, 6))] * 4, jnp.ones((8, 6))
  # Rows of the experts: 8, 4, 0, 4.
  chosen = jnp.array([[0, 1]] * 4 + [[0, 3]] * 4)
  routing = experts_lib.Routing(chosen, jnp.full((8, 2), 0.5))
  jax.block_until_ready(
    jax.jit(lambda: experts_lib.mix(counted, weights, x, routing))()
  )
  jax.effects_barrier()
  assert blocks == computed
