"""The promise of the library: a drafter changes the speed, never the tokens.

Everything here is float32 on CPU and compared token for token.
"""

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
from specdec import decode
from specdec import DecodeConfig
from specdec import Drafter
from specdec import generate
from specdec import NGram
from specdec import PLAIN
from specdec import PromptLookup
from specdec import Request
from specdec import Sampling
from specdec import staged
from specdec.sampling import choose
from specdec.sampling import position_noise
from specdec.tree.topology import chain
from specdec.tree.topology import k_ary

LIMIT = tiny.MAX_NEW_TOKENS
TEMPERATURES = (0.0, 1.0)


def _generate(batch_size, temperatures, drafter=PLAIN, *, limit=LIMIT, **kw):
  """`generate` with the defaults of this file."""
  kw = {
    'target': tiny.gpt2(),
    'prompts': tiny.prompts(batch_size),
    'rng_key': tiny.row_keys(batch_size),
    'sampling': tiny.sampling(*temperatures),
    'drafter': drafter,
  } | kw
  return generate(max_new_tokens=limit, **kw)


@functools.cache
def _plain(batch_size, temperature):
  return _generate(batch_size, [temperature] * batch_size).tokens


def _make(shape, batch_size, temperature, kind='similar', inner='perfect'):
  """A drafter whose tables, if perfect, know this very text by heart."""
  prompts = tiny.prompts(batch_size)
  new = _plain(batch_size, temperature)
  texts = [prompt + row for prompt, row in zip(prompts, new, strict=True)]
  return tiny_drafters.make(shape, kind, inner, texts)


@jax.jit
def _logits_without_cache(model, tokens):
  batch_size, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  mask = jnp.tril(jnp.ones((length, length), bool))
  mask = jnp.broadcast_to(mask[None], (batch_size, length, length))
  return model.apply(tokens, positions, mask, None)[0]


@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_plain_decoding_equals_a_loop_without_cache(temperature):
  batch_size = 5
  sampling = tiny.sampling_params(*[temperature] * batch_size)
  everywhere = np.tile(np.arange(tiny.MAX_POSITIONS), (batch_size, 1))
  keys = tiny.row_keys(batch_size)
  noise = np.asarray(
    position_noise(keys, everywhere, tiny.VOCAB_SIZE, sampling)
  )
  select = jax.jit(choose)
  tokens = np.zeros((batch_size, tiny.MAX_POSITIONS), np.int32)
  padded, starts = tiny.pad(tiny.prompts(batch_size))
  tokens[:, : padded.shape[1]] = padded
  rows = np.arange(batch_size)
  for ends in starts[None] + np.arange(LIMIT)[:, None]:
    logits = np.asarray(_logits_without_cache(tiny.gpt2(), tokens))
    tokens[rows, ends] = select(
      logits[rows, ends - 1], noise[rows, ends], sampling
    )
  expected = [
    row[start : start + LIMIT].tolist()
    for row, start in zip(tokens, starts, strict=True)
  ]
  assert _plain(batch_size, temperature) == expected
  assert all(len(set(row)) > 10 for row in expected), 'not a trivial text'


_KINDS = [
  ('perfect', 'perfect'),
  ('similar', 'perfect'),
  ('similar', 'random'),
  ('random', 'empty'),
  ('hopeless', 'perfect'),
  ('similar', 'wrong'),
]


# Every shape, and every batch size with none, one, and several stages inside.
_SHAPES = [
  (2, 'chain of 1'),
  (5, 'chain of 4'),
  (1, 'binary tree'),
  (2, 'ragged tree'),
  (1, 'tree'),
  (5, 'tree'),
  (2, 'tables'),
  (5, 'model, table'),
  (2, 'model, model'),
  (1, 'model, model, tables'),
  (5, 'model, model, tables'),
]


# One test for all kinds of a shape, so that no two processes compile the same.
@pytest.mark.parametrize(('batch_size', 'shape'), _SHAPES)
def test_drafted_equals_plain(batch_size, shape):
  for temperature in TEMPERATURES:
    for kind, inner in _KINDS:
      drafter = _make(shape, batch_size, temperature, kind, inner)
      generation = _generate(batch_size, [temperature] * batch_size, drafter)
      assert generation.tokens == _plain(batch_size, temperature), (
        f'{kind} model, {inner} inner, temperature {temperature}'
      )


