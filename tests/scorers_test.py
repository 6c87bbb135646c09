"""What scorers say about nodes, against the same in plain Python."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
from list_trees import CAPACITY
from list_trees import match_context
from list_trees import Node
from list_trees import NUM_TOKENS
from list_trees import random_tree
from list_trees import stack
from list_trees import to_arrays
from list_trees import up
import numpy as np
import pytest
import tiny_drafters
from tiny_drafters import BigramTable

from specdec import CandidateScorer
from specdec import NGram
from specdec import PromptLookup
from specdec import Sampling
from specdec import StageConfig
from specdec.checks import check_sampling
from specdec.draft.ngram import recent_tokens
from specdec.draft.ranking import rank_candidates
from specdec.draft.ranking import rank_logits
from specdec.ngram.table import find_context
from specdec.sampling import EXCLUDED
from specdec.tree.topology import TreeShape

_EULER_GAMMA = 0.5772157
_MAX_LENGTH = 20
_WIDTH = 4

_propose = jax.jit(lambda proposer, *args: proposer.propose(*args))


def _said(tokens, log_probs):
  """The guesses of each node, as (token, log-probability)."""
  return [
    [
      (token, log_prob)
      for token, log_prob in zip(row, probs, strict=True)
      if log_prob > EXCLUDED / 2
    ]
    for row, probs in zip(tokens.tolist(), log_probs.tolist(), strict=True)
  ]


def _assert_same_guesses(actual, expected):
  for one, other in zip(actual, expected, strict=True):
    assert len(one) == len(other)
    # Tokens are integers, and the tolerance is far below 1.
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _random_case(rng, length=None):
  """A text, a tree below its last token, and nodes of it."""
  length = int(rng.integers(1, _MAX_LENGTH + 1)) if length is None else length
  # What is behind the text is garbage, and likely to match.
  tokens = rng.integers(NUM_TOKENS, size=_MAX_LENGTH).astype(np.int32)
  nodes = random_tree(rng)
  nodes[0] = dataclasses.replace(nodes[0], token=int(tokens[length - 1]))
  chosen = rng.integers(len(nodes), size=_WIDTH).astype(np.int32)
  return tokens, length, nodes, chosen


def _path(tokens, length, nodes, node):
  """All tokens up to a node."""
  below = [nodes[index].token for index in reversed(up(nodes, node))]
  return tokens[: length - 1].tolist() + below


# Prompt lookup.


def _slow_lookup(proposer, text, path):
  """What followed the best matches of the end of a path in a text."""
  matches = []
  for end in range(1, len(text)):  # a match is text[start:end]
    longest = 0
    for size in range(1, len(proposer.confidence) + 1):
      if size <= min(end, len(path)) and text[end - size : end] == path[-size:]:
        longest = size
    if longest and proposer.confidence[longest - 1] > 0:
      matches.append((longest, end, text[end]))
  said, left = {}, 1.0
  for size, _, token in sorted(matches, reverse=True)[: proposer.num_matches]:
    if token not in said:
      p = proposer.confidence[size - 1]
      said[token] = np.log(p * left)
      left *= 1 - p
  return list(said.items())


@pytest.mark.parametrize(
  'proposer',
  [
    PromptLookup(),
    PromptLookup((0.5,), num_matches=1),
    PromptLookup((0.0, 0.3, 0.9), num_matches=8),
    PromptLookup((0.2, 0.0, 0.9), num_matches=50),
  ],
)
def test_lookup_against_a_loop(proposer):
  rng = np.random.default_rng(0)
  numbers = set()
  for _ in range(60):
    tokens, length, nodes, chosen = _random_case(rng)
    actual = _said(
      *_propose(proposer, to_arrays(nodes), chosen, tokens, jnp.asarray(length))
    )
    expected = [
      _slow_lookup(
        proposer,
        tokens[:length].tolist(),
        _path(tokens, length, nodes, node),
      )
      for node in chosen
    ]
    _assert_same_guesses(actual, expected)
    numbers |= {len(row) for row in expected}
    for row in actual:
      assert sum(np.exp(log_prob) for _, log_prob in row) <= 1
  assert 0 in numbers
  assert max(numbers) >= min(proposer.num_matches, NUM_TOKENS - 1)


def _looked_up(text, proposer, capacity=30):
  """After the last token of a text of letters."""
  tokens = np.full(capacity, ord('?'), np.int32)
  tokens[: len(text)] = [ord(letter) for letter in text]
  tree = to_arrays([Node(ord(text[-1]))])
  said = _said(
    *_propose(proposer, tree, jnp.array([0]), tokens, jnp.asarray(len(text)))
  )[0]
  return [(chr(token), float(np.exp(log_prob))) for token, log_prob in said]


def test_lookup_by_hand():
  proposer = PromptLookup((0.1, 0.5, 0.8), num_matches=3)
  letters = lambda text: [letter for letter, _ in _looked_up(text, proposer)]
  # Both letters beat one, and the most recent of equals comes first.
  assert letters('abx cby abz b') == ['z', 'y', 'x']
  assert letters('abx cby bbz ab') == ['x', 'z', 'b']
  # The match that was looked for is not itself a match.
  assert letters('abc') == []
  assert letters('a') == []
  assert letters('aa') == ['a']
  # At the start of the text a match is as long as the text is.
  assert letters('abcab') == ['c']
  # What follows two of the matches is one guess.
  assert letters('axqayraxsa') == ['x', 'y']
  found = _looked_up('xby xbz ab', proposer)
  np.testing.assert_allclose([prob for _, prob in found], [0.1, 0.9 * 0.1])
  found = _looked_up('cabx by ab', proposer)
  np.testing.assert_allclose([prob for _, prob in found], [0.5, 0.5 * 0.1])
  assert [letter for letter, _ in found] == ['x', 'y']
  # Matches of one letter are not good enough, if the confidence is 0.
  sure = PromptLookup((0.0, 0.5), num_matches=3)
  assert [letter for letter, _ in _looked_up('cabx by ab', sure)] == ['x']


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'confidence': ()}, 'confidence needs an entry'),
    ({'confidence': (0.5, 1.0)}, 'at least 0 and below 1'),
    ({'confidence': (-0.1,)}, 'at least 0 and below 1'),
    ({'num_matches': 0}, 'num_matches must be at least 1, got 0'),
  ],
)
def test_bad_settings_of_lookup(arguments, message):
  with pytest.raises(ValueError, match=message):
    PromptLookup(**arguments)


# N-grams.

_find_context = jax.jit(find_context)


def test_recent_tokens():
  tokens = jnp.array([5, 6, 7, 8])
  recent = lambda length, number: recent_tokens(
    tokens, jnp.array(length), number
  ).tolist()
  assert recent(3, 2) == [7, 6]
  assert recent(1, 3) == [5, -1, -1]
  assert recent(4, 0) == []


@pytest.mark.parametrize('order', [1, 2, 3, 5])
def test_an_ngram_table_is_asked_about_the_path(order):
  rng = np.random.default_rng(order)
  text = rng.integers(NUM_TOKENS, size=60).tolist()
  table = tiny_drafters.ngram_table(
    [text], NUM_TOKENS, order=order, num_continuations=3
  )
  proposer = NGram(table)
  lengths = set()
  for _ in range(30):
    tokens, length, nodes, chosen = _random_case(rng)
    said, log_probs = _propose(
      proposer, to_arrays(nodes), chosen, tokens, jnp.asarray(length)
    )
    for place, node in enumerate(chosen):
      path = _path(tokens, length, nodes, node)
      # The longest context of the path that was in the text.
      for size in range(min(order - 1, len(path)), -1, -1):
        context = path[len(path) - size :]
        followers = [
          text[end]
          for end in range(size, len(text))
          if text[end - size : end] == context
        ]
        if followers:
          break
      lengths.add(size)
      history = [*reversed(path), *[-1] * order][: order - 1]
      index = _find_context(table, np.array(history, np.int32))
      np.testing.assert_array_equal(said[place], table.next_tokens[index])
      np.testing.assert_array_equal(
        log_probs[place], table.next_log_probs[index]
      )
      counts = {token: followers.count(token) for token in followers}
      best = _said(said[place : place + 1], log_probs[place : place + 1])[0]
      assert len(best) == min(3, len(counts))
      for token, log_prob in best:
        share = 0.95 * counts[token] / len(followers)
        np.testing.assert_allclose(np.exp(log_prob), share, rtol=1e-4)
  assert max(lengths) == order - 1
  assert len(lengths) > 1 or order < 3


# Several proposers as one scorer.


def _bigrams(rng, num_candidates, total, name):
  """Distinct tokens, some of them missing."""
  shape = (NUM_TOKENS, num_candidates)
  tokens = np.argsort(rng.random((NUM_TOKENS, NUM_TOKENS)))[:, :num_candidates]
  probs = total * rng.dirichlet(np.ones(num_candidates), size=NUM_TOKENS)
  log_probs = np.where(rng.random(shape) < 0.3, EXCLUDED, np.log(probs))
  return BigramTable(
    jnp.asarray(tokens, jnp.int32), jnp.asarray(log_probs, jnp.float32), name
  )


def _slow_merge(proposers, last):
  """`{token: (probability, source)}`; each shares what those before left."""
  merged, left = {}, 1.0
  for source, one in enumerate(proposers):
    shared = 0.0
    for token, log_prob in zip(
      one.tokens[last].tolist(), one.log_probs[last].tolist(), strict=True
    ):
      if log_prob > EXCLUDED / 2:
        prob = left * np.exp(log_prob)
        shared += prob
        before, first = merged.get(token, (0.0, source))
        merged[token] = (before + prob, first)
    left = max(left - shared, 1e-6)
  return merged


def _ranked(merged, noise, temperature, calibration):
  """The formula of `specdec.ranking`: the rest is one token more."""
  tokens = list(merged)
  probs = np.array([merged[token][0] for token in tokens])
  rest = max(1 - probs.sum(), 1e-6)
  scores = np.log(probs) / (temperature or 1.0) + noise[tokens]
  other = np.log(rest) / (temperature or 1.0)
  other += _EULER_GAMMA if temperature else 0.0
  scores = calibration * np.append(scores, other)
  ranked = scores - np.logaddexp.reduce(scores)
  return dict(zip(tokens, ranked, strict=False))


@functools.partial(jax.jit, static_argnums=4)
def _score(scorer, tree, ctx, nodes, config):
  """The `Scores`, and the numbers of the children in the tree."""
  scores, _ = scorer.score((), tree, nodes, ctx, config)
  is_child = tree.parent[:, :, None] == nodes[:, None]
  fields = {
    field.name: getattr(scores, field.name)
    for field in dataclasses.fields(scores)
  }
  log_prob_of = fields.pop('log_prob_of')
  return fields | {
    'given': log_prob_of(jnp.argmax(is_child, axis=2), tree.token)
  }


def _context(rng, tokens, length, temperatures):
  shape = (len(temperatures), CAPACITY + 1, NUM_TOKENS)
  stochastic = np.array(temperatures)[:, None, None] > 0
  noise = (rng.gumbel(size=shape) * stochastic).astype(np.float32)
  return match_context(
    tokens, length, noise, _params(temperatures), shape=TreeShape()
  )


def _params(temperatures, **kw):
  sampling = Sampling(temperature=temperatures, **kw)
  return check_sampling(sampling, len(temperatures), 8)


@pytest.mark.parametrize('num_proposers', [1, 2, 3])
def test_merging_proposers(num_proposers):
  """Later ones share what is left; equal tokens are one, of the first."""
  rng = np.random.default_rng(num_proposers)
  config = StageConfig(branching=3, calibration=1.7)
  temperatures = (0.0, 1.0, 0.6)
  doubled = 0
  for _ in range(10):
    proposers = [
      _bigrams(rng, 3, total, name)
      for total, name in zip(
        rng.choice([0.5, 0.9, 1.0], size=num_proposers), 'abc', strict=False
      )
    ]
    scorer = CandidateScorer(tuple(proposers))
    assert scorer.labels == tuple('abc'[:num_proposers])
    cases = [_random_case(rng) for _ in temperatures]
    tokens = np.stack([case[0] for case in cases])
    length = np.array([case[1] for case in cases])
    nodes = np.stack([case[3] for case in cases])
    nodes[:, 2] = -1
    tree = stack([to_arrays(case[2]) for case in cases])
    ctx = _context(rng, tokens, length, temperatures)
    scores = jax.device_get(_score(scorer, tree, ctx, nodes, config))
    scores = types.SimpleNamespace(**scores)
    np.testing.assert_array_equal(scores.nodes, nodes)
    assert scores.slots_read.tolist() == [0] * len(temperatures)
    possible = scores.cond_log_probs > EXCLUDED / 2
    assert not possible[:, 2].any()
    for row, place in itertools.product(range(3), (0, 1, 3)):
      one, node = cases[row][2], nodes[row, place]
      merged = _slow_merge(proposers, one[node].token)
      doubled += sum(
        sum(token in one.tokens[3].tolist() for one in proposers) > 1
        for token in merged
      )
      assert sum(prob for prob, _ in merged.values()) <= 1 + 1e-4
      noise = ctx.randomness.noise[row, one[node].depth]
      ranked = _ranked(merged, noise, temperatures[row], config.calibration)
      best = sorted(ranked, key=lambda token: -ranked[token])[:3]
      kept = possible[row, place]
      assert scores.tokens[row, place][kept].tolist() == best
      np.testing.assert_allclose(
        scores.cond_log_probs[row, place][kept],
        [ranked[token] for token in best],
        rtol=1e-3,
        atol=1e-3,
      )
      assert scores.sources[row, place][kept].tolist() == [
        merged[token][1] for token in best
      ]
      # And what it says about children that are in the tree already.
      for index, below in enumerate(one):
        if below.parent == node:
          expected = ranked.get(below.token, EXCLUDED)
          np.testing.assert_allclose(
            scores.given[row, index], expected, rtol=1e-3, atol=1e-3
          )
  assert (doubled > 20) == (num_proposers > 1)


def test_proposers_that_know_everything_leave_nothing():
  """Probabilities add up to 1, not to more, whatever comes after."""
  sure = BigramTable(
    jnp.array([[0, 1], [1, 0]]), jnp.log(jnp.array([[1.0, 0.0], [0.25, 0.75]]))
  )
  scorer = CandidateScorer((sure, sure.replace(name='again')))
  tree = stack([to_arrays([Node(token)]) for token in (0, 1)])
  ctx = _context(
    np.random.default_rng(0),
    np.zeros((2, 4), np.int32),
    np.ones(2, int),
    (0.0,) * 2,
  )
  nodes = np.zeros((2, 1), np.int32)
  scores = types.SimpleNamespace(
    **_score(scorer, tree, ctx, nodes, StageConfig(branching=4))
  )
  edges = np.asarray(scores.cond_log_probs)[:, 0]
  probs = np.where(edges > EXCLUDED / 2, np.exp(edges), 0).sum(axis=1)
  np.testing.assert_allclose(probs, [1, 1], atol=1e-4)
  assert (edges <= 0).all()
  assert scores.tokens[1, 0, 0] == 0
  np.testing.assert_allclose(np.exp(edges[1, :2]), [0.75, 0.25], atol=1e-4)


def test_sizes_are_those_of_the_proposers():
  table = tiny_drafters.ngram_table(
    [[0, 1, 2]], 3, order=2, num_continuations=2
  )
  both = CandidateScorer((PromptLookup(), NGram(table)))
  assert both.labels == ('lookup', 'ngram')
  assert both.vocab_size == 3
  assert CandidateScorer((PromptLookup(),)).vocab_size is None
  assert both.bytes_per_forward(5) == 5 * table.lookup_bytes > 0
  assert both.bytes_per_slot == 0
  assert both.init(None, None, num_slots=3, num_scored=4) == ()


# Ranks.


_rank_logits = jax.jit(rank_logits, static_argnums=4)


@pytest.mark.parametrize('calibration', [0.5, 1.0, 3.0])
def test_ranking_logits(calibration):
  """Each row at its own temperature; what is filtered out is impossible."""
  rng = np.random.default_rng(0)
  temperatures = np.array([0.0, 1.0, 0.5])
  shape = (3, 2, 9)
  logits = 3 * rng.normal(size=shape)
  noise = rng.gumbel(size=shape) * (temperatures > 0)[:, None, None]
  sampling = _params(temperatures, top_k=4)
  ranking = _rank_logits(
    logits.astype(np.float32),
    noise.astype(np.float32),
    sampling,
    jnp.float32(calibration),
    3,
  )
  ranked = np.asarray(ranking.scores - ranking.log_total)
  best = np.asarray(ranking.best_log_probs)
  np.testing.assert_allclose(best, -np.sort(-ranked)[..., :3])
  np.testing.assert_allclose(
    best, np.take_along_axis(ranked, np.asarray(ranking.tokens), axis=-1)
  )
  for row, place in itertools.product(range(3), range(2)):
    kept = np.argsort(-logits[row, place])[:4]
    scaled = logits[row, place] / (temperatures[row] or 1.0)
    scores = calibration * (scaled + noise[row, place])[kept]
    expected = scores - np.logaddexp.reduce(scores)
    np.testing.assert_allclose(
      ranked[row, place, kept], expected, rtol=1e-3, atol=1e-4
    )
    others = np.delete(ranked[row, place], kept)
    assert (others < EXCLUDED * calibration / 2).all()
  assert (best <= 0).all()


def test_the_likeliest_token_is_the_one_that_is_chosen():
  """A draft that equals its target ranks the target's choice first."""
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(2, 50, 8)).astype(np.float32)
  noise = rng.gumbel(size=logits.shape).astype(np.float32)
  noise[0] = 0
  sampling = _params([0.0, 0.7])
  ranked = rank_logits(logits, noise, sampling, 0.6, 1).scores
  scaled = logits / np.array([1.0, 0.7], np.float32)[:, None, None]
  np.testing.assert_array_equal(
    np.argmax(ranked, axis=-1), np.argmax(scaled + noise, axis=-1)
  )


