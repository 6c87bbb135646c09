"""Models that break: the row ends with an error, and no other row changes.

A row whose target gives logits that are not finite ends with an error. Whatever
a draft gives, the text is that of plain decoding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters
from tiny_drafters import Settings
from tiny_drafters import with_settings

from models.nn.table_model import table_model
from specdec import generate
from specdec import PLAIN
from specdec import Sampling
from specdec import staged
from specdec.tree.topology import chain

VOCAB_SIZE = 16
MAX_POSITIONS = 64
LIMIT = 20

_PROMPTS = [[1, 2], [3], [4, 5, 6, 7], [2, 2]]
_DRAFTERS = ('plain', 'chain', 'staged')


_table = functools.partial(tiny.table, VOCAB_SIZE)


@functools.cache
def _definition():
  base = table_model(_table(0), max_positions=MAX_POSITIONS).spec

  def apply(params, tokens, positions, mask, cache):
    logits, cache = base.apply(params, tokens, positions, mask, cache)
    # Padding may lie beyond the context.
    return logits + params['extra'][positions % MAX_POSITIONS], cache

  return dataclasses.replace(base, apply=apply)


def _model(table, extra=None):
  """A table, with an addition to its logits at each position.

  Args:
    table: `[V, V]`.
    extra: `[positions, V]`.
  """
  if extra is None:
    extra = np.zeros((MAX_POSITIONS, VOCAB_SIZE))
  return table_model(table, max_positions=MAX_POSITIONS).replace(
    params={'logits': jnp.asarray(table), 'extra': jnp.asarray(extra, 'f')},
    spec=_definition(),
  )


def _drafter(name, model):
  config = Settings(
    num_nodes=8, width=3, branching=2, rounds=2, capacity=20, cost_ratio=0
  )
  draft = tiny_drafters.model(model, config)
  bigram = tiny_drafters.exact(_table(0))
  inner = tiny_drafters.candidates(bigram, config=tiny_drafters.INNER)
  return {
    'plain': PLAIN,
    'chain': with_settings(draft, Settings(topology=chain(3))),
    'tree': draft,
    'staged': staged(draft, inner),
  }[name]


def _generate(target, drafter=PLAIN):
  """All options, so that broken logits pass through all filters."""
  bias = np.zeros(VOCAB_SIZE, np.float32)
  bias[3] = -np.inf
  return generate(
    target,
    jax.random.key(0),
    _PROMPTS,
    max_new_tokens=LIMIT,
    sampling=Sampling(
      temperature=[0.0, 1.0, 0.7, 2.0],
      logit_bias=bias,
      repetition_penalty=1.2,
      top_k=6,
      top_p=0.9,
      min_p=0.01,
    ),
    drafter=drafter,
  )


@functools.cache
def _healthy():
  return _generate(_model(_table(0)))


_SIMILAR = _table(0) + 0.4 * _table(1)

# Added to the logits of one forward.
_BROKEN = {
  'nan': np.full(VOCAB_SIZE, np.nan),
  'one nan': np.where(np.arange(VOCAB_SIZE) == 9, np.nan, 0.0),
  'inf': np.where(np.arange(VOCAB_SIZE) == 9, np.inf, 0.0),
  # In a token that is banned: the model is broken all the same.
  'inf in a banned token': np.where(np.arange(VOCAB_SIZE) == 3, np.inf, 0.0),
  'all -inf': np.full(VOCAB_SIZE, -np.inf),
}


def _assert_ends(generation, ends):
  """Each row has `ends` new tokens of the healthy text, or all of them."""
  for row, prompt in enumerate(_PROMPTS):
    end = ends[row]
    assert generation.tokens[row] == _healthy().tokens[row][:end]
    if end is None:
      assert generation.finish_reasons[row] == 'length'
      assert generation.errors[row] is None
    else:
      assert generation.finish_reasons[row] == 'error'
      assert generation.errors[row] == (
        f'row {row}: the target gave logits that are not finite for position'
        f' {len(prompt) + end} (new token {end})'
      )
  histogram = np.array(generation.stats['accepted_histogram'])
  total = sum(map(len, generation.tokens))
  assert histogram @ np.arange(1, len(histogram) + 1) == total
  assert generation.stats['new_tokens'] == total


@pytest.mark.parametrize('name', _DRAFTERS)
def test_a_row_ends_where_its_target_breaks(name):
  """At every position, from the first new token to behind the last."""
  for number, kind in enumerate(_BROKEN):
    for position in (0, 3, *range(5 + number, 26, 10)):
      extra = np.zeros((MAX_POSITIONS, VOCAB_SIZE), np.float32)
      extra[position] = _BROKEN[kind]
      # Logits at a position are those of the token behind it.
      numbers = [position + 1 - len(prompt) for prompt in _PROMPTS]
      ends = [end if 0 <= end < LIMIT else None for end in numbers]
      drafts = [_table(0)] if name == 'plain' else [_table(0), _SIMILAR]
      for draft in drafts:
        drafter = _drafter(name, _model(draft))
        _assert_ends(_generate(_model(_table(0), extra), drafter), ends)


@pytest.mark.parametrize('name', _DRAFTERS)
def test_a_row_ends_with_the_token_that_breaks_its_target(name):
  """The others, which do not have it, go on to their end.

  The draft proposes the token often.
  """
  for kind in ('nan', 'inf', 'all -inf'):
    for token in range(0, VOCAB_SIZE, 5):
      table, draft = _table(0), _SIMILAR.copy()
      table[token] += _BROKEN[kind]
      draft[:, token] += 3
      ends = []
      for prompt, new in zip(_PROMPTS, _healthy().tokens, strict=True):
        scored = [prompt[-1], *new[:-1]]
        ends.append(scored.index(token) if token in scored else None)
      for logits in (draft, table + draft):  # sound, and as broken
        drafter = _drafter(name, _model(logits))
        _assert_ends(_generate(_model(table), drafter), ends)


@pytest.mark.parametrize('name', _DRAFTERS)
def test_logits_of_minus_infinity_are_those_of_tokens_never_said(name):
  allowed = np.array([1, 2, 6, 11])
  extra = np.full((MAX_POSITIONS, VOCAB_SIZE), -np.inf)
  extra[:, allowed] = 0.0
  target = _model(_table(0), extra)
  plain = _generate(target)
  assert plain.finish_reasons == ['length'] * 4
  assert set(np.ravel(plain.tokens)) == set(allowed.tolist())
  for draft in (target, _model(_table(0))):
    generation = _generate(target, _drafter(name, draft))
    assert generation.tokens == plain.tokens
    assert generation.finish_reasons == plain.finish_reasons


@pytest.mark.parametrize('name', _DRAFTERS[1:])
def test_a_draft_may_break_as_it_likes(name):
  """Always, at some positions, or after some tokens."""
  efficiency = {}
  for kind, broken in _BROKEN.items():
    everywhere = np.tile(broken, (MAX_POSITIONS, 1))
    sometimes = np.where(np.arange(MAX_POSITIONS)[:, None] % 4, 0.0, everywhere)
    table = _table(0)
    table[::3] += broken
    for when, draft in (
      ('never', _model(_table(0))),
      ('sometimes', _model(_table(0), sometimes)),
      ('after some tokens', _model(table)),
      ('always', _model(_table(0), everywhere)),
    ):
      generation = _generate(_model(_table(0)), _drafter(name, draft))
      assert generation.tokens == _healthy().tokens, (kind, when)
      assert generation.finish_reasons == ['length'] * 4
      efficiency[when] = generation.stats['block_efficiency']
      if when == 'always':  # no token is the draft's
        assert generation.stats['origins']['draft'] == 0
        assert name == 'staged' or generation.stats['nodes_per_forward'] == 1
    if name == 'staged':  # the other stages still draft
      assert efficiency['always'] > 1.2
    if name == 'chain' and 'banned' not in kind:
      assert efficiency['never'] == LIMIT / (LIMIT // 4)
      assert efficiency['never'] > efficiency['sometimes'] > 1.1


# With a cache, a rejected node could spoil others. One layer is enough, and
# compiles fast.


_draft = functools.partial(tiny.draft, num_layers=1)


def _gpt2_run(target, prompts, draft=None):
  return generate(
    target,
    tiny.row_keys(2),
    prompts,
    max_new_tokens=40,
    sampling=Sampling(temperature=[0.0, 1.0]),
    drafter=PLAIN if draft is None else _drafter('tree', draft),
  )


def _with_broken_token(model, token, value=np.nan):
  """Its embedding is not finite, nor are the logits after it."""
  params = jax.tree.map(lambda leaf: leaf, model.params)
  embedding = params['gpt2']['wte']['embedding']
  params['gpt2']['wte']['embedding'] = embedding.at[token].set(value)
  return model.replace(params=params)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_guess_that_is_not_finite_spoils_nothing(value):
  """No plain text has the token, but the draft often proposes it."""
  prompts, target = tiny.prompts(2), tiny.gpt2(num_layers=1)
  healthy = _gpt2_run(target, prompts)
  broken = _with_broken_token(target, tiny.TABOO, value)
  for draft in (
    None,
    _draft('hopeless'),
    _with_broken_token(_draft('hopeless'), tiny.TABOO, value),
    # A draft that is right where the other is wrong.
    _with_broken_token(_draft('similar'), tiny.TABOO, value),
  ):
    generation = _gpt2_run(broken, prompts, draft)
    assert generation.finish_reasons == ['length', 'length']
    assert generation.tokens == healthy.tokens


def test_padding_that_is_not_finite_spoils_nothing():
  """Prompts are padded with token 0."""
  prompts = [[5, 9, 2], [7]]
  target = tiny.gpt2(num_layers=1)
  bias = target.params['bias'].at[0].set(-1e6)
  target = target.replace(params=target.params | {'bias': bias})
  healthy = _gpt2_run(target, prompts)
  broken = _with_broken_token(target, 0)
  for draft in (None, broken):
    generation = _gpt2_run(broken, prompts, draft)
    assert generation.finish_reasons == ['length', 'length']
    assert generation.tokens == healthy.tokens


def test_a_broken_row_leaves_the_cache_of_others_alone():
  """And has the beginning of its own text."""
  prompts, target = tiny.prompts(2), tiny.gpt2(num_layers=1)
  healthy = _gpt2_run(target, prompts).tokens
  token = next(new for new in healthy[0][6:] if new not in healthy[1])
  end = healthy[0].index(token) + 1
  broken = _with_broken_token(target, token)
  for draft in (None, _draft('similar')):
    generation = _gpt2_run(broken, prompts, draft)
    assert generation.finish_reasons == ['error', 'length']
    assert generation.tokens == [healthy[0][:end], healthy[1]]
    assert f'(new token {end})' in generation.errors[0]
