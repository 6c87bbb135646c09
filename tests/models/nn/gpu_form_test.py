"""The form of a model for a GPU, run on CPU; `families_test` has a Gemma."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import cache as cache_lib
from specdec.models.nn import adapter
from specdec.models.nn import attention


def _module(name):
  if name == 'delta':  # States amplify what was rounded.
    return tiny.llama_module(name)
  shape = {'num_positions': tiny.MAX_POSITIONS, 'width': 32}
  return tiny.module(dtype=jnp.bfloat16, vocab_size=45, **shape)


def _forms(name):
  module, hidden = _module(name), (0, cache_lib.AFTER_NORM)
  make = lambda on_gpu: adapter.as_model(module, hidden=hidden, on_gpu=on_gpu)
  return make(False), make(True)


def _steps(model):
  """Logits and caches of a prompt, of single tokens and of a few."""

  def run(params, tokens):
    del params
    cache, parts = model.spec.init_cache(1, 16), []
    for part in jnp.split(tokens, (4, 5, 6), axis=1):
      length = part.shape[1]
      positions = cache.length[:, None] + jnp.arange(length)[None]
      mask = cache_lib.causal_mask(cache.length, length, cache.num_slots)
      logits, cache = model.apply(part, positions, mask, cache)
      cache = cache_lib.advance(cache, jnp.full(1, length, jnp.int32))
      parts.append(logits)
    return jnp.concatenate(parts, axis=1), cache

  tokens = np.random.default_rng(0).integers(40, size=(1, 9))
  return jax.jit(run)(model.params, tokens)


@pytest.mark.parametrize(
  ('name', 'most_sums'), [('gpt2', 0), ('delta', 1 << 23)]
)
def test_it_computes_what_the_other_form_computes(name, most_sums, monkeypatch):
  monkeypatch.setattr(attention, '_MOST_SUMS', most_sums)
  common, for_gpu = _forms(name)
  (logits, cache), (gpu_logits, gpu_cache) = _steps(common), _steps(for_gpu)
  assert gpu_logits.shape == logits.shape
  np.testing.assert_allclose(gpu_logits, logits, rtol=0.05, atol=0.1)
  assert (len(gpu_cache.keys), len(gpu_cache.values)) == (1, 0)
  for layer in range(len(cache.keys)):
    for ours, theirs in zip(
      gpu_cache.layer(layer), cache.layer(layer), strict=True
    ):
      np.testing.assert_allclose(
        *(each[:, :, :9].astype('float32') for each in (ours, theirs)),
        0.05,
        0.05,
      )
  for ours, theirs in zip(
    *map(jax.tree.leaves, (gpu_cache.recurrent, cache.recurrent)), strict=True
  ):
    np.testing.assert_allclose(ours, theirs, rtol=0.05, atol=0.1)


def test_it_decodes_as_plainly():
  """Path by path, in rows of several lengths."""
  _, target = _forms('gpt2')
  decode = lambda drafter: specdec.generate(
    target,
    jax.random.key(0),
    [[1, 2, 3], [4, 5]],
    drafter=drafter,
    max_new_tokens=24,
  )
  plain = decode(specdec.PLAIN)
  tree = decode(tiny_drafters.simple('tree', target))
  assert tree.tokens == plain.tokens
  assert tree.stats.target_forwards < 0.6 * plain.stats.target_forwards


def test_long_texts_have_an_array_per_layer():
  """A forward copies a layer's slots; copies of many slots would be slow."""
  _, model = _forms('gpt2')
  caches = [
    jax.eval_shape(lambda size=size: model.spec.init_cache(1, size))
    for size in (100, 100_000)
  ]
  assert [len(cache.values) for cache in caches] == [0, 2]
