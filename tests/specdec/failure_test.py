"""Models that break: the row ends with an error, and no other row changes."""

import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec.models.nn import table_model

VOCAB_SIZE = 16
LIMIT = 20

_PROMPTS = [[1, 2], [3], [4, 5, 6, 7], [2, 2]]
_DRAFTERS = ('plain', 'chain', 'staged')


_table = functools.partial(tiny.table, VOCAB_SIZE)
_model = functools.partial(table_model.table_model, max_positions=64)


def _drafter(name, model):
  return tiny_drafters.simple(name, model, tiny_drafters.exact(_table()))


def _generate(target, drafter=specdec.PLAIN):
  """All options, so that broken logits pass through all filters."""
  options = {'logit_bias': {3: -np.inf}, 'repetition_penalty': 1.2}
  options |= {'top_k': 6, 'top_p': 0.9, 'min_p': 0.01}
  return specdec.generate(
    target,
    jax.random.key(0),
    _PROMPTS,
    max_new_tokens=LIMIT,
    sampling=specdec.Sampling(temperature=[0.0, 1.0, 0.7, 2.0], **options),
    drafter=drafter,
  )


@functools.cache
def _healthy():
  return _generate(_model(_table())).tokens


# Added to the logits of one forward.
_BROKEN = {
  'nan': np.full(VOCAB_SIZE, np.nan),
  'one nan': np.where(np.arange(VOCAB_SIZE) == 9, np.nan, 0.0),
  'inf': np.where(np.arange(VOCAB_SIZE) == 9, np.inf, 0.0),
  # In a token that is banned: the model is broken all the same.
  'inf in a banned token': np.where(np.arange(VOCAB_SIZE) == 3, np.inf, 0.0),
  'all -inf': np.full(VOCAB_SIZE, -np.inf),
}


def _with_broken(table, kind, tokens):
  """The table, broken after some tokens."""
  table = table.copy()
  table[tokens] += _BROKEN[kind]
  return table


def _assert_ends(generation, ends):
  """Each row has `ends` new tokens of the healthy text, or all of them."""
  for row, (prompt, end) in enumerate(zip(_PROMPTS, ends, strict=True)):
    assert generation.tokens[row] == _healthy()[row][:end]
    reason = 'length' if end is None else 'error'
    assert generation.finish_reasons[row] == reason
    error = end is not None and (
      f'row {row}: the target gave logits that are not finite for position'
      f' {len(prompt) + end} (new token {end})'
    )
    assert generation.errors[row] == (error or None)
  histogram = np.array(generation.stats.accepted_histogram)
  total = sum(map(len, generation.tokens))
  assert histogram @ np.arange(1, len(histogram) + 1) == total
  assert generation.stats.new_tokens == total


@pytest.mark.parametrize('name', _DRAFTERS)
def test_a_row_ends_with_the_token_that_breaks_its_target(name):
  """With each token that any row has; the others go on to their end."""
  all_ends = set()
  for number, kind in enumerate(_BROKEN):
    for token in range(number, VOCAB_SIZE, len(_BROKEN)):
      table = _with_broken(_table(), kind, token)
      ends = []
      for prompt, new in zip(_PROMPTS, _healthy(), strict=True):
        scored = [prompt[-1], *new[:-1]]
        ends.append(scored.index(token) if token in scored else None)
      all_ends |= {*ends}
      likely = _table() + 0.4 * _table(1)
      likely[:, token] += 3
      # The target as it was; one that says the token often; a broken one.
      for draft in (_table(), likely, table):
        drafter = _drafter(name, _model(draft))
        _assert_ends(_generate(_model(table), drafter), ends)
  assert all_ends >= {None, *range(6)}


@pytest.mark.parametrize('name', _DRAFTERS[1:])
def test_a_draft_may_break_as_it_likes(name):
  """Always, or after some tokens."""
  for kind in _BROKEN:
    efficiency = []
    for tokens in (slice(None, None, 3), slice(None)):
      draft = _model(_with_broken(_table(), kind, tokens))
      generation = _generate(_model(_table()), _drafter(name, draft))
      assert generation.tokens == _healthy(), kind
      assert generation.finish_reasons == ['length'] * 4
      efficiency.append(generation.stats.block_efficiency)
    # No token is the draft's; the other stages still draft.
    assert generation.stats.origins['draft'] == 0
    if name == 'staged':
      assert efficiency[1] > 1.2
    else:
      assert generation.stats.nodes_per_forward == 1
      assert 'banned' in kind or 4 > efficiency[0] > 1.1