def test_what_is_no_candidate_stays_so():
  log_probs = np.array([[[np.log(0.5), EXCLUDED]]], np.float32)
  ranked = rank_candidates(
    log_probs,
    np.zeros_like(log_probs),
    _params([2.0]),
    0.5,
    shares_noise=True,
  )
  assert ranked[0, 0, 1] == np.float32(EXCLUDED)


def test_ranks_know_the_noise_of_the_candidates():
  """Which of them it would be, and how likely it is to be one of them."""
  rng = np.random.default_rng(3)
  probs = np.array([0.5, 0.2])
  number = 20_000
  noise = rng.gumbel(size=(1, number, 8)).astype(np.float32)
  log_probs = np.broadcast_to(np.log(probs), (1, number, 2))
  ranked = rank_candidates(
    log_probs.astype(np.float32),
    noise[..., :2],
    _params([1.0]),
    1.0,
    shares_noise=True,
  )
  everything = np.concatenate([probs, np.full(6, 0.05)])
  chosen = np.argmax(np.log(everything) + noise[0], axis=-1)
  among = chosen < 2
  best = np.asarray(ranked[0]).argmax(axis=-1)
  np.testing.assert_array_equal(chosen[among], best[among])
  total = np.exp(np.asarray(ranked[0])).sum(axis=-1)
  assert total[among].mean() > total[~among].mean() + 0.1
  np.testing.assert_allclose(total.mean(), among.mean(), atol=0.05)
