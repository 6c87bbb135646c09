"""The distribution under rejection verification, and the link to compiled code.

First the distributions of whole sequences, every branch summed (see
`enumeration`); then that the rules and `draw_children` branch in that way,
decision by decision (see `slow_walks`); then match verification, whose
distribution follows from its being plain decoding for every noise. `law_test`
does the same for the whole loop, by counting.
"""

import functools
import itertools
from unittest import mock

import enumeration
from enumeration import quick_jit
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_walks
import tiny_drafters
from tiny_drafters import Settings

from models.nn.table_model import table_model
from specdec import decode
from specdec import DecodeConfig
from specdec import NGram
from specdec import PLAIN
from specdec import PromptLookup
from specdec import Request
from specdec import sampling as sampling_module
from specdec import staged
from specdec import StepContext
from specdec.draft.growth import grow
from specdec.draft.ranking import draw_children
from specdec.draft.stages import init_stages
from specdec.sampling import BEST
from specdec.sampling import CHILDREN
from specdec.sampling import is_possible
from specdec.sampling import Randomness
from specdec.sampling import step_keys
from specdec.sampling import step_randomness
from specdec.sampling import WITH_REPLACEMENT
from specdec.sampling import WITHOUT_REPLACEMENT
from specdec.tree.topology import chain
from specdec.tree.topology import from_paths
from specdec.tree.topology import k_ary
from specdec.tree.tree import NO_NODE
from specdec.tree.tree import TokenTree
from specdec.verify import rejection
from specdec.verify.block import BlockRule
from specdec.verify.rejection import RejectionRule
from specdec.watchers import make_watchers

# Total variation of whole sequences: the rounding of float32.
_TOLERANCE = 1e-6

# Tokens and length of the sequences.
_SIZES = [(3, 4), (4, 3)]
_TOPOLOGIES = {
  'chain of 1': chain(1),
  'chain of 2': chain(2),
  'chain of 3': chain(3),
  'binary tree': k_ary(2, 2),
  'ternary tree': k_ary(3, 2),
  'ragged tree': from_paths(
    [(0,), (1,), (2,), (0, 0), (2, 0), (2, 1), (2, 1, 0)]
  ),
  'more children than tokens': k_ary(5, 1),
}
_CHAIN = 3


@functools.cache
def _worlds(vocab_size, length):
  return enumeration.make_worlds(vocab_size, length - 1 + _CHAIN, seed=3)


def _assert_law(worlds, law, length, tolerance=_TOLERANCE):
  distances = enumeration.distance(law, worlds.exact_law(length))
  worst = distances.argmax()
  assert distances[worst] < tolerance, worlds.names[worst]


def _check_trees(worlds, length, children):
  for topology in _TOPOLOGIES.values():
    law, _ = enumeration.tree_law(worlds, topology, children, length)
    _assert_law(worlds, law, length)


def _check_blocks(worlds, length, children):
  for room in range(1, _CHAIN + 1):
    for size in range(room + 1):
      law, _ = enumeration.block_law(worlds, room, children, length, size)
      _assert_law(worlds, law, length)


@pytest.mark.parametrize('children', CHILDREN)
@pytest.mark.parametrize(('vocab_size', 'length'), _SIZES)
def test_rejection_has_the_targets_law(vocab_size, length, children):
  _check_trees(_worlds(vocab_size, length), length, children)


@pytest.mark.parametrize('children', CHILDREN)
@pytest.mark.parametrize(('vocab_size', 'length'), _SIZES)
def test_block_verification_has_the_targets_law(vocab_size, length, children):
  """Chains cut short, as at the end of the draft's context, among them."""
  _check_blocks(_worlds(vocab_size, length), length, children)


def _few_worlds():
  kinds = {'drafts': ('similar',), 'samplings': ('temperature 1',)}
  return enumeration.make_worlds(3, 5, seed=3, **kinds)


def check_few_trees(children):
  """A part of the above that takes a moment."""
  _check_trees(_few_worlds(), 3, children)


def check_few_blocks(children):
  _check_blocks(_few_worlds(), 3, children)


@pytest.mark.long
@pytest.mark.parametrize('children', CHILDREN)
@pytest.mark.parametrize('seed', range(3))
def test_more_worlds_and_longer_sequences(seed, children):
  for vocab_size, length in ((2, 6), (3, 5), (4, 4), (5, 3)):
    worlds = enumeration.make_worlds(vocab_size, length + 1, seed=seed + 10)
    for topology in _TOPOLOGIES.values():
      law, _ = enumeration.tree_law(worlds, topology, children, length)
      _assert_law(worlds, law, length)
    law, _ = enumeration.block_law(worlds, 2, children, length, 2)
    _assert_law(worlds, law, length)


