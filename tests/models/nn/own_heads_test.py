"""MTP layers that targets bring along: their formulas, files and acceptance."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import own_heads
import pytest

from specdec import cache as cache_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.nn import adapter

_long = lambda *values, runs: pytest.param(
  *values, marks=[] if runs else [pytest.mark.long]
)
_SHAPES = [
  _long(family, number, runs=number in (0, 5))
  for family in ('qwen', 'mimo')
  for number in range(own_heads.NUM_SHAPES)
]


def load(name, **options):
  """A target and the head in its folder or file."""
  checkpoint = hub.locate(name)
  stored = heads.own(checkpoint)
  module = hub.read_module(checkpoint, **options)
  target = adapter.as_model(module, hidden=stored.config.reads)
  return target, heads.load(stored, target, **options)


@jax.jit
def _forward(head, tokens, positions, cache, states):
  mask = cache_lib.causal_mask(cache.length, tokens.shape[1], cache.num_slots)
  given, cache = head.forward(tokens, positions, mask, cache, states)
  cache = cache.replace(length=cache.length + tokens.shape[1])
  return head.spec.logits(head.params, given), given, cache


def _drafted(target, head):
  """What the head drafts after the text, and its logits."""
  text, slots = jnp.array(own_heads.TEXT)[None], own_heads.TEXT.size + 3
  cache = jax.jit(lambda: target.spec.init_cache(1, text.size))()
  _, cache = jax.jit(lambda cache: target.causal(text, cache))(cache)
  (hidden,) = (cache.hidden[one][:, 0] for one in head.spec.reads)
  states = head.spec.fuse(head.params, hidden)[:, :-1]
  cache = head.spec.init_cache(1, slots)
  positions = jnp.arange(1, text.size)[None]
  tokens, found, drafted = text[:, 1:], [], []
  # Nothing is seen in the first slot, as in front of a text.
  cache = cache.replace(length=cache.length + 1)
  for _ in range(own_heads.DEPTHS + 1):
    logits, states, cache = _forward(head, tokens, positions, cache, states)
    found.append(np.asarray(logits[0]))
    drafted.append(int(np.argmax(found[-1][-1])))
    tokens, states = jnp.array([drafted[-1:]]), states[:, -1:]
    positions = positions[:, -1:] + 1
  return drafted[:-1], np.concatenate(found)


def check_logits(family, number):
  """The logits of a folder are those of the golden file."""
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    nested = family == 'qwen' and number % 2 == 1
    own_heads.write(folder, family, number, nested=nested)
    drafted, logits = _drafted(*load(folder))
  with np.load(own_heads.GOLDEN) as golden:
    name = f'{family}_{number}'
    assert drafted == golden[f'{name}_drafted'].tolist()
    found = logits[:, own_heads.WORDS]
    np.testing.assert_allclose(found, golden[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize(('family', 'number'), _SHAPES)
def test_logits_are_those_of_a_program_in_torch(family, number):
  check_logits(family, number)
