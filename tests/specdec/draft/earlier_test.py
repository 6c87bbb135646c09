"""Drafts from what was rated and said before, against plain Python."""

import bisect
import functools

import enumeration
import jax
import jax.numpy as jnp
import list_trees
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import carried as carried_lib
from specdec import loop
from specdec import sampling as sampling_lib
from specdec.draft import candidates
from specdec.draft import lookup as lookup_lib
from specdec.models.nn import table_model
from specdec.tree import topology as topology_lib

_V = 10
_L = lookup_lib.LONGEST_CONTEXT


def _proposed(proposer, state, path):
  """Tokens after a path that is all text, with their log-probabilities."""
  tree = list_trees.to_arrays([list_trees.Node(path[-1])])
  text = np.resize(path, 16)  # The text ends with the path.
  args = tree, jnp.zeros(1, jnp.int32), text, np.array(len(path))
  tokens, log_probs = _propose(proposer, state, *args)
  said = zip(tokens[0].tolist(), log_probs[0].tolist(), strict=True)
  return [pair for pair in said if pair[1] > sampling_lib.EXCLUDED]


@jax.jit
def _propose(proposer, state, *args):
  return proposer.propose(state, specdec.Query(*args))


# Recycling.


def test_recycling_against_a_loop():
  """Two rows; tokens share entries, and some nodes are missing or NaN."""
  rng, learner = np.random.default_rng(0), lookup_lib.Recycling(3, 4, trust=0.5)
  texts = carried_lib.Texts(np.zeros((2, 1), int), np.ones(2, int), 9)
  state, expected = learner.start(texts), [{}, {}]
  for _ in range(5):
    tokens = rng.integers(-1, _V, size=(2, 5))
    logits = rng.normal(size=(2, 5, _V)).astype(np.float32)
    logits[rng.random((2, 5)) < 0.2] = np.nan
    state = jax.jit(learner.observe)(
      state, carried_lib.Verified(tokens, logits)
    )
    for row, latest in enumerate(expected):
      for token, values in zip(tokens[row], logits[row], strict=True):
        if token >= 0 and not np.isnan(values).any():
          log_probs = values - np.log(2 * np.exp(values).sum())
          best = np.argsort(-values)[:3]
          latest[token % 4] = (
            token,
            [*zip(best, log_probs[best], strict=True)],
          )
    for row, latest in enumerate(expected):
      of_row = jax.tree.map(lambda array, row=row: array[row], state)
      for token in range(_V):
        said = _proposed(learner, of_row, [token])
        owner, best = latest.get(token % 4, (None, []))
        assert owner == token or not said
        if said:
          np.testing.assert_allclose(said, best, rtol=1e-5)


def test_a_step_shows_the_logits_of_every_node():
  """Rejected nodes, too; what follows depends on the last token alone."""
  logits = np.random.default_rng(1).normal(size=(_V, _V)).astype(np.float32)
  target = table_model.table_model(logits, max_positions=100)
  wrong = tiny_drafters.exact(np.roll(logits, 1, axis=1))
  drafter = tiny_drafters.candidates(
    wrong, lookup_lib.Recycling(2, size=16), config=tiny_drafters.TREE
  )
  request = enumeration.request(
    jax.random.split(jax.random.key(0), 2),
    jax.tree.map(
      lambda array: jnp.repeat(array, 2, axis=0),
      enumeration.full_sampling({}, _V),
    ),
    length=12,
  ).replace(limit=jnp.array([12, 0]))
  config = specdec.DecodeConfig(max_new_tokens=12)
  state = loop.start(target, drafter, request, config=config)
  state = loop.advance(target, drafter, request, state, 4, 2, config=config)
  _, table = state.stages[0].scorer.learned
  owners = np.asarray(table.owner)
  assert np.all(owners[1] == -1), 'a row that is done learns nothing'
  owning = owners[0][owners[0] >= 0]
  emitted = {*state.tokens[0, : state.length[0]].tolist()}
  assert {*owning.tolist()} - emitted, 'no node was rejected'
  for token in owning:
    best = np.argsort(-logits[token])[:2]
    assert table.tokens[0, token].tolist() == best.tolist()


