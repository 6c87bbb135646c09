"""Families that people run: random shapes of each, compared with transformers.

Also that drafted text equals plain text, and that chat templates render.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters
import variants

from models.checkpoints import hub
from models.nn import adapter
from models.nn.cpu import build
import specdec

_LENGTH = len(variants.LONG)
# Of each family the first shapes; the others take minutes.
_NAMES = [
  pytest.param(name, marks=[pytest.mark.long] * (int(name.split('_')[-1]) > 1))
  for name in variants.FAMILIES
]
_FIRST = [name for name in variants.FAMILIES if name.endswith('_0')]
_DRAFTED = ('gpt_oss_0', 'ministral3_1')


_CAUSAL = np.tri(_LENGTH, dtype=bool)


@jax.jit
def _forward(model, tokens, positions, mask):
  """Logits of a prefill into a cache that is longer than the text."""
  cache = model.spec.init_cache(1, _LENGTH + 3)
  mask = jnp.pad(mask[None], ((0, 0), (0, 0), (0, 3)))
  return model.apply(tokens[None], positions[None], mask, cache)[0][0]


def _logits(module, tokens=variants.LONG, positions=None, mask=_CAUSAL):
  if positions is None:
    positions = np.arange(_LENGTH)
  return _forward(adapter.as_model(module), tokens, positions, mask)


def _error(module, name):
  """The errors of some logits at all positions."""
  with np.load(variants.FAMILY_RESULTS) as results:
    return np.abs(_logits(module)[:, variants.SOME_WORDS] - results[name])


@pytest.mark.parametrize('name', _NAMES)
def test_logits_are_those_of_transformers_and_shapes_are_saved(name, tmp_path):
  module = hub.load_module(
    variants.write(variants.FAMILIES[name], tmp_path / name)
  )
  assert np.max(_error(module, name)) < 2e-4
  hub.save_pretrained(module, tmp_path)
  saved = hub.load_module(tmp_path)
  assert saved.config == module.config
  both = map(tiny.parameters, (module, saved))
  jax.tree.map(np.testing.assert_array_equal, *both)
  # A tree whose branches go on after the same beginning: nodes see windows,
  # sinks and factors by their own positions.
  start, size = 16, 12
  one, branch = np.arange(start, start + size), np.arange(start + size, _LENGTH)
  positions, mask = np.arange(_LENGTH), _CAUSAL.copy()
  positions[branch], mask[np.ix_(branch, one)] = one, False
  found = _logits(module, variants.LONG, positions, mask)
  text = np.roll(variants.LONG, -size)
  text[:start] = variants.LONG[:start]
  expected = _logits(module, text)
  np.testing.assert_allclose(found[branch], expected[one], rtol=0, atol=2e-4)


@pytest.mark.parametrize('name', _FIRST)
def test_kernels_and_few_bits(name, tmp_path):
  folder = variants.write(variants.FAMILIES[name], tmp_path / name)
  load = functools.partial(hub.load_module, folder)
  if build.is_available():
    assert np.max(_error(load(packed=True), name)) < 2e-4
  if 'gpt_oss' in name:  # Its experts are computed in another way.
    # Routing may differ for a few tokens.
    assert 0 < np.median(_error(load(dtype='int8'), name)) < 0.2
    assert np.isfinite(_error(load(dtype='int4'), name)).all()


@pytest.mark.long
@pytest.mark.parametrize('name', _DRAFTED)
def test_greedy_trees_equal_plain_text(name, tmp_path):
  folder = variants.write(variants.FAMILIES[name], tmp_path / name)
  target = adapter.as_model(hub.load_module(folder))
  rng = np.random.default_rng(0)
  noise = lambda leaf: leaf * (1 + 0.1 * rng.standard_normal(leaf.shape))
  draft = target.replace(params=jax.tree.map(noise, target.params))
  prompts = [variants.LONG[:9].tolist(), variants.LONG[9:12].tolist()]
  generate = functools.partial(
    *(specdec.generate, target, jax.random.key(0), prompts), max_new_tokens=40
  )
  plain = generate()
  drafted = generate(drafter=tiny_drafters.simple('tree', draft))
  assert drafted.tokens == plain.tokens
  assert drafted.stats.block_efficiency > 1.2