def test_every_shape_is_tested():
  """And trees that reach beyond the end of the context are among them."""
  assert {shape for _, shape in _SHAPES} == set(tiny_drafters.SHAPES)
  for batch_size in (1, 2, 5):
    stages = {
      len(_make(shape, batch_size, 0.0).stages)
      for size, shape in _SHAPES
      if size == batch_size
    }
    assert len(stages) >= 2
  longest = max(map(len, tiny.prompts(5)))
  assert longest + LIMIT == tiny.MAX_POSITIONS


@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_block_efficiency_of_the_extreme_drafts(temperature):
  chains = {
    kind: _make('chain of 4', 5, temperature, kind)
    for kind in ('perfect', 'hopeless')
  }
  num_blocks = LIMIT // 5
  limit = num_blocks * 5
  run = lambda kind: (
    _generate(5, [temperature] * 5, chains[kind], limit=limit).stats
  )

  stats = run('perfect')
  assert stats['block_efficiency'] == 5
  assert stats['accepted_histogram'] == [0, 0, 0, 0, num_blocks * 5]
  stats = run('hopeless')
  assert stats['block_efficiency'] == 1.0
  assert stats['accepted_histogram'] == [limit * 5, 0, 0, 0, 0]


@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize(
  ('shape', 'lengths'),
  [
    ('chain of 4', range(1, 6)),
    ('tree', range(1, 5)),
    ('model, table', range(2, 8)),
    ('model, model, tables', range(2, 8)),
  ],
)
def test_the_similar_draft_meets_every_length(shape, lengths, temperature):
  """Otherwise the equality above would be tested at the extremes only."""
  drafter = _make(shape, 5, temperature, 'similar')
  stats = _generate(5, [temperature] * 5, drafter).stats
  emitted = np.flatnonzero(stats['accepted_histogram']) + 1
  assert set(lengths) <= set(emitted.tolist())


@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_a_better_stage_inside_is_worth_it(temperature):
  def block_efficiency(kind, inner):
    drafter = _make('model, table', 5, temperature, kind, inner)
    stats = _generate(5, [temperature] * 5, drafter).stats
    return stats['block_efficiency']

  # What a table knows by heart is accepted, though its draft be hopeless.
  assert block_efficiency('hopeless', 'perfect') > 1.5
  assert block_efficiency('hopeless', 'empty') == 1.0
  for kind in ('similar', 'perfect'):
    perfect = block_efficiency(kind, 'perfect')
    assert perfect > 1.1 * block_efficiency(kind, 'empty')


def test_greedy_and_sampled_rows_in_one_batch():
  temperatures = (0.0, 1.0, 0.0, 0.5, 2.0)
  plain = _generate(5, temperatures).tokens
  for shape in ('chain of 4', 'model, model, tables'):
    drafter = _make(shape, 5, 0.0)
    assert _generate(5, temperatures, drafter).tokens == plain
  greedy, sampled = _plain(5, 0.0), _plain(5, 1.0)
  assert [plain[row] == greedy[row] for row in range(5)] == [
    temperature == 0 for temperature in temperatures
  ]
  assert plain[1] == sampled[1]
  assert plain[3] != sampled[3]
  assert plain[4] != sampled[4]


_MIXED = (0.0, 1.0, 0.7, 1.0, 0.0)


@pytest.mark.parametrize('shape', [None, 'tree'])
def test_each_row_equals_its_own_run(shape):
  drafter = PLAIN if shape is None else _make(shape, 5, 0.0)
  batch = _generate(5, _MIXED, drafter).tokens
  keys, prompts = tiny.row_keys(5), tiny.prompts(5)
  for row, temperature in enumerate(_MIXED):
    alone = _generate(
      1,
      [temperature],
      drafter,
      rng_key=keys[row : row + 1],
      prompts=[prompts[row]],
    )
    assert alone.tokens == [batch[row]]


