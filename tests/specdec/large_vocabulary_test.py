"""Vocabularies of real size, where XLA adds and compares in other orders."""

import functools
import itertools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_drafters

import specdec
from specdec import arguments as arguments_lib
from specdec import best as best_lib
from specdec import cache as cache_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec.draft import ranking as ranking_lib

_SIZE = 151_936
_NUM_ROWS = 8

# Logits of the tokens that have most of the probability; all others together
# have as much as two of these.
_HEAD = np.log(np.arange(12, 0, -1))


@functools.cache
def _base():
  """`[V]` float32, the head at random places, among noise."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=_SIZE)
  logits += np.log(12 / np.exp(logits).sum())
  logits = np.minimum(logits, -0.01)
  logits[rng.choice(_SIZE, len(_HEAD), replace=False)] = _HEAD
  return logits.astype(np.float32)


@functools.cache
def _rows():
  """`[rows, V]`, the same logits in other orders."""
  shifts = 7919 * np.arange(_NUM_ROWS)
  return np.stack([np.roll(_base(), shift) for shift in shifts])


def _edge(rank):
  """The float32 top-p at which the token of a rank is kept, or just not."""
  weights = np.exp(np.float64(_base()))
  probs = np.sort(weights)[::-1] / weights.sum()
  return np.float32(probs[:rank].sum())


def _around(value):
  """A float32 and its two neighbours."""
  below, above = np.nextafter(value, np.float32([0, 1]))
  return below, value, above


def _params(batch_size, vocab_size=_SIZE, **filters):
  filters = specdec.Sampling(**{'temperature': 1.0} | filters)
  return arguments_lib.to_params(filters, batch_size, vocab_size)


@jax.jit
def _best_log_prob(logits, noise, params):
  ranking = ranking_lib.rank_logits(logits, noise, params, 1.0, 1)
  return ranking.best_log_probs[:, 0, 0]


@jax.jit
def _decisions(logits, positions, params, keys):
  """All that decides about tokens, for `logits [B, W, V]`."""
  noise = randomness_lib.DrawnNoise(positions, params.is_stochastic)
  nodes = jnp.zeros(logits.shape[:2], jnp.int32)
  children = sampling_lib.WITHOUT_REPLACEMENT
  return (
    sampling_lib.filter_logits(logits, params),
    sampling_lib.choose(logits, noise, params),
    sampling_lib.token_probs(logits, params),
    sampling_lib.log_softmax(logits),
    *ranking_lib.draw_children(
      logits, nodes, keys, params, 4, children=children
    ),
  )


def test_a_row_has_the_same_bits_in_every_shape():
  """With top-p at the edge of what is kept, and one unit to either side."""
  logits = _rows()
  positions = jax.random.split(jax.random.key(1), len(logits))
  for top_p in (*_around(_edge(6)), _edge(400)):
    by_shape = []
    for batch_size, width in ((1, 1), (1, 8), (8, 1)):
      params = _params(batch_size, top_p=top_p)
      keys = jnp.tile(jax.random.key(0)[None], batch_size)
      shape = (-1, batch_size, width)
      shaped = logits.reshape(*shape, _SIZE), positions.reshape(shape)
      pairs = zip(*shaped, strict=True)
      results = [_decisions(*arrays, params, keys) for arrays in pairs]
      flat = lambda *parts: np.concatenate(
        [np.asarray(part).reshape(-1, *part.shape[2:]) for part in parts]
      )
      by_shape.append(jax.tree.map(flat, *results))
    for other in by_shape[1:]:
      jax.tree.map(np.testing.assert_array_equal, by_shape[0], other)


@pytest.mark.parametrize('rank', [3, 257, 400])
def test_top_p_keeps_what_the_definition_says(rank):
  """Halfway between two edges; a sum in 16 bits would be elsewhere.

  The 256 most likely tokens are looked at first.
  """
  params = _params(1, top_p=(_edge(rank - 1) + _edge(rank)) / 2)
  kept = jax.jit(sampling_lib.filter_logits)(_base()[None], params)[0]
  expected = _base() >= np.sort(_base())[-rank]
  np.testing.assert_array_equal(kept > sampling_lib.EXCLUDED, expected)


@functools.partial(jax.jit, static_argnames='number')
def _ranked(logits, keys, params, proposed, of_tokens, *, number):
  noise = randomness_lib.DrawnNoise(keys, params.is_stochastic)
  ranking = ranking_lib.rank_logits(
    logits, noise, params, 0.7, number, proposed
  )
  index = jnp.zeros(of_tokens.shape, jnp.int32)
  log_probs = ranking.log_prob_of(index, of_tokens)
  return ranking.tokens, ranking.best_log_probs, log_probs


def test_ranks_among_what_is_proposed_are_those_among_all():
  rng, vocab_size = np.random.default_rng(0), 1000
  proposed = np.sort(rng.choice(vocab_size, 300, replace=False))
  logits = np.full((2, 1, vocab_size), -np.inf, np.float32)
  logits[..., proposed] = rng.normal(size=(2, 1, 300)).round(1)  # With ties.
  params = _params(2, vocab_size, temperature=[1.0, 0.0], top_p=0.8)
  keys = jax.random.split(jax.random.key(1), (2, 1))
  others = np.broadcast_to(np.arange(vocab_size), (2, vocab_size))
  rank = functools.partial(_ranked, logits, keys, params)
  expected = rank(None, others, number=4)
  ranked = rank(proposed, others, number=4)
  np.testing.assert_array_equal(ranked[0], expected[0])
  for array, other in zip(ranked[1:], expected[1:], strict=True):
    np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-5)
  # There are no more than these.
  assert rank(proposed[:3], others, number=4)[0].shape == (2, 1, 3)


class _OnlyOfFew(randomness_lib.DrawnNoise):
  """Noise by which the last token wins, if the noise of all tokens is read."""

  def of_all(self, vocab_size):
    last = jnp.where(jnp.arange(vocab_size) < vocab_size - 1, 0.0, jnp.inf)
    return jnp.broadcast_to(last, (*self.keys.shape, vocab_size))


@jax.jit
def _by_few(logits, keys, params):
  """Choices and ranks by noise of few tokens."""
  noise = _OnlyOfFew(keys, params.is_stochastic)
  ranking = ranking_lib.rank_logits(logits, noise, params, 0.7, 3)
  of_best = jax.vmap(ranking.log_prob_of, (None, 2), 2)(
    jnp.zeros(logits.shape[:2], jnp.int32), ranking.tokens
  )
  return (
    sampling_lib.choose(logits, noise, params),
    ranking.tokens,
    ranking.best_log_probs,
    of_best,
  )


@jax.jit
def _by_all(logits, keys, params):
  """The same by the scores of all tokens, with noise that JAX draws."""
  draw = lambda key: jax.random.gumbel(key, logits.shape[-1:])
  noise = jax.vmap(jax.vmap(draw))(keys)
  noise = jnp.where(params.is_stochastic[:, None, None], noise, 0.0)
  scores = sampling_lib.filter_logits(logits, params) + noise
  log_probs, tokens = lax.top_k(jax.nn.log_softmax(0.7 * scores), 3)
  return jnp.argmax(scores, axis=-1), tokens, log_probs, log_probs


@pytest.mark.parametrize(
  'filters',
  [{'top_p': 0.8}, {'min_p': 0.3}, {'top_k': 5, 'top_p': 0.8, 'min_p': 0.2}],
)
def test_where_filters_keep_few_tokens_only_their_noise_is_drawn(filters):
  logits = _rows()[:, None]
  for seed in range(3):
    keys = jax.random.split(jax.random.key(seed), (8, 1))
    params = _params(8, temperature=[1.0, 0.0] * 4, **filters)
    computed, expected = (
      function(logits, keys, params) for function in (_by_few, _by_all)
    )
    for array, other in zip(computed[:2], expected[:2], strict=True):
      np.testing.assert_array_equal(array, other)
    for array, other in zip(computed[2:], expected[2:], strict=True):
      np.testing.assert_allclose(array, other, atol=2e-6)


def test_where_filters_keep_many_tokens_all_noise_is_drawn():
  """Or if more tokens tie with the last than are looked at."""
  tied = np.zeros((1, 1, _SIZE), np.float32)
  tied[..., 5:] = -1.0
  for logits, filters in (
    (_base()[None, None], {'top_p': _edge(400)}),
    (tied, {'top_k': 64}),
  ):
    params = _params(1, temperature=2.0, **filters)
    keys = jax.random.split(jax.random.key(3), (1, 1))
    chosen, *_ = _by_few(logits, keys, params)
    assert chosen[0, 0] == _SIZE - 1
    noise = randomness_lib.DrawnNoise(keys, params.is_stochastic)
    chosen = jax.jit(sampling_lib.choose)(logits, noise, params)
    expected, *_ = _by_all(logits, keys, params)
    assert chosen[0, 0] == expected[0, 0] < _SIZE - 1


def test_noise_of_few_tokens_has_the_bits_of_jax():
  """They have the bits of `jax.random.gumbel` over a whole vocabulary."""
  keys = jax.random.split(jax.random.key(5), (2, 3))
  noise = randomness_lib.DrawnNoise(keys, np.array([True, True]))
  draw = lambda key: jax.random.gumbel(key, (_SIZE,))
  expected = np.asarray(jax.jit(jax.vmap(jax.vmap(draw)))(keys))
  of_all = jax.jit(lambda noise: noise.of_all(_SIZE))(noise)
  np.testing.assert_array_equal(of_all, expected)
  of_tokens = jax.jit(lambda noise, tokens: noise.of_tokens(tokens))
  rng = np.random.default_rng(0)
  for number in (1, 7, 255):
    tokens = rng.integers(_SIZE, size=(2, 3, number))
    few = np.take_along_axis(expected, tokens, axis=-1)
    np.testing.assert_array_equal(of_tokens(noise, tokens), few)


def test_the_best_are_found_in_blocks_as_by_a_sort():
  """Among equal scores the lowest tokens win, also from other blocks."""
  rng = np.random.default_rng(0)
  run = jax.jit(best_lib.top_k, static_argnums=1)
  for vocab_size, number in ((151_936, 3), (50_257, 256), (50_257, 500)):
    scores = rng.normal(size=(2, 3, vocab_size)).astype(np.float32)
    scores[1] = np.round(scores[1])
    scores[1, 2] = -np.inf
    scores[1, 2, [vocab_size - 1, 700]] = 1
    order = np.argsort(-scores, axis=-1, kind='stable')[..., :number]
    best, tokens = run(scores, number)
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(
      best, np.take_along_axis(scores, order, axis=-1)
    )
    best = jax.jit(best_lib.best_token)(scores)
    np.testing.assert_array_equal(best, order[..., 0])


def test_a_value_that_is_not_finite_is_seen():
  """Wherever it is; -inf alone in all is as bad, in some it is not."""
  places = (0, _SIZE // 2, _SIZE - 1)
  for place, value in itertools.product(places, (np.nan, np.inf)):
    logits = _rows()[:4].copy()
    logits[0, place] = value
    logits[1] = -np.inf
    logits[2, place] = -np.inf
    usable = jax.jit(sampling_lib.is_usable)(logits)
    np.testing.assert_array_equal(usable, [False, False, True, True])
    params = _params(4)
    no_noise = randomness_lib.noise_table(np.zeros_like(logits[:, None]))
    best = _best_log_prob(logits[:, None], no_noise, params)
    np.testing.assert_array_equal(best > sampling_lib.EXCLUDED, usable)


def _apply(params, tokens, positions, mask, cache):
  """Every token is followed by the same logits in another order."""
  del positions, mask
  places = jnp.arange(len(params))[None, None] - 7919 * tokens[..., None]
  return params[places % len(params)], cache


def test_a_whole_decode_at_the_edge_of_top_p():
  spec = specdec.ModelSpec(
    apply=_apply,
    init_cache=cache_lib.init_empty_cache,
    vocab_size=_SIZE,
    max_positions=64,
    weight_bytes=_SIZE,
    cache_bytes_per_slot=0,
  )
  model = specdec.LanguageModel(params=jnp.asarray(_base()), spec=spec)
  top_p = [*_around(_edge(6)), 1.0]
  plain, drafted = (
    specdec.generate(
      model,
      jax.random.key(0),
      [[1, 2], [3], [4, 5, 6], [7]],
      max_new_tokens=12,
      drafter=tiny_drafters.simple(kind, model),
      sampling=specdec.Sampling(temperature=1.0, top_p=top_p),
      log_probs=True,
    )
    for kind in ('plain', 'tree')
  )
  assert drafted.tokens == plain.tokens
  assert drafted.log_probs == plain.log_probs
  assert drafted.stats.block_efficiency > 1.5