def test_in_float64_nothing_is_left():
  """So the distance in float32 is rounding, and no error of the method."""
  with jax.enable_x64(True):
    worlds = enumeration.make_worlds(3, 5, dtype=np.float64)
    assert worlds.target.dtype == worlds.draft.dtype == np.float64
    for children in CHILDREN:
      for name in ('chain of 2', 'ternary tree', 'ragged tree'):
        law, _ = enumeration.tree_law(worlds, _TOPOLOGIES[name], children, 3)
        _assert_law(worlds, law, 3, tolerance=1e-13)
      law, _ = enumeration.block_law(worlds, 3, children, 3, 3)
      _assert_law(worlds, law, 3, tolerance=1e-13)


def test_an_error_would_be_seen():
  """Another distribution than the target's is far away."""
  worlds = _worlds(3, 4)
  law, _ = enumeration.tree_law(worlds, chain(1), BEST, 4)
  other = np.roll(worlds.exact_law(4), 1, axis=0)
  assert np.all(enumeration.distance(law, other) > 0.01)


# How many tokens are accepted: a rule that rejected all would be exact, too.


@pytest.mark.parametrize('children', CHILDREN)
def test_as_many_guesses_stand_as_can(children):
  """Of one token 1 - TV, or the target's probability of one not drawn."""
  worlds = _worlds(3, 4)
  root = slice(None, None, len(worlds.contexts))
  target, draft = worlds.exact[root], worlds.draft[root]
  best = np.take_along_axis(target, worlds.ranked[root, :1], axis=1)[:, 0]
  likely = np.minimum(target, draft).sum(1)
  is_drawn = worlds.stochastic[root] & (children != BEST)
  expected = np.where(is_drawn, likely, best)
  _, emitted = enumeration.tree_law(worlds, chain(1), children, 4)
  np.testing.assert_allclose(emitted, 1 + expected, atol=1e-6)
  _, emitted = enumeration.block_law(worlds, 1, children, 4, 1)
  np.testing.assert_allclose(emitted, 1 + expected, atol=1e-6)


def test_all_of_a_few_best_guesses_stand():
  """One of several point masses: the sum of the target's probabilities."""
  worlds = _worlds(4, 3)
  root = slice(None, None, len(worlds.contexts))
  best = worlds.ranked[root, :3]
  probs = np.take_along_axis(worlds.exact[root], np.maximum(best, 0), axis=1)
  expected = np.where(best >= 0, probs, 0.0).sum(1)
  _, emitted = enumeration.tree_law(worlds, k_ary(3, 1), BEST, 3)
  np.testing.assert_allclose(emitted, 1 + expected, atol=1e-6)


def test_a_block_keeps_at_least_as_many():
  worlds = _worlds(3, 4)
  for children in CHILDREN:
    _, one_by_one = enumeration.tree_law(worlds, chain(3), children, 4)
    _, block = enumeration.block_law(worlds, 3, children, 4, 3)
    assert np.all(block > one_by_one - 1e-6)
    more = np.mean(block > one_by_one + 1e-3)
    # With point masses there is nothing to make up for.
    assert more == 0 if children == BEST else more > 0.1


def test_an_identical_draft_is_never_rejected():
  worlds = enumeration.make_worlds(3, 6, drafts=('identical',))
  stochastic = worlds.stochastic[:: len(worlds.contexts)]
  for children in (WITHOUT_REPLACEMENT, WITH_REPLACEMENT):
    _, emitted = enumeration.tree_law(worlds, chain(3), children, 4)
    np.testing.assert_allclose(emitted[stochastic], 4, atol=1e-5)
    _, emitted = enumeration.block_law(worlds, 3, children, 4, 3)
    np.testing.assert_allclose(emitted[stochastic], 4, atol=1e-5)


# Distributions of which rejection leaves nothing.


def test_normalized():
  mass = np.array([[0.0, 0.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1e-30, 0.0]])
  fallback = np.tile([0.5, 0.25, 0.25], (3, 1))
  normalized = rejection.normalized(mass.astype(np.float32), fallback)
  np.testing.assert_allclose(
    normalized, [[0.5, 0.25, 0.25], [0.0, 0.75, 0.25], [0.0, 1.0, 0.0]]
  )


def _one_guess(target, draft, children):
  """The distribution of the next token, one child tried; `[V]` each."""
  vocab_size = len(target)
  target, draft = (
    np.tile(np.asarray(probs, np.float32), (vocab_size, 1))
    for probs in (target, draft)
  )
  tokens = np.arange(vocab_size, dtype=np.int32)
  chance = np.asarray(rejection.acceptance_probs(target, draft, tokens))
  left, _ = rejection.after_rejection(target, draft, tokens, children)
  tried = np.asarray(draft[0], np.float64)
  return tried * chance + (tried * (1.0 - chance)) @ np.asarray(left)