def _decode(drafter, prompts, temperatures, *, keys=None, fill=0, limits=None):
  """The function under `generate`, for what that hides."""
  batch_size = len(prompts)
  padded, lengths = tiny.pad(prompts, fill)
  result = decode(
    tiny.gpt2(),
    drafter,
    Request(
      prompt=padded,
      prompt_length=lengths,
      limit=np.array(limits or [LIMIT] * batch_size, np.int32),
      row_keys=tiny.row_keys(batch_size) if keys is None else keys,
      sampling=tiny.sampling_params(*temperatures),
    ),
    config=DecodeConfig(max_new_tokens=LIMIT),
  )
  return jax.device_get(result), tiny.new_tokens(result, lengths)


@pytest.mark.parametrize('shape', ['chain of 4', 'model, model, tables'])
def test_permuting_rows_permutes_the_output(shape):
  """And what is counted: a row's guesses are its own as well."""
  order = np.array([3, 0, 4, 2, 1])
  drafter = _make(shape, 5, 0.0)
  keys, prompts = tiny.row_keys(5), tiny.prompts(5)
  batch, tokens = _decode(drafter, prompts, _MIXED, keys=keys)
  permuted, permuted_tokens = _decode(
    drafter,
    [prompts[row] for row in order],
    [_MIXED[row] for row in order],
    keys=keys[order],
  )
  assert permuted_tokens == [tokens[row] for row in order]
  counts = lambda result: (
    result.counters.emitted_histogram,
    result.counters.nodes_verified,
    *(stage.row_forwards for stage in result.stage_counters),
  )
  for one, other in zip(counts(batch), counts(permuted), strict=True):
    np.testing.assert_array_equal(one[order], other)


@pytest.mark.parametrize('shape', [None, 'chain of 4'])
def test_seeds(shape):
  same_prompt = [tiny.prompts(1)[0]] * 5
  run = lambda seed: (
    _generate(
      5,
      (1.0,) * 5,
      PLAIN if shape is None else _make(shape, 5, 1.0),
      rng_key=jax.random.key(seed),
      prompts=same_prompt,
    ).tokens
  )
  first = run(0)
  assert run(0) == first
  other = run(1)
  assert all(a != b for a, b in zip(first, other, strict=True))
  assert len({tuple(row) for row in first}) == 5, 'rows share their noise'


@pytest.mark.parametrize('shape', ['chain of 4', 'model, model, tables'])
def test_padding_is_never_read(shape):
  """Neither by the target nor by any stage: all that is counted is the same."""
  drafter = _make(shape, 5, 1.0, 'similar', 'random')
  temperatures = (0.0, 1.0, 1.0, 0.0, 0.0)
  (one, tokens), (other, other_tokens) = (
    _decode(drafter, tiny.prompts(5), temperatures, fill=fill)
    for fill in (0, 17)
  )
  assert tokens == other_tokens
  for name in ('counters', 'stage_counters'):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(one, name), getattr(other, name)
    )


