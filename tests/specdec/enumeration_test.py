"""The distribution under rejection verification, and the link to compiled code.

First the distributions of sequences, every branch of a step or of several ones
summed; then that the rules, `draw_children` and block drafters branch in that
way, decision by decision. `law_test` counts what the whole loop says, and
`equality_test` enumerates match verification.
"""

import functools
import itertools

import enumeration
import jax
import jax.numpy as jnp
import list_trees
import numpy as np
import pytest
import tiny_drafters

import specdec
from specdec import carried as carried_lib
from specdec import decode_options
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import growth
from specdec.draft import lookup
from specdec.draft import ranking as ranking_lib
from specdec.models.nn import table_model
from specdec.tree import topology as topology_lib
from specdec.tree import tree as tree_lib
from specdec.verify import rejection

# Total variation of whole sequences: the rounding of float32.
_TOLERANCE = 1e-6


def _assert_law(worlds, law, length):
  # Total variation; mass that is lost counts.
  distances = 0.5 * np.abs(law - worlds.exact_law(length)).sum(1)
  worst = distances.argmax()
  assert distances[worst] < _TOLERANCE, worlds.names[worst]


_RULES = ('rejection', 'traversal')
_SAMPLINGS = ('temperature 1', 'penalty, bias, filters', 'greedy')
_SAMPLINGS += ('a banned token', 'all filters')


def _check_laws(worlds, rule, children):
  """The first step of a rule, after which all is drawn from the target."""
  for topology in enumeration.TOPOLOGIES.values():
    law, _ = _step_law(rule, worlds, topology, children)
    _assert_law(worlds, law, topology.max_depth + 1)


def _step_law(rule, worlds, topology, children):
  """The distribution of sequences that begin with a step, and `accepted`."""
  length, rule = topology.max_depth + 1, decode_options.RULES[rule](children)
  roots = np.flatnonzero(worlds.length == 0)
  mass, accepted = enumeration.step(
    worlds, roots, np.ones(len(roots)), topology, rule
  )
  enumeration.finish(worlds, mass, length)
  return worlds.of_length(mass, length), accepted


@pytest.mark.parametrize('rule', _RULES)
@pytest.mark.parametrize('children', sampling_lib.CHILDREN)
def test_sequences_have_the_targets_law(children, rule):
  _check_laws(enumeration.make_worlds(4, 4), rule, children)


@pytest.mark.parametrize('rule', _RULES)
@pytest.mark.parametrize('children', sampling_lib.CHILDREN)
def test_several_steps_have_the_targets_law(children, rule):
  few = {'drafts': ('similar', 'adversarial'), 'samplings': _SAMPLINGS[:3]}
  worlds = enumeration.make_worlds(3, 5, **few)
  rule = decode_options.RULES[rule](children)
  for topology in (topology_lib.chain(2), topology_lib.k_ary(2, 2)):
    law = enumeration.several_steps(worlds, topology, rule, 3)
    _assert_law(worlds, law, 3)


def check_few(rule, children):
  """A part of the above that takes a moment."""
  few = {'drafts': ('similar',), 'samplings': ('temperature 1',)}
  _check_laws(enumeration.make_worlds(3, 4, **few), rule, children)


# How many tokens are accepted: a rule that rejected all would be exact, too.


def _emitted(worlds, num_tokens, children):
  """Expected tokens of a step with a chain, by rejection and by traversal."""
  given = worlds, topology_lib.chain(num_tokens), children
  return [1 + _step_law(rule, *given)[1] for rule in _RULES]


