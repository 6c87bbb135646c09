"""What the search tries, with trials that are a formula instead of a decode."""

import numpy as np
import pytest
from tiny_drafters import Settings

from models.text.drafters import DraftSettings
from models.tune.candidates import Search
from specdec.study.planning import PLAIN
from specdec.study.planning import StepCosts
from specdec.study.planning import Trial

_NODES = (2, 4, 8, 16, 32, 64)


def _search(evaluate, *, slope=0.0, measure=lambda one: np.inf, **base):
  verification = {n: 0.1 + slope * (n - 1) for n in (1, *_NODES)}
  costs = StepCosts(
    prompt=0.0, verification=verification, plain_step=verification[1]
  )
  return Search(
    costs=costs,
    evaluate=evaluate,
    measure=measure,
    base=DraftSettings(**base),
    node_counts=_NODES,
  )


def _trial(num_nodes, rate, seconds):
  return Trial(
    num_nodes=num_nodes,
    tokens=round(1000 * rate),
    forwards=1000,
    steps=1000,
    prompts=1,
    seconds=1000 * seconds,
  )


def _nodes(candidate):
  if candidate.method == 'plain':
    return 1
  if candidate.method == 'chain':
    return candidate.drafting.num_draft_tokens + 1
  return candidate.drafting.tree.num_nodes


def _evaluate(candidate):
  """Every doubling of the nodes brings 0.4 tokens, every round takes 2 ms."""
  nodes, tree = _nodes(candidate), candidate.drafting.tree
  rounds = {'plain': 0, 'chain': nodes - 1, 'tree': tree.rounds}
  rounds |= {'staged': tree.rounds}
  bonus = {'staged': 0.5, 'tree': 0.2}.get(candidate.method, 0)
  return _trial(
    nodes,
    1 + 0.4 * np.log2(nodes) + bonus,
    0.005 + 0.002 * rounds.get(candidate.method, 0),
  )


_RANKS = np.array([0, 0, 0, 0, 0, 0, 1, 1, 2, 9])


def _run(search, has_draft=True):
  search.run(has_draft=has_draft, ranks=lambda: _RANKS)
  return search


def test_all_methods_are_tried_and_each_once():
  tried = []

  def evaluate(candidate):
    tried.append(candidate.name)
    return _evaluate(candidate)

  search = _run(_search(evaluate))
  methods = {one.method for one in search.candidates.values()}
  assert methods == {
    'plain',
    'chain',
    'tree',
    'staged',
    'ngram',
    'lookup',
    'ngram+lookup',
  }
  assert any(name.startswith('fixed') for name in tried)
  assert len(tried) == len(set(tried)) == len(search.trials)
  assert len(tried) < 60, 'every try compiles a program'


def test_dear_nodes_make_small_trees():
  def nodes_of_best(slope):
    search = _run(_search(_evaluate, slope=slope))
    grown = {
      name: rate
      for name, rate in search.rates.items()
      if search.candidates[name].method == 'staged'
    }
    best = max(grown, key=grown.__getitem__)
    return search.candidates[best].drafting.tree.num_nodes

  sizes = [nodes_of_best(slope) for slope in (0.0, 0.003, 0.02, 0.2)]
  assert sizes == sorted(sizes, reverse=True)
  assert sizes[0] == 64
  assert sizes[-1] == 2


def test_a_draft_forward_is_read_off_the_chains():
  search = _search(_evaluate)
  forward, rest = search.search_chains()
  assert forward == pytest.approx(0.002)
  assert rest == pytest.approx(0.005)
  # Growth stops by it, in units of the forward over those nodes.
  search.search_trees('tree', forward, None)
  trees = [
    one.drafting.tree
    for one in search.candidates.values()
    if one.method == 'tree'
  ]
  assert {tree.cost_ratio for tree in trees} == {0.02}


def test_what_predictions_leave_out_is_measured_once():
  measured = []

  def measure(candidate):
    """All steps take 20 ms longer than their parts, plain ones apart."""
    measured.append(candidate.name)
    trial = _evaluate(candidate)
    return trial.tokens / (trial.seconds + trial.steps * (0.1 + 0.02))

  search = _run(_search(_evaluate, measure=measure))
  assert len(measured) == 1
  np.testing.assert_allclose(search.costs.interference, 0.02)
  best = measured[0]
  np.testing.assert_allclose(
    search.rates[best], measure(search.candidates[best])
  )
  assert search.rates['plain'] == _run(_search(_evaluate)).rates['plain']
  # Where decoding was faster than predicted there is none.
  assert _run(_search(_evaluate)).costs.interference == 0


def test_without_a_draft_there_are_tables_and_the_text():
  search = _run(_search(_evaluate), has_draft=False)
  methods = {one.method for one in search.candidates.values()}
  assert methods == {'plain', 'ngram', 'lookup', 'ngram+lookup'}


def test_a_table_that_does_not_fit_is_passed_over():
  def evaluate(candidate):
    if 'ngram' in candidate.method:
      raise ValueError('another tokenizer')
    return _evaluate(candidate)

  search = _run(_search(evaluate), has_draft=False)
  assert {one.method for one in search.candidates.values()} == {
    'plain',
    'lookup',
  }


def test_what_the_user_settled_is_not_varied():
  search = _run(_search(_evaluate, inner='none'))
  methods = {one.method for one in search.candidates.values()}
  assert methods == {PLAIN, 'chain', 'tree'}
  tree = Settings(calibration=0.7, max_depth=5, capacity=512)
  search = _run(_search(_evaluate, inner='lookup', tree=tree))
  methods = {one.method for one in search.candidates.values()}
  assert methods == {PLAIN, 'chain', 'tree', 'staged', 'lookup'}
  for one in search.candidates.values():
    if one.method == 'staged':
      assert one.drafting.inner == 'lookup'
      assert one.drafting.tree.calibration == 0.7
      assert one.drafting.tree.max_depth == 5


def test_no_guess_is_dropped_for_want_of_room():
  search = _run(_search(_evaluate))
  for one in search.candidates.values():
    tree, inner = one.drafting.tree, one.drafting.inner_tree
    if one.method in ('tree', 'staged') and tree.topology is None:
      most = 1 + tree.branching * (1 + (tree.rounds - 1) * tree.width)
      if one.method == 'staged':
        of_inner = inner.rounds * inner.width * inner.branching
        most += (tree.rounds + 1) * of_inner
      assert tree.capacity >= min(most, 512)
      assert tree.capacity >= tree.num_nodes
