"""Caches that were written, kept and rolled back, against fresh ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import cache as cache_lib
from specdec import carried as carried_lib
from specdec import model as model_lib


def _assert_masks(masks, drawn):
  """`drawn` are the rows of a batch, the slots of each query as digits."""
  digits = np.asarray(masks).astype(int)
  assert [
    ' '.join(''.join(map(str, query)) for query in row)
    for row in digits.tolist()
  ] == drawn


@pytest.mark.parametrize('how', ['_written', '_looked_up'])
def test_window_mask_by_hand(how):
  """The root and two children, as drawn, with slots before and after them."""
  window = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
  make = getattr(cache_lib, how)
  _assert_masks(
    make(jnp.array([2, 0, 3]), jnp.asarray([window] * 3), num_slots=6),
    ['111000 111100 111010', '100000 110000 101000', '111100 111110 111101'],
  )
  # Fewer queries than slots of the window.
  part = jnp.asarray(window[None, 2:])
  _assert_masks(make(jnp.array([1]), part, num_slots=5), ['11010'])


def _lettered(rows, length):
  """Keys and hidden states are letters, values the same in upper case."""
  array = lambda rows: np.array(
    [[ord(letter) for letter in row] for row in rows], np.float32
  )[:, None, :, None]
  return cache_lib.KVCache(
    keys=(array(rows),),
    values=(array([row.upper() for row in rows]),),
    hidden={0: array(rows)},
    length=np.array(length, np.int32),
    num_slots=len(rows[0]),
  )


def _assert_holds(cache, expected):
  """The letters of each row that count, wherever they are kept."""
  upper = [text.upper() for text in expected]
  for array, texts in (
    (cache.keys[0], expected),
    (cache.values[0], upper),
    (cache.hidden[0], expected),
  ):
    rows = zip(np.asarray(array)[:, 0, :, 0], cache.length, strict=True)
    assert [
      ''.join(chr(int(code)) for code in row[:length]) for row, length in rows
    ] == texts


def test_keep_by_hand():
  """The drawing: all of it kept, none, and a row of another length."""
  rows = ['tttt' + 'rxayb.', 'tttt' + 'rxayb.', 'ttt' + 'rxayb..']
  cache = _lettered(rows, [4, 4, 3])
  kept = cache_lib.keep(
    cache,
    jnp.array([1, 1, 1]),
    jnp.array([[2, 4, 1], [3, 3, 3], [2, 3, 4]]),
    jnp.array([2, 0, 3]),
    window=5,
  )
  _assert_holds(kept, ['ttttrab', 'ttttr', 'tttrayb'])
  assert kept.num_slots == cache.num_slots


def test_many_rows_are_written_and_read_at_once():
  """So that a GPU's program does not grow with them; as one by one."""
  slots = np.zeros((40, 2, 8, 4), np.float32)
  new = np.random.default_rng(0).normal(size=(40, 2, 3, 4)).astype(np.float32)
  start = jnp.arange(40) % 6
  expected = cache_lib.write_slots(slots, new, start)
  at_once = cache_lib._write_at_once(slots, new, start)
  np.testing.assert_array_equal(at_once, expected)
  read = cache_lib.read_slots(expected, start, 3)
  np.testing.assert_array_equal(read, new)
  read = cache_lib._read_at_once(expected, start, number=3)
  np.testing.assert_array_equal(read, new)

  @jax.jit
  def both(slots, new, start):
    slots = cache_lib.write_slots(slots, new, start)
    return cache_lib.read_slots(slots, start, 3)

  lower = both.trace(slots, new, start).lower
  count = lambda platform: sum(
    lower(lowering_platforms=(platform,)).as_text().count(name)
    for name in ('dynamic_slice', 'dynamic_update_slice')
  )
  assert count('cuda') == 0
  assert count('tpu') >= 80


_keep = jax.jit(model_lib.keep)


def test_keeping_nodes_by_hand():
  """From a path of three nodes 0 to 3 are kept."""
  for window, read, kept in (
    # Nodes r, a, b, c, d are scored in this order; the path is r, b, d.
    ([0, 1, 2, 3, 4], 0, ['', 'r', 'rb', 'rbd']),
    # In another order, after two tokens of text that were read late.
    ([-1, -1, 4, 0, 2], 2, ['xx', 'xxr', 'xxrb', 'xxrbd']),
    # The last was not scored in time.
    ([2, 0, 3, 1, -1], 0, ['', 'r', 'rb', 'rb']),
  ):
    slots = ''.join('x' if node < 0 else 'rabcd'[node] for node in window)
    state = model_lib.ModelState(
      cache=_lettered([f'text{slots}..'] * 4, [4] * 4),
      num_text=np.full(4, read),
      window=np.tile(window, (4, 1)),
      used=np.array(len(window)),
    )
    path, count = np.array([[0, 2, 4]] * 4), np.arange(4)
    after = _keep(state, carried_lib.Added(path, path, count, 0 * count))
    _assert_holds(after.cache, [f'text{letters}' for letters in kept])


