"""A decode without the target has the counts of the decode with it, exactly."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings

from specdec import generate
from specdec import staged
from specdec.checks import check_sampling
from specdec.study.replay import next_token_ranks
from specdec.study.replay import oracle_target
from specdec.tree.topology import k_ary

_LIMIT = 32
_BRANCHING = 3
_ROWS = 3
_PROMPTS = tiny.prompts(_ROWS)
_TARGET = tiny.gpt2(num_layers=1)
_DRAFT = tiny.perturbed(_TARGET, 0.2)
# A greedy row between sampled ones.
_SAMPLING = dataclasses.replace(
  tiny.sampling(1.0, 0.0, 1.0),
  logit_bias={3: 4.0, 5: -float('inf'), 7: -3.0},
)


def _decode(target, drafter, **options):
  options = {'max_new_tokens': _LIMIT, 'sampling': _SAMPLING} | options
  return generate(
    target, tiny.row_keys(_ROWS), _PROMPTS, drafter=drafter, **options
  )


def _texts(generation):
  rows = zip(_PROMPTS, generation.tokens, strict=True)
  return [prompt + new for prompt, new in rows]


def _check_replay(real, drafter, **options):
  """Tokens, origins, reasons, and all statistics."""
  oracle = oracle_target(_TARGET.spec, _texts(real))
  assert _decode(oracle, drafter, **options) == real
  counts = real.stats['accepted_histogram']
  assert sum(count > 0 for count in counts) > 1, 'nothing to tell apart'


@functools.cache
def _of_depth_one():
  """The drafter, and a decode with it whose rows may end before the limit."""
  drafter = tiny_drafters.model(_DRAFT, Settings(topology=k_ary(_BRANCHING, 1)))
  eos_ids = range(0, tiny.VOCAB_SIZE, 8)
  return drafter, eos_ids, _decode(_TARGET, drafter, eos_ids=eos_ids)


def test_a_fixed_tree_has_the_counts_and_the_ends_of_the_target():
  drafter, eos_ids, real = _of_depth_one()
  assert 'eos' in real.finish_reasons
  _check_replay(real, drafter, eos_ids=eos_ids)


def test_stages_have_the_counts_of_the_target():
  """They stop for cost; with other bytes there would be other rounds.

  All that a target has to do with it: a penalty changes its logits.
  """
  options = {'sampling': dataclasses.replace(_SAMPLING, repetition_penalty=1.3)}
  config = Settings(
    num_nodes=8, width=3, branching=2, rounds=3, capacity=24, cost_ratio=None
  )
  outer = tiny_drafters.model(_DRAFT, config)

  def drafter(texts, kind):
    table = tiny_drafters.table_of(texts, kind)
    inner = tiny_drafters.candidates(table, config=tiny_drafters.INNER)
    return staged(outer, inner)

  real = _decode(_TARGET, drafter(_PROMPTS, 'empty'), **options)
  knowing = drafter(_texts(real), 'perfect')
  real = _decode(_TARGET, knowing, **options)
  _check_replay(real, knowing, **options)
  rounds = real.stats['stage_forwards']['draft']
  assert 0 < rounds < 3 * real.stats['target_forwards']


def test_other_texts_share_the_program():
  spec = _TARGET.spec
  one = oracle_target(spec, [[1, 2, 3]])
  other = oracle_target(spec, [[4], [5, 6]])
  assert one.spec is other.spec
  assert one.spec.weight_bytes == spec.weight_bytes


def test_a_text_beyond_the_context_is_refused():
  spec = _TARGET.spec
  oracle_target(spec, [[0] * spec.max_positions])
  with pytest.raises(ValueError, match='exceeds the context'):
    oracle_target(spec, [[0] * (spec.max_positions + 1)])


def _ranks(draft, texts):
  tokens = np.zeros((_ROWS, len(_PROMPTS[2]) + _LIMIT), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  sampling = check_sampling(_SAMPLING, _ROWS, tiny.VOCAB_SIZE)
  return np.asarray(
    next_token_ranks(draft, jnp.asarray(tokens), tiny.row_keys(_ROWS), sampling)
  )


def test_ranks_are_those_of_the_drafter():
  """How often the k children of a tree of depth 1 contain the next token.

  One position is tried per forward, that after the token emitted last.
  """
  _, _, real = _of_depth_one()
  ranks = _ranks(_DRAFT, _texts(real))
  all_stood = []
  for row, origins in enumerate(real.origins):
    begin = len(_PROMPTS[row])
    # After a token of the target itself a new forward begins.
    tried = np.concatenate([[True], np.array(origins[:-1]) == 0])
    at = begin - 1 + np.flatnonzero(tried)
    stood = np.array(origins)[tried] > 0
    assert (ranks[row, at] < _BRANCHING).tolist() == stood.tolist()
    all_stood += stood.tolist()
  assert set(all_stood) == {False, True}


def test_the_target_itself_is_always_right():
  texts = _texts(_of_depth_one()[2])
  ranks = _ranks(_TARGET, texts)
  for row, prompt in enumerate(_PROMPTS):
    assert not ranks[row, len(prompt) - 1 : len(texts[row]) - 1].any()
