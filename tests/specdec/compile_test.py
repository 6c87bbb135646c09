"""Programs that are compiled, and how often."""

import collections
import dataclasses

import jax
import numpy as np
import tiny
import tiny_drafters

import specdec
from specdec import loop
from specdec.models.nn import table_model


def _table(seed):
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
  target = _counting(_table(0), counts, 'target')
  draft = _counting(_table(1), counts, 'draft')

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
  target = target.replace(params=_table(7).params)
  draft = draft.replace(params=_table(8).params)
  run([[1], [2]], 10, 0, 1.0, 0.9)
  np.testing.assert_array_equal(programs(), before + 1)
  assert sum(counts.values()) == 5