def test_a_row_goes_on_or_starts_anew():
  """It goes on with its text, or if nothing was read; else it forgets."""
  scorer = candidates.CandidateScorer((lookup_lib.Recycling(2, size=4),))
  texts = lambda length, kept=None: carried_lib.Texts(
    np.zeros((3, 9), int), np.array(length), 9, kept and np.array(kept)
  )
  state = scorer.start(texts([4, 4, 4]), 0)
  seen = carried_lib.Verified(np.full((3, 1), 2), np.zeros((3, 1, _V)))
  state = scorer.observe(state, seen)
  nothing = np.zeros((3, 1), int)
  added = carried_lib.Added(nothing, nothing, np.ones(3, int), np.full(3, 4))
  state = scorer.keep(state, added)
  state, forwards = scorer.restart(state, texts([8, 8, 0], [4, 3, 0]), 0)
  assert forwards == 0
  assert state.learned[0].owner.max(axis=1).tolist() == [2, -1, 2]
  assert state.length.tolist() == [8, 8, 5]


# The store.


def _slow_store(texts, path):
  """The eight sorted places around a path, grouped by length of match."""
  context = lambda before: tuple([*reversed(before), *[-1] * _L][:_L])
  places = sorted(
    (context(text[:end]), number, end, text[end])
    for number, text in enumerate(texts)
    for end in range(1, len(text))
  )
  wanted = context(path)
  at = bisect.bisect_left([place[0] for place in places], wanted)
  by_length = {}
  for place in places[max(at - 4, 0) : at + 4]:
    same = [a == b >= 0 for a, b in zip(place[0], wanted, strict=True)]
    length = [*same, False].index(False)
    by_length.setdefault(length, []).append(place[3])
  said, left = [], 1.0
  for length in sorted(by_length.keys() - {0}, reverse=True):
    p, tokens = (0.2, 0.4, 0.6, 0.75)[min(length, 4) - 1], by_length[length]
    said += [(token, np.log(left * p / len(tokens))) for token in tokens]
    left *= 1 - p
  return sorted(said)


def test_the_store_against_a_scan():
  rng = np.random.default_rng(0)
  for number in (0, 1, 30):
    texts = [
      rng.integers(3, size=rng.integers(30)).tolist() for _ in range(number)
    ]
    index = lookup_lib.StoredTexts.of_texts(texts)
    for _ in range(30):
      path = rng.integers(3, size=rng.integers(1, 13)).tolist()
      np.testing.assert_allclose(
        np.reshape(sorted(_proposed(index, (), path)), (-1, 2)),
        np.reshape(_slow_store(texts, path), (-1, 2)),
        rtol=1e-5,
      )


# In a decode.

_LIMIT = 16
_PROMPTS = tiny.prompts(3)


@functools.cache
def _generate(drafter_name, **options):
  """The prompts, greedy and sampled."""
  return specdec.generate(
    tiny_drafters.target(),
    tiny.row_keys(3),
    _PROMPTS,
    drafter=_drafter(drafter_name),
    max_new_tokens=_LIMIT,
    sampling=specdec.Sampling(temperature=[0.0, 1.0, 0.7]),
    **options,
  )


def _drafter(name):
  if name == 'plain':
    return specdec.PLAIN
  texts = _generate('plain').tokens
  learner, tree = lookup_lib.Recycling(2, size=64), tiny_drafters.TREE
  lookup, store = specdec.PromptLookup(), lookup_lib.StoredTexts.of_texts(texts)
  other = lookup_lib.StoredTexts.of_texts([text[::-1] for text in texts])
  of = tiny_drafters.candidates
  chain = tiny_drafters.Settings(topology=topology_lib.chain(3))
  return {
    'recycling': lambda: of(learner, config=chain),
    'all': lambda: of(lookup, store, learner, config=tree),
    'staged': lambda: tiny_drafters.simple(
      'staged', tiny.draft('similar', num_layers=1), other, learner
    ),
  }[name]()


@pytest.mark.parametrize(
  ('name', 'source'),
  [('recycling', 'recycling'), ('all', 'store'), ('staged', 'draft')],
)
def test_decoding_equals_plain(name, source):
  result = _generate(name)
  assert result.tokens == _generate('plain').tokens
  assert result.stats.origins[source] > 0


def test_a_fallback():
  result = _generate('all', break_even=9.0)
  assert result.tokens == _generate('plain').tokens
  assert result.stats.plain_steps > 0