@pytest.mark.parametrize('children', sampling_lib.CHILDREN)
def test_as_many_guesses_stand_as_can(children):
  """One token: 1 - TV, or the target's probability of one not drawn."""
  worlds = enumeration.make_worlds(4, 4)
  root = slice(None, None, len(worlds.contexts))
  target, draft = worlds.exact[root], worlds.draft[root]
  best = np.take_along_axis(target, worlds.ranked[root, :1], axis=1)[:, 0]
  likely = np.minimum(target, draft).sum(1)
  is_drawn = worlds.stochastic[root] & (children != sampling_lib.BEST)
  expected = 1 + np.where(is_drawn, likely, best)
  for emitted in _emitted(worlds, 1, children):
    np.testing.assert_allclose(emitted, expected, atol=1e-6)
  # Traversal emits at least as many tokens; only point masses gain nothing.
  one_by_one, by_traversal = _emitted(worlds, 3, children)
  assert np.all(by_traversal > one_by_one - 1e-6)
  more = np.mean(by_traversal > one_by_one + 1e-3)
  assert more == 0 if children == sampling_lib.BEST else more > 0.1
  # An identical draft is never rejected.
  never = is_drawn & ['identical' in name for name in worlds.names]
  for emitted in (one_by_one, by_traversal):
    np.testing.assert_allclose(emitted[never], 4, atol=1e-5)


def test_a_weight_of_which_nothing_is_left():
  """Neither NaN nor a weight below 1 at the root, by rounding."""
  half, certain = np.full((3, 2), 0.5, np.float32), np.float32([[1, 0]] * 3)
  weights = np.float32([1.0, 0.5, 0.0])
  tokens = np.zeros(3, np.int32)
  rule = rejection.TraversalRule()
  weigh = functools.partial(enumeration.try_child, rule=rule)
  _, chance, left, rest, _ = weigh(weights, half, half, tokens)
  assert chance.tolist() == [1.0, 0.5, 0.0]
  assert left.tolist() == [1.0, 0.0, 0.0]
  np.testing.assert_array_equal(rest[0], half[0])  # the target itself
  _, _, left, rest, _ = weigh(weights, half, certain, tokens)
  np.testing.assert_allclose(left, [1.0, 1 / 3, 0.0])
  np.testing.assert_array_equal(rest[:2], 1 - certain[:2])


# Trees that are grown, not drawn: every world has a tree of its own.


_GROWN = tiny_drafters.Settings(
  num_nodes=7, width=3, branching=2, rounds=2, capacity=20, cost_ratio=0
)


def _drafter(name, draft):
  model = tiny_drafters.model(
    table_model.table_model(draft, max_positions=1000), _GROWN
  )
  wrong = tiny_drafters.exact(np.roll(draft, 1, axis=0))
  text = np.random.default_rng(1).integers(len(draft), size=40).tolist()
  earlier = (
    lookup.StoredTexts.of_texts([text]),
    lookup.Recycling(num_kept=2, size=3),
  )
  if name == 'earlier':
    return tiny_drafters.candidates(*earlier, config=_GROWN)
  tables = tiny_drafters.candidates(wrong, config=tiny_drafters.INNER)
  return specdec.staged(model, tables)


def _grown_trees(drafter, vocab_size, rng):
  """After some text, one of each sampling; unverified nodes have no parent."""
  of_rows = [
    enumeration.full_sampling(values, vocab_size)
    for values in enumeration.SAMPLINGS.values()
  ]
  rows = len(of_rows)
  shape = rows, list_trees.TEXT_SLOTS
  texts = rng.integers(vocab_size, size=shape)
  _, tree = list_trees.grown(
    drafter,
    np.int32(texts),
    np.full(rows, 9, np.int32),
    np.ones(rows, bool),
    np.zeros((rows, drafter.max_depth + 1, vocab_size), np.float32),
    jax.tree.map(lambda *rows: np.concatenate(rows), *of_rows),
  )
  nodes = np.asarray(drafter.shape.select(tree))
  verified = (nodes[:, :, None] == np.arange(tree.capacity)).any(1)
  return tree.replace(parent=np.where(verified, tree.parent, tree_lib.NO_NODE))


def _guesses(token, parent, max_depth):
  """The tokens of a tree by paths of ranks."""
  paths, guesses = {0: ()}, {}
  for node in range(1, len(parent)):
    above = paths.get(parent[node])
    if above is not None and len(above) < max_depth:
      paths[node] = (*above, sum(path[:-1] == above for path in guesses))
      guesses[paths[node]] = token[node]
  return guesses


