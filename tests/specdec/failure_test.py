"""Models that break: the row ends with an error, and no other row changes."""

import functools

import jax
import numpy as np
import pytest
import tiny
import tiny_drafters

from models.nn import table_model
import specdec

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
    *(target, jax.random.key(0), _PROMPTS),
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
  found = set()
  for number, kind in enumerate(_BROKEN):
    for token in range(number % 3, VOCAB_SIZE, 3):
      table = _with_broken(_table(), kind, token)
      ends = []
      for prompt, new in zip(_PROMPTS, _healthy(), strict=True):
        scored = [prompt[-1], *new[:-1]]
        ends.append(scored.index(token) if token in scored else None)
      found |= {*ends}
      likely = _table() + 0.4 * _table(1)
      likely[:, token] += 3
      # The target as it was; one that says the token often; a broken one.
      for draft in (_table(), likely, table):
        drafter = _drafter(name, _model(draft))
        _assert_ends(_generate(_model(table), drafter), ends)
  assert found >= {None, *range(6)}


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


# With a cache, a rejected node could spoil others.


def _gpt2_run(target, prompts, draft=None):
  return specdec.generate(
    *(target, tiny.row_keys(2), prompts),
    max_new_tokens=40,
    sampling=specdec.Sampling(temperature=[0.0, 1.0]),
    drafter=specdec.PLAIN if draft is None else _drafter('tree', draft),
  )


def _with_broken_token(model, token, value=np.nan):
  """Its embedding is not finite, nor are the logits after it."""
  params = jax.tree.map(lambda leaf: leaf, model.params)
  embedding = params['gpt2']['wte']['embedding']
  params['gpt2']['wte']['embedding'] = embedding.at[token].set(value)
  return model.replace(params=params)


def _never_says(model, token):
  bias = model.params['bias'].at[token].set(-1e6)
  return model.replace(params=model.params | {'bias': bias})


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize('what', ['a guess', 'padding', 'a row'])
def test_caches_of_other_texts_are_not_spoilt(what, value):
  """By what no plain text has, or only one; a row has its own beginning."""
  prompts, target = tiny.prompts(2), tiny.gpt2(num_layers=1)
  token, drafts, end = tiny.TABOO, [tiny.draft('similar', num_layers=1)], None
  if what == 'padding':  # of prompts, with token 0
    prompts, token, target = [[5, 9, 2, 4, 6], [7]], 0, _never_says(target, 0)
  healthy = _gpt2_run(target, prompts).tokens
  if what == 'a row':
    token = next(new for new in healthy[0][6:] if new not in healthy[1])
    end = healthy[0].index(token) + 1
  if what == 'a guess':  # and often one
    drafts.append(tiny.draft('hopeless', num_layers=1))
  broken = _with_broken_token(target, token, value)
  # Drafts that are right where the others are wrong.
  drafts += [_with_broken_token(draft, token, value) for draft in drafts]
  for draft in (None, *drafts):
    generation = _gpt2_run(broken, prompts, draft)
    assert generation.tokens == [healthy[0][:end], healthy[1]]
    assert generation.finish_reasons == ['error' if end else 'length', 'length']
    assert end is None or f'(new token {end})' in generation.errors[0]
