"""Growth of trees, against a best-first search on dicts in plain Python."""

import dataclasses

import jax
import list_growth as growth
from list_growth import assert_equal_trees
from list_growth import BATCH_SIZE
from list_growth import run
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import candidates
from tiny_drafters import Settings
from tiny_drafters import with_settings

from specdec import staged
from specdec.draft.stages import commit_stages
from specdec.tree.topology import chain
from specdec.tree.topology import from_paths
from specdec.tree.topology import k_ary

_WIDE = {'branching': growth.VOCAB_SIZE + 5, 'width': 60, 'capacity': 50}


def _by_name(name, tables):
  """A drafter of tables and its reference; the outermost stage is named first.

  Each stage is a model or a table, with its own of `tables`.
  """
  drafter = slow = None
  configs = (growth.TREE, growth.SMALL, growth.TINY)
  kinds = name.split(', ')
  for place in reversed(range(len(kinds))):
    table, config = tables[place], configs[place]
    if kinds[place] == 'model':
      stage = growth.model_stage(table, config, f'model {place}')
      slow = growth.slow_model(table, config, slow)
    else:
      stage = candidates(tiny_drafters.exact(table), config=config)
      slow = growth.slow_proposer(table, config)
    drafter = staged(stage, drafter) if drafter else stage
  return drafter, slow


@pytest.mark.parametrize(
  ('name', 'config'),
  [
    ('model', {}),
    ('table', {}),
    ('model, model', {}),
    ('model, table', {}),
    ('model, model, table', {}),
    # Full after a round or two: what is guessed later is dropped.
    ('model, table', {'num_nodes': 6, 'capacity': 11}),
    # Reached before the rounds are over.
    ('model, table', {'max_depth': 3, 'branching': 2}),
    # One node wide, which in a forward is two.
    ('model', {'width': 1, 'branching': 2, 'rounds': 5, 'calibration': 2.5}),
    # More than there are.
    ('table', {'calibration': 0.5} | _WIDE),
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
      step = growth.random_step(seed, drafter.max_depth, temperature, active)
      trees, forwards = run(drafter, step)
      slow_trees, slow_forwards = growth.run_slowly(slow, step)
      # Rows that are done grow as far as the others take them.
      assert_equal_trees(trees, slow_trees)
      assert forwards == slow_forwards
      sizes |= set(map(len, trees))
  assert (max(sizes) == 11) if config.get('capacity') == 11 else max(sizes) > 10


def test_an_inner_drafter_without_guesses_changes_nothing():
  nothing = candidates(
    tiny_drafters.empty(growth.VOCAB_SIZE, 3), config=growth.SMALL
  )
  drafter = staged(growth.model_stage(growth.random_table(4)), nothing)
  for temperature in (0.0, 1.0):
    step = growth.random_step(4, drafter.max_depth, temperature)
    both, forwards = run(drafter, step)
    alone, of_one = run(growth.model_stage(growth.random_table(4)), step)
    assert_equal_trees(both, alone)
    assert forwards[0] == of_one[0] == 3


# GPT-2, whose logits depend on position and on all of the text.


@jax.jit
def _last_logits(model, tokens, length):
  return model.logits(tokens)[0, length - 1]


def _gpt2_logits(model):
  def logits(tokens):
    padded = np.zeros((1, growth.TEXT_SLOTS), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_last_logits(model, padded, len(tokens)), np.float64)

  return logits


def test_gpt2_sees_the_text_and_the_path_and_nothing_else():
  outer, inner = tiny.gpt2(), tiny.draft('similar')
  drafter = staged(
    tiny_drafters.model(outer, growth.TREE),
    tiny_drafters.model(inner, growth.TINY, 'small'),
  )
  for temperature in (0.0, 1.0):
    slow = growth.SlowStage(
      _gpt2_logits(outer),
      growth.TREE,
      growth.SlowStage(_gpt2_logits(inner), growth.TINY),
    )
    step = growth.random_step(
      1, drafter.max_depth, temperature, vocab_size=tiny.VOCAB_SIZE
    )
    trees, forwards = run(drafter, step)
    slow_trees, slow_forwards = growth.run_slowly(slow, step)
    assert_equal_trees(trees, slow_trees)
    assert forwards == slow_forwards == [3, 4]
    assert max(map(len, trees)) > 20


def test_growth_after_a_step_is_growth_after_a_prefill():
  """Also where the draft has yet to read what it did not guess itself."""
  rng = np.random.default_rng(2)
  drafter = tiny_drafters.model(
    tiny.draft('similar'), Settings(topology=k_ary(2, 2))
  )
  tokens = np.zeros((BATCH_SIZE, growth.TEXT_SLOTS), np.int32)
  length = np.array([4, 1, 9], np.int32)
  for row, size in enumerate(length):
    tokens[row, :size] = rng.integers(tiny.VOCAB_SIZE, size=size)
  noise = growth.random_step(2, 2, 1.0, vocab_size=tiny.VOCAB_SIZE).noise
  rest = (np.ones(BATCH_SIZE, bool), noise, tiny.sampling_params(1.0, 0.0, 1.0))
  commit, grow_again = jax.jit(commit_stages), jax.jit(growth.grown_from)
  stages, tree = growth.grown(drafter, tokens, length, *rest)
  for leaf in (3, 4, 5, 6):
    # To a leaf, which no draft has scored, and a bonus token.
    path = np.array([[0, (leaf - 1) // 2, leaf]] * BATCH_SIZE, np.int32)
    stages = commit(drafter, stages, path, np.full(BATCH_SIZE, 2, np.int32))
    for row in range(BATCH_SIZE):
      new = [*np.asarray(tree.token[row])[path[row, 1:]], rng.integers(9)]
      tokens[row, length[row] : length[row] + 3] = new
    length = length + 3
    stages, tree = grow_again(drafter, stages, tokens, length, *rest)
    _, expected = growth.grown(drafter, tokens, length, *rest)
    assert_equal_trees(growth.dicts_of(tree), growth.dicts_of(expected))


# Fixed shapes.


@pytest.mark.parametrize(
  'topology',
  [
    chain(3),
    k_ary(3, 2),
    from_paths([(1,), (0,), (3,), (1, 2), (1, 0), (1, 2, 4), (3, 0)]),
  ],
)
@pytest.mark.parametrize('is_model', [True, False])
def test_fixed_shapes_are_filled_by_rank(topology, is_model):
  config = Settings(topology=topology, calibration=1.5)
  table = growth.random_table(5)
  if is_model:
    drafter, slow = (
      growth.model_stage(table, config),
      growth.slow_model(table, config),
    )
  else:
    drafter = candidates(tiny_drafters.exact(table), config=config)
    slow = growth.slow_proposer(table, config)
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