@pytest.mark.parametrize('name', ['staged', 'earlier'])
def test_grown_trees_have_the_targets_law(name):
  length, vocab_size = 4, 3
  drafts = ('uniform',) * 3  # only the targets are used
  worlds = enumeration.make_worlds(vocab_size, length + 1, drafts=drafts)
  rng = np.random.default_rng(0)
  tables = 2 * rng.normal(size=(3, vocab_size, vocab_size))
  mass, kinds = np.zeros(len(worlds.length)), set()
  for number, table in enumerate(tables):
    trees = _grown_trees(_drafter(name, table), vocab_size, rng)
    for row, tree in enumerate(zip(trees.token, trees.parent, strict=True)):
      guesses = _guesses(*map(np.asarray, tree), length)
      kinds.add((*guesses.items(),))
      root = (number * len(enumeration.SAMPLINGS) + row) * len(worlds.contexts)
      mass += enumeration.step(
        worlds,
        np.array([root]),
        np.ones(1),
        topology_lib.Topology([*guesses]),
        rejection.RejectionRule(),
        guesses,
      )[0]
  enumeration.finish(worlds, mass, length)
  _assert_law(worlds, worlds.of_length(mass, length), length)
  assert len(kinds) >= 8, 'a poor example'


# The link: the rules take the branches that were summed above.

_BATCH_SIZE, _NUM_BATCHES = 64, 10
_NUM_NODES = 9  # that are verified
_CAPACITY = 14
_DEPTH = 4


def _random_trees(case, children):
  """Trees of all forms, with siblings that could have been drawn.

  And the nodes `[B, N]` that are verified, gaps among them.
  """
  rng, vocab_size = case['rng'], case['logits'].shape[2]
  token = rng.integers(vocab_size, size=(_BATCH_SIZE, _CAPACITY))
  parent = np.full(token.shape, tree_lib.NO_NODE)
  depths = np.zeros(token.shape, np.int32)
  nodes = np.full((_BATCH_SIZE, _NUM_NODES), tree_lib.NO_NODE, np.int32)
  for row in range(_BATCH_SIZE):
    left = case['proposals'][row].astype(float)
    depth = depths[row]
    reach, share = rng.choice([1, 2, _CAPACITY]), rng.choice([0.6, 1.0])
    verified = [0]
    for node in range(1, _CAPACITY):
      can_grow = np.flatnonzero((depth < _DEPTH) & (left.sum(1) > 0))
      can_grow = can_grow[can_grow < node]
      if not len(can_grow):
        break
      above = rng.choice(can_grow[-reach:])
      law = left[above] / left[above].sum()
      token[row, node] = rng.choice(vocab_size, p=law)
      if children != sampling_lib.WITH_REPLACEMENT:
        left[above, token[row, node]] = 0.0
      parent[row, node], depth[node] = above, depth[above] + 1
      if above in verified and rng.random() < share:
        verified.append(node)
    verified = verified[:_NUM_NODES]
    size = len(verified) - 1
    places = 1 + rng.choice(_NUM_NODES - 1, size=size, replace=False)
    nodes[row, [0, *np.sort(places)]] = verified
  zeros = np.zeros(token.shape, np.float32)
  tree = tree_lib.TokenTree(
    token=np.int32(token),
    parent=np.int32(parent),
    depth=depths,
    origin=np.int32(zeros),
    cond_log_prob=zeros,
    log_prob=zeros,
    size=np.full(len(token), _CAPACITY, np.int32),
  )
  return tree, nodes


@functools.partial(enumeration.quick_jit, static_argnames='rule')
def _verify(rule, tree, nodes, logits, proposals, randomness, sampling):
  verdict = rule(tree, nodes, logits, proposals, randomness, sampling)
  return verdict, verdict.path(nodes)


# The rows of a batch have these in turn; a greedy one must not disturb others.
_MIXED = [
  enumeration.SAMPLINGS[name]
  for name in ('temperature 1', 'greedy', 'top-p', 'all filters', 'min-p')
]


