"""Windows of attention, and gradients of products; `hub_test` has the rest."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec.models.nn import attention
from specdec.models.nn import matrices as matrices_lib

# A text of three tokens, then a tree of two branches. Their nodes alternate,
# and one branch is longer than a window of three positions. For each node: what
# it sees, as its path, and what of it is within the window.
_PATHS = {
  (0,): (0,),
  (0, 1, 2): (0, 1, 2),
  (0, 1, 2, 3): (1, 2, 3),
  (0, 1, 2, 4): (1, 2, 4),
  (0, 1, 2, 3, 5): (2, 3, 5),
  (0, 1, 2, 4, 6): (2, 4, 6),
  (0, 1, 2, 3, 5, 7): (3, 5, 7),
  (): (),
}


def test_a_window_is_counted_along_the_path_of_a_query():
  is_in = lambda paths: np.array(
    [[[slot in path for slot in range(9)] for path in paths]]
  )
  mask = jnp.asarray(is_in(_PATHS))
  narrowed = attention.within_window(mask, 3)
  np.testing.assert_array_equal(narrowed, is_in(_PATHS.values()))
  assert attention.within_window(mask, None) is mask
  np.testing.assert_array_equal(attention.within_window(mask, 6), mask)


def test_gradients_of_matmul_are_those_of_the_plain_product():
  rng = np.random.default_rng(1)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  x, weight = draw(2, 3, 16), draw(8, 16)
  ours = jax.grad(lambda *a: jnp.sum(jnp.sin(matrices_lib.matmul(*a))), (0, 1))
  plain = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), (0, 1))
  for got, expected in zip(ours(x, weight), plain(x, weight), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