def _ulps(probs, number):
  """Some are raised, some lowered, by `number` units in the last place."""
  probs = np.asarray(probs, np.float32)
  signs = np.resize([1, -1, -1, 1], probs.shape)
  bits = probs.view(np.int32) + np.where(probs > 0, signs * number, 0)
  return bits.astype(np.int32).view(np.float32)


@pytest.mark.parametrize('children', CHILDREN)
def test_a_draft_that_is_the_target_up_to_rounding(children):
  rng = np.random.default_rng(0)
  for _ in range(20):
    target = rng.dirichlet(np.full(4, 0.5)).astype(np.float32)
    for number in (0, 1, -1, 3):
      law = _one_guess(target, _ulps(target, number), children)
      np.testing.assert_allclose(law, target, atol=1e-6)


@pytest.mark.parametrize('children', CHILDREN)
def test_distributions_that_are_all_on_one_token(children):
  one, other = np.eye(3)[0], np.eye(3)[1]
  spread_out = np.array([0.2, 0.5, 0.3])
  for target in (one, other, spread_out):
    for draft in (one, other, spread_out):
      np.testing.assert_allclose(
        _one_guess(target, draft, children), target, atol=1e-6
      )


def test_a_block_of_which_nothing_is_left():
  """Weights of 1 and of 0, and no residual: never NaN nor a wrong cut."""
  one, half = np.eye(2)[0], np.full(2, 0.5)
  judge = lambda target, draft, tokens: enumeration.judge_block(
    np.asarray(target, np.float32)[None],
    np.asarray(draft, np.float32)[None],
    np.array([tokens], np.int32),
    np.array([len(tokens)], np.int32),
  )
  chances, left = judge([half, half, half], [half, half], [0, 1])
  assert chances.tolist() == [[1, 1, 1]]
  np.testing.assert_array_equal(left, [[half, half]])  # the target itself
  chances, left = judge([1 - one, half, half], [one, half], [0, 1])
  assert chances.tolist() == [[1, 0, 0]]
  np.testing.assert_array_equal(left[0, 0], 1 - one)
  chances, _ = judge([one, one, one], [one, one], [0, 0])
  assert chances.tolist() == [[1, 1, 1]]


# Trees that are grown, not drawn: every state has a tree of its own.

_GROWN = Settings(
  num_nodes=7, width=3, branching=2, rounds=3, capacity=20, cost_ratio=0
)


def _of_tables(draft):
  """Drafters that know the last token alone; `[V, V]` logits."""
  vocab_size = len(draft)
  model = tiny_drafters.model(table_model(draft, max_positions=1000), _GROWN)
  table = tiny_drafters.candidates(
    tiny_drafters.exact(np.roll(draft, 1, axis=0)), config=tiny_drafters.INNER
  )
  text = np.random.default_rng(1).integers(vocab_size, size=40).tolist()
  ngram = tiny_drafters.ngram_table(
    [text], vocab_size, order=3, num_continuations=2
  )
  lookup = PromptLookup((0.3, 0.6), num_matches=2)
  return {
    'tree': model,
    'staged': staged(model, table),
    'tables': tiny_drafters.candidates(NGram(ngram), lookup, config=_GROWN),
  }


@functools.partial(quick_jit, static_argnames='room')
def _grown_tree(drafter, sampling, text, length, *, room):
  """The tree of a step of one row; `NO_NODE` is the parent of unverified nodes.

  Args:
    drafter: the drafter.
    sampling: of one row.
    text: `[P]`.
    length: `[]`, of the text.
    room: for new tokens.
  """
  vocab_size = sampling.logit_bias.shape[-1]
  in_text = (jnp.arange(text.shape[0]) < length)[:, None]
  seen = jnp.any(jax.nn.one_hot(text, vocab_size, dtype=bool) & in_text, axis=0)
  length = length[None]
  ctx = StepContext(
    tokens=jnp.pad(text, (0, room))[None],
    length=length,
    active=jnp.ones(1, bool),
    seen=seen[None],
    sampling=sampling,
    randomness=step_randomness(
      jax.random.key(0)[None],
      length,
      sampling,
      max_depth=drafter.max_depth,
      num_nodes=drafter.shape.num_nodes,
      vocab_size=vocab_size,
      shares_noise=False,
    ),
    shape=drafter.shape,
    max_depth=drafter.max_depth,
    target_bytes=1,
    shares_noise=False,
    children=BEST,
  )
  states = init_stages(
    drafter, text[None], length, num_slots=text.shape[0] + room
  )
  _, tree = grow(drafter.stages, states, ctx.root_trees(), ctx)
  tree, nodes = jax.tree.map(
    lambda array: array[0], (tree, drafter.shape.select(tree))
  )
  verified = jnp.isin(jnp.arange(tree.capacity), nodes)
  return tree.replace(parent=jnp.where(verified, tree.parent, NO_NODE))