def _random_case(seed, vocab_size=4):
  """Logits and distributions by node, and the randomness of a batch."""
  rng = np.random.default_rng(seed)
  shape = (_BATCH_SIZE, _CAPACITY, vocab_size)
  logits = (1.5 * rng.normal(size=shape)).astype(np.float32)
  rows = [_MIXED[row % len(_MIXED)] for row in range(_BATCH_SIZE)]
  values = {
    name: [(enumeration.NEUTRAL | row)[name] for row in rows]
    for name in ('temperature', 'top_k', 'top_p', 'min_p')
  }
  nothing = [np.zeros(shape[1:], bool)] * _BATCH_SIZE
  target = np.stack([*map(enumeration.exact_probs, logits, nothing, rows)])
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
    'randomness': randomness_lib.Randomness(
      # A chain may be as deep as there are nodes.
      noise=randomness_lib.noise_table(
        np.zeros((_BATCH_SIZE, _NUM_NODES, vocab_size), np.float32)
      ),
      draft_keys=jax.random.split(jax.random.key(seed), _BATCH_SIZE),
      uniforms=rng.random((_BATCH_SIZE, _NUM_NODES), np.float32),
      residual_noise=rng.gumbel(size=shape[::2]).astype(np.float32),
    ),
  }


def check_walks(children, name='rejection'):
  """Compares verdicts with the verdicts of a slow walk, row by row."""
  rule, num_close, numbers = decode_options.RULES[name](children), 0, []
  for seed in range(_NUM_BATCHES):
    case = _random_case(seed)
    tree, nodes = _random_trees(case, children)
    at = np.maximum(nodes, 0)[:, :, None]
    logits, target, draft = (
      np.take_along_axis(case[name], at, axis=1)
      for name in ('logits', 'target', 'proposals')
    )
    proposals = case['proposals'][
      :, :, : 0 if children == sampling_lib.BEST else None
    ]
    randomness = case['randomness']
    given = (tree, nodes, logits, proposals, randomness, case['sampling'])
    verdict, path = jax.device_get(_verify(rule, *given))
    for row in range(_BATCH_SIZE):
      place_of = {node: place for place, node in enumerate(nodes[row])}
      above = np.where(
        nodes[row] > 0, tree.parent[row, nodes[row]], tree_lib.NO_NODE
      )
      emitted, places, margin = enumeration.walk(
        np.array([place_of[node] if node >= 0 else -1 for node in above]),
        tree.token[row, nodes[row]],
        target[row],
        draft[row].astype(float),
        randomness.uniforms[row],
        randomness.residual_noise[row],
        case['stochastic'][row],
        rule,
      )
      if margin < enumeration.ENOUGH:
        num_close += 1
        continue
      number = int(verdict.accepted[row])
      assert verdict.chosen[row, : number + 1].tolist() == emitted
      walk = np.stack([verdict.index[row], path[row]])
      expected = [places, nodes[row, places]]
      np.testing.assert_array_equal(walk[:, : number + 1], expected)
      assert np.all(walk[:, number + 1 :] == tree_lib.NO_NODE)
      numbers.append(number)
  # The example has few close decisions and all numbers of accepted tokens.
  assert num_close < 0.05 * _NUM_BATCHES * _BATCH_SIZE
  assert np.all(np.bincount(numbers, minlength=3)[:3] >= 10)


@pytest.mark.parametrize('name', _RULES)
@pytest.mark.parametrize('children', sampling_lib.CHILDREN)
def test_the_compiled_walk_branches_as_the_slow_one(children, name):
  check_walks(children, name)


_draw = enumeration.quick_jit(
  ranking_lib.draw_children, static_argnames=('number', 'children')
)


_DRAWN = sampling_lib.CHILDREN[1:]


@pytest.mark.parametrize('children', _DRAWN)
def test_children_are_drawn_from_what_is_said(children):
  """In order, from the filtered distribution, with noise of their own."""
  number, num_close = 3, 0
  replacement = children == sampling_lib.WITH_REPLACEMENT
  for seed in range(4):
    case = _random_case(seed)
    rng, logits = case['rng'], case['logits']
    batch_size, num_nodes, vocab_size = logits.shape
    nodes = np.argsort(rng.random((batch_size, num_nodes)), axis=1)
    keys = case['randomness'].draft_keys
    given = (logits, np.int32(nodes), keys, case['sampling'])
    tokens, log_probs, drawn_from = jax.device_get(
      _draw(*given, number=number, children=children)
    )
    shape = (number, vocab_size) if replacement else (vocab_size,)
    noise = np.float64(enumeration.child_noise(keys, num_nodes, shape))
    nothing = np.zeros((num_nodes, vocab_size), bool)
    for row in range(batch_size):
      stochastic = case['stochastic'][row]
      probs = case['target'][row]
      if not stochastic:
        probs = enumeration.exact_probs(logits[row], nothing, {})
      for place, node in enumerate(nodes[row]):
        if stochastic:
          law = probs[place]
          np.testing.assert_allclose(drawn_from[row, place], law, atol=1e-6)
        given = (probs[place], noise[row, node], number, stochastic, children)
        expected, margin = enumeration.pick_children(*given)
        if margin < enumeration.ENOUGH:
          num_close += 1
          continue
        is_child = log_probs[row, place] > -100
        assert tokens[row, place][is_child].tolist() == expected
        said, logs = log_probs[row, place][is_child], np.log(probs[place])
        np.testing.assert_allclose(said, logs[expected], atol=1e-5)
  assert num_close < 20


