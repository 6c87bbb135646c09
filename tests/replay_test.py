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
from specdec import PLAIN
from specdec.checks import check_sampling
from specdec.study.replay import next_token_ranks
from specdec.study.replay import oracle_target
from specdec.tree.topology import k_ary

_LIMIT = 40


def _decode(target, batch_size, sampling, drafter=PLAIN, **options):
  return generate(
    target,
    tiny.row_keys(batch_size),
    tiny.prompts(batch_size),
    max_new_tokens=_LIMIT,
    sampling=sampling,
    drafter=drafter,
    **options,
  )


@functools.cache
def _texts(*temperatures):
  batch_size = len(temperatures)
  sampling = tiny.sampling(*temperatures)
  new = _decode(tiny.gpt2(), batch_size, sampling).tokens
  prompts = tiny.prompts(batch_size)
  return [prompt + row for prompt, row in zip(prompts, new, strict=True)]


def _compare(batch_size, sampling, texts, drafter, **options):
  target = tiny.gpt2()
  real = _decode(target, batch_size, sampling, drafter, **options)
  replayed = _decode(
    oracle_target(target.spec, texts), batch_size, sampling, drafter, **options
  )
  assert replayed == real  # tokens, origins, reasons, and all statistics
  return real


_SHAPES = ('chain of 4', 'ragged tree', 'tree', 'model, table')
_RAGGED = (1.0, 0.0, 1.0)  # a batch of sampled rows and a greedy one


@pytest.mark.parametrize(
  ('shape', 'temperatures'),
  [
    *((shape, _RAGGED) for shape in _SHAPES),
    ('model, table', (0.0,)),
    *(
      pytest.param(shape, temperatures, marks=pytest.mark.long)
      for shape in _SHAPES
      for temperatures in ((0.0,), (1.0,))
    ),
  ],
)
def test_counts_are_those_of_the_target(shape, temperatures):
  texts = _texts(*temperatures)
  drafter = tiny_drafters.make(shape, 'similar', 'perfect', texts)
  real = _compare(len(texts), tiny.sampling(*temperatures), texts, drafter)
  counts = real.stats['accepted_histogram']
  assert sum(count > 0 for count in counts) > 1, 'nothing to tell apart'


def test_the_stop_rule_sees_the_bytes_of_the_target():
  """It stops for cost; with other bytes there would be other rounds."""
  texts = _texts(*_RAGGED)
  drafter = tiny_drafters.make('tree', 'similar', 'perfect', texts)
  drafter = tiny_drafters.with_settings(
    drafter,
    Settings(
      num_nodes=12, width=4, branching=3, rounds=3, capacity=48, cost_ratio=None
    ),
  )
  real = _compare(3, tiny.sampling(*_RAGGED), texts, drafter)
  rounds = real.stats['stage_forwards']['draft']
  assert 0 < rounds < 3 * real.stats['target_forwards']


def test_eos_bias_and_penalty_end_the_same_way():
  sampling = dataclasses.replace(
    tiny.sampling(*_RAGGED),
    logit_bias={3: 4.0, 5: -float('inf'), 7: -3.0},
    repetition_penalty=1.3,
  )
  target = tiny.gpt2()
  plain = _decode(target, 3, sampling)
  eos = plain.tokens[0][9]
  new = _decode(target, 3, sampling, eos_ids=[eos]).tokens
  prompts = tiny.prompts(3)
  texts = [prompt + row for prompt, row in zip(prompts, new, strict=True)]
  drafter = tiny_drafters.make('chain of 4', 'similar', 'perfect', texts)
  real = _compare(3, sampling, texts, drafter, eos_ids=[eos])
  assert real.finish_reasons[0] == 'eos'


def test_other_texts_share_the_program():
  spec = tiny.gpt2().spec
  one = oracle_target(spec, [[1, 2, 3]])
  other = oracle_target(spec, [[4], [5, 6]])
  assert one.spec is other.spec
  assert one.spec.weight_bytes == spec.weight_bytes


def test_a_text_beyond_the_context_is_refused():
  spec = tiny.gpt2().spec
  long = [0] * (spec.max_positions + 1)
  with pytest.raises(ValueError, match='exceeds the context'):
    oracle_target(spec, [long])


def _padded(texts):
  tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  return jnp.asarray(tokens)


def test_ranks_are_those_of_the_drafter():
  """How often the k children of a tree of depth 1 contain the next token.

  One position is tried per forward, that after the token emitted last.
  """
  texts = _texts(*_RAGGED)
  sampling = tiny.sampling(*_RAGGED)
  draft = tiny.draft('similar')
  ranks = np.asarray(
    next_token_ranks(
      draft,
      _padded(texts),
      tiny.row_keys(3),
      check_sampling(sampling, 3, tiny.VOCAB_SIZE),
    )
  )
  for branching in (1, 3):
    drafter = tiny_drafters.model(draft, Settings(topology=k_ary(branching, 1)))
    real = _decode(tiny.gpt2(), 3, sampling, drafter)
    for row, origins in enumerate(real.origins):
      begin = len(tiny.prompts(3)[row])
      # After a token of the target itself a new forward begins.
      tried = np.concatenate([[True], np.array(origins[:-1]) == 0])
      at = begin - 1 + np.flatnonzero(tried)
      stood = np.array(origins)[tried] > 0
      assert (ranks[row, at] < branching).tolist() == stood.tolist()


def test_the_target_itself_is_always_right():
  texts = _texts(*_RAGGED)
  sampling = check_sampling(tiny.sampling(*_RAGGED), 3, tiny.VOCAB_SIZE)
  ranks = np.asarray(
    next_token_ranks(tiny.gpt2(), _padded(texts), tiny.row_keys(3), sampling)
  )
  for row, prompt in enumerate(tiny.prompts(3)):
    assert not ranks[row, len(prompt) - 1 : len(texts[row]) - 1].any()
