"""The table model, on which other tests build."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.nn.table_model import table_model


def test_logits_are_rows_of_the_table():
  table = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
  model = table_model(table, max_positions=30)
  cache = model.spec.init_cache(2, 9)
  tokens = np.array([[0, 6, 3], [3, 3, 1]], np.int32)
  logits, after = model.apply(
    tokens, np.zeros((2, 3), np.int32), jnp.ones((2, 3, 9), bool), cache
  )
  np.testing.assert_array_equal(logits, table[tokens])
  assert after is cache


def test_its_cache_has_slots_but_no_layers():
  cache = table_model(np.eye(3), max_positions=5).spec.init_cache(2, 9)
  assert cache.keys == cache.values == ()
  assert cache.num_slots == 9
  assert cache.length.tolist() == [0, 0]


def test_tables_of_one_size_share_their_definition():
  """And with it their compiled programs."""
  models = [table_model(np.eye(3) * i, max_positions=5) for i in (1, 2)]
  assert models[0].spec == models[1].spec
  assert hash(models[0].spec) == hash(models[1].spec)
  assert models[0].spec.vocab_size == 3
  assert models[0].spec.weight_bytes == 36


@pytest.mark.parametrize('shape', [(3,), (3, 4), (2, 3, 3)])
def test_a_table_must_be_square(shape):
  with pytest.raises(ValueError, match=r'logits must be \[V, V\]'):
    table_model(np.zeros(shape), max_positions=5)