# Children of a block drafter with a parent term, whose distribution depends on
# the token before the root, the depth and the parent.

_V, _BLOCK = 3, 3
_ALL = topology_lib.k_ary(_V, _BLOCK)


@functools.partial(enumeration.quick_jit, static_argnames='children')
def _grown(scorer, sampling, key, text, length, *, children):
  """The tree below a text `[T]`, its proposals `[M, V]`, the candidates."""
  drafter = specdec.fixed_drafter(scorer, _ALL)
  in_text = (jnp.arange(text.shape[0]) < length)[:, None]
  seen = jnp.any(jax.nn.one_hot(text, _V, dtype=bool) & in_text, axis=0)
  # The states lead to the root, or do not, by the tokens of the text.
  hidden = {0: jax.nn.one_hot(text, _V)[None, None]}
  hidden = carried_lib.HiddenStates(hidden, jnp.zeros(1, jnp.int32))
  ctx = list_trees.match_context(
    text[None],
    length[None],
    jnp.zeros((1, _BLOCK + 1, _V)),
    sampling,
    shape=drafter.shape,
    seen=seen[None],
    rule=rejection.RejectionRule(children),
    hidden=hidden,
  )
  randomness = ctx.randomness.replace(draft_keys=key[None])
  texts = carried_lib.Texts(text[None], length[None], 40, hidden=hidden)
  drawn_from = 0 if children == sampling_lib.BEST else _V
  states = drafter_lib.start(drafter, texts, drawn_from)
  ctx = ctx.replace(randomness=randomness)
  [state], tree = growth.grow(drafter.stages, states, ctx.root_trees(), ctx)
  grown = tree, state.drawn_from, state.scorer.tokens
  return jax.tree.map(lambda array: array[0], grown)


def _block_probs(scores, edges, candidates, values):
  """The distribution below a parent, by definition."""
  logits = np.full(_V, -np.inf)
  logits[candidates] = (scores + edges)[candidates]
  # A few candidates are not penalised, and greedy rows have a distribution.
  plain = {'repetition_penalty': 1.0}
  plain |= {} if values.get('temperature') else {'temperature': 1.0}
  nothing = np.zeros((1, _V), bool)
  return enumeration.exact_probs(logits[None], nothing, values | plain)[0]


