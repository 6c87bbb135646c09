"""A decode without the target has the counts of the decode with it, exactly."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import tiny
import tiny_drafters

import specdec
from specdec import arguments as arguments_lib
from specdec.models.lab.bench import replay
from specdec.tree import topology as topology_lib

_LIMIT = 32
_BRANCHING = 3
_ROWS = 3
_PROMPTS = tiny.prompts(_ROWS)
_EOS_IDS = range(0, tiny.VOCAB_SIZE, 8)
_TARGET = tiny.gpt2(num_layers=1)
_DRAFT = tiny.perturbed(_TARGET, 0.2)
# A greedy row between sampled ones.
_SAMPLING = dataclasses.replace(
  tiny.sampling(1.0, 0.0, 1.0), logit_bias={3: 4.0, 5: -float('inf'), 7: -3.0}
)


def _decode(target, drafter, **options):
  options = {'max_new_tokens': _LIMIT, 'sampling': _SAMPLING} | options
  return specdec.generate(
    target, tiny.row_keys(_ROWS), _PROMPTS, drafter=drafter, **options
  )


def _texts(generation):
  return [*map(list.__add__, _PROMPTS, generation.tokens)]


def test_stages_have_the_counts_and_the_ends_of_the_target():
  """They stop for cost; with other bytes there would be other rounds.

  All that a target has to do with it: a penalty changes its logits.
  """
  options = {'sampling': dataclasses.replace(_SAMPLING, repetition_penalty=1.3)}
  options['eos_ids'] = _EOS_IDS
  config = tiny_drafters.Settings(
    num_nodes=8, width=3, branching=2, rounds=3, capacity=24, cost_ratio=None
  )
  outer = tiny_drafters.model(_DRAFT, config)
  decode = functools.partial(_decode, **options)

  def drafter(texts, kind):
    table = tiny_drafters.table_of(texts, kind)
    inner = tiny_drafters.candidates(table, config=tiny_drafters.INNER)
    return specdec.staged(outer, inner)

  texts = _texts(decode(_TARGET, drafter(_PROMPTS, 'empty')))
  knowing = drafter(texts, 'perfect')
  real = decode(_TARGET, knowing)
  # Tokens, origins, reasons, and all statistics.
  assert decode(replay.oracle_target(_TARGET, _texts(real)), knowing) == real
  counts = real.stats.accepted_histogram
  assert sum(count > 0 for count in counts) > 1, 'nothing to tell apart'
  assert 'eos' in real.finish_reasons
  rounds = real.stats.stage_forwards['draft']
  assert 0 < rounds < 3 * real.stats.target_forwards


def _ranks(draft, texts, sampling=_SAMPLING):
  tokens = np.zeros((_ROWS, len(_PROMPTS[2]) + _LIMIT), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  params = arguments_lib.to_params(sampling, _ROWS, tiny.VOCAB_SIZE)
  given = jnp.asarray(tokens), tiny.row_keys(_ROWS), params
  return np.asarray(replay.next_token_ranks(draft, *given))


def test_ranks_are_those_of_the_drafter():
  """How often the k children of a tree of depth 1 contain the next token.

  One position is tried per forward, that after the token emitted last.
  """
  drafter = tiny_drafters.model(
    _DRAFT, tiny_drafters.Settings(topology=topology_lib.k_ary(_BRANCHING, 1))
  )
  real = _decode(_TARGET, drafter, eos_ids=_EOS_IDS)  # before their limits
  ranks, own = (_ranks(model, _texts(real)) for model in (_DRAFT, _TARGET))
  all_stood = []
  for row, origins in enumerate(real.origins):
    begin = len(_PROMPTS[row])
    # The target itself is always right.
    assert not own[row, begin - 1 : begin - 1 + len(origins)].any()
    # After a token of the target itself a new forward begins.
    tried = np.concatenate([[True], np.array(origins[:-1]) == 0])
    at = begin - 1 + np.flatnonzero(tried)
    stood = np.array(origins)[tried] > 0
    assert (ranks[row, at] < _BRANCHING).tolist() == stood.tolist()
    all_stood += stood.tolist()
  assert set(all_stood) == {False, True}
