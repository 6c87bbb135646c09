"""The host boundary: what it refuses, its own keys, and what it compiles."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import loop
from specdec.models.nn import table_model
from specdec.tree import topology as topology_lib

_KEY = jax.random.key(0)
_CHAIN = tiny_drafters.Settings(topology=topology_lib.chain(4))
_TREE = tiny_drafters.Settings(num_nodes=6, width=2, branching=2, rounds=2)


def _model(vocab_size=6):
  return table_model.table_model(np.zeros((vocab_size,) * 2), max_positions=50)


def _draft(config=_CHAIN, name='draft', **kw):
  return tiny_drafters.model(_model(**kw), config, name)


def _lookup(*proposers):
  return tiny_drafters.candidates(
    *proposers, specdec.PromptLookup(), config=_TREE
  )


def _generate(**kw):
  kw = {'target': _model(), 'rng_key': _KEY, 'prompts': [[0], [1, 2]]} | kw
  return specdec.generate(**{'max_new_tokens': 5} | kw)


_SMALL = _draft(_TREE, 'small', vocab_size=5)
_KEYS = r'rng_key must be one key or one per row \(2\)'


# `fuzzing.BAD` has what all methods of `Generator` refuse alike.
def test_bad_arguments_are_refused():
  for arguments, message in (
    ({'drafter': _draft(vocab_size=7)}, '6 tokens, the draft of 7.*tokenizer'),
    ({'drafter': specdec.staged(_draft(_TREE), _SMALL)}, '6 tokens, the small'),
    (
      {'drafter': specdec.staged(_draft(_TREE), _draft(_TREE))},
      r"\('draft', 'draft'\)",
    ),
    ({'drafter': _draft(name='target')}, 'a name of its own'),
    (
      {'drafter': _lookup(specdec.PromptLookup())},
      r"own.* \('lookup', 'lookup'\)",
    ),
    ({'rng_key': jax.random.split(_KEY, 3)}, rf'{_KEYS}, got \(3,\)'),
    ({'rng_key': jax.random.split(_KEY, (2, 1))}, rf'{_KEYS}, got \(2, 1\)'),
    # Two numbers, which would pass for the keys of two rows.
    ({'rng_key': jax.random.PRNGKey(0)}, r'jax\.random\.key.* uint32'),
    ({'rng_key': 0}, r'jax\.random\.key'),
    # The noise of all rows would depend on the first.
    ({'rng_key': jax.random.key(0, impl='rbg')}, 'kind rbg; under vmap'),
  ):
    with pytest.raises(ValueError, match=message):
      _generate(**arguments)


def test_types_of_64_bits_are_refused():
  with jax.enable_x64(True), pytest.raises(ValueError, match='jax_enable_x64'):
    _generate()


def test_one_key_gives_every_row_its_own():
  arguments = {'prompts': [[0], [0]], 'max_new_tokens': 30}
  arguments['sampling'] = specdec.Sampling(temperature=1.0)
  tokens = _generate(**arguments).tokens
  assert tokens[0] != tokens[1]
  keys = jax.vmap(jax.random.fold_in, (None, 0))(_KEY, jnp.arange(2))
  assert _generate(**arguments, rng_key=keys).tokens == tokens


# Programs that are compiled, and how often.


def _numbered(seed):
  return table_model.table_model(tiny.table(10, seed), max_positions=500)


def _counting(model, counts, name):
  """The model, counting how often it is traced."""

  def apply(*args):
    counts[name] += 1
    return model.spec.apply(*args)

  definition = dataclasses.replace(model.spec, apply=apply)
  return model.replace(spec=definition)


def test_one_program_for_all_prompts_limits_seeds_and_temperatures():
  counts = collections.Counter()
  target = _counting(_numbered(0), counts, 'target')
  draft = _counting(_numbered(1), counts, 'draft')

  def run(prompts, limit, seed, temperature, top_p):
    specdec.generate(
      target,
      jax.random.key(seed),
      prompts,
      max_new_tokens=limit,
      drafter=tiny_drafters.simple('staged', draft),
      sampling=specdec.Sampling(temperature=temperature, top_p=top_p),
    )

  programs = lambda: np.array(
    [loop.start._cache_size(), loop.advance._cache_size()]
  )
  before = programs()
  run([[1], [2]], 10, 0, 1.0, 0.9)
  np.testing.assert_array_equal(programs(), before + 1)
  # The prefill, and the body of the loop.
  assert counts['target'] == 2
  # The prefill, and the body of the loop within that loop, where a forward has
  # few rows or many.
  assert counts['draft'] == 3

  run([[3, 1, 4], [1] * 32], 10, 0, 1.0, 0.9)
  for changes in (
    (0, 0, 1.0, 0.9),
    (64, 0, 1.0, 0.9),
    (10, 1, 1.0, 0.9),
    (10, 0, 0, 0.5),
    (10, 0, np.float64(0.3), 1),
  ):
    run([[1], [2]], *changes)
  target = target.replace(params=_numbered(7).params)
  draft = draft.replace(params=_numbered(8).params)
  run([[1], [2]], 10, 0, 1.0, 0.9)
  np.testing.assert_array_equal(programs(), before + 1)
  assert sum(counts.values()) == 5