def test_what_is_kept_is_kept_exactly():
  """To the last bit, however large or small it is."""
  rng = np.random.default_rng(0)
  shape = (2, 3, 12, 4)
  exponents = rng.integers(-30, 30, size=shape)
  array = jnp.asarray(rng.normal(size=shape) * 10.0**exponents, 'bfloat16')
  lengths, offsets = np.array([2, 4]), np.array([[1, 5, 3], [2, 6, 7]])
  cache = cache_lib.KVCache(
    keys=(array,), values=(-array,), length=lengths, num_slots=shape[2]
  )
  keep = jax.jit(cache_lib.keep, static_argnames='window')
  kept = jax.device_get(
    keep(cache, 0 * lengths, offsets, np.array([3, 2]), window=8)
  )
  assert kept.keys[0].dtype == array.dtype
  for row, length in enumerate(lengths):
    expected = np.array(array)[row]
    expected[:, length : length + 3] = expected[:, length + offsets[row]]
    np.testing.assert_array_equal(kept.keys[0][row], expected)
    np.testing.assert_array_equal(kept.values[0][row], -expected)


def test_what_is_not_finite_is_written_as_zero():
  """Also what is infinite when it is rounded to the dtype of the cache."""
  cache = cache_lib.init_cache(
    1, 2, num_heads=1, head_widths=(4,), dtype='float16'
  )
  cache = cache_lib.with_hidden(cache, {0: 4}, 'float16')
  states = jnp.array([[[1.0, 1e6, np.inf, np.nan]]])
  entry = states[None].astype('float16')
  cache = cache_lib.write(cache, 0, entry, entry)
  cache = cache_lib.write_hidden(cache, 0, states)
  for written in jax.tree.leaves((cache.keys, cache.values, cache.hidden)):
    np.testing.assert_array_equal(written[0, 0], [[1, 0, 0, 0], [0, 0, 0, 0]])


def _target():
  """Keeps hidden states, too, next to keys and values."""
  return tiny.gpt2(num_layers=1, hidden=(0, 1, cache_lib.AFTER_NORM))


@jax.jit
def _start(model, tokens, length):
  texts = carried_lib.Texts(tokens, length, tokens.shape[1])
  return model_lib.start(model, texts, window_size=1)


def _assert_equals_fresh(model, cache, tokens):
  """Equals the cache of the text, as if nothing had ever been guessed."""
  fresh = jax.device_get(_start(model, tokens, cache.length + 1)).cache
  arrays = lambda cache: jax.tree.leaves(
    (cache.keys, cache.values, cache.hidden)
  )
  for array, expected in zip(arrays(cache), arrays(fresh), strict=True):
    for row, length in enumerate(cache.length):
      np.testing.assert_allclose(
        array[row, :, :length], expected[row, :, :length], rtol=1e-4, atol=1e-5
      )


@jax.jit
def _restart(model, state, tokens, length, kept):
  texts = carried_lib.Texts(tokens, length, tokens.shape[1], kept)
  return model_lib.restart(model, state, texts)


def test_text_is_read_from_what_is_kept_to_the_end_of_the_context():
  """The last chunk of a full cache begins within what was read."""
  model = _target()
  spec = dataclasses.replace(model.spec, max_positions=36)
  model, rng = model.replace(spec=spec), np.random.default_rng(0)
  texts = rng.integers(tiny.TABOO, size=(4, 40), dtype=np.int32)
  kept, length = np.array([20, 0, 10, 4]), np.array([40, 7, 0, 40])
  before = np.where(np.arange(40)[None] < kept[:, None], texts, tiny.TABOO)
  state = _start(model, before, kept + [10, 1, 1, 3])
  state, forwards = _restart(model, state, texts, length, kept)
  np.testing.assert_array_equal(state.cache.length, [36, 6, 10, 36])
  assert forwards == 1
  _assert_equals_fresh(model, jax.device_get(state.cache), texts)


@pytest.mark.parametrize('kind', ['chain', 'staged'])
def test_caches_of_all_stages_after_every_step(kind):
  """They equal caches that only read the text, as far as they go."""
  draft = tiny.draft('similar', num_layers=1, hidden=(1,))
  decoding = specdec.Decoding(
    _target(),
    tiny.row_keys(3),
    tiny.prompts(3),
    max_new_tokens=(30, 9, 28),
    drafter=tiny_drafters.simple(kind, draft),
    sampling=specdec.Sampling(temperature=[0.0, 1.0, 0.7]),
  )
  lags = set()
  for _ in decoding:
    state = jax.device_get(decoding._state)
    caches = state.target.cache, state.stages[0].scorer.cache
    for model, cache in zip((_target(), draft), caches, strict=True):
      _assert_equals_fresh(model, cache, state.tokens)
    lags |= {*(state.length - 1 - caches[1].length).tolist()}
  # The classic off-by-one: all accepted, but the last was never scored.
  assert lags == {0, 1} if kind == 'chain' else max(lags) > 0, lags