@pytest.mark.parametrize(
  ('children', 'num_candidates'),
  [(sampling_lib.BEST, 2), (_DRAWN[0], 2), (_DRAWN[0], 64), (_DRAWN[1], 64)],
)
def test_a_block_draws_from_the_candidates_of_a_depth(children, num_candidates):
  rng, rows, num_close, checked = np.random.default_rng(0), 60, 0, 0
  texts = np.int32(rng.integers(_V, size=(rows, 5)))
  lengths = np.int32(rng.integers(1, 6, size=rows))
  keys = jax.random.split(jax.random.key(1), rows)
  few = min(num_candidates, _V)
  replacement = children == sampling_lib.WITH_REPLACEMENT
  shape = (few, few) if replacement else (few,)
  noise = np.float64(enumeration.child_noise(keys, _ALL.num_nodes, shape))
  grow = jax.vmap(
    functools.partial(_grown, children=children), (None, None, 0, 0, 0)
  )
  for values in map(enumeration.SAMPLINGS.get, _SAMPLINGS):
    marginals = 1.5 * rng.normal(size=(_BLOCK, _V))
    edges = 1.5 * rng.normal(size=(_V, _V))
    scorer = tiny_drafters.block_table(
      marginals, edges, num_candidates=num_candidates
    )
    sampling = enumeration.full_sampling(values, _V)
    trees, proposals, candidates = jax.device_get(
      grow(scorer, sampling, keys, texts, lengths)
    )
    is_drawn = values.get('temperature', 1.0) and children != sampling_lib.BEST
    for row, node in np.ndindex(rows, _ALL.num_nodes - _V**_BLOCK):
      if node and trees.parent[row, node] < 0:
        continue
      depth, last = trees.depth[row, node], lengths[row] - 1
      # A text of one token has no state before its root, but a slot.
      leads = texts[row, last] == texts[row, max(last - 1, 0)]
      scores = marginals[depth] * (1 if leads else -4)
      likeliest = np.argsort(-scores, kind='stable')[:num_candidates]
      probs = _block_probs(
        scores, edges[trees.token[row, node]], likeliest, values
      )
      tokens = candidates[row, depth]
      if is_drawn:
        np.testing.assert_allclose(proposals[row, node], probs, atol=1e-6)
      expected, margin = enumeration.pick_children(
        probs[tokens], noise[row, node], few, is_drawn, children
      )
      if margin < enumeration.ENOUGH:
        num_close += 1
        continue
      drawn = trees.token[row, trees.parent[row] == node]
      assert drawn.tolist() == tokens[expected].tolist()
      checked += 1
  assert num_close < 20
  assert checked > 1000


def test_children_that_float32_gives_no_probability():
  """Once likelier siblings are rejected, its probability may be unknown."""
  logits = np.array([0.0, -80.0, -100.0, -110.0, -110.0], np.float32)
  neutral = enumeration.NEUTRAL | {'logit_bias': {}}
  sampling = enumeration.params(neutral, 200, 5)
  for scale in (0.1, 0.5, 0.8, 1.0, 1.1, 2.0):
    given = (np.tile(scale * logits, (200, 1, 1)), np.zeros((200, 1), np.int32))
    given += (jax.random.split(jax.random.key(0), 200), sampling)
    drawn = _draw(*given, number=5, children=_DRAWN[0])
    _, log_probs, drawn_from = jax.device_get(drawn)
    drawn = np.asarray(
      log_probs[:, 0] > sampling_lib.EXCLUDED
    )  # the children in the tree
    possible = (drawn_from[:, 0] > 1e-37).sum(1)
    np.testing.assert_array_equal(drawn.sum(1), possible)
    assert np.all(np.diff(drawn.astype(int), axis=1) <= 0), 'a gap'


def test_the_randomness_of_a_step_is_of_these_keys():
  """Every stream is used for what it is for, at any length."""
  keys = jax.random.split(jax.random.key(1), 3)
  sizes = {'num_nodes': 40, 'vocab_size': 6}
  fold_in = jax.random.fold_in
  of_depth = lambda key, at: jax.random.gumbel(fold_in(key, at), (6,))
  of_rows = jax.vmap(jax.vmap(of_depth, (None, 0)))
  find = enumeration.quick_jit(
    functools.partial(randomness_lib.step_randomness, max_depth=2, **sizes),
    static_argnames='wants_all',
  )
  of_all = jax.jit(lambda noise: noise.of_all(6))
  for length in (np.array([1, 7, 3]), np.array([2, 8, 900])):
    expected = enumeration.randomness(keys, length, **sizes)
    noise = of_rows(keys, length[:, None] + np.arange(3)[None])
    drawn = noise * np.array([1, 0, 1])[:, None, None]
    for shares_noise, wants_all in itertools.product((True, False), repeat=2):
      is_drawn = np.array([shares_noise, False, shares_noise])
      randomness = find(keys, length, is_drawn, wants_all=wants_all)
      assert jnp.all(randomness.draft_keys == expected[0])
      np.testing.assert_array_equal(randomness.uniforms, expected[1])
      np.testing.assert_array_equal(randomness.residual_noise, expected[2])
      np.testing.assert_array_equal(
        of_all(randomness.noise), drawn * shares_noise
      )
