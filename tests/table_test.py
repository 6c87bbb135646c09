"""The table model, on which other tests build."""

import numpy as np
import pytest

from models.nn import table_model


def test_logits_are_rows_of_the_table():
  table = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
  model = table_model.table_model(table, max_positions=30)
  cache = model.spec.init_cache(2, 9)
  assert cache.keys == cache.values == ()  # It has slots, but no layers.
  assert (cache.num_slots, cache.length.tolist()) == (9, [0, 0])
  tokens = np.array([[0, 6, 3], [3, 3, 1]], np.int32)
  logits, after = model.apply(
    tokens, np.zeros((2, 3), np.int32), np.ones((2, 3, 9), bool), cache
  )
  np.testing.assert_array_equal(logits, table[tokens])
  assert after is cache


def test_tables_of_one_size_share_their_definition():
  """And with it their compiled programs."""
  make = lambda logits: table_model.table_model(logits, max_positions=5).spec
  one, other = make(np.eye(3)), make(np.eye(3) * 2)
  assert one == other
  assert hash(one) == hash(other)
  assert (one.vocab_size, one.weight_bytes) == (3, 36)
  for shape in ((3,), (3, 4), (2, 3, 3)):
    with pytest.raises(ValueError, match=r'logits must be \[V, V\]'):
      make(np.zeros(shape))
