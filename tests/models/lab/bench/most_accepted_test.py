"""Acceptance by lossless rules, beside the most that any could.

docs/verification.md has some of the figures.
"""

import collections
import functools
import itertools

import enumeration
import numpy as np
import pytest
from scipy import optimize
from scipy import sparse

from specdec import sampling as sampling_lib
from specdec.models.lab.bench import acceptance
from specdec.tree import topology as topology_lib
from specdec.verify import rules as rules_lib

_BEST, _WITHOUT, _WITH, _APART = sampling_lib.CHILDREN


def _coupled(sets, gain, bounds):
  """The largest sum of gain[set, choice] that a coupling reaches.

  `sets` are probabilities and choices; a choice adds to all of `bounds(choice)`
  linear constraints, whose values may not exceed those of the second result.
  """
  cells = [(row, one) for row, (_, some) in enumerate(sets) for one in some]
  shares, at_most = bounds([one for _, one in cells])
  rows = [row for row, _ in cells]
  chosen = sparse.coo_array((np.ones(len(cells)), (rows, range(len(cells)))))
  found = optimize.linprog(
    [-gain(one) for _, one in cells],
    A_ub=shares,
    b_ub=at_most,
    A_eq=chosen.tocsr(),
    b_eq=[prob for prob, _ in sets],
  )
  assert found.status == 0, found.message
  return -found.fun


def _drawn_sets(q, number, children):
  """The probabilities and the tokens of sets of children, and `NONE`."""
  laws = collections.Counter()
  for tokens in itertools.product(range(len(q)), repeat=number):
    prob, left = 1.0, 1.0
    for at, token in enumerate(tokens):
      prob *= q[token] / left
      if children == _WITHOUT:
        left -= q[token]
        prob *= token not in tokens[:at]
    laws[frozenset(tokens)] += prob
  return [(prob, [*tokens, None]) for tokens, prob in laws.items() if prob]


@pytest.mark.parametrize('children', [_WITHOUT, _WITH])
def test_one_step_against_a_linear_program(children):
  rng = np.random.default_rng(0)
  for vocab_size, number in [(3, 1), (3, 2), (4, 2), (4, 3), (5, 3), (5, 4)]:
    p, q = rng.dirichlet(np.full(vocab_size, 0.7), size=(2, 5))
    found = acceptance.one_step(p, q, number, children)
    for one, target, draft in zip(found, p, q, strict=True):

      def bounds(choices, target=target):
        tokens = np.arange(len(target))[:, None]
        return tokens == np.array(
          [-1 if x is None else x for x in choices]
        ), target

      sets = _drawn_sets(draft, number, children)
      most = _coupled(sets, lambda token: token is not None, bounds)
      assert one == pytest.approx(most, abs=1e-9)


def _drawn_trees(worlds, world, topology, children):
  """The probabilities and the states of the nodes of all drawn trees."""
  paths, trees = [()], {(world * len(worlds.contexts),): 1.0}
  for above in [(), *topology.paths]:
    ranks = enumeration.turns(topology, above, children)
    for rank in ranks:
      more = collections.Counter()
      for states, prob in trees.items():
        parent = np.array([states[paths.index(above)]])
        after = worlds.following(parent)
        given = np.isin(after, states), rank, len(ranks), children
        [law] = worlds.next_draw(parent, *given)
        for token in np.flatnonzero(law):
          more[(*states, int(after[0, token]))] += prob * law[token]
      paths, trees = [*paths, (*above, rank)], more
  sets = collections.Counter()
  for states, prob in trees.items():
    sets[frozenset(states)] += prob
  return [(prob, sorted(states)) for states, prob in sets.items()]


def _most_of_tree(worlds, world, topology, children):
  """The expected tokens that the best lossless rule accepts.

  A rule is lossless if and only if of the tokens after a node that is accepted,
  none is accepted with a probability above the target's.
  """
  size = len(worlds.contexts)

  def path_of(state):
    """The states from the root to one, the root left out."""
    path, context = [], state % size
    while context:
      path.append(world * size + context)
      context = (context - 1) // worlds.vocab_size
    return path[::-1]

  def bounds(choices):
    rows, columns, values = [], [], []
    for column, state in enumerate(choices):
      path = path_of(state)
      for one in path:
        rows, columns, values = [*rows, one], [*columns, column], [*values, 1.0]
      for parent in path:
        for token, child in enumerate(worlds.following(np.array([parent]))[0]):
          if parent % size < (child % size):
            rows.append(int(child))
            columns.append(column)
            values.append(-worlds.exact[parent, token])
    shape = (len(worlds.length), len(choices))
    at_most = np.zeros(shape[0])
    root = world * size
    at_most[worlds.following(np.array([root]))[0]] = worlds.exact[root]
    shares = sparse.coo_array((values, (rows, columns)), shape=shape).tocsr()
    return shares, at_most

  sets = _drawn_trees(worlds, world, topology, children)
  return _coupled(sets, lambda state: len(path_of(state)), bounds)


_SHAPES = {
  (2, 1): [(0,), (1,), (0, 0), (1, 0)],
  (2, 2): topology_lib.k_ary(2, 2).paths,
  (3, 1): [(0,), (1,), (2,), (0, 0), (1, 0), (2, 0)],
  (1, 1, 1): topology_lib.chain(3).paths,
}
_RULES = ('rejection', 'traversal')


@functools.cache
def _many_worlds():
  """Normal logits of the target; the draft adds as much noise."""
  return enumeration.make_worlds(
    3, 4, drafts=('similar',) * 20, samplings=('temperature 1',), scale=1.0
  )


def _expected(rule, shape, children):
  """Expected tokens that are accepted in each world."""
  topology = topology_lib.from_paths(_SHAPES[shape])
  rule = rules_lib.RULES[rule](children)
  return enumeration.step_law(_many_worlds(), topology, rule)[1]


@pytest.mark.parametrize(
  ('shape', 'children', 'by_rejection', 'by_traversal', 'most'),
  [
    ((2, 1), _WITHOUT, 1.6118, 1.6577, 1.8023),
    ((2, 1), _APART, 1.6874, 1.7394, 1.7775),
    ((2, 1), _BEST, 1.1849, 1.1849, 1.1849),
    ((2, 2), _WITHOUT, 1.7204, 1.7492, 1.9054),
    ((2, 2), _WITH, 1.4558, 1.4896, 1.6696),
    ((2, 2), _APART, 1.8486, 1.8581, 1.8696),
    ((2, 2), _BEST, 1.3959, 1.3959, 1.3959),
    ((3, 1), _WITHOUT, 1.7862, 1.8321, 1.9091),
    ((1, 1, 1), _WITHOUT, 1.7541, 1.8621, 1.8621),
    ((1, 1, 1), _BEST, 0.8737, 0.8737, 0.8737),
  ],
)
def test_the_table(shape, children, by_rejection, by_traversal, most):
  worlds = _many_worlds()
  topology = topology_lib.from_paths(_SHAPES[shape])
  given = topology, children
  ceiling = np.array(
    [_most_of_tree(worlds, world, *given) for world in range(len(worlds.names))]
  )
  found = [_expected(rule, shape, children) for rule in _RULES]
  for one in found:
    assert np.all(one < ceiling + 1e-6)
  if children == _BEST:  # the sum of the probabilities of all paths
    np.testing.assert_allclose(found, [ceiling, ceiling], atol=1e-6)
  means = [np.mean(one) for one in (*found, ceiling)]
  assert means == pytest.approx([by_rejection, by_traversal, most], abs=1e-4)