def _grown_trees(worlds, drafters, samplings, length):
  """Of all states of fewer than `length` tokens; arbitrary for the others."""
  contexts = worlds.contexts
  texts = np.zeros((len(contexts), length), np.int32)
  texts[:, 0] = enumeration.PROMPT
  lengths = np.array([1 + len(context) for context in contexts])
  for index, context in enumerate(contexts):
    texts[index, 1 : 1 + len(context)] = context[: length - 1]
  trees = []
  grow_all = jax.vmap(
    functools.partial(_grown_tree, room=8), (None, None, 0, 0)
  )
  for drafter in drafters:
    for name in samplings:
      sampling = enumeration.full_sampling(
        enumeration.SAMPLINGS[name], worlds.vocab_size
      )
      trees.append(grow_all(drafter, sampling, texts, lengths))
  return jax.tree.map(lambda *arrays: np.concatenate(arrays), *trees)


@pytest.mark.parametrize('name', ['tree', 'staged', 'tables'])
def test_grown_trees_have_the_targets_law(name):
  vocab_size, length, num_drafts = 3, 4, 3
  samplings = tuple(enumeration.SAMPLINGS)
  worlds = enumeration.make_worlds(
    vocab_size,
    length,
    drafts=('uniform',) * num_drafts,  # only the targets are used
    samplings=samplings,
  )
  rng = np.random.default_rng(0)
  tables = [2 * rng.normal(size=(vocab_size,) * 2) for _ in range(num_drafts)]
  trees = _grown_trees(
    worlds, [_of_tables(table)[name] for table in tables], samplings, length
  )
  law = enumeration.grown_law(worlds, trees, length)
  _assert_law(worlds, law, length)
  short = worlds.length < length
  kinds = np.concatenate([trees.parent, trees.token], axis=1)[short]
  assert len(np.unique(kinds, axis=0)) >= 10, 'a poor example'


# The link: the rules take the branches that were summed above.

_BATCH_SIZE = 64
_NUM_NODES = 9
_CAPACITY = 14
_DEPTH = 4


