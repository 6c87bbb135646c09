"""Layers with a state: a node has its path's state, to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters
import tiny_recurrent
import variants

import specdec
from specdec import cache as cache_lib
from specdec import memory
from specdec import recurrent as recurrent_lib
from specdec import statistics
from specdec.models.checkpoints import hub
from specdec.models.nn import adapter
from specdec.models.nn import other_tokens
from specdec.models.nn.cpu import build
from specdec.models.nn.cpu import ops

_HYBRIDS = ('lfm2_old_keys', 'qwen3_5_shared_keys')
_kernels = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)


def _load(name, tmp_path, **options):
  folder = variants.write(name, tmp_path / name)
  return adapter.as_model(hub.load_module(folder, **options))


@jax.jit
def _row(cache, row):
  """The cache of one row."""
  take = lambda array: jax.lax.dynamic_slice_in_dim(array, row, 1)
  return jax.tree.map(take, cache)


@pytest.mark.parametrize('name', _HYBRIDS)
def test_logits_are_those_of_transformers_however_a_text_is_read(
  name, tmp_path
):
  """In chunks, and as a tree that grows in two forwards."""
  model, golden = _load(name, tmp_path), np.load(variants.RESULTS)[name]
  tokens = variants.tokens(name)
  for size, end in ((1, 40), (7, 35)):
    logits, _ = tiny_recurrent.in_chunks(model, tokens[:, :end], size)
    np.testing.assert_allclose(logits, golden[:, :end], rtol=0, atol=2e-4)
  # The rest of a text is a path of a tree, whose other nodes are random.
  rng = np.random.default_rng(0)
  _, cache = tiny_recurrent.in_chunks(model, tokens[:, :14], 7)
  tree = tiny_recurrent.Tree.random(rng, 2, 26, variants.VOCAB_SIZE)
  path = [0, *np.sort(rng.permutation(np.arange(1, 26))[:13])]
  tree.parents[:, path] = [-1, *path[:-1]]
  tree.tokens[:, path] = tokens[:, 14:28]
  logits = tree.logits(model, cache, 13)
  np.testing.assert_allclose(
    logits[:, path], golden[:, 14:28], rtol=0, atol=2e-4
  )
  for node in range(20, 26):
    _check_path(model, tree, logits, cache, 1, node, atol=2e-4)


def _check_path(model, tree, logits, cache, row, leaf, atol):
  """Decoding a path token by token gives the same logits."""
  state = _row(cache, row)
  for node in tree.path(row, leaf):
    token = tree.tokens[row, node][None, None]
    alone, state = tiny_recurrent.chunk(model, token, state)
    np.testing.assert_allclose(
      logits[row, node], np.asarray(alone)[0, 0], rtol=0, atol=atol
    )


@_kernels
@pytest.mark.parametrize(
  ('name', 'dtype'),
  [
    (_HYBRIDS[0], 'float32'),
    (_HYBRIDS[1], 'float32'),
    (_HYBRIDS[0], 'int4'),
    (_HYBRIDS[1], 'bfloat16'),
  ],
)
def test_a_node_has_the_bits_of_plain_decoding_of_its_path(
  name, dtype, tmp_path
):
  """With the CPU kernels, for trees that grow in one or in several forwards.

  In float32 a prompt has the logits of transformers.
  """
  model = _load(name, tmp_path, dtype=dtype, packed=True)
  rng = np.random.default_rng(1)
  for rows, nodes, most in ((1, 5, 5), (4, 16, 8), (2, 64, 64)):
    prompt = np.resize(variants.tokens(name)[:, :9], (rows, 9))
    read, cache = tiny_recurrent.in_chunks(model, prompt, 9)
    if dtype == 'float32':
      golden = np.resize(np.load(variants.RESULTS)[name][:, :9], read.shape)
      np.testing.assert_allclose(read, golden, rtol=0, atol=2e-4)
    tree = tiny_recurrent.Tree.random(rng, rows, nodes, variants.VOCAB_SIZE)
    logits = tree.logits(model, cache, most)
    for row in {0, rows - 1}:
      for leaf in {nodes - 1, nodes // 2}:
        _check_path(model, tree, logits, cache, row, leaf, atol=0)


@_kernels
def test_keys_near_zero_have_the_length_of_transformers(tmp_path):
  """It is divided by a root with an epsilon; the epsilon matters for these."""
  name = 'qwen3_5_shared_keys'
  folder = variants.write(name, tmp_path / name)
  convolutions = {
    key: lambda tensors, key=key: 1e-3 * tensors[key]
    for key in variants.VARIANTS[name]['tensors']
    if key.endswith('conv1d.weight')
  }
  variants.edit_tensors(folder, convolutions)
  logits = [
    tiny_recurrent.in_chunks(
      adapter.as_model(hub.load_module(folder, packed=packed)),
      variants.tokens(name)[:, :9],
      9,
    )[0]
    for packed in (False, True)
  ]
  np.testing.assert_allclose(*logits, rtol=0, atol=2e-4)


_VOCAB = 12


def _by_hand(tokens, window):
  """A cache of one hashed layer that has read tokens, and a window."""
  model = tiny_recurrent.hashed(_VOCAB)
  cache = model.spec.init_cache(len(tokens), 32)
  cache = cache_lib.with_window(cache, len(window[0]))
  _, cache = tiny_recurrent.chunk(model, jnp.asarray(tokens), cache)
  inputs = {'token': jnp.asarray(window)[:, None, :, None]}
  layer = cache.recurrent[0].replace(inputs=inputs)
  return cache.replace(recurrent={0: layer})


def _states(cache):
  return cache.recurrent[0].state['hash'].tolist()


def test_lengthening_and_going_back_by_hand():
  cache = _by_hand([[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]])
  assert _states(cache) == [
    tiny_recurrent.hash_of([1, 2]),
    tiny_recurrent.hash_of([3, 4]),
  ]
  ahead = cache_lib.advance(cache, jnp.array([0, 2]))
  assert _states(ahead) == [
    tiny_recurrent.hash_of([1, 2]),
    tiny_recurrent.hash_of([3, 4, 8, 9]),
  ]
  marked = cache_lib.mark(cache)
  kept = cache_lib.keep(
    marked,
    jnp.array([1, 0]),
    jnp.array([[2, 1], [2, 0]]),
    jnp.array([1, 2]),
    window=3,
  )
  assert _states(kept) == [
    tiny_recurrent.hash_of([1, 2, 5, 7]),
    tiny_recurrent.hash_of([3, 4, 10, 8]),
  ]
  assert kept.length.tolist() == [4, 4]
  for length, left, states in (
    (jnp.array([4, 9]), [4, 4], _states(kept)),
    (jnp.array([3, 2]), [2, 2], _states(cache)),
    (jnp.array([1, 4]), [0, 4], [0, _states(kept)[1]]),
  ):
    back = cache_lib.rewind(kept, length)
    assert (back.length.tolist(), _states(back)) == (left, states)
    # A mark counts only while its text is unchanged.
    again = cache_lib.rewind(back.replace(length=back.length + 5), 3)
    assert again.length.tolist() == [0 if size == 0 else 2 for size in left]
    marks = zip(left, _states(cache), strict=True)
    assert _states(again) == [
      state if is_marked else 0 for is_marked, state in marks
    ]


def test_parents_and_ancestors_by_hand():
  """A text of one token in the window, then a root and its children."""
  rows = ['x....', 'xx...', 'xxx..', 'xx.x.', 'xx.xx']
  sees = np.array([[[mark == 'x' for mark in row] for row in rows]])
  assert recurrent_lib.parents(sees).tolist() == [[-1, 0, 1, 1, 3]]
  # Nodes of a later forward say it, too.
  assert recurrent_lib.parents(sees[:, 4:]).tolist() == [[-1, 0, -1, 1, 3]]
  for number, expected in enumerate(([0, 1, 2, 3, 4], [-1, 0, 1, 1, 3])):
    assert recurrent_lib.ancestor(sees, number).tolist() == [expected]


def test_states_are_counted():
  """Their memory before a decode, and what steps read of them."""
  model = adapter.as_model(tiny.llama_module('delta'))
  matrix, conv = 4 * 16 * 8, 2 * 2 * 16 + 4 * 8
  state, inputs = 4 * (matrix + 3 * conv), 4 * (conv + 2 * 16 + 4 * 8 + 4)
  assert model.spec.state_bytes == state
  drafter = tiny_drafters.simple('chain', model)
  parts = memory.decode_bytes(
    model, drafter, (3, 16), specdec.DecodeConfig(max_new_tokens=8)
  )
  # A state and its mark, and the windows of the target and the draft.
  [held] = [size for part, size in parts.items() if 'states' in part]
  assert held == 3 * (2 * 2 * state + (4 + 1) * inputs)
  result = specdec.generate(
    model, tiny.row_keys(2), [[1], [2, 3]], max_new_tokens=4, drafter=drafter
  )
  stats = result.stats
  assert stats.costs['draft']['per_row'] == 2 * state
  assert stats.reads['target']['rows'] == stats.target_forwards
  plain = statistics.bytes_read({'target': stats.reads['plain']}, stats.costs)
  slots = stats.reads['plain']['slots'] * 2 * 2 * 8 * 4
  assert plain == 4 * model.spec.weight_bytes + slots + 8 * 2 * state


def mixed_by_kernels(heads, picked):
  """The kernels of delta nets for the heads `picked`: results, states."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  rows, nodes, slots, width = 2, 6, 9, 128
  numbers = lambda *lead: draw(*lead, heads)[..., picked]

  def vectors(number, *lead):
    """Some vectors of each head, all heads next to one another."""
    arrays = [draw(*lead, heads, width)[..., picked, :] for _ in range(number)]
    return np.concatenate([each.reshape(*lead, -1) for each in arrays], -1)

  parts = vectors(4, rows, nodes), numbers(rows, nodes), numbers(rows, nodes)
  projected = np.concatenate(parts, axis=-1)
  matrix = draw(rows, heads, width, width)[:, picked]
  state = {'conv': vectors(3, rows, 3), 'matrix': matrix}
  window = rows, 1, slots
  inputs = {'conv': vectors(3, *window), 'decay': numbers(*window)}
  inputs |= {name: vectors(1, *window) for name in ('key', 'delta')}
  weight, rates = vectors(3, 4), numbers(2)
  parents = np.tile(np.int32([-1, 0, 1, 2, 3, 4, 3, 3, 5]), (rows, 1))
  out, inputs = ops.mix_delta(
    projected,
    state,
    inputs,
    (parents, np.int32([3, 2])),
    weight,
    (-np.abs(rates[0]), rates[1]),
    ops.Norm(draw(width), None, 1e-6, center=False),
    tiled=False,
  )
  slots = np.tile(np.int32([0, 4, 2]), (rows, 1))
  folded = ops.fold_delta(matrix, inputs, slots, np.int32([3, 2]), tiled=False)
  of_heads = lambda name, row, slot: np.asarray(
    inputs[name][row, 0, slot]
  ).reshape(len(picked), -1)
  for row, taken in enumerate(([0, 4, 2], [0, 4])):
    state = matrix[row]
    for slot in taken:
      key, delta, decay = (
        of_heads(name, row, slot) for name in ('key', 'delta', 'decay')
      )
      state = decay[..., None] * state + key[..., None] * delta[:, None]
    np.testing.assert_allclose(folded[row], state, rtol=0, atol=1e-4)
  out = np.asarray(out).reshape(rows, nodes, len(picked), width)
  return out, np.asarray(folded)


@_kernels
def test_several_threads_compute_the_bits_of_one():
  """Four heads are read by all threads, one head by the calling one."""
  out, folded = mixed_by_kernels(4, [0, 1, 2, 3])
  for head in range(4):
    alone, alone_folded = mixed_by_kernels(4, [head])
    np.testing.assert_array_equal(out[:, :, [head]], alone)
    np.testing.assert_array_equal(folded[:, [head]], alone_folded)


def test_a_draft_with_states_reads_tokens_as_they_are():
  draft = adapter.as_model(tiny.llama_module('lfm2'))
  same = jnp.arange(tiny.VOCAB_SIZE)
  with pytest.raises(
    ValueError, match=r'cannot read a token .* as 2 of its own'
  ):
    other_tokens.with_other_tokens(draft, same, jnp.stack([same, same], 1))
