"""The host boundary: what it refuses, and what it returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import generate
from specdec import PromptLookup
from specdec import Sampling
from specdec import staged
from specdec.tree.topology import chain

VOCAB_SIZE = 6


def _model(vocab_size=VOCAB_SIZE, max_positions=50):
  table = np.roll(np.eye(vocab_size), 1, axis=1)  # predicts i + 1 after i
  return table_model(table, max_positions=max_positions)


_CHAIN = Settings(topology=chain(4))
_TREE = Settings(num_nodes=6, width=2, branching=2, rounds=2)


def _draft(config=_CHAIN, name='draft', **kw):
  return tiny_drafters.model(_model(**kw), config, name)


def _lookup(*proposers):
  return tiny_drafters.candidates(*proposers, PromptLookup(), config=_TREE)


def _generate(**kw):
  kw = {
    'target': _model(),
    'rng_key': jax.random.key(0),
    'prompts': [[0], [1, 2]],
    'max_new_tokens': 5,
  } | kw
  return generate(**kw)


def test_what_it_returns():
  generation = _generate(drafter=_draft())
  assert generation.tokens == [[1, 2, 3, 4, 5], [3, 4, 5, 0, 1]]
  # Four of the draft, and the bonus token of the target.
  assert generation.origins == [[1, 1, 1, 1, 0]] * 2
  assert generation.labels == ('target', 'draft')
  assert generation.stats['stage_forwards'].keys() == {'draft'}
  plain = _generate()
  assert plain.tokens == generation.tokens
  assert (plain.origins, plain.labels) == ([[0] * 5] * 2, ('target',))
  assert plain.stats['block_efficiency'] == 1.0
  assert plain.stats['relative_bandwidth'] == 1.0
  for rows in (generation.tokens, generation.origins):
    assert all(type(token) is int for row in rows for token in row)


_KEY = jax.random.key(0)
_KEYS = r'rng_key must be one key or one per row \(2\)'


# What all methods of `Generator` refuse alike is in `fuzzing.BAD`.
@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'drafter': _draft(vocab_size=7)}, '6 tokens, the draft of 7.*tokenizer'),
    (
      {'drafter': staged(_draft(_TREE), _draft(_TREE, 'small', vocab_size=5))},
      'the target has a vocabulary of 6 tokens, the small of 5',
    ),
    (
      {'drafter': staged(_draft(_TREE), _draft(_TREE))},
      r"\('draft', 'draft'\)",
    ),
    ({'drafter': _draft(name='target')}, 'a name of its own'),
    ({'drafter': _lookup(PromptLookup())}, r"own.* \('lookup', 'lookup'\)"),
    ({'rng_key': jax.random.split(_KEY, 3)}, rf'{_KEYS}, got \(3,\)'),
    ({'rng_key': jax.random.split(_KEY, (2, 1))}, rf'{_KEYS}, got \(2, 1\)'),
    # Two numbers, which would pass for the keys of two rows.
    ({'rng_key': jax.random.PRNGKey(0)}, r'jax\.random\.key.* uint32'),
    ({'rng_key': 0}, r'jax\.random\.key'),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    _generate(**arguments)


def test_one_key_gives_every_row_its_own():
  arguments = {
    'target': _model().replace(params={'logits': jnp.zeros((6, 6))}),
    'prompts': [[0], [0]],
    'max_new_tokens': 30,
    'sampling': Sampling(temperature=1.0),
  }
  tokens = _generate(**arguments).tokens
  assert tokens[0] != tokens[1]
  fold = jax.vmap(jax.random.fold_in, (None, 0))
  keys = fold(jax.random.key(0), jnp.arange(2))
  assert _generate(**arguments, rng_key=keys).tokens == tokens
