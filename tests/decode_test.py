"""The promise of the library: a drafter changes the speed, never the tokens.

Everything here is float32 on CPU and compared token for token with a slow loop.
Greedy and sampled rows are in one batch, and all that differs in values alone
shares a program: one per shape of a drafter. `fuzz_test` has random requests.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
import specdec
from specdec.tree.topology import k_ary

LIMIT = tiny.MAX_NEW_TOKENS
TEMPERATURES = (0.0, 1.0, 1.0, 0.0, 0.7)
_PROMPTS = tiny.prompts(5)
_KEYS = tiny.row_keys(5)
_ALL = tuple(range(5))


@jax.jit
def _logits(model, tokens):
  """`[T, V]`, without a cache."""
  length = tokens.shape[0]
  mask = jnp.tril(jnp.ones((length, length), bool))[None]
  positions = jnp.arange(length)[None]
  return model.apply(tokens[None], positions, mask, None)[0][0]


def _logits_of(text):
  padded = np.zeros(tiny.MAX_POSITIONS, np.int32)
  padded[: len(text)] = text
  return np.asarray(_logits(tiny.gpt2(), padded))[len(text) - 1]


@functools.cache
def _expected(row):
  """The new tokens of one of the five rows, slowly."""
  options = reference.Options(  # as of `tiny.sampling`
    temperature=TEMPERATURES[row], top_k=20, top_p=0.95, min_p=0.01
  )
  tokens, _ = reference.decode(
    _logits_of, _PROMPTS[row], LIMIT, _KEYS[row], options
  )
  return tokens


def _make(shape, kind='similar', inner='perfect'):
  """A drafter whose tables, if perfect, know these very texts by heart."""
  if shape is None:
    return specdec.PLAIN
  texts = [prompt + _expected(row) for row, prompt in enumerate(_PROMPTS)]
  return tiny_drafters.make(shape, kind, inner, texts)


def _decode(drafter, rows=_ALL, fill=0):
  """Some of the rows, in any order; the function under `generate`."""
  padded, lengths = tiny.pad([_PROMPTS[row] for row in rows], fill)
  request = specdec.Request(
    prompt=padded,
    prompt_length=lengths,
    limit=np.full(len(rows), LIMIT, np.int32),
    row_keys=_KEYS[np.array(rows)],
    sampling=tiny.sampling_params(*(TEMPERATURES[row] for row in rows)),
  )
  config = specdec.DecodeConfig(max_new_tokens=LIMIT)
  result = specdec.decode(tiny.gpt2(), drafter, request, config=config)
  return jax.device_get(result), tiny.new_tokens(result, lengths)


def _histogram(result):
  """How many steps emitted 1, 2, ... tokens, if all counters agree with it."""
  counters = result.counters
  histogram = counters.emitted_histogram
  np.testing.assert_array_equal(histogram.sum(axis=1), counters.target_forwards)
  sizes = np.arange(1, histogram.shape[1] + 1)
  np.testing.assert_array_equal(histogram @ sizes, LIMIT)
  assert counters.steps == max(counters.target_forwards)
  return histogram.sum(axis=0)


def test_plain_decoding_equals_a_loop_without_cache():
  expected = [_expected(row) for row in _ALL]
  assert all(len(set(row)) > 10 for row in expected), 'not a trivial text'
  assert _decode(specdec.PLAIN)[1] == expected
  # The trees of a row that fills the context reach beyond its end.
  assert max(map(len, _PROMPTS)) + LIMIT == tiny.MAX_POSITIONS


_MODELS = [(kind, 'perfect') for kind in tiny.DRAFTS]
_TABLES = [('perfect', inner) for inner in tiny_drafters.TABLES]
_BOTH = [
  ('perfect', 'perfect'),
  ('similar', 'random'),
  ('random', 'empty'),
  ('hopeless', 'perfect'),
  ('similar', 'wrong'),
]
# Which drafters are tried of a shape, and how many tokens a step must have
# emitted now and then: otherwise the equality would be tested at the extremes.
_SHAPES = {
  'chain of 4': (_MODELS, range(1, 6)),
  'ragged tree': (_MODELS, range(1, 4)),
  'tree': (_MODELS, range(1, 5)),
  'tables': (_TABLES, range(1, 4)),
  'model, table': (_BOTH, range(1, 7)),
  'model, model': (_BOTH, range(1, 6)),
  'model, model, tables': (_BOTH, range(1, 7)),
}


# One test for all kinds of a shape, so that no two processes compile the same.
@pytest.mark.parametrize('shape', _SHAPES)
def test_drafted_equals_plain(shape):
  kinds, lengths = _SHAPES[shape]
  # The tree is for one row at a time: each is as among others.
  batches = [(row,) for row in _ALL] if shape == 'tree' else [_ALL]
  total = 0
  for kind, inner in kinds:
    drafter = _make(shape, kind, inner)
    for rows in batches:
      result, tokens = _decode(drafter, rows)
      assert tokens == [_expected(row) for row in rows], (
        f'{kind} model, {inner} inner, rows {rows}'
      )
      total = total + _histogram(result)
  assert set(lengths) <= set((np.flatnonzero(total) + 1).tolist())


def test_a_better_stage_inside_is_worth_it():
  def efficiency(kind, inner):
    result, _ = _decode(_make('model, table', kind, inner))
    return LIMIT * len(_ALL) / _histogram(result).sum()

  # What a table knows by heart is accepted, though its draft be hopeless.
  assert efficiency('hopeless', 'perfect') > 1.5
  assert efficiency('hopeless', 'empty') == 1.0
  for kind in ('similar', 'perfect'):
    assert efficiency(kind, 'perfect') > 1.1 * efficiency(kind, 'empty')


@pytest.mark.parametrize('shape', ['chain of 4', 'model, model, tables'])
def test_neither_order_nor_padding_matters(shape):
  """All that is counted is the same: a row's guesses are its own as well."""
  order = (3, 0, 4, 2, 1)
  drafter = _make(shape, 'similar', 'random')
  result, tokens = _decode(drafter)
  other, other_tokens = _decode(drafter, order, fill=17)
  assert other_tokens == [tokens[row] for row in order]
  counts = lambda result: (
    result.counters.emitted_histogram,
    result.counters.nodes_verified,
    *(stage.row_forwards for stage in result.stage_counters),
  )
  for one, permuted in zip(counts(result), counts(other), strict=True):
    np.testing.assert_array_equal(one[np.array(order)], permuted)
  # And with the rows where they were, also what is counted for all of them.
  padded, _ = _decode(drafter, fill=17)
  every = lambda result: (result.counters, result.stage_counters)
  jax.tree.map(np.testing.assert_array_equal, every(result), every(padded))


