"""Growth of trees, against a best-first search on dicts in plain Python."""

import dataclasses

import jax
import list_growth as growth
from list_growth import assert_equal_trees
from list_growth import run
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings
from tiny_drafters import with_settings

from specdec import staged
from specdec.draft.stages import commit_stages
from specdec.tree.topology import from_paths
from specdec.tree.topology import k_ary


def _by_name(name, tables):
  """A drafter of tables and its reference; the outermost stage is named first.

  Each stage is a model or a table, with its own of `tables`.
  """
  drafter = slow = None
  configs = (growth.TREE, growth.SMALL, growth.TINY)
  stages = list(zip(name.split(', '), tables, configs, strict=False))
  for place, stage in reversed([*enumerate(stages)]):
    fast, slow = growth.both(*stage, f'model {place}', slow)
    drafter = staged(fast, drafter) if drafter else fast
  return drafter, slow


_MORE_THAN_THERE_ARE = {'branching': growth.VOCAB_SIZE + 5, 'width': 60}
_MORE_THAN_THERE_ARE |= {'capacity': 50, 'calibration': 0.5}


@pytest.mark.parametrize(
  ('name', 'config'),
  [
    ('model', {}),
    ('model, table', {}),
    ('model, model, table', {}),
    # Full after a round or two: what is guessed later is dropped.
    ('model, table', {'num_nodes': 6, 'capacity': 11}),
    # Reached before the rounds are over; one node wide is two in a forward.
    ('model', {'width': 1, 'max_depth': 3, 'branching': 2, 'rounds': 9}),
    ('table', _MORE_THAN_THERE_ARE),
  ],
)
def test_growth_is_a_best_first_search(name, config):
  check(name, config)


def check(name, config=()):
  """Of 12 batches."""
  config, sizes = dict(config), set()
  for temperature in (0.0, 1.0, 0.6):
    for seed in range(4):
      tables = [growth.random_table(3 * seed + index) for index in range(3)]
      if name == 'model, model, table':
        # Of three stages two are alike now and then.
        tables[2] = tables[seed % 2]
      drafter, slow = _by_name(name, tables)
      outer = dataclasses.replace(slow.config, **config)
      drafter, slow.config = with_settings(drafter, outer), outer
      active = [True, True, config != {} or seed > 0]
      step = growth.random_step(
        seed, drafter.max_depth, temperature, active=active
      )
      trees, forwards = run(drafter, step)
      slow_trees, slow_forwards = growth.run_slowly(slow, step)
      # Rows that are done grow as far as the others take them.
      assert_equal_trees(trees, slow_trees)
      assert forwards == slow_forwards
      sizes |= set(map(len, trees))
  assert (max(sizes) == 11) if config.get('capacity') == 11 else max(sizes) > 10


def test_an_inner_drafter_without_guesses_changes_nothing():
  alone = _by_name('model', [growth.random_table(4)])[0]
  nothing = tiny_drafters.empty(growth.VOCAB_SIZE, 3)
  both = staged(alone, tiny_drafters.candidates(nothing, config=growth.SMALL))
  step = growth.random_step(4, both.max_depth, 1.0)
  (trees, forwards), (expected, of_one) = run(both, step), run(alone, step)
  assert_equal_trees(trees, expected)
  assert forwards[0] == of_one[0] == 3


def test_growth_after_a_step_is_growth_after_a_prefill():
  """Also where the draft has yet to read what it did not guess itself."""
  rng = np.random.default_rng(2)
  draft = tiny.draft('similar', num_layers=1)
  drafter = tiny_drafters.model(draft, Settings(topology=k_ary(2, 2)))
  step = growth.random_step(2, 2, 1.0, tiny.VOCAB_SIZE)
  rows = np.arange(growth.BATCH_SIZE)
  tokens, length = growth.padded(step.texts)
  rest = (rows >= 0, step.noise, tiny.sampling_params(1.0, 0.0, 1.0))
  commit, grow_again = jax.jit(commit_stages), jax.jit(growth.grown_from)
  stages, tree = growth.grown(drafter, tokens, length, *rest)
  for leaf in (3, 4, 5, 6):
    # To a leaf, which no draft has scored, and a bonus token.
    path = np.array([[0, (leaf - 1) // 2, leaf]] * len(rows), np.int32)
    stages = commit(drafter, stages, path, 0 * length + 2)
    for row in rows:
      new = [*np.asarray(tree.token[row])[path[row, 1:]], rng.integers(9)]
      tokens[row, length[row] : length[row] + 3] = new
    length = length + 3
    stages, tree = grow_again(drafter, stages, tokens, length, *rest)
    _, expected = growth.grown(drafter, tokens, length, *rest)
    assert_equal_trees(growth.dicts_of(tree), growth.dicts_of(expected))


@pytest.mark.parametrize('kind', ['model', 'table'])
def test_fixed_shapes_are_filled_by_rank(kind):
  topology = from_paths([(1,), (0,), (3,), (1, 2), (1, 0), (1, 2, 4), (3, 0)])
  config = Settings(topology=topology, calibration=1.5)
  drafter, slow = growth.both(kind, growth.random_table(5), config)
  for temperature in (0.0, 1.0):
    step = growth.random_step(5, topology.max_depth, temperature)
    trees, forwards = run(drafter, step)
    assert forwards == [topology.max_depth]
    for row, tree in enumerate(trees):
      expected, tokens = {(): (0.0, 0.0, 0)}, {(): ()}
      for ranks in topology.paths:
        above = tokens[ranks[:-1]]
        ranked = growth.ranked_logits(slow, step, row, above)
        token = int(np.argsort(-ranked, kind='stable')[ranks[-1]])
        tokens[ranks] = (*above, token)
        total = expected[above][1] + ranked[token]
        expected[tokens[ranks]] = (ranked[token], total, 1)
      assert_equal_trees([tree], [expected])
