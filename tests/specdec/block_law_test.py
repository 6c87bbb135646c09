"""The distributions that children of a block drafter with a parent term have.

These distributions depend on the root, the depth and the parent. A draft may
have any, `enumeration_test`; that children are drawn from them is compared draw
by draw.
"""

import functools

import enumeration
import jax
import jax.numpy as jnp
import list_trees
import numpy as np
import pytest
import slow_walks
import table_blocks

import specdec
from specdec import carried as carried_lib
from specdec import sampling as sampling_lib
from specdec.draft import growth
from specdec.draft import stages as stages_lib
from specdec.tree import topology as topology_lib
from specdec.verify import rejection

_V, _DEPTH, _LENGTH = 3, 3, 4
_ALL = topology_lib.k_ary(_V, _DEPTH)
_SAMPLINGS = ('temperature 1', 'all filters', 'penalty, bias, filters')
_SAMPLINGS += ('a banned token', 'greedy')


def _tables(seed):
  """Marginals `[D, V]` and an edge term `[V, V]`, both of some weight."""
  rng = np.random.default_rng(seed)
  return 1.5 * rng.normal(size=(_DEPTH, _V)), 1.5 * rng.normal(size=(_V, _V))


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
    jnp.zeros((1, _DEPTH + 1, _V)),
    sampling,
    shape=drafter.shape,
    seen=seen[None],
    rule=rejection.RejectionRule(children),
    hidden=hidden,
  )
  randomness = ctx.randomness.replace(draft_keys=key[None])
  ctx = ctx.replace(randomness=randomness)
  texts = carried_lib.Texts(text[None], length[None], 40, hidden=hidden)
  drawn_from = 0 if children == sampling_lib.BEST else _V
  states = stages_lib.start(drafter, texts, drawn_from)
  [state], tree = growth.grow(drafter.stages, states, ctx.root_trees(), ctx)
  found = tree, state.proposals, state.scorer.tokens
  return jax.tree.map(lambda array: array[0], found)


def _all_grown(num_candidates, worlds, children):
  """`_grown` below all contexts of all worlds."""
  lengths = np.array([1 + len(context) for context in worlds.contexts])
  texts = np.zeros((len(lengths), lengths.max()), np.int32)
  for text, context in zip(texts, worlds.contexts, strict=True):
    text[1 : 1 + len(context)] = context
  grow = jax.vmap(
    functools.partial(_grown, children=children), (None, None, 0, 0, 0)
  )
  keys = jax.random.split(jax.random.key(1), len(texts))
  params = [
    enumeration.full_sampling(enumeration.SAMPLINGS[name], _V)
    for name in _SAMPLINGS
  ]
  scorers = [
    table_blocks.scorer(*_tables(seed), num_candidates=num_candidates)
    for seed in range(2)
  ]
  grown = [
    grow(scorer, sampling, keys, texts, lengths)
    for scorer in scorers
    for sampling in params
  ]
  return jax.device_get(grown), keys


def _nodes(worlds, grown):
  """World, root, node and state of all nodes above the last level."""
  number = len(worlds.contexts)
  for world, (trees, *_) in enumerate(grown):
    for root, context in enumerate(worlds.contexts):
      states = {0: world * number + root}
      token, parent = trees.token[root], trees.parent[root]
      for node in range(_ALL.num_nodes - _V**_DEPTH):
        if node and parent[node] in states:
          above = np.array([states[parent[node]]])
          if worlds.length[above] < _LENGTH:
            states[node] = worlds.after(above, token[node : node + 1])[0]
        if node in states and len(context) < _LENGTH:
          yield world, root, node, states[node]


def _expected(world, depth, root, text, num_candidates):
  """The distribution below a root after some text, by definition."""
  marginals, edges = _tables(world // len(_SAMPLINGS))
  # Before the first token there is a state of zeros.
  leads = root[-1] == (0, *root)[-2]
  scores = marginals[depth] * (1 if leads else -4)
  candidates = np.argsort(-scores, kind='stable')[:num_candidates]
  logits = np.full(_V, -np.inf)
  logits[candidates] = (scores + edges[text[-1]])[candidates]
  values = enumeration.SAMPLINGS[_SAMPLINGS[world % len(_SAMPLINGS)]]
  # A few candidates are not penalised, and greedy rows have a distribution.
  plain = {'repetition_penalty': 1.0}
  plain |= {} if values.get('temperature') else {'temperature': 1.0}
  nothing = np.zeros((1, _V), bool)
  return enumeration.exact_probs(logits[None], nothing, values | plain)[0]


def check_draws(children, num_candidates=2):
  """Children are drawn from the candidates of their depth, by the parent."""
  worlds = enumeration.make_worlds(
    _V, _LENGTH, drafts=('similar', 'uniform'), samplings=_SAMPLINGS
  )
  grown, keys = _all_grown(num_candidates, worlds, children)
  few = min(num_candidates, _V)
  replacement = children == sampling_lib.WITH_REPLACEMENT
  shape = (few, few) if replacement else (few,)
  noise = np.float64(slow_walks.child_noise(keys, _ALL.num_nodes, shape))
  num_close, checked = 0, set()
  for world, root, node, state in _nodes(worlds, grown):
    trees, proposals, candidates = (one for one in grown[world])
    context = worlds.contexts[root]
    depth, text = trees.depth[root, node], (enumeration.PROMPT, *context)
    path = (
      *text,
      *worlds.contexts[state % len(worlds.contexts)][len(context) :],
    )
    probs = _expected(world, depth, text, path, num_candidates)
    stochastic, tokens = worlds.stochastic[state], candidates[root, depth]
    if stochastic and children != sampling_lib.BEST:
      np.testing.assert_allclose(proposals[root, node], probs, atol=1e-6)
    expected, margin = slow_walks.pick_children(
      probs[tokens], noise[root, node], few, stochastic, children
    )
    if margin < slow_walks.ENOUGH:
      num_close += 1
      continue
    found = trees.token[root, trees.parent[root] == node]
    assert found.tolist() == tokens[expected].tolist()
    checked.add((world, root, node))
  assert num_close < 20
  assert len(checked) > 1000


@pytest.mark.parametrize('num_candidates', [2, 64])
@pytest.mark.parametrize('children', sampling_lib.CHILDREN)
def test_children_are_drawn_from_what_is_said(children, num_candidates):
  check_draws(children, num_candidates)