# What follows is about tables, which compile fast.

_TABLE_LIMIT = 36


def _model(table):
  return table_model(table, max_positions=1000)


def _staged(outer, inner, config):
  table = tiny_drafters.exact(inner)
  return specdec.staged(
    tiny_drafters.model(_model(outer), config),
    tiny_drafters.candidates(table, config=tiny_drafters.INNER),
  )


def _checked(table, drafter):
  """The statistics of a greedy and a sampled row, if their tokens are right."""
  prompts = [[1], [0, len(table) - 1, 0]]
  generation = specdec.generate(
    _model(table),
    _KEYS[:2],
    prompts,
    max_new_tokens=_TABLE_LIMIT,
    drafter=drafter,
    sampling=specdec.Sampling(temperature=np.array([0.0, 1.0])),
  )
  for row, prompt in enumerate(prompts):
    options = reference.Options(temperature=float(row))
    expected, _ = reference.decode(
      lambda text: table[text[-1]], prompt, _TABLE_LIMIT, _KEYS[row], options
    )
    assert generation.tokens[row] == expected
  return generation.stats


_TWO, _TWO_DRAFT = tiny.table(2, 0), tiny.table(2, 1)
_GROWN = Settings(
  num_nodes=9, width=3, branching=4, rounds=3, capacity=9, cost_ratio=0
)
_FIXED = Settings(topology=k_ary(3, 2))  # more ranks than there are guesses
_NGRAM = tiny_drafters.ngram_table(
  [[0, 1, 1, 0]], 2, order=2, num_continuations=4
)


@pytest.mark.parametrize(
  ('name', 'drafter'),
  {
    'staged': _staged(_TWO_DRAFT, _TWO, _GROWN),
    'lookup': tiny_drafters.candidates(
      specdec.PromptLookup(), specdec.NGram(_NGRAM), config=_GROWN
    ),
    'fixed tree': tiny_drafters.model(_model(_TWO_DRAFT), _FIXED),
    'fixed lookup': tiny_drafters.candidates(
      specdec.PromptLookup(num_matches=2), config=_FIXED
    ),
  }.items(),
)
def test_two_tokens(name, drafter):
  """Fewer than the children that a node might have."""
  stats = _checked(_TWO, drafter)
  if name != 'fixed lookup':
    assert stats['block_efficiency'] > 1.3
  if name == 'fixed tree':  # has all continuations
    assert stats['accepted_histogram'][2] == stats['target_forwards']


_FIVE, _FIVE_DRAFT = tiny.table(5, 0), tiny.table(5, 1)


@pytest.mark.parametrize(
  'drafter',
  [
    _staged(_FIVE, _FIVE_DRAFT, dataclasses.replace(_GROWN, num_nodes=1)),
    tiny_drafters.candidates(
      tiny_drafters.empty(5, 3), config=tiny_drafters.TREE
    ),
  ],
  ids=['a budget of one node', 'never a guess'],
)
def test_without_guesses_it_is_plain_decoding(drafter):
  stats = _checked(_FIVE, drafter)
  assert stats['nodes_per_forward'] == stats['block_efficiency'] == 1.0
  assert {*stats['origins'].values()} == {0, 2 * _TABLE_LIMIT}
  assert drafter.max_depth or not any(stats['stage_forwards'].values())
