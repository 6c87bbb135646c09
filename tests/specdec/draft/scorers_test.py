"""Estimates of scorers about nodes, against the same in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import list_trees
import numpy as np
import pytest
import tiny_drafters

import specdec
from specdec import arguments as arguments_lib
from specdec import carried as carried_lib
from specdec import sampling as sampling_lib
from specdec.ngram import table as table_lib
from specdec.tree import topology as topology_lib

_NUM_TOKENS = list_trees.NUM_TOKENS
_MAX_LENGTH = 20
_WIDTH = 4

_propose = jax.jit(
  lambda proposer, *args: proposer.propose((), specdec.Query(*args))
)


def _said(tokens, log_probs):
  """The guesses of each node, as (token, log-probability)."""
  return [
    [pair for pair in zip(*row, strict=True) if pair[1] > sampling_lib.EXCLUDED]
    for row in zip(tokens.tolist(), log_probs.tolist(), strict=True)
  ]


def _random_case(rng, length=None):
  """A text, a tree below its last token, and nodes of it."""
  length = int(rng.integers(1, _MAX_LENGTH + 1)) if length is None else length
  # Garbage after the text is likely to match.
  tokens = np.int32(rng.integers(_NUM_TOKENS, size=_MAX_LENGTH))
  nodes = list_trees.random_tree(rng)
  nodes[0] = dataclasses.replace(nodes[0], token=int(tokens[length - 1]))
  chosen = rng.integers(len(nodes), size=_WIDTH).astype(np.int32)
  return tokens, length, nodes, chosen


def _path(tokens, length, nodes, node):
  """All tokens up to a node."""
  below = [nodes[index].token for index in reversed(list_trees.up(nodes, node))]
  return tokens[: length - 1].tolist() + below


# Prompt lookup.


def _slow_lookup(proposer, text, path):
  """Tokens that followed the best matches of the end of a path in a text."""
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


def test_lookup_against_a_loop():
  for proposer in (
    specdec.PromptLookup(),
    specdec.PromptLookup((0.5,), num_matches=1),
    specdec.PromptLookup((0.0, 0.3, 0.9), num_matches=8),
    specdec.PromptLookup((0.2, 0.0, 0.9), num_matches=50),
  ):
    rng, numbers = np.random.default_rng(0), set()
    for _ in range(60):
      tokens, length, nodes, chosen = _random_case(rng)
      given = list_trees.to_arrays(nodes), chosen, tokens, length
      text = tokens[:length].tolist()
      said = _said(*_propose(proposer, *given))
      for row, node in zip(said, chosen, strict=True):
        path = _path(tokens, length, nodes, node)
        expected = _slow_lookup(proposer, text, path)
        assert len(row) == len(expected)
        # Tokens are integers, and the tolerance is far below 1.
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)
        assert sum(np.exp(log_prob) for _, log_prob in row) <= 1
        numbers.add(len(row))
    assert 0 in numbers
    assert max(numbers) >= min(proposer.num_matches, list_trees.NUM_TOKENS - 1)


def test_bad_settings_of_lookup():
  for settings, words in (
    (((0.5, 1.0),), 'at least 0 and below 1'),
    (((-0.1,),), 'at least 0 and below 1'),
    (((),), 'needs an entry'),
    (((0.5,), 0), 'of at least 1, got 0'),
  ):
    with pytest.raises(ValueError, match=words):
      specdec.PromptLookup(*settings)


# N-grams.

_find_context = jax.jit(table_lib.find_context)


@pytest.mark.parametrize('order', [1, 4])
def test_an_ngram_table_is_asked_about_the_path(order):
  rng = np.random.default_rng(order)
  text = rng.integers(list_trees.NUM_TOKENS, size=60).tolist()
  table = tiny_drafters.ngram_table(
    [text], list_trees.NUM_TOKENS, order=order, num_continuations=3
  )
  proposer, contexts = specdec.NGram(table), set()
  for _ in range(30):
    tokens, length, nodes, chosen = _random_case(rng)
    said = _propose(
      proposer, list_trees.to_arrays(nodes), chosen, tokens, length
    )
    for place, node in enumerate(chosen):
      path = _path(tokens, length, nodes, node)
      history = [*reversed(path), *[-1] * order][: order - 1]
      index = _find_context(table, np.array(history, np.int32))
      stored = table.next_tokens, table.next_log_probs
      for values, other in zip(said, stored, strict=True):
        np.testing.assert_array_equal(values[place], other[index])
      contexts.add(int(index))
  assert order == 1 or len(contexts) >= list_trees.NUM_TOKENS


# Several proposers as one scorer.


def _bigrams(rng, num_candidates, total, name):
  """Distinct tokens, some of them missing."""
  shape = (_NUM_TOKENS, num_candidates)
  tokens = np.argsort(rng.random((_NUM_TOKENS,) * 2))[:, :num_candidates]
  probs = total * rng.dirichlet(np.ones(num_candidates), size=_NUM_TOKENS)
  log_probs = np.where(rng.random(shape) < 0.3, specdec.EXCLUDED, np.log(probs))
  arrays = jnp.asarray(tokens, jnp.int32), jnp.asarray(log_probs, jnp.float32)
  return tiny_drafters.BigramTable(*arrays, name)


def _slow_merge(proposers):
  """One table that says what they say; each shares what earlier ones left.

  Also `[V, V]`, who was the first to propose a token after a token.
  """
  probs = np.zeros((_NUM_TOKENS, _NUM_TOKENS))
  sources, left = np.full(probs.shape, -1), np.ones(_NUM_TOKENS)
  for source, proposer in enumerate(proposers):
    shared = np.zeros(_NUM_TOKENS)
    for last, row in enumerate(_said(proposer.tokens, proposer.log_probs)):
      for token, log_prob in row:
        shared[last] += left[last] * np.exp(log_prob)
        probs[last, token] += left[last] * np.exp(log_prob)
        if sources[last, token] < 0:
          sources[last, token] = source
    left = np.maximum(left - shared, 1e-6)
  logs = np.where(probs > 0, np.log(np.maximum(probs, 1e-9)), specdec.EXCLUDED)
  tokens = np.tile(np.arange(_NUM_TOKENS, dtype=np.int32), (_NUM_TOKENS, 1))
  table = tiny_drafters.BigramTable(tokens, logs.astype(np.float32))
  return table, sources


@functools.partial(jax.jit, static_argnums=4)
def _score(scorer, tree, ctx, nodes, config):
  """The `Scores`, with `log_prob_of` of the children in the tree."""
  scores, _ = scorer.score((), tree, nodes, ctx, config)
  place = jnp.argmax(tree.parent[:, :, None] == nodes[:, None], axis=2)
  return vars(scores) | {'log_prob_of': scores.log_prob_of(place, tree.token)}


def _context(rng, tokens, length, temperatures):
  shape = (len(temperatures), list_trees.CAPACITY + 1, list_trees.NUM_TOKENS)
  stochastic = np.array(temperatures)[:, None, None] > 0
  noise = (rng.gumbel(size=shape) * stochastic).astype(np.float32)
  return list_trees.match_context(
    tokens, length, noise, _params(temperatures), shape=topology_lib.TreeShape()
  )


def _params(temperatures, **kw):
  sampling = specdec.Sampling(temperature=temperatures, **kw)
  return arguments_lib.to_params(sampling, len(temperatures), 8)


def test_merging_proposers():
  """Later ones share what is left; equal tokens are one, of the first."""
  rng, num_proposers = np.random.default_rng(0), 3
  config = specdec.StageConfig(branching=3, calibration=0.7)
  temperatures = (0.0, 1.0, 2.5)
  doubled, names = 0, 'abc'[:num_proposers]
  for _ in range(10):
    shares = rng.choice([0.5, 0.9, 1.0], size=num_proposers)
    proposers = [
      _bigrams(rng, 3, share, name)
      for share, name in zip(shares, names, strict=True)
    ]
    scorer = specdec.CandidateScorer(tuple(proposers))
    assert scorer.facts.labels == tuple(names)
    table, source_of = _slow_merge(proposers)
    doubled += sum(proposer.tokens.size for proposer in proposers)
    doubled -= np.sum(source_of >= 0)
    tokens, length, trees, nodes = zip(
      *(_random_case(rng) for _ in temperatures), strict=True
    )
    tokens, length, nodes = map(np.array, (tokens, length, nodes))
    nodes[:, 2] = -1
    tree = list_trees.stack(list(map(list_trees.to_arrays, trees)))
    ctx = _context(rng, tokens, length, temperatures)
    scores, expected = (
      jax.device_get(_score(each_scorer, tree, ctx, nodes, config))
      for each_scorer in (scorer, specdec.CandidateScorer((table,)))
    )
    np.testing.assert_array_equal(scores['nodes'], nodes)
    assert not np.any(scores['slots_read'])
    edges, said = scores['cond_log_probs'], scores['tokens']
    possible = expected['cond_log_probs'] > sampling_lib.EXCLUDED
    assert not possible[:, 2].any()
    np.testing.assert_array_equal(edges > sampling_lib.EXCLUDED, possible)
    np.testing.assert_array_equal(said[possible], expected['tokens'][possible])
    last = np.take_along_axis(tree.token, np.maximum(nodes, 0), axis=1)
    sources = source_of[last[:, :, None], said]
    np.testing.assert_array_equal(
      scores['sources'][possible], sources[possible]
    )
    # Also what it says about children that are in the tree already.
    for name in ('cond_log_probs', 'log_prob_of'):
      np.testing.assert_allclose(
        scores[name], expected[name], rtol=1e-3, atol=1e-3
      )
  assert doubled > 100


# Block drafters.


def test_a_block_drafter_by_hand():
  """Scores of a later round, of nodes at depths 1 and 2; it drafts two."""
  rng, size, depth = np.random.default_rng(0), _NUM_TOKENS, 2
  marginals, edges = (
    rng.normal(size=(depth, size)),
    rng.normal(size=(size,) * 2),
  )
  made = tiny_drafters.block_table(marginals, edges)
  spec = dataclasses.replace(
    made.drafter.spec,
    num_candidates=3,
    confidence=lambda params, states, parents: states[..., 0],
  )
  scorer = made.replace(drafter=made.drafter.replace(spec=spec))
  text = np.array([[2, 1, 0]], np.int32)
  hidden = {0: jax.nn.one_hot(text, size)[:, None]}
  hidden = carried_lib.HiddenStates(hidden, jnp.zeros(1, jnp.int32))
  texts = carried_lib.Texts(text, np.array([3]), 20, hidden=hidden)
  state = scorer.start(texts, 1)
  assert state.tokens.shape == (1, depth, 3)
  assert state.cache.num_slots >= texts.num_slots + spec.block_size
  best = np.argsort(-marginals)[:, :3]
  state = state.replace(
    tokens=jnp.asarray(best[None], jnp.int32),
    scores=jnp.float32(np.take_along_axis(marginals, best, axis=1)[None]),
    states=jnp.array([[[0.2], [0.6]]]),
  )
  nodes = [list_trees.Node(0)]
  for parent, token in enumerate((3, 1)):
    nodes.append(list_trees.child(nodes, parent, token, -0.5, 0))
  noise = rng.gumbel(size=(1, 4, size)).astype(np.float32)
  ctx = list_trees.match_context(
    jnp.asarray(text),
    texts.length,
    noise,
    _params([1.0]),
    shape=topology_lib.TreeShape(),
    hidden=hidden,
  )
  config = specdec.StageConfig(branching=3, calibration=0.4)
  tree = list_trees.stack([list_trees.to_arrays(nodes)])

  @jax.jit
  def score(*args):
    scores, _ = scorer.score(*args, config)
    work = scores.forwards, scores.slots_read
    return scores.tokens[0], scores.cond_log_probs[0], work

  tokens, cond_log_probs, work = score(state, tree, np.array([[1, 2]]), ctx)
  log_softmax = lambda x: x - np.log(np.exp(x).sum())
  log_probs = log_softmax((marginals[1] + edges[3])[best[1]])
  expected = log_softmax(0.4 * (log_probs + noise[0, 1, best[1]]))
  order = np.argsort(-expected)
  assert tokens[0].tolist() == best[1][order].tolist()
  np.testing.assert_allclose(
    cond_log_probs[0], expected[order] + np.log(0.6), rtol=1e-4
  )
  assert (cond_log_probs[1] == sampling_lib.EXCLUDED).all()
  assert not np.any(np.concatenate([np.ravel(array) for array in work]))
