"""What only accelerators run, run on CPU: the branches by platform."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings

from specdec import decode
from specdec import DecodeConfig
from specdec import NGram
from specdec import PLAIN
from specdec import PromptLookup
from specdec import Request
from specdec import staged
from specdec.checks import check_sampling
from specdec.tree.tree import _looked_up
from specdec.tree.tree import _looked_up_sums
from specdec.tree.tree import _scattered
from specdec.tree.tree import _scattered_sums

_TREE = Settings(num_nodes=6, width=2, branching=2, rounds=2, capacity=16)


def _take(monkeypatch, platform):
  """Makes programs of another platform; returns the branches chosen."""
  taken = []

  def choose(*args, default=None, **branches):
    taken.append(branches.get(platform, default))
    return taken[-1](*args)

  monkeypatch.setattr(lax, 'platform_dependent', choose)
  return taken


def _decode(method, rows):
  """With a jit of its own, which has no program traced before."""
  target, draft = (tiny.gpt2(seed=i, num_heads=1) for i in range(2))
  vocab_size = target.spec.vocab_size
  text = np.random.default_rng(0).integers(vocab_size, size=80).tolist()
  table = tiny_drafters.ngram_table(
    [text], vocab_size, order=3, num_continuations=2
  )
  drafter = staged(
    tiny_drafters.model(draft, _TREE),
    tiny_drafters.candidates(NGram(table), PromptLookup(), config=_TREE),
  )
  prompt, lengths = tiny.pad(tiny.prompts(rows))
  request = Request(
    prompt=jnp.asarray(prompt),
    prompt_length=jnp.asarray(lengths),
    limit=jnp.full(rows, 24, jnp.int32),
    row_keys=tiny.row_keys(rows),
    sampling=check_sampling(
      tiny.sampling(*(0.0, 1.0)[:rows]), rows, vocab_size
    ),
  )
  run = jax.jit(functools.partial(decode.__wrapped__), static_argnames='config')
  return run(
    target,
    PLAIN if method == 'plain' else drafter,
    request,
    config=DecodeConfig(max_new_tokens=32),
  )


@pytest.mark.parametrize('platform', ['cuda', 'tpu'])
@pytest.mark.parametrize(('method', 'rows'), [('plain', 1), ('staged', 2)])
def test_accelerators_decode_what_a_cpu_decodes(
  monkeypatch, method, rows, platform
):
  expected = _decode(method, rows)
  taken = _take(monkeypatch, platform)
  result = _decode(method, rows)
  assert taken
  np.testing.assert_array_equal(result.length, expected.length)
  for row, length in enumerate(expected.length):
    np.testing.assert_array_equal(
      result.tokens[row, :length], expected.tokens[row, :length]
    )
    np.testing.assert_array_equal(
      result.origins[row, :length], expected.origins[row, :length]
    )


def test_a_lookup_writes_what_a_scatter_writes():
  rng = np.random.default_rng(0)
  for _ in range(50):
    old = (
      jnp.asarray(rng.integers(9, size=12)),
      jnp.asarray(rng.normal(size=12)),
    )
    # Distinct, and some of them beyond the end.
    index = jnp.asarray(rng.permutation(20)[:8])
    new = (
      jnp.asarray(rng.integers(9, size=8)),
      jnp.asarray(rng.normal(size=8)),
    )
    for got, expected in zip(
      _looked_up(old, index, new), _scattered(old, index, new), strict=True
    ):
      np.testing.assert_array_equal(got, expected)
      assert got.dtype == expected.dtype


def test_sums_that_are_looked_up_are_those_of_a_scatter():
  rng = np.random.default_rng(0)
  # Whole numbers, so that the order of adding makes no difference. Some entries
  # get several, some none, and some numbers belong nowhere.
  index = jnp.asarray(rng.integers(20, size=(50, 16)))
  values = jnp.asarray(rng.integers(99, size=(50, 16)).astype('float32'))
  for at, new in zip(index, values, strict=True):
    looked_up = _looked_up_sums(at, new, 12)
    assert looked_up.dtype == new.dtype
    np.testing.assert_array_equal(looked_up, _scattered_sums(at, new, 12))