def _random_trees(rng, probs, children):
  """Of all sizes and forms; siblings that could have been drawn.

  Args:
    rng: of numpy.
    probs: `[B, N, V]`, the distributions that they are drawn from.
    children: one of `CHILDREN`.

  Returns:
    `[B, N]` tokens, parents, and sizes `[B]`.
  """
  batch_size, num_nodes, vocab_size = probs.shape
  token = rng.integers(vocab_size, size=(batch_size, num_nodes))
  parent = np.full((batch_size, num_nodes), NO_NODE)
  depth = np.zeros((batch_size, num_nodes), int)
  size = rng.integers(1, num_nodes + 1, size=batch_size)
  size[: batch_size // 2] = num_nodes
  reach = rng.choice([1, 2, num_nodes], size=batch_size)
  for row in range(batch_size):
    drawn: list[set[int]] = [set() for _ in range(num_nodes)]
    index = 1
    while index < size[row]:
      above = int(rng.integers(max(0, index - reach[row]), index))
      law = probs[row, above].copy()
      if children != WITH_REPLACEMENT:
        law[list(drawn[above])] = 0.0
      if depth[row, above] == _DEPTH or law.sum() <= 0:
        reach[row] = num_nodes
        size[row] -= 1  # at last there is no place for more
        continue
      token[row, index] = rng.choice(vocab_size, p=law / law.sum())
      drawn[above].add(int(token[row, index]))
      parent[row, index], depth[row, index] = above, depth[row, above] + 1
      index += 1
  return token, parent, size


def _within_larger_trees(rng, token, parent, size, proposals):
  """The trees as the verified part of larger ones.

  Args:
    rng: of numpy.
    token: `[B, N]`.
    parent: `[B, N]`.
    size: `[B]`.
    proposals: `[B, N, V]`.

  Returns:
    The larger trees, whose other nodes are children of any node, not verified;
    the verified nodes `[B, N]`; and the proposals by node, `[B, M, V]`.
  """
  shape = (len(token), _CAPACITY)
  tree = {
    'token': rng.integers(proposals.shape[2], size=shape),
    'parent': rng.integers(np.maximum(np.arange(_CAPACITY), 1), size=shape),
    'depth': np.zeros(shape),
  }
  nodes = np.full(token.shape, NO_NODE)
  of_node = rng.dirichlet(np.ones(proposals.shape[2]), size=shape)
  for row, used in enumerate(size):
    chosen = 1 + rng.choice(_CAPACITY - 1, size=used - 1, replace=False)
    nodes[row, 1:used], nodes[row, 0] = np.sort(chosen), 0
    at = nodes[row, :used]
    tree['token'][row, at] = token[row, :used]
    tree['parent'][row, at] = at[parent[row, :used]]
    tree['parent'][row, 0] = NO_NODE
    of_node[row, at] = proposals[row, :used]
    for node in range(1, _CAPACITY):
      above = tree['parent'][row, node]
      tree['depth'][row, node] = tree['depth'][row, above] + 1
  zeros = np.zeros(shape, np.float32)
  tree = TokenTree(
    **{name: array.astype(np.int32) for name, array in tree.items()},
    cond_log_prob=zeros,
    log_prob=zeros,
    origin=zeros.astype(np.int32),
    size=np.full(len(token), _CAPACITY, np.int32),
  )
  return tree, nodes.astype(np.int32), of_node.astype(np.float32)


def _with_gaps(rng, nodes, size):
  """The nodes at other places, as in a fixed topology; `[B, N]` old places."""
  places = np.full(nodes.shape, NO_NODE)
  for row, used in enumerate(size):
    at = 1 + rng.choice(nodes.shape[1] - 1, size=used - 1, replace=False)
    places[row, np.sort(at)], places[row, 0] = np.arange(1, used), 0
  moved = np.take_along_axis(nodes, np.maximum(places, 0), axis=1)
  return np.where(places >= 0, moved, NO_NODE).astype(np.int32), places


@functools.partial(quick_jit, static_argnames='rule')
def _verify(rule, tree, nodes, logits, proposals, randomness, sampling):
  verdict = rule(tree, nodes, logits, proposals, randomness, sampling)
  return verdict, verdict.path(nodes)


# Of the rows of one batch, in turn; a greedy row must not disturb the others.
_MIXED = [
  enumeration.SAMPLINGS[name]
  for name in ('temperature 1', 'greedy', 'top-p', 'all filters', 'min-p')
]


def _random_case(seed, vocab_size=4):
  """Logits, distributions and randomness of a batch."""
  rng = np.random.default_rng(seed)
  shape = (_BATCH_SIZE, _NUM_NODES, vocab_size)
  logits = (1.5 * rng.normal(size=shape)).astype(np.float32)
  rows = [_MIXED[row % len(_MIXED)] for row in range(_BATCH_SIZE)]
  values = {
    name: [(enumeration.NEUTRAL | row)[name] for row in rows]
    for name in ('temperature', 'top_k', 'top_p', 'min_p')
  }
  nothing = np.zeros((_NUM_NODES, vocab_size), bool)
  target = np.stack(
    [
      enumeration.exact_probs(of_row, nothing, row)
      for of_row, row in zip(logits, rows, strict=True)
    ]
  )
  proposals = rng.dirichlet(np.ones(vocab_size), size=shape[:2])
  proposals *= rng.random(shape) < 0.8  # cannot draw all tokens
  proposals[..., 0] += proposals.sum(-1) == 0
  proposals = (proposals / proposals.sum(-1, keepdims=True)).astype(np.float32)
  # Now and then it is all but the target, or all on one token.
  near = rng.random(shape[:2]) < 0.15
  proposals[near] = target[near]
  return {
    'rng': rng,
    'logits': logits,
    'target': target,
    'proposals': proposals,
    'stochastic': np.array([row.get('temperature', 1.0) > 0 for row in rows]),
    'sampling': enumeration.params(values, _BATCH_SIZE, vocab_size),
    'randomness': Randomness(
      noise=np.zeros((_BATCH_SIZE, _DEPTH + 1, vocab_size), np.float32),
      draft_keys=jax.random.split(jax.random.key(seed), _BATCH_SIZE),
      uniforms=rng.random(shape[:2], np.float32),
      residual_noise=rng.gumbel(size=shape[::2]).astype(np.float32),
    ),
  }


class _Agreement:
  """Compares rows, and counts how they ended."""

  def __init__(self):
    self.close = 0
    self.accepted = []

  def compare(self, verdict, path, nodes, emitted, places, margin):
    """One row of a verdict and of its path with the results of a slow walk."""
    if margin < slow_walks.ENOUGH:
      self.close += 1
      return
    number = int(verdict.accepted)
    assert verdict.chosen[: number + 1].tolist() == emitted
    for found, expected in ((verdict.place, places), (path, nodes[places])):
      assert found[: number + 1].tolist() == list(expected)
      assert np.all(found[number + 1 :] == NO_NODE)
    self.accepted.append(number)

  def check(self, number, depths):
    """That it was no poor example."""
    assert self.close < 0.05 * number
    counts = np.bincount(self.accepted, minlength=depths + 1)
    assert np.all(counts[: depths + 1] >= 10)


def check_walks(children, num_batches=30):
  agreement = _Agreement()
  for seed in range(num_batches):
    case = _random_case(seed)
    rng, proposals = case['rng'], case['proposals']
    token, parent, size = _random_trees(rng, proposals.astype(float), children)
    tree, nodes, of_node = _within_larger_trees(
      rng, token, parent, size, proposals
    )
    nodes, old = _with_gaps(rng, nodes, size)
    if children == BEST:
      of_node = of_node[:, :, :0]
    verdict, path = jax.device_get(
      _verify(
        RejectionRule(children),
        tree,
        nodes,
        case['logits'],
        of_node,
        case['randomness'],
        case['sampling'],
      )
    )
    for row in range(_BATCH_SIZE):
      at = np.maximum(old[row], 0)
      parents = [
        np.flatnonzero(old[row] == parent[row, place])[0] if place > 0 else -1
        for place in old[row]
      ]
      found = slow_walks.walk(
        np.array(parents),
        token[row, at],
        case['target'][row],
        proposals[row, at].astype(np.float64),
        case['randomness'].uniforms[row],
        case['randomness'].residual_noise[row],
        stochastic=case['stochastic'][row],
        children=children,
      )
      of_row = jax.tree.map(lambda array, row=row: array[row], verdict)
      agreement.compare(of_row, path[row], nodes[row], *found)
  agreement.check(num_batches * _BATCH_SIZE, depths=2)


@pytest.mark.parametrize('children', CHILDREN)
def test_the_compiled_walk_branches_as_the_slow_one(children):
  check_walks(children)


@pytest.mark.long
@pytest.mark.parametrize('children', CHILDREN)
def test_many_more_walks(children):
  check_walks(children, num_batches=500)


def _chains(case, is_drawn):
  """All nodes in a chain; the tokens are drawn, or any; see `_random_trees`."""
  rng, proposals = case['rng'], case['proposals'].astype(float)
  size = rng.integers(1, _NUM_NODES + 1, size=_BATCH_SIZE)
  token = rng.integers(proposals.shape[2], size=proposals.shape[:2])
  if is_drawn:
    gumbel = rng.gumbel(size=proposals.shape)
    with np.errstate(divide='ignore'):
      token[:, 1:] = (np.log(proposals) + gumbel).argmax(-1)[:, :-1]
  # So that some tokens are accepted in greedy rows.
  likely = case['target'].argmax(-1)[:, :-1]
  follow = rng.random(likely.shape) < 0.7
  follow &= ~case['stochastic'][:, None] | (not is_drawn)
  token[:, 1:] = np.where(follow, likely, token[:, 1:])
  return token, np.tile(np.arange(-1, _NUM_NODES - 1), (_BATCH_SIZE, 1)), size


@pytest.mark.parametrize('is_drawn', [True, False])
def test_the_compiled_block_is_cut_as_the_slow_one(is_drawn):
  check_cuts(is_drawn)


def check_cuts(is_drawn):
  num_batches = 20
  agreement = _Agreement()
  children = WITH_REPLACEMENT if is_drawn else BEST
  for seed in range(num_batches):
    case = _random_case(seed)
    token, parent, sizes = _chains(case, is_drawn)
    tree, nodes, of_node = _within_larger_trees(
      case['rng'], token, parent, sizes, case['proposals']
    )
    verdict, path = jax.device_get(
      _verify(
        BlockRule(children),
        tree,
        nodes,
        case['logits'],
        of_node if is_drawn else of_node[:, :, :0],
        case['randomness'],
        case['sampling'],
      )
    )
    for row, size in enumerate(sizes):
      found = slow_walks.walk_block(
        token[row, :size],
        case['target'][row],
        case['proposals'][row].astype(np.float64),
        case['randomness'].uniforms[row],
        case['randomness'].residual_noise[row],
        stochastic=case['stochastic'][row],
        children=children,
      )
      of_row = jax.tree.map(lambda array, row=row: array[row], verdict)
      agreement.compare(of_row, path[row], nodes[row], *found)
  agreement.check(num_batches * _BATCH_SIZE, depths=3)


_draw = quick_jit(draw_children, static_argnames=('number', 'replacement'))


@pytest.mark.parametrize('children', [WITHOUT_REPLACEMENT, WITH_REPLACEMENT])
def test_children_are_drawn_from_what_is_said(children):
  """In order, from the filtered distribution, with noise of their own."""
  check_draws(children)


def check_draws(children):
  number, num_close = 3, 0
  for seed in range(4):
    case = _random_case(seed)
    rng, logits = case['rng'], case['logits']
    batch_size, num_nodes, vocab_size = logits.shape
    nodes = np.argsort(rng.random((batch_size, num_nodes)), axis=1)
    keys = case['randomness'].draft_keys
    tokens, log_probs, drawn_from = jax.device_get(
      _draw(
        logits,
        nodes.astype(np.int32),
        keys,
        case['sampling'],
        number=number,
        replacement=children == WITH_REPLACEMENT,
      )
    )
    shape = (number, vocab_size)
    noise = slow_walks.child_noise(
      keys,
      num_nodes=num_nodes,
      shape=shape if children == WITH_REPLACEMENT else shape[1:],
    )
    noise = np.asarray(noise, np.float64)
    nothing = np.zeros((num_nodes, vocab_size), bool)
    for row in range(batch_size):
      stochastic = case['stochastic'][row]
      probs = case['target'][row]
      if not stochastic:
        probs = enumeration.exact_probs(logits[row], nothing, {})
      np.testing.assert_allclose(drawn_from[row], probs, atol=1e-6)
      for place, node in enumerate(nodes[row]):
        expected, margin = slow_walks.pick_children(
          probs[place],
          noise[row, node],
          number,
          stochastic=stochastic,
          children=children,
        )
        if margin < slow_walks.ENOUGH:
          num_close += 1
          continue
        found = log_probs[row, place] > -100
        assert tokens[row, place][found].tolist() == expected
        np.testing.assert_allclose(
          log_probs[row, place][found],
          np.log(probs[place, expected]),
          atol=1e-5,
        )
  assert num_close < 20


def test_children_that_float32_gives_no_probability():
  """Or its probability, when likelier siblings are rejected, is unknown."""
  logits = np.array([0.0, -80.0, -100.0, -110.0, -110.0], np.float32)
  for scale in (0.1, 0.5, 0.8, 1.0, 1.1, 2.0):
    _, log_probs, drawn_from = jax.device_get(
      _draw(
        np.tile(scale * logits, (200, 1, 1)),
        np.zeros((200, 1), np.int32),
        jax.random.split(jax.random.key(0), 200),
        enumeration.params(enumeration.NEUTRAL | {'logit_bias': {}}, 200, 5),
        number=5,
        replacement=False,
      )
    )
    drawn = np.asarray(is_possible(log_probs[:, 0]))  # the children in the tree
    possible = (drawn_from[:, 0] > 1e-37).sum(1)
    np.testing.assert_array_equal(drawn.sum(1), possible)
    assert np.all(np.diff(drawn.astype(int), axis=1) <= 0), 'a gap'


def test_every_stream_of_every_step_has_keys_of_its_own():
  keys = jax.random.split(jax.random.key(0), 3)
  streams = jnp.array([2**31 - 1, 2**31 - 2, 2**31 - 3])
  of_step = jax.vmap(
    lambda stream, length: step_keys(keys, stream, jnp.full(3, length)),
    (None, 0),
  )
  # And those of `position_noise`.
  of_position = jax.vmap(jax.random.fold_in, (0, None))
  found = [
    *jax.jit(jax.vmap(of_step, (0, None)))(streams, jnp.arange(50)),
    jax.jit(jax.vmap(of_position, (None, 0)))(keys, jnp.arange(200)),
  ]
  found = [np.asarray(jax.random.key_data(one)).reshape(-1, 2) for one in found]
  found = np.concatenate(found)
  assert len(np.unique(found, axis=0)) == len(found) == 3 * (3 * 50 + 200)


def test_the_randomness_of_a_step_is_of_these_keys():
  """Every stream is used for what it is for, at any length."""
  keys = jax.random.split(jax.random.key(1), 3)
  sizes = {'num_nodes': 6, 'vocab_size': 6}
  sampling = enumeration.params({'temperature': [1.0, 0.0, 0.5]}, 3, 6)
  of_depth = lambda key, at: jax.random.gumbel(
    jax.random.fold_in(key, at), (6,)
  )
  of_rows = jax.vmap(jax.vmap(of_depth, (None, 0)))
  find = quick_jit(
    functools.partial(step_randomness, max_depth=2, **sizes),
    static_argnames='shares_noise',
  )
  for length in (np.array([1, 7, 3]), np.array([2, 8, 900])):
    draft_keys, uniforms, residual = slow_walks.randomness(
      keys, length, **sizes
    )
    noise = of_rows(keys, length[:, None] + np.arange(3)[None])
    drawn = noise * np.array([1, 0, 1])[:, None, None]
    for shares_noise in (True, False):
      found = find(keys, length, sampling, shares_noise=shares_noise)
      assert jnp.all(found.draft_keys == draft_keys)
      np.testing.assert_array_equal(found.uniforms, uniforms)
      np.testing.assert_array_equal(found.residual_noise, residual)
      np.testing.assert_array_equal(found.noise, drawn * shares_noise)


# Match verification: whatever the noise, it emits the tokens of plain decoding,
# the likeliest after the noise was added: draws from the target's distribution.

_MATCH_LENGTH = 4
_MATCH_VOCAB_SIZE = 3
_DEEPEST = 6


def _match_drafters(draft, wrong):
  model = lambda config: tiny_drafters.model(
    table_model(draft, max_positions=1000), config
  )
  grown = _of_tables(draft)
  inner = tiny_drafters.candidates(
    tiny_drafters.exact(wrong), config=tiny_drafters.INNER
  )
  return {
    'none': PLAIN,
    'chain': model(Settings(topology=chain(3))),
    'ragged tree': model(Settings(topology=_TOPOLOGIES['ragged tree'])),
    'tree': grown['tree'],
    'staged': staged(grown['tree'], inner),
    'tables': grown['tables'],
  }


def _decode_with_noise(target, drafter, sampling, noise):
  """One row, whose noise is `[T, V]` by position while it is traced."""
  given = lambda keys, positions, vocab_size, sampling: noise[positions]
  request = Request(
    prompt=jnp.full((1, 1), enumeration.PROMPT, jnp.int32),
    prompt_length=jnp.ones(1, jnp.int32),
    limit=jnp.full(1, _MATCH_LENGTH, jnp.int32),
    row_keys=jax.random.split(jax.random.key(0), 1),
    sampling=sampling,
    watchers=make_watchers(penalty_vocab_size=_MATCH_VOCAB_SIZE),
  )
  config = DecodeConfig(max_new_tokens=_MATCH_LENGTH)
  with mock.patch.object(sampling_module, 'position_noise', given):
    result = decode.__wrapped__(target, drafter, request, config=config)
  return result.tokens[0, 1:], result.counters.steps


def _noises(table, values):
  """`[n, T, V]` noises by position, `[n, L]` what they lead to.

  Every possible sequence is among these.
  """
  rng = np.random.default_rng(0)
  sequences = list(
    itertools.product(range(_MATCH_VOCAB_SIZE), repeat=_MATCH_LENGTH)
  )
  total = 1 + _MATCH_LENGTH + _DEEPEST
  noises = rng.gumbel(size=(3, len(sequences), total, _MATCH_VOCAB_SIZE))
  for index, sequence in enumerate(sequences):
    for place, token in enumerate(sequence, start=1):
      noises[0, index, place, token] += 20.0  # more than any token is unlikely
  noises = noises.reshape(-1, total, _MATCH_VOCAB_SIZE).astype(np.float32)
  noises *= values.get('temperature', 1.0) > 0
  texts = np.full((len(noises), 1), enumeration.PROMPT)
  for place in range(1, _MATCH_LENGTH + 1):
    seen = (texts[:, :, None] == np.arange(_MATCH_VOCAB_SIZE)).any(1)
    probs = enumeration.exact_probs(table[texts[:, -1]], seen, values)
    with np.errstate(divide='ignore'):
      best = np.argmax(np.log(probs) + noises[:, place], axis=1)
    texts = np.concatenate([texts, best[:, None]], axis=1)
  return noises, texts[:, 1:]


@pytest.mark.parametrize(
  'name',
  [
    'none',
    'staged',
    *(
      pytest.param(name, marks=pytest.mark.long)
      for name in ('chain', 'ragged tree', 'tables', 'tree')
    ),
  ],
)
def test_match_says_what_plain_decoding_does(name):
  """All sequences that are possible, with noises that lead to them."""
  run = quick_jit(jax.vmap(_decode_with_noise, (None, None, None, 0)))
  steps = []
  for number, (sampling, values) in enumerate(enumeration.SAMPLINGS.items()):
    rng = np.random.default_rng(number)
    target = 1.3 * rng.normal(size=(_MATCH_VOCAB_SIZE,) * 2)
    target = target.astype(np.float32)
    noises, expected = _noises(target, values)
    if sampling == 'temperature 1':
      assert len(np.unique(expected, axis=0)) == 3**_MATCH_LENGTH
    for kind in ('similar', 'adversarial'):
      draft = enumeration.draft_logits(kind, target, rng)
      drafter = _match_drafters(draft, wrong=target.T)[name]
      emitted, num_steps = run(
        table_model(target, max_positions=1000),
        drafter,
        enumeration.full_sampling(values, _MATCH_VOCAB_SIZE),
        noises,
      )
      np.testing.assert_array_equal(emitted, expected, err_msg=sampling)
      steps += np.asarray(num_steps).tolist()
  # More than one step, and fewer than in plain decoding.
  assert name == 'none' or 1.2 < np.mean(steps) < 0.9 * _MATCH_LENGTH
