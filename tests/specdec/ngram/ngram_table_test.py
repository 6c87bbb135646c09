"""Looking up contexts, and files of tables."""

from unittest import mock

import jax
import jax.numpy as jnp
import ngram_texts
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny_drafters

from specdec.ngram import table as table_lib

_find = jax.jit(table_lib.find_context)


def _table(texts, vocab_size, order, k=2):
  # JAX would compile a program for every shape of an array.
  with mock.patch.object(tiny_drafters, 'jnp', np):
    return tiny_drafters.ngram_table(
      texts, vocab_size, order=order, num_continuations=k
    )


def _expected(index, histories):
  found = []
  for history in histories.tolist():
    known = 0
    while known < len(history) and tuple(history[: known + 1]) in index:
      known += 1
    found.append(index[tuple(history[:known])])
  return found


def _random(order, vocab_size, low):
  """A table, and histories that it knows, half knows or does not know."""
  rng = np.random.default_rng(order)
  draw = lambda *shape: rng.integers(low, vocab_size, size=shape)
  texts = draw(150, order).tolist()
  table = _table(texts, vocab_size, order)
  histories, names = draw(300, order - 1), ngram_texts.contexts(table)
  for row in range(150):  # Known ones, some followed by others.
    name = names[rng.integers(len(names))]
    histories[row, : len(name)] = name
  for row in range(0, 300, 3):  # Starts of texts.
    histories[row, rng.integers(order) :] = -1
  histories[:2] = [[vocab_size - 1], [0]]
  index = {name: number for number, name in enumerate(names)}
  return table, index, histories.astype(np.int32)


@pytest.mark.parametrize(
  ('order', 'vocab_size', 'low'),
  [(1, 6, 0), (2, 300, 0), (3, 262144, 262100), (4, 6, 0), (5, 262144, 0)],
)
def test_the_longest_known_context_is_found(order, vocab_size, low):
  table, index, histories = _random(order, vocab_size, low)
  expected = _expected(index, histories)
  found = _find(table, histories)
  assert found.dtype == jnp.int32
  assert found.tolist() == expected
  names = [*index]
  assert {len(names[context]) for context in expected} == set(range(order))


def test_any_leading_shape_and_vmap_take_the_same_steps():
  table, index, histories = _random(3, 300, 0)
  expected = np.array(_expected(index, histories))
  shaped = _find(table, histories.reshape(5, 6, 10, 2))
  assert np.array_equal(shaped, expected.reshape(5, 6, 10))
  mapped = jax.jit(jax.vmap(table_lib.find_context, (None, 0)))
  assert np.array_equal(mapped(table, histories), expected)
  # Whatever the text; and the sizes of a table are static.
  steps = str(jax.make_jaxpr(table_lib.find_context)(table, histories))
  assert f'length={table.num_probes}' in steps
  assert 'while' not in steps
  with pytest.raises(ValueError, match=r'the last 2 tokens .* order 3, got'):
    table_lib.find_context(table, np.zeros((4, 3), np.int32))


def test_bytes_of_a_lookup_and_a_table_without_contexts():
  texts = [[1, token, 0] for token in range(5)]
  table = _table(texts, 9, 3, k=4)
  # The child of the root; then ends and edge of its children, of which each
  # context has one; then 4 tokens with log-probabilities.
  assert table.lookup_bytes == 4 * (1 + (2 + 0 + 1) + 2 * 4)
  assert _table([[0]], 9, 1, k=4).lookup_bytes == 4 * 2 * 4
  table = _table([[0]], 9, 3)
  assert table.num_contexts == 1
  histories = np.array([[0, 0], [-1, -1], [8, 3]], np.int32)
  assert _find(table, histories).tolist() == [0, 0, 0]


@pytest.mark.parametrize('vocab_size', [1 << 16, (1 << 16) + 1])
def test_a_file_holds_the_table(vocab_size, tmp_path):
  table, _, _ = _random(4, vocab_size, vocab_size - 200)
  path = tmp_path / 'new' / 'table.safetensors'
  provenance = {'draft': 'a', 'tokens': 3, 'discounts': [0.5]}
  table_lib.save_table(path, table, provenance)
  loaded, found = table_lib.load_table(path)
  assert found == provenance
  assert (loaded.order, loaded.vocab_size) == (4, vocab_size)
  for field in ('edge_token', 'first_child', 'next_tokens'):
    assert np.array_equal(getattr(loaded, field), getattr(table, field))
    assert getattr(loaded, field).dtype == jnp.int32
  assert loaded.next_log_probs.dtype == jnp.float32
  np.testing.assert_allclose(
    loaded.next_log_probs, table.next_log_probs, rtol=1e-3
  )
  assert -np.inf in np.asarray(loaded.next_log_probs)
  # Small vocabularies give small files: per context an edge and two tokens.
  bytes_per_id = 2 if vocab_size <= 1 << 16 else 4
  floats = 2 * 2 * table.num_contexts + 4 * (table.num_contexts + 1)
  content = path.stat().st_size - 3 * bytes_per_id * table.num_contexts - floats
  assert 0 < content < 1000  # Its description.
  # Rounding twice changes nothing.
  whole = path.read_bytes()
  table_lib.save_table(path, loaded, provenance)
  assert path.read_bytes() == whole
  # A failed write leaves the old file.
  with pytest.raises(TypeError):
    table_lib.save_table(path, table, {'version': object()})
  assert path.read_bytes() == whole
  assert [file.name for file in path.parent.iterdir()] == [path.name]


def _refused(path, message):
  with pytest.raises(ValueError, match=message) as caught:
    table_lib.load_table(path)
  assert str(path) in str(caught.value)
  assert 'scripts/build_ngram.py' in str(caught.value)


def test_bad_files_are_refused(tmp_path):
  path, unreadable = tmp_path / 'table', 'table cannot be read: '
  _refused(path, 'there is no n-gram table')
  _refused(tmp_path, 'there is no n-gram table')
  table, _, _ = _random(3, 300, 0)
  table_lib.save_table(path, table, {})
  whole = path.read_bytes()
  damaged = whole[:-1] + bytes([whole[-1] ^ 1])
  text = b'def f():\n  pass\n' * 9
  for content in (b'', text, whole[:-1]):
    path.write_bytes(content)
    _refused(path, unreadable)
  other_type = whole.replace(b'"I32"', b'"F32"')
  longer_order = whole.replace(rb'order\": 3', rb'order\": 2')
  for content, reason in (
    (damaged, 'its checksum does not match'),
    (other_type, 'first_child is float32'),
    (longer_order, 'its content does not match its entry digest'),
  ):
    path.write_bytes(content)
    _refused(path, f'cannot be read: {reason}')
  for metadata in (None, {'format': 'pt'}, {'ngram_table': '{}'}):
    safetensors_numpy.save_file({'a': np.zeros(3)}, path, metadata=metadata)
    _refused(path, 'it is no table of this version')
  safetensors_numpy.save_file({}, path, metadata={'ngram_table': '{'})
  _refused(path, unreadable)
