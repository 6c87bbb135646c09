"""The branches of accelerators, run on CPU."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import contraction
from specdec.models.nn import layers
from specdec.tree import tree as tree_lib

_ROWS = 2


def _decode():
  """With a new jit: it has not traced any program before."""
  target, draft = (
    tiny.gpt2(seed=seed, num_layers=1, num_heads=1) for seed in range(2)
  )
  table = tiny_drafters.table_of(tiny.prompts(_ROWS), 'perfect')
  drafter = tiny_drafters.simple('staged', draft, table, specdec.PromptLookup())
  prompt, lengths = tiny.pad(tiny.prompts(_ROWS))
  request = specdec.Request(
    prompt=prompt,
    prompt_length=lengths,
    limit=np.full(_ROWS, 24, np.int32),
    row_keys=tiny.row_keys(_ROWS),
    sampling=tiny.sampling_params(0.0, 1.0),
  )
  run = jax.jit(
    functools.partial(specdec.decode.__wrapped__), static_argnames='config'
  )
  return run(
    target, drafter, request, config=specdec.DecodeConfig(max_new_tokens=32)
  )


def test_a_gpu_decodes_what_a_cpu_decodes(monkeypatch):
  """All that a TPU runs differs from a CPU as here, or not at all."""
  expected = _decode()
  taken = []

  def choose(*args, default=None, **branches):
    assert not ('tpu' in branches and args[0].dtype == jnp.float32)
    taken.append((branches.get('cuda', default), branches.get('cpu', default)))
    return taken[-1][0](*args)

  monkeypatch.setattr(lax, 'platform_dependent', choose)
  result = _decode()
  assert all(gpu is not cpu for gpu, cpu in taken)
  names = {getattr(gpu, 'func', gpu).__name__ for gpu, _ in taken}
  always_wide = {'zeros_like'}  # A draft's forward over text and nodes.
  all_rounds = {'<lambda>'}  # A draft that need not pay.
  others = {'_argmax', '_gathered', '_looked_up', 'looked_up', 'unrolled'}
  assert names == always_wide | all_rounds | others
  np.testing.assert_array_equal(result.length, expected.length)
  for row, length in enumerate(expected.length):
    for name in ('tokens', 'origins'):
      arrays = getattr(result, name), getattr(expected, name)
      np.testing.assert_array_equal(*(array[row, :length] for array in arrays))


def test_a_row_is_multiplied_as_eight_on_a_tpu():
  rng = np.random.default_rng(0)
  row, weight = rng.normal(size=(1, 24)), rng.normal(size=(5, 24))
  product = contraction._contract_padded(
    8, jnp.float32(row), jnp.float32(weight)
  )
  np.testing.assert_allclose(product, row @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_variance_in_one_pass_is_as_exact_as_one_in_two():
  """Also where the mean is large, and where the first entry is far from it."""
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(4, 1280))
  rows[1] += 300
  rows[2, 0] = 3000
  rows[3] = 7
  x = rows.astype(np.float32)
  exact = x.var(1, keepdims=True, dtype=float)
  for variance in (layers._variance, layers._variance_by_origin):
    computed = jax.jit(lambda x, of=variance: of(x, x.mean(1, keepdims=True)))(
      x
    )
    np.testing.assert_allclose(computed, exact, rtol=5e-4, atol=5e-4)


def test_what_is_looked_up_is_what_a_scatter_writes_and_sums():
  rng = np.random.default_rng(0)
  looked_up = jax.jit(tree_lib.looked_up)
  scattered = jax.jit(tree_lib.scattered)
  arrays = lambda size: (rng.integers(9, size=size), rng.normal(size=size))
  equal = functools.partial(np.testing.assert_array_equal, strict=True)
  for _ in range(50):
    # Distinct, and some of them beyond the end.
    arguments = (arrays(12), rng.permutation(20)[:8], arrays(8))
    jax.tree.map(equal, looked_up(*arguments), scattered(*arguments))
  # Whole numbers, so that the order of adding makes no difference. Some entries
  # get several, some none, and some numbers belong nowhere.
  index = rng.integers(20, size=(50, 16))
  values = rng.integers(99, size=(50, 16)).astype('float32')
  sums = lambda of: jax.jit(jax.vmap(lambda at, new: of(at, new, 12)))(
    index, values
  )
  assert sums(tree_lib._looked_up_sums).dtype == values.dtype
  np.testing.assert_array_equal(
    sums(tree_lib._looked_up_sums), sums(tree_lib._scattered_sums)
  )
