"""The promise of the library: a draft changes the speed, never the tokens.

Everything here is float32 on CPU and compared token for token.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from models.table import table_model
from specdec import decode
from specdec import DecodeConfig
from specdec import generate
from specdec import Sampling
from specdec.sampling import choose
from specdec.sampling import position_noise

LIMIT = tiny_models.MAX_NEW_TOKENS
SHAPES = [(batch_size, g) for batch_size in (1, 2, 5) for g in range(1, 9)]
TEMPERATURES = (0.0, 1.0)


def _generate(batch_size, temperatures, kind=None, g=4, *, limit=LIMIT, **kw):
  """`generate` with the defaults of this file; `kind` is of a draft."""
  kw = {
    'target': tiny_models.gpt2(),
    'prompts': tiny_models.prompts(batch_size),
    'rng_key': tiny_models.row_keys(batch_size),
    'sampling': tiny_models.sampling(*temperatures),
    'draft': None if kind is None else tiny_models.draft(kind),
    'num_draft_tokens': g,
  } | kw
  return generate(max_new_tokens=limit, **kw)


@functools.cache
def _plain(batch_size, temperature):
  return _generate(batch_size, [temperature] * batch_size).tokens


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
  sampling = tiny_models.sampling(*[temperature] * batch_size).validated()
  everywhere = np.tile(np.arange(tiny_models.MAX_POSITIONS), (batch_size, 1))
  keys = tiny_models.row_keys(batch_size)
  noise = np.asarray(
    position_noise(keys, everywhere, tiny_models.VOCAB_SIZE, sampling)
  )
  select = jax.jit(choose)
  tokens = np.zeros((batch_size, tiny_models.MAX_POSITIONS), np.int32)
  padded, starts = tiny_models.pad(tiny_models.prompts(batch_size))
  tokens[:, : padded.shape[1]] = padded
  rows = np.arange(batch_size)
  for ends in starts[None] + np.arange(LIMIT)[:, None]:
    logits = np.asarray(_logits_without_cache(tiny_models.gpt2(), tokens))
    tokens[rows, ends] = select(
      logits[rows, ends - 1], noise[rows, ends], sampling
    )
  expected = [
    row[start : start + LIMIT].tolist()
    for row, start in zip(tokens, starts, strict=True)
  ]
  assert _plain(batch_size, temperature) == expected
  assert all(len(set(row)) > 10 for row in expected), 'not a trivial text'


@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize('kind', tiny_models.DRAFTS)
@pytest.mark.parametrize(('batch_size', 'g'), SHAPES)
def test_chain_equals_plain(batch_size, g, kind, temperature):
  chain = _generate(batch_size, [temperature] * batch_size, kind, g)
  assert chain.tokens == _plain(batch_size, temperature)


@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize(('batch_size', 'g'), SHAPES)
def test_block_efficiency_of_the_extreme_drafts(batch_size, g, temperature):
  num_blocks = LIMIT // (g + 1)
  limit = num_blocks * (g + 1)
  temperatures = [temperature] * batch_size

  stats = _generate(batch_size, temperatures, 'perfect', g, limit=limit).stats
  assert stats['block_efficiency'] == g + 1
  assert stats['accepted_histogram'] == [0] * g + [num_blocks * batch_size]

  stats = _generate(batch_size, temperatures, 'hopeless', g, limit=limit).stats
  assert stats['block_efficiency'] == 1.0
  assert stats['accepted_histogram'] == [limit * batch_size] + [0] * g


@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_the_similar_draft_meets_every_accepted_length(temperature):
  """Otherwise the equality above would be tested at the extremes only."""
  stats = _generate(5, [temperature] * 5, 'similar', 4).stats
  assert min(stats['accepted_histogram']) >= 5


def test_greedy_and_sampled_rows_in_one_batch():
  temperatures = (0.0, 1.0, 0.0, 0.5, 2.0)
  plain = _generate(5, temperatures).tokens
  assert _generate(5, temperatures, 'similar').tokens == plain
  greedy, sampled = _plain(5, 0.0), _plain(5, 1.0)
  assert [plain[row] == greedy[row] for row in range(5)] == [
    temperature == 0 for temperature in temperatures
  ]
  assert plain[1] == sampled[1]
  assert plain[3] != sampled[3]
  assert plain[4] != sampled[4]


@pytest.mark.parametrize('kind', [None, 'similar'])
def test_each_row_equals_its_own_run(kind):
  temperatures = (0.0, 1.0, 0.7, 1.0, 0.0)
  batch = _generate(5, temperatures, kind).tokens
  keys, prompts = tiny_models.row_keys(5), tiny_models.prompts(5)
  for row, temperature in enumerate(temperatures):
    alone = _generate(
      1,
      [temperature],
      kind,
      rng_key=keys[row : row + 1],
      prompts=[prompts[row]],
    )
    assert alone.tokens == [batch[row]]


def test_permuting_rows_permutes_the_output():
  order = [3, 0, 4, 2, 1]
  temperatures = (0.0, 1.0, 0.7, 1.0, 0.0)
  keys, prompts = tiny_models.row_keys(5), tiny_models.prompts(5)
  batch = _generate(5, temperatures, 'similar').tokens
  permuted = _generate(
    5,
    [temperatures[row] for row in order],
    'similar',
    rng_key=keys[np.array(order)],
    prompts=[prompts[row] for row in order],
  )
  assert permuted.tokens == [batch[row] for row in order]


@pytest.mark.parametrize('kind', [None, 'similar'])
def test_seeds(kind):
  temperatures = (1.0,) * 5
  same_prompt = [tiny_models.prompts(1)[0]] * 5
  run = lambda seed: (
    _generate(
      5, temperatures, kind, rng_key=jax.random.key(seed), prompts=same_prompt
    ).tokens
  )
  first = run(0)
  assert run(0) == first
  other = run(1)
  assert all(a != b for a, b in zip(first, other, strict=True))
  assert len({tuple(row) for row in first}) == 5, 'rows share their noise'


def test_padding_is_never_read():
  keys, prompts = tiny_models.row_keys(5), tiny_models.prompts(5)
  sampling = tiny_models.sampling(0.0, 1.0, 1.0, 0.0, 0.0).validated()
  runs = []
  for fill in (0, 17):
    padded, lengths = tiny_models.pad(prompts, fill)
    result = decode(
      tiny_models.gpt2(),
      tiny_models.draft('similar'),
      keys,
      padded,
      lengths,
      np.full(5, LIMIT, np.int32),
      sampling,
      config=DecodeConfig(num_draft_tokens=4, max_new_tokens=LIMIT),
    )
    runs.append((tiny_models.new_tokens(result, lengths), result.counters))
  assert runs[0][0] == runs[1][0]
  # The drafts did not read it either.
  assert jax.tree.map(np.array_equal, runs[0][1], runs[1][1]) == jax.tree.map(
    lambda _: True, runs[0][1]
  )


@pytest.mark.parametrize(
  'limits',
  [(0, LIMIT, 5, 1, 4), (3, 2, 0, 100, 6), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)],
)
@pytest.mark.parametrize('kind', [None, *tiny_models.DRAFTS])
@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_limits_around_a_block_of_five(kind, temperature, limits):
  """Rows that finish early, or never start, leave the others alone."""
  g = 0 if kind is None else 4
  padded, lengths = tiny_models.pad(tiny_models.prompts(5))
  result = decode(
    tiny_models.gpt2(),
    None if kind is None else tiny_models.draft(kind),
    tiny_models.row_keys(5),
    padded,
    lengths,
    np.array(limits, np.int32),
    tiny_models.sampling(*[temperature] * 5).validated(),
    config=DecodeConfig(num_draft_tokens=g, max_new_tokens=LIMIT),
  )
  assert tiny_models.new_tokens(result, lengths) == [
    row[:limit]
    for row, limit in zip(_plain(5, temperature), limits, strict=True)
  ]
  # A row is counted until it is done, and not after.
  histogram = np.asarray(result.counters.emitted_histogram)
  forwards = np.asarray(result.counters.target_forwards)
  np.testing.assert_array_equal(histogram.sum(axis=1), forwards)
  np.testing.assert_array_equal(histogram @ np.arange(1, g + 2), limits)
  assert result.counters.steps == max(forwards)
  if kind == 'perfect':
    np.testing.assert_array_equal(forwards, -(-np.array(limits) // (g + 1)))


@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize('kind', tiny_models.DRAFTS)
@pytest.mark.parametrize('g', [1, 8])
def test_prompt_and_limit_fill_the_context(g, kind, temperature):
  """Blocks that would reach beyond the last position change nothing."""
  prompts = [tiny_models.prompts(3)[2]]
  assert len(prompts[0]) + LIMIT == tiny_models.MAX_POSITIONS
  plain = _generate(1, [temperature], prompts=prompts).tokens
  assert len(plain[0]) == LIMIT
  chain = _generate(1, [temperature], kind, g, prompts=prompts).tokens
  assert chain == plain


def test_a_draft_of_another_shape():
  draft = tiny_models.gpt2(seed=3, num_layers=1, num_heads=1, width=8)
  for temperature in TEMPERATURES:
    chain = _generate(1, [temperature], draft=draft, g=2)
    assert chain.tokens == _plain(1, temperature)


# The end of a row. A counting table says i + 1 after i, so that which token
# comes where is known without decoding.

VOCAB_SIZE = 64


def _counting(step=1):
  """Says i + step after i."""
  table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
  rows = np.arange(VOCAB_SIZE)
  table[rows, (rows + step) % VOCAB_SIZE] = 10.0
  return table_model(table, max_positions=1000)


_EOS_IDS = (34, 20)


@pytest.mark.parametrize('draft', [None, _counting(), _counting(2)])
def test_a_table_counts(draft):
  """The one test that needs no reference at all; no EOS comes so early."""
  starts = range(34, 40)
  generation = generate(
    _counting(),
    jax.random.key(0),
    [[7, 7, start] for start in starts],
    max_new_tokens=44,
    draft=draft,
    eos_ids=_EOS_IDS,
  )
  assert generation.tokens == [
    [(start + i) % VOCAB_SIZE for i in range(1, 45)] for start in starts
  ]


@pytest.mark.parametrize('draft', [None, _counting(), _counting(2)])
def test_the_first_of_several_eos_ids_ends_a_row(draft):
  """An EOS in the prompt, as in that of the third, does not."""
  generation = generate(
    _counting(),
    jax.random.key(0),
    [[34, start] for start in (10, 19, 20, 25, 33, 50)],
    max_new_tokens=20,
    draft=draft,
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


@pytest.mark.parametrize('step', [1, 2])
@pytest.mark.parametrize('g', [1, 3, 6])
def test_eos_at_every_offset_of_a_block(g, step):
  """The first two blocks and a bit; the EOS is emitted, and nothing after.

  The draft is right (step 1), so that an EOS is met in the middle of a block,
  or wrong (step 2), so that it is always a bonus token.
  """
  eos = 40
  offsets = range(2 * (g + 1) + 1)
  for temperature in TEMPERATURES:
    generation = generate(
      _counting(),
      jax.random.key(0),
      [[eos - 1 - offset] for offset in offsets],
      max_new_tokens=50,
      draft=_counting(step),
      num_draft_tokens=g,
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


@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_eos_in_the_middle_of_gpt2_text(temperature):
  """With a real cache, rows done early must leave the others alone."""
  eos = 11
  lengths = set()
  for seed in range(5):
    arguments = {
      'prompts': tiny_models.prompts(2, seed),
      'rng_key': tiny_models.row_keys(2, seed),
    }
    plain = _generate(2, [temperature] * 2, **arguments).tokens
    chain = _generate(
      2, [temperature] * 2, 'similar', 3, eos_ids=[eos], **arguments
    )
    expected = [
      row[: row.index(eos) + 1] if eos in row else row for row in plain
    ]
    assert chain.tokens == expected
    lengths |= {len(row) for row in expected}
  assert len(lengths) >= 6, 'the EOS should come at many places'
