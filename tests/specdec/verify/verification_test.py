"""The verdict on a tree, and the rule by which tokens are emitted."""

import dataclasses

import jax
import jax.numpy as jnp
import list_trees
import numpy as np
import pytest

import specdec
from specdec import decode_options
from specdec import sampling as sampling_lib
from specdec.draft import drafter as drafter_lib
from specdec.tree import tree as tree_lib
from specdec.verify import accept

_count_emitted = jax.jit(accept.count_emitted)


@dataclasses.dataclass(frozen=True)
class _ChainRule(specdec.MatchRule):
  """A rule of a user."""

  needs_chain = True


class _Drawing(specdec.Scorer):
  """A scorer that could draw children."""

  facts = drafter_lib.ScorerFacts(labels=('drawing',), can_draw=True)


def _to_rule(verify, children=None, *, topology=None, scorer=None):
  scorer = scorer or _Drawing()
  drafter = specdec.fixed_drafter(scorer, topology or specdec.chain(2))
  return decode_options.to_rule(verify, children, drafter)


_BEST, _DRAWN = sampling_lib.BEST, sampling_lib.WITHOUT_REPLACEMENT


def test_a_rule_is_a_name_or_an_object():
  for name in ('rejection', 'traversal', 'block'):
    make = decode_options.RULES[name]
    assert (_to_rule(name), _to_rule(name, _BEST)) == (
      make(_DRAWN),
      make(_BEST),
    )
  match = specdec.MatchRule()
  assert _to_rule('match') == _to_rule(match, _BEST) == match
  assert _to_rule(_ChainRule()) == _ChainRule()
  for children in sampling_lib.CHILDREN:
    rule = specdec.RejectionRule(children)
    assert _to_rule(rule) is _to_rule(rule, children) is rule


@pytest.mark.parametrize(
  ('arguments', 'options', 'message'),
  [
    ([object()], {}, 'must be one of'),
    ([specdec.MatchRule], {}, 'hashable specdec.verify.accept.Rule, got <'),
    ([lambda *arguments: None], {}, 'got <function'),
    ([_ChainRule()], {'topology': specdec.k_ary(2, 2)}, 'is for chains'),
    ([_ChainRule(), _DRAWN], {}, r'_ChainRule\(\) wants the best'),
    ([specdec.RejectionRule(), _DRAWN], {}, 'has children=best, got'),
    (
      ['rejection', _DRAWN],
      {'scorer': specdec.CandidateScorer((specdec.PromptLookup(),))},
      'needs a drafter with a distribution',
    ),
  ],
)
def test_a_rule_says_its_own_conditions(arguments, options, message):
  with pytest.raises(ValueError, match=message):
    _to_rule(*arguments, **options)


def test_origins_by_hand():
  """Whoever proposed the next node of the path; nobody the bonus token."""
  nodes = [(0,), (1, 0, 1, 0, 0, 3), (2, 0, 1, 0, 0, 1), (3, 2, 2, 0, 0, 2)]
  arrays = list_trees.to_arrays([list_trees.Node(*node) for node in nodes], 6)
  tree, none = list_trees.stack([arrays] * 3), tree_lib.NO_NODE
  place = jnp.array([[0, 2, 3], [0, 1, none], [0, none, none]])
  chosen = jnp.zeros((3, 3), jnp.int32)
  verdict = accept.Verdict(place, jnp.array([2, 1, 0]), chosen)
  nodes = jnp.tile(jnp.arange(6), (3, 1))
  origins = accept.emitted_origins(tree, nodes, verdict)
  assert origins.tolist() == [[1, 2, 0], [3, 0, 0], [0, 0, 0]]


def _slow_step(accepted, valid, room, ends):
  """The number of emitted tokens, and why the row ends."""
  for emitted, end in enumerate(ends[: accepted + 1]):
    if emitted == room:
      return emitted, accept.LIMIT
    if emitted == valid:
      return emitted, accept.NOT_FINITE
    if end != accept.RUNNING:
      return emitted + 1, end
  return accepted + 1, accept.LIMIT if accepted + 1 == room else accept.RUNNING


@pytest.mark.parametrize('often', [0.0, 0.1])
@pytest.mark.parametrize('max_depth', [0, 2, 5])
def test_the_stop_rule_against_a_loop(max_depth, often):
  rng = np.random.default_rng(max_depth)
  draw = lambda end: rng.integers(end, size=4000).astype(np.int32)
  accepted, room = draw(max_depth + 1), draw(max_depth + 4)
  valid = draw(2 * max_depth + 3)
  kinds = [accept.RUNNING, accept.EOS, accept.STOP]
  shares = [1 - 2 * often, often, often]
  ends = rng.choice(np.int32(kinds), (4000, max_depth + 1), p=shares)
  verdict = accept.Verdict(index=None, accepted=accepted, chosen=ends)
  emitted, reason = _count_emitted(verdict, ends, valid, room)
  expected = list(map(_slow_step, accepted, valid, room, ends))
  # Not as lists: pytest would explain how two of 4,000 differ for hours.
  np.testing.assert_array_equal(np.stack([emitted, reason], 1), expected)
  # The cases that matter were among them.
  assert {case[0] for case in expected} == set(range(max_depth + 2))
  reasons = {accept.RUNNING, accept.LIMIT, accept.NOT_FINITE} | (
    {accept.EOS, accept.STOP} if often else set()
  )
  assert {case[1] for case in expected} == reasons


def test_logits_count_as_far_as_they_are_numbers():
  logits = np.zeros((5, 4, 6), np.float32)
  logits[:, :, 2] = -np.inf  # a token that is never chosen
  logits[1, 0, 3] = np.nan  # the root
  logits[2, 3, 5] = np.inf  # the last of the path
  logits[3, 1, 0] = np.nan  # off the path
  logits[4, 2] = -np.inf  # no token can be chosen
  path = np.array([[0, 2, 3]] * 5)
  verdict = accept.Verdict(path, np.full(5, 2), np.zeros((5, 3), np.int32))
  assert accept.count_valid(logits, verdict).tolist() == [3, 0, 2, 3, 1]
  # Where the path has ended, nothing is asked of the logits.
  short = np.array([[0, tree_lib.NO_NODE, tree_lib.NO_NODE]] * 5)
  valid = accept.count_valid(logits, verdict.replace(index=short))
  assert valid.tolist() == [3, 0, 3, 3, 3]