@pytest.mark.parametrize(
  'limits',
  [(0, LIMIT, 5, 1, 4), (3, 2, 0, 100, 6), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)],
)
@pytest.mark.parametrize('shape', [None, 'chain of 4', 'model, model, tables'])
def test_limits_around_a_block_of_five(shape, limits):
  """Rows that finish early, or never start, leave the others alone."""
  for temperature in TEMPERATURES:
    for kind in tiny.DRAFTS:
      drafter = PLAIN if shape is None else _make(shape, 5, temperature, kind)
      result, tokens = _decode(
        drafter, tiny.prompts(5), [temperature] * 5, limits=limits
      )
      assert tokens == [
        row[:limit]
        for row, limit in zip(_plain(5, temperature), limits, strict=True)
      ]
      # A row is counted until it is done, and not after.
      histogram = result.counters.emitted_histogram
      forwards = result.counters.target_forwards
      np.testing.assert_array_equal(histogram.sum(axis=1), forwards)
      sizes = np.arange(1, histogram.shape[1] + 1)
      np.testing.assert_array_equal(histogram @ sizes, limits)
      assert result.counters.steps == max(forwards)
      if shape == 'chain of 4' and kind == 'perfect':
        np.testing.assert_array_equal(forwards, -(-np.array(limits) // 5))


def test_one_row_that_fills_the_context():
  """Trees that would reach beyond the last position change nothing."""
  prompts = [tiny.prompts(3)[2]]
  assert len(prompts[0]) + LIMIT == tiny.MAX_POSITIONS
  for temperature in TEMPERATURES:
    plain = _generate(1, [temperature], prompts=prompts).tokens
    assert len(plain[0]) == LIMIT
    for shape in ('tree', 'model, model, tables'):
      drafter = _make(shape, 1, temperature)
      run = _generate(1, [temperature], drafter, prompts=prompts)
      assert run.tokens == plain


def test_a_draft_of_another_shape():
  draft = tiny.gpt2(seed=3, num_layers=1, num_heads=1, width=8)
  drafter = tiny_drafters.model(draft, Settings(topology=chain(2)))
  for temperature in TEMPERATURES:
    run = _generate(1, [temperature], drafter)
    assert run.tokens == _plain(1, temperature)


# What follows is about tables, which compile fast. A counting table says
# i + 1 after i, so that which token comes where is known without decoding.

VOCAB_SIZE = 64


def _counting(step=1):
  """Says i + step after i."""
  table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
  rows = np.arange(VOCAB_SIZE)
  table[rows, (rows + step) % VOCAB_SIZE] = 10.0
  return table


def _model(table):
  return table_model(table, max_positions=1000)


def _table_drafters(outer, inner):
  """One of each kind, for target tables.

  Args:
    outer: `[V, V]` logits of the model.
    inner: likewise, of the proposers.
  """
  config = Settings(
    num_nodes=6, width=3, branching=2, rounds=2, capacity=20, cost_ratio=0
  )
  model = tiny_drafters.model(_model(outer), config)
  table = tiny_drafters.candidates(
    tiny_drafters.exact(inner), config=tiny_drafters.INNER
  )
  return {
    'none': PLAIN,
    'chain': with_settings(model, Settings(topology=chain(3))),
    'tree': model,
    'proposer': with_settings(table, config),
    'staged': staged(model, table),
  }


_EOS_IDS = (34, 20)


def _counting_drafters(step):
  return _table_drafters(_counting(step), _counting())


_DRAFTERS = tuple(_counting_drafters(1))


@pytest.mark.parametrize('name', _DRAFTERS)
def test_a_table_counts(name):
  """The one test that needs no reference at all; no EOS comes so early."""
  starts = range(34, 40)
  for step in (1, 2):
    generation = generate(
      _model(_counting()),
      jax.random.key(0),
      [[7, 7, start] for start in starts],
      max_new_tokens=44,
      drafter=_counting_drafters(step)[name],
      eos_ids=_EOS_IDS,
    )
    assert generation.tokens == [
      [(start + i) % VOCAB_SIZE for i in range(1, 45)] for start in starts
    ]


@pytest.mark.parametrize('name', _DRAFTERS)
def test_the_first_of_several_eos_ids_ends_a_row(name):
  """An EOS in the prompt, as in that of the third, does not."""
  for step in (1, 2):
    generation = generate(
      _model(_counting()),
      jax.random.key(0),
      [[34, start] for start in (10, 19, 20, 25, 33, 50)],
      max_new_tokens=20,
      drafter=_counting_drafters(step)[name],
      eos_ids=_EOS_IDS,
    )
    assert generation.tokens == [
      list(range(11, 21)),
      [20],
      list(range(21, 35)),
      list(range(26, 35)),
      [34],
      [i % VOCAB_SIZE for i in range(51, 71)],
    ]


@pytest.mark.parametrize('g', [1, 3])
def test_eos_at_every_offset_of_a_block(g):
  """The first two blocks and a bit; the EOS is emitted, and nothing after.

  The draft is right (step 1), so that an EOS is met in the middle of a block,
  or wrong (step 2), so that it is always a bonus token.
  """
  eos = 40
  offsets = range(2 * (g + 1) + 1)
  for step in (1, 2):
    for temperature in TEMPERATURES:
      generation = generate(
        _model(_counting()),
        jax.random.key(0),
        [[eos - 1 - offset] for offset in offsets],
        max_new_tokens=50,
        drafter=tiny_drafters.model(
          _model(_counting(step)), Settings(topology=chain(g))
        ),
        sampling=Sampling(temperature=temperature, top_k=1),
        eos_ids=[eos],
      )
      assert generation.tokens == [
        list(range(eos - offset, eos + 1)) for offset in offsets
      ]
      expected = np.zeros(g + 1, int)
      for offset in offsets:
        if step == 1:
          expected[g] += offset // (g + 1)
          expected[offset % (g + 1)] += 1
        else:
          expected[0] += offset + 1
      assert generation.stats['accepted_histogram'] == expected.tolist()


def test_eos_in_the_middle_of_gpt2_text():
  """With a real cache, rows done early must leave the others alone."""
  eos = 11
  lengths = set()
  for temperature in TEMPERATURES:
    for seed in range(5):
      arguments = {
        'prompts': tiny.prompts(2, seed),
        'rng_key': tiny.row_keys(2, seed),
      }
      plain = _generate(2, [temperature] * 2, **arguments).tokens
      drafter = _make('ragged tree', 2, temperature)
      run = _generate(2, [temperature] * 2, drafter, eos_ids=[eos], **arguments)
      expected = [
        row[: row.index(eos) + 1] if eos in row else row for row in plain
      ]
      assert run.tokens == expected
      lengths |= {len(row) for row in expected}
  assert len(lengths) >= 10, 'the EOS should come at many places'


def _random_table(vocab_size, seed):
  rng = np.random.default_rng(seed)
  return 2 * rng.normal(size=(vocab_size, vocab_size)).astype(np.float32)


def _assert_equals_plain(target, drafter, vocab_size):
  """At both temperatures; returns the statistics of both."""
  stats = []
  for temperature in TEMPERATURES:
    run = lambda drafter, temperature=temperature: generate(
      target,
      tiny.row_keys(2),
      [[1], [0, vocab_size - 1, 0]],
      max_new_tokens=40,
      drafter=drafter,
      sampling=Sampling(temperature=temperature),
    )
    drafted = run(drafter)
    assert drafted.tokens == run(PLAIN).tokens
    stats.append(drafted.stats)
  return stats


@pytest.mark.parametrize('name', [*_DRAFTERS[1:], 'binary tree', 'lookup'])
def test_two_tokens(name):
  """Fewer than the children that a node might have."""
  target, draft = _random_table(2, 0), _random_table(2, 1)
  config = Settings(
    num_nodes=9, width=3, branching=4, rounds=3, capacity=9, cost_ratio=0
  )
  lookup = tiny_drafters.candidates(
    PromptLookup(),
    NGram(
      tiny_drafters.ngram_table([[0, 1, 1, 0]], 2, order=2, num_continuations=4)
    ),
    config=config,
  )
  drafter = _table_drafters(draft, target).get(name, lookup)
  if name == 'binary tree':
    drafter = tiny_drafters.model(_model(draft), Settings(topology=k_ary(2, 3)))
  stats = _assert_equals_plain(_model(target), drafter, 2)
  assert max(one['block_efficiency'] for one in stats) > 1.3
  if name == 'binary tree':  # has all continuations
    for one in stats:
      assert one['accepted_histogram'][3] == one['target_forwards']


@pytest.mark.parametrize('is_model', [True, False])
def test_a_fixed_shape_with_more_ranks_than_there_are_guesses(is_model):
  config = Settings(topology=k_ary(3, 2))
  drafter = tiny_drafters.model(_model(_random_table(2, 1)), config)
  if not is_model:
    drafter = tiny_drafters.candidates(
      PromptLookup(num_matches=2), config=config
    )
  _assert_equals_plain(_model(_random_table(2, 0)), drafter, 2)


@pytest.mark.parametrize('name', ['tree', 'proposer', 'staged'])
def test_a_budget_of_one_node_is_plain_decoding(name):
  tables = _random_table(5, 0), _random_table(5, 1)
  drafter = _table_drafters(*tables)[name]
  config = Settings(num_nodes=1, width=3, branching=2, rounds=2)
  drafter = with_settings(drafter, config)
  assert drafter.max_depth == 0
  for one in _assert_equals_plain(_model(tables[0]), drafter, 5):
    assert one['nodes_per_forward'] == one['block_efficiency'] == 1.0
    assert set(one['stage_forwards'].values()) == {0}


def test_a_drafter_that_never_guesses():
  table = _random_table(5, 0)
  nothing = tiny_drafters.candidates(
    tiny_drafters.empty(5, 3), config=tiny_drafters.TREE
  )
  assert isinstance(nothing, Drafter)
  for one in _assert_equals_plain(_model(table), nothing, 5):
    assert one['nodes_per_forward'] == one['block_efficiency'] == 1.0
    assert one['origins']['bigram'] == 0
