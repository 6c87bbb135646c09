"""What only accelerators run, run on CPU: the branches by platform."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import tiny
import tiny_drafters
from tiny_drafters import Settings

from specdec import decode
from specdec import DecodeConfig
from specdec import NGram
from specdec import PromptLookup
from specdec import Request
from specdec import staged
from specdec.tree.tree import _looked_up
from specdec.tree.tree import _looked_up_sums
from specdec.tree.tree import _scattered
from specdec.tree.tree import _scattered_sums

_ROWS = 2
_TREE = Settings(num_nodes=6, width=2, branching=2, rounds=2, capacity=16)


def _decode():
  """With a jit of its own, which has no program traced before."""
  target, draft = (
    tiny.gpt2(seed=seed, num_layers=1, num_heads=1) for seed in range(2)
  )
  text = np.random.default_rng(0).integers(tiny.VOCAB_SIZE, size=80).tolist()
  table = tiny_drafters.ngram_table(
    [text], tiny.VOCAB_SIZE, order=3, num_continuations=2
  )
  drafter = staged(
    tiny_drafters.model(draft, _TREE),
    tiny_drafters.candidates(NGram(table), PromptLookup(), config=_TREE),
  )
  prompt, lengths = tiny.pad(tiny.prompts(_ROWS))
  request = Request(
    prompt=jnp.asarray(prompt),
    prompt_length=jnp.asarray(lengths),
    limit=jnp.full(_ROWS, 24, jnp.int32),
    row_keys=tiny.row_keys(_ROWS),
    sampling=tiny.sampling_params(0.0, 1.0),
  )
  run = jax.jit(functools.partial(decode.__wrapped__), static_argnames='config')
  return run(target, drafter, request, config=DecodeConfig(max_new_tokens=32))


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
  assert names == {'_looked_up', '_looked_up_sums', 'unrolled'}
  np.testing.assert_array_equal(result.length, expected.length)
  for row, length in enumerate(expected.length):
    for name in ('tokens', 'origins'):
      np.testing.assert_array_equal(
        getattr(result, name)[row, :length],
        getattr(expected, name)[row, :length],
      )


def test_a_lookup_writes_what_a_scatter_writes():
  rng = np.random.default_rng(0)
  looked_up, scattered = jax.jit(_looked_up), jax.jit(_scattered)
  arrays = lambda size: (
    jnp.asarray(rng.integers(9, size=size)),
    jnp.asarray(rng.normal(size=size)),
  )
  for _ in range(50):
    # Distinct, and some of them beyond the end.
    index = jnp.asarray(rng.permutation(20)[:8])
    arguments = (arrays(12), index, arrays(8))
    pairs = zip(looked_up(*arguments), scattered(*arguments), strict=True)
    for got, expected in pairs:
      np.testing.assert_array_equal(got, expected)
      assert got.dtype == expected.dtype


def test_sums_that_are_looked_up_are_those_of_a_scatter():
  rng = np.random.default_rng(0)
  # Whole numbers, so that the order of adding makes no difference. Some entries
  # get several, some none, and some numbers belong nowhere.
  index = jnp.asarray(rng.integers(20, size=(50, 16)))
  values = jnp.asarray(rng.integers(99, size=(50, 16)).astype('float32'))
  sums = lambda of: jax.jit(jax.vmap(lambda at, new: of(at, new, 12)))(
    index, values
  )
  assert sums(_looked_up_sums).dtype == values.dtype
  np.testing.assert_array_equal(sums(_looked_up_sums), sums(_scattered_sums))
