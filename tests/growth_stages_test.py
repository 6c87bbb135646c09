"""Growth of trees with stages inside one another."""

import dataclasses

import jax
from list_growth import assert_equal_trees
from list_growth import chain_config
from list_growth import chain_table
from list_growth import model_stage
from list_growth import random_step
from list_growth import random_table
from list_growth import run
from list_growth import SMALL
from list_growth import TINY
from list_growth import TREE
from list_growth import VOCAB_SIZE
import numpy as np
import tiny_drafters
from tiny_drafters import candidates
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import generate
from specdec import Sampling
from specdec import staged


def test_a_perfect_inner_drafter_multiplies_the_depth():
  """Three levels guessed and one of its own: four per forward of the draft."""
  table = chain_table(0.9)
  config = chain_config(width=4, rounds=2, capacity=24, num_nodes=20)
  step = random_step(0, 11, 0.0)
  alone, forwards = run(model_stage(table, config), step)
  assert forwards == [2]
  assert [max(map(len, tree)) for tree in alone] == [2] * 3
  inner = model_stage(table, chain_config(width=2, rounds=3), 'small')
  drafter = staged(model_stage(table, config), inner)
  assert drafter.max_depth == 11
  both, forwards = run(drafter, step)
  # Before the first forward and after each of the two.
  assert forwards == [2, 9]
  # What was guessed after the last forward is in the tree as well.
  for tree, text in zip(both, step.texts, strict=True):
    path = tuple((text[-1] + 1 + depth) % VOCAB_SIZE for depth in range(11))
    edge, origins = np.log(0.9), [0, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2]
    expected = {
      path[:depth]: (edge * (depth > 0), edge * depth, origins[depth])
      for depth in range(12)
    }
    assert_equal_trees([tree], [expected])


def test_with_a_perfect_inner_drafter_the_tree_is_at_least_as_good():
  """In a third of the forwards."""
  roomy = dataclasses.replace(TREE, capacity=120)
  once = dataclasses.replace(roomy, rounds=1)
  for temperature in (0.0, 1.0):
    for seed in range(3):
      table = random_table(seed)
      step = random_step(seed, 7, temperature)
      alone, forwards = run(model_stage(table, roomy), step)
      assert forwards == [3]
      drafter = staged(
        model_stage(table, once), model_stage(table, roomy, 'small')
      )
      both, forwards = run(drafter, step)
      assert forwards == [1, 6]
      for one, other in zip(alone, both, strict=True):
        for path, (_, log_prob, _) in one.items():
          np.testing.assert_allclose(other[path][1], log_prob, atol=1e-4)


def test_an_inner_drafter_without_guesses_changes_nothing():
  nothing = candidates(tiny_drafters.empty(VOCAB_SIZE, 3), config=SMALL)
  drafter = staged(model_stage(random_table(4)), nothing)
  for temperature in (0.0, 1.0):
    step = random_step(4, drafter.max_depth, temperature)
    both, forwards = run(drafter, step)
    alone, of_one = run(model_stage(random_table(4)), step)
    assert_equal_trees(both, alone)
    assert forwards[0] == of_one[0] == 3


def test_what_the_draft_scored_has_the_numbers_of_the_draft():
  """Though a stage inside was sure of something else."""
  table, wrong = chain_table(0.9), np.roll(chain_table(0.99), 2, axis=1)
  drafter = staged(
    model_stage(table, dataclasses.replace(TREE, capacity=120)),
    candidates(tiny_drafters.exact(wrong), config=TINY),
  )
  step = random_step(1, drafter.max_depth, 0.0)
  trees, _ = run(drafter, step)
  for tree, text in zip(trees, step.texts, strict=True):
    right = (text[-1] + 1) % VOCAB_SIZE
    for path in [path for path in tree if len(path) == 1]:
      p = 0.9 if path == (right,) else 0.1 / (VOCAB_SIZE - 1)
      np.testing.assert_allclose(tree[path][1], np.log(p), rtol=1e-4)
    assert tree[(text[-1] + 3) % VOCAB_SIZE,][2] == 2
    assert tree[right,][2] == 1


def test_a_perfect_inner_drafter_saves_forwards_of_a_decode():
  """By the factor that it is designed to: the levels guessed, and one."""
  rng = np.random.default_rng(0)
  target = random_table(0)
  draft = target + 0.1 * rng.normal(size=target.shape).astype(np.float32)
  config = Settings(
    num_nodes=16, width=6, branching=3, rounds=6, capacity=64, cost_ratio=0
  )
  few = dataclasses.replace(config, rounds=2)
  inner = candidates(
    tiny_drafters.exact(draft),
    config=dataclasses.replace(config, width=8, rounds=2),
  )
  drafters = {
    'deep': model_stage(draft, config),
    'staged': staged(model_stage(draft, few), inner),
  }
  stats = {
    name: generate(
      table_model(target, max_positions=200),
      jax.random.key(0),
      [[0], [1, 2], [0], [1, 2]],
      max_new_tokens=60,
      drafter=drafter,
      sampling=Sampling(temperature=[0.0, 0.0, 1.0, 1.0]),
    ).stats
    for name, drafter in drafters.items()
  }
  efficiency = {name: one['block_efficiency'] for name, one in stats.items()}
  per_token = {
    name: one['stage_forwards']['draft'] / one['new_tokens']
    for name, one in stats.items()
  }
  # As deep a tree, in a third of the forwards.
  assert efficiency['staged'] >= 0.95 * efficiency['deep']
  assert per_token['staged'] < 0.4 * per_token['deep']
