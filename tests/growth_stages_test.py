"""Growth of trees with stages inside one another."""

import dataclasses

import jax
from list_growth import assert_equal_trees
from list_growth import chain_config
from list_growth import model_stage
from list_growth import random_step
from list_growth import random_table
from list_growth import run
from list_growth import run_slowly
from list_growth import slow_model
from list_growth import SMALL
from list_growth import TINY
from list_growth import TREE
from list_growth import VOCAB_SIZE
from list_trees import up
import numpy as np
import tiny_drafters
from tiny_drafters import candidates
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import generate
from specdec import Sampling
from specdec import staged
from specdec.tree.tree import ROOT


def _chain_table(p):
  """After every token there is one that follows with probability p."""
  rest = np.full((VOCAB_SIZE, VOCAB_SIZE), (1 - p) / (VOCAB_SIZE - 1))
  rows = np.arange(VOCAB_SIZE)
  rest[rows, (rows + 1) % VOCAB_SIZE] = p
  return np.log(rest).astype(np.float32)


def _depth(nodes):
  return max(node.depth for node in nodes)


def test_a_perfect_inner_drafter_multiplies_the_depth():
  """Three levels guessed and one of its own: four per forward of the draft."""
  table = _chain_table(0.9)
  config = chain_config(width=4, rounds=2, capacity=24, num_nodes=20)
  alone, forwards = run(model_stage(table, config), random_step(0, 11, 0.0))
  assert forwards == [2]
  assert {_depth(nodes) for nodes in alone} == {2}
  inner = model_stage(table, chain_config(width=2, rounds=3), 'small')
  drafter = staged(model_stage(table, config), inner)
  assert drafter.max_depth == 11
  both, forwards = run(drafter, random_step(0, 11, 0.0))
  # Before the first forward and after each of the two.
  assert forwards == [2, 9]
  assert {_depth(nodes) for nodes in both} == {11}
  # What was guessed after the last forward is in the tree as well.
  for nodes in both:
    np.testing.assert_allclose(
      [node.log_prob for node in nodes],
      [node.depth * np.log(0.9) for node in nodes],
      rtol=1e-4,
    )
    origins = {node.depth: node.origin for node in nodes[1:]}
    assert origins == {depth: 2 - (depth in (4, 8)) for depth in range(1, 12)}


def test_with_a_perfect_inner_drafter_the_tree_is_at_least_as_good():
  """In a third of the forwards."""
  path = lambda nodes, index: tuple(
    nodes[one].token for one in reversed(up(nodes, index))
  )
  paths = lambda nodes: {
    path(nodes, index): node.log_prob for index, node in enumerate(nodes)
  }
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
        found = paths(other)
        for tokens, log_prob in paths(one).items():
          np.testing.assert_allclose(found[tokens], log_prob, atol=1e-4)


def test_an_inner_drafter_without_guesses_changes_nothing():
  nothing = candidates(tiny_drafters.empty(VOCAB_SIZE, 3), config=SMALL)
  table = random_table(4)
  for temperature in (0.0, 1.0):
    drafter = staged(model_stage(table), nothing)
    step = random_step(4, drafter.max_depth, temperature)
    both, forwards = run(drafter, step)
    # The stage alone cannot reach as deep, but here it need not.
    alone = run_slowly(slow_model(table), step)
    assert_equal_trees(both, alone[0])
    assert forwards[0] == alone[1][0] == 3


def test_what_the_draft_scored_has_the_numbers_of_the_draft():
  """Though a stage inside was sure of something else."""
  table, wrong = _chain_table(0.9), np.roll(_chain_table(0.99), 2, axis=1)
  roomy = dataclasses.replace(TREE, capacity=120)
  drafter = staged(
    model_stage(table, roomy),
    candidates(tiny_drafters.exact(wrong), config=TINY),
  )
  trees, _ = run(drafter, random_step(1, drafter.max_depth, 0.0))
  for nodes in trees:
    first = {node.token: node for node in nodes if node.parent == ROOT}
    right = (nodes[ROOT].token + 1) % VOCAB_SIZE
    for token, node in first.items():
      p = 0.9 if token == right else 0.1 / (VOCAB_SIZE - 1)
      np.testing.assert_allclose(node.log_prob, np.log(p), rtol=1e-4)
    assert first[(nodes[ROOT].token + 3) % VOCAB_SIZE].origin == 2
    assert first[right].origin == 1


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
    'shallow': model_stage(draft, few),
    'staged': staged(model_stage(draft, few), inner),
  }
  for temperature in (0.0, 1.0):
    stats = {
      name: generate(
        table_model(target, max_positions=200),
        jax.random.key(0),
        [[0], [1, 2]],
        max_new_tokens=60,
        drafter=drafter,
        sampling=Sampling(temperature=temperature),
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
    assert efficiency['staged'] > 1.3 * efficiency['shallow']
    assert per_token['staged'] < 0.4 * per_token['deep']
    assert per_token['staged'] < 0.8 * per_token['shallow']
