"""Plants known bugs in a copy of the source; the suite must detect each.

Most of them were seen in other systems. Each is listed with a test that must
fail with it, which runs on a fresh import of all modules, one place of the
source replaced.
"""

import ast
import contextlib
import importlib
import importlib.machinery
import re
import sys

import pytest

_ROOTS = ('specdec', 'models')
# Nothing imported under one source may be used under another.
_HELPERS = (
  'enumeration',
  'list_growth',
  'list_trees',
  'slow_walks',
  'tiny_drafters',
  'tiny',
)

# Tests that detect several bugs.
_TESTS = {
  'BLOCKS': "enumeration.check_few_blocks('without_replacement')",
  'COMMIT': 'cache.test_commit_by_hand()',
  'CUTS': 'enumeration.check_cuts(True)',
  'DRAWS': "enumeration.check_draws('without_replacement')",
  'MATCH': 'verification.test_match_by_hand()',
  'NEXT_STEP': ('growth.test_growth_after_a_step_is_growth_after_a_prefill()'),
  'RANDOMNESS': 'enumeration.test_the_randomness_of_a_step_is_of_these_keys()',
  'STEP': 'step.test_a_decode_of_all_that_a_step_does()',
  'TREES': "enumeration.check_few_trees('without_replacement')",
  'WALKS': "enumeration.check_walks('without_replacement')",
}

# A name; a module of specdec and the test; code, and what replaces it.
_TABLE = r"""
# The rule by which tokens are accepted and emitted.
accepts tokens behind a rejected one
  tree.tree: tree.test_the_accepted_path()
  - jnp.all(agrees[None] | ~is_above, axis=1)
  + agrees
bonus token from the wrong node
  verify.match: MATCH
  - verdict.along_path(choices)
  + verdict.replace(place=jax.numpy.roll(place, 1, 1)).along_path(choices)
continues past an EOS accepted within a path
  verify.accept: verification.test_the_stop_rule_against_a_loop(2, 0.1)
  - jnp.minimum(until_end, room)
  + room
overshoots the limit
  verify.accept: verification.test_the_stop_rule_against_a_loop(2, 0.1)
  - jnp.minimum(until_end, room)
  + until_end
goes on with a row that is done
  step: STEP
  - jnp.where(ctx.active, room, 0)
  + room
the origin of a token is that of the token before
  verify.accept: verification.test_origins_by_hand()
  - verdict.path(nodes)[:, 1:], ((0, 0), (0, 1))
  + verdict.path(nodes), ((0, 0), (0, 0))
# The noise.
noise keyed by step, not by position
  step: STEP
  - request.row_keys,
  -       state.length,
  + request.row_keys,
  +       state.counters.steps + 0 * state.length,
noise used again in every step
  sampling: RANDOMNESS
  - position_noise(row_keys, positions,
  + position_noise(row_keys, positions - length[:, None],
target chooses with the noise of the depth above
  verify.match: MATCH
  - jax.vmap(pick)(tree.depth, nodes)
  + jax.vmap(pick)(tree.depth, nodes) - 1
draft ranks with the noise of the depth above
  draft.language_model: growth.check('model')
  - jax.vmap(pick)(tree.depth, nodes)
  + jax.vmap(pick)(tree.depth, nodes) - 1
# What nodes see, and where they are.
mask forgets the farthest ancestor
  tree.tree: tree.test_walks_and_masks()
  - for _ in range(num_steps):
  + for _ in range(num_steps - 1):
nodes see all that is in front of them, as in a chain
  model: STEP
  - window_mask(length, sees,
  + window_mask(length, jnp.tril(sees | True),
positions by index instead of depth
  model: STEP
  - (ctx.length - 1)[:, None] + at(tree.depth, nodes)
  + (ctx.length - 1)[:, None] + nodes
nodes do not see the last token of the text
  cache: cache.test_window_mask_by_hand('_written')
  - before = jnp.arange(num_slots)[None] < start[:, None]
  + before = jnp.arange(num_slots)[None] < start[:, None] - 1
draft forgets the text that it could not read in time
  model: NEXT_STEP
  - sees |= slot < text.num_seen[:, :, None]
  + pass
# The caches.
target keeps the first nodes, not those of the path
  step: STEP
  - commit(target_state, path, emitted - 1)
  + commit(target_state, jnp.where(path >= 0, nodes[:, : path.shape[1]], path),
  +   emitted - 1)
target cache keeps one too many
  model: COMMIT
  - jnp.minimum(num_scored, num_kept + 1)
  + jnp.minimum(num_scored, num_kept + 1) + 1
target cache keeps rejected nodes
  model: COMMIT
  - jnp.minimum(num_scored, num_kept + 1)
  + 0 * num_kept + path.shape[1]
only keys are moved
  cache: cache.test_keep_by_hand()
  - values=tuple(map(move, cache.values))
  + values=cache.values
draft cache keeps one too many after full acceptance
  model: COMMIT
  - jnp.minimum(num_scored, num_kept + 1)
  + num_kept + 1
draft cache forgets the root
  model: COMMIT
  - jnp.minimum(num_scored, num_kept + 1)
  + jnp.minimum(num_scored, num_kept)
draft cache keeps nodes in the order of the tree
  model: COMMIT
  - jnp.argmax(in_slot, axis=2),
  + state.num_text[:, None] + path,
# Trees.
duplicates are not merged
  tree.tree: tree.test_adding_children()
  - wanted & (find_children(tree, parents, tokens) == NO_NODE)
  + wanted
the best nodes are not connected
  tree.tree: tree.test_the_best_nodes_are_a_connected_subtree(6, 'different')
  - best_nodes(tree, jnp.arange(capacity)
  + best_nodes(tree.replace(log_prob=tree.cond_log_prob), jnp.arange(capacity)
log-probabilities are summed from the node up
  tree.tree: tree.test_accumulating_new_edges('tiny')
  -     log_prob = jnp.where(is_child, summed, log_prob)
  +   walk = walk_up(tree.parent, jnp.arange(tree.capacity), max_depth)
  +   summed = jnp.zeros(tree.capacity)
  +   for above in walk.T:
  +     summed += jnp.where(above >= 0, tree.cond_log_prob[above], 0.0)
  +   log_prob = jnp.where(is_child, summed, log_prob)
a context of the text instead of the path
  tree.tree: tree.test_histories_by_hand()
  - behind_root > 0,
  + behind_root > -1 - tree.capacity,
# Growth.
an inner stage drafts below what has been scored
  draft.growth: growth.check('model, table')
  - expanded | states[0].scored,
  + expanded,
children keep the numbers of the inner stage
  draft.growth: growth.check('model, table')
  - jnp.where(known, log_probs, tree.cond_log_prob)
  + tree.cond_log_prob
rows that are done have a say
  draft.growth: growth_stop.test_rows_that_are_done_have_no_say()
  - jnp.where(ctx.active, values, 0.0)
  + values
lookup reads what is behind the text
  draft.lookup: scorers.test_lookup_by_hand()
  - (position < length - 1)
  + (position < num_tokens - 1)
proposers share all of the probability, not what is left
  draft.candidates: scorers.test_merging_proposers(2)
  - log_prob + left,
  + log_prob,
# What only GPUs run.
slots before the window are looked up in it
  cache: cache.test_window_mask_by_hand('_looked_up')
  - seen, place[:, None] < 0
  + seen, place[:, None] < -1
# Rejection verification: what the children were drawn from.
distributions without the filters that were drawn with
  draft.ranking: DRAWS
  -     jnp.exp(log_probs),
  +     jax.nn.softmax(logits, axis=-1),
the best children count as drawn
  draft.ranking: DRAWS
  - noise = jnp.where(per_row(stochastic, noise), noise, 0.0)
  + noise = 0.0 * noise
children that are not drawn count as drawn evenly
  verify.rejection: enumeration.check_walks('best')
  - draft = jax.nn.one_hot(token, vocab_size)
  + draft = jnp.full(walk.target.shape, 1.0 / vocab_size)
drawn where float32 has no probability
  draft.ranking: enumeration.test_children_that_float32_gives_no_probability()
  - _LEAST_LOG_PROB = -69.0
  + _LEAST_LOG_PROB = -1e29
greedy rows judged as at temperature 1
  sampling: WALKS
  - per_row(sampling.is_stochastic, logits)
  + per_row(sampling.is_stochastic | True, logits)
greedy rows divided by a temperature of -1
  sampling: sampling.test_temperature_0_is_argmax_whatever_the_filters()
  - jnp.where(temperature > 0, temperature, 1.0)
  + jnp.where(temperature > 0, temperature, -1.0)
top-p before temperature
  sampling: sampling.test_filters_against_numpy(None, 0.6, None)
  - _top_p_threshold(candidates, top_p)
  + _top_p_threshold(candidates * temperature, top_p)
# Its randomness.
drafting noise used again in every step
  sampling: RANDOMNESS
  - step_keys(row_keys, DRAFTING, length)
  + step_keys(row_keys, DRAFTING, 0 * length)
uniforms and bonus noise used again in every step
  sampling: RANDOMNESS
  - jax.vmap(jax.random.fold_in)(of_stream, length)
  + jax.vmap(jax.random.fold_in)(of_stream, 0 * length)
children and uniforms from one stream
  sampling: RANDOMNESS
  - (2**31 - 1 - stream for stream in range(3))
  + (2**31 - 1 - max(stream, 1) for stream in range(3))
uniforms and bonus token from one stream
  sampling: RANDOMNESS
  - (2**31 - 1 - stream for stream in range(3))
  + (2**31 - 1 - min(stream, 1) for stream in range(3))
one uniform for all siblings
  verify.rejection: WALKS
  - randomness.uniforms[:, index]
  + randomness.uniforms[:, 0]
one drafting noise for all nodes
  draft.ranking: DRAWS
  - jax.random.fold_in(key, node)
  + jax.random.fold_in(key, 0 * node)
# What is left after a rejection.
rows that accepted get the residual of those that did not
  verify.rejection: WALKS
  - rejected = (is_child & ~is_accepted)[:, None]
  + rejected = ~is_accepted[:, None]
residual not normalised for the next sibling
  verify.rejection: TREES
  - left = normalized(jnp.maximum(target - draft, 0.0), target)
  + left = jnp.maximum(target - draft, 0.0)
residual of the target alone
  verify.rejection: TREES
  - jnp.maximum(target - draft, 0.0), target)
  + target, target)
residual subtracts the probability of another token
  verify.rejection: TREES
  - jnp.maximum(target - draft, 0.0)
  + jnp.maximum(target - jnp.roll(draft, 1, axis=1), 0.0)
drawn without replacement, judged as with
  verify.rejection: TREES
  - if children == WITHOUT_REPLACEMENT:
  + if False:
drawn with replacement, judged as without
  verify.rejection: enumeration.check_few_trees('with_replacement')
  - if children == WITHOUT_REPLACEMENT:
  + if True:
siblings in another order than they were drawn
  draft.ranking: DRAWS
  - _, tokens = lax.top_k(log_probs + noise, number)
  + tokens = jnp.flip(lax.top_k(log_probs + noise, number)[1], axis=-1)
the draft of the node above
  verify.rejection: WALKS
  - replace(at(proposals, node), walk.draft)
  + walk.draft + (node == ROOT)[:, None] * at(proposals, node)
the bonus token from the distribution of the root
  verify.rejection: WALKS
  - token_probs(of_row(logits)[:, None], sampling)
  + token_probs(logits[:, :1], sampling)
the bonus token where the last draft token was
  verify.rejection: WALKS
  - _put(walk.chosen, walk.accepted, bonus, everywhere)
  + _put(walk.chosen, walk.accepted - 1, bonus, everywhere)
tokens of the first nodes, not of the verified ones
  verify.rejection: WALKS
  - at(tree.token, nodes), at(tree.parent, nodes)
  + tree.token[:, :num_nodes], at(tree.parent, nodes)
# Block verification.
a block: proposals of the first nodes, not of the verified ones
  verify.block: CUTS
  - at(proposals, nodes[:, :-1])
  + proposals[:, : num_nodes - 1]
a block: weights above 1
  verify.block: BLOCKS
  - jnp.minimum(weights[-1] * ratios[:, depth], 1.0)
  + weights[-1] * ratios[:, depth]
a block: every ratio cut at 1, as one by one
  verify.block: BLOCKS
  - jnp.minimum(weights[-1] * ratios[:, depth], 1.0)
  + weights[-1] * jnp.minimum(ratios[:, depth], 1.0)
a block: probabilities without the mass of the residual
  verify.block: BLOCKS
  - rest = mass + 1.0 - weights
  + rest = 1.0 + 0.0 * mass
a block: inner prefixes are accepted by their weight
  verify.block: BLOCKS
  - jnp.where(depth == size[:, None], weights, inner)
  + weights
a block: residual not weighted
  verify.block: BLOCKS
  - weighted = weights[:, :-1, None] * target[:, :-1]
  + weighted = target[:, :-1]
a block: cut at the first uniform that rejects
  verify.block: CUTS
  - jnp.max(jnp.where(is_accepted, depth, 0), axis=1)
  + jnp.sum(jnp.cumprod(is_accepted, axis=1), axis=1) - 1
a block: residual where all was accepted
  verify.block: CUTS
  - whole = (accepted == size)[:, None]
  + whole = (accepted > size)[:, None]
a block: the bonus token of the depth above
  verify.block: CUTS
  -     after_chain = at(target, accepted)
  +     after_chain = at(target, jnp.maximum(accepted - 1, 0))
  +     left = jnp.concatenate([left[:, :1], left[:, :-1]], axis=1)
# What is returned beside tokens.
stop strings are forgotten between blocks
  watchers: step.test_stop_strings_go_on_where_the_emitted_tokens_led()
  - jnp.take_along_axis(pending, emitted[:, None], axis=1)[:, 0]
  + self.table.start
a token is not seen before the next block
  context: STEP
  - seen_by_nodes(tree, nodes, seen, self.max_depth)
  + jnp.broadcast_to(seen[:, None], logits.shape)
log-probabilities after bias and penalty
  step: STEP
  - verdict=verdict, logits=scores.logits
  + verdict=verdict, logits=logits
the fallback tries a hopeless draft too often
  fallback: guard.test_the_worst_of_drafts_costs_under_five_percent(2.0)
  - _PREMIUM = 0.02
  + _PREMIUM = 0.2
the fallback counts rows that are done
  fallback: guard.test_rows_that_are_done_have_no_say()
  - jnp.maximum(jnp.sum(active), 1)
  + active.shape[0]
# Broken models and short contexts.
a node that is NaN spoils the tree
  cache: STEP
  - jnp.where(jnp.isfinite(new), new, 0)
  + new
a row goes on with choices from NaN
  verify.accept: verification.test_the_stop_rule_against_a_loop(2, 0.1)
  - emitted = jnp.minimum(wanted, valid)
  + emitted = wanted
a draft goes on beyond its context
  draft.growth: growth_stop.test_no_node_is_scored_beyond_the_context()
  - jnp.maximum(longest - ctx.length, -1)
  + jnp.maximum(longest - ctx.length, -1) + 1
"""


def _parse(table):
  """The bugs: name, module, code, what replaces it, test."""
  pattern = re.compile(
    r'^(?P<name>\S.*)\n  (?P<module>[\w.]+): (?P<test>.*)\n'
    r'(?P<old>(?:  -.*\n)+)(?P<new>(?:  \+.*\n)+)',
    re.MULTILINE,
  )
  lines = lambda text: '\n'.join(line[4:] for line in text.splitlines())
  return [
    pytest.param(
      bug['module'],
      lines(bug['old']),
      lines(bug['new']),
      _TESTS.get(bug['test'], bug['test']),
      id=bug['name'],
    )
    for bug in pattern.finditer(table)
  ]


_BUGS = _parse(_TABLE)


class _Planter(importlib.machinery.SourceFileLoader):
  """Loads a module with one place of it replaced."""

  def __init__(self, name, path, old, new):
    super().__init__(name, path)
    self._old, self._new = old, new

  def get_code(self, fullname):
    source = self.get_source(fullname)
    if source.count(self._old) != 1:
      raise RuntimeError(f'{fullname} has changed: plant this bug anew')
    source = source.replace(self._old, self._new)
    return compile(source, f'<{fullname}, planted>', 'exec')


def _is_ours(module):
  root = module.split('.')[0]
  return root in (*_ROOTS, *_HELPERS) or module.endswith('_test')


class _Finder:
  """Finds the modules of this project, one of them with a bug.

  It precedes pytest's own finder, whose rewritten assertions compare long lists
  for hours where the variable `CI` is set.
  """

  def __init__(self, name, old, new):
    self._name, self._bug = f'specdec.{name}', (old, new)

  def find_spec(self, fullname, path, target=None):
    if not _is_ours(fullname):
      return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if fullname == self._name:
      spec.loader = _Planter(fullname, spec.origin, *self._bug)
    return spec


@contextlib.contextmanager
def _planted(name, old, new):
  """All modules are imported anew, one of them with a bug."""
  pop = lambda: {
    module: sys.modules.pop(module)
    for module in list(sys.modules)
    if _is_ours(module)
  }
  saved = pop()
  finder = _Finder(name, old, new)
  sys.meta_path.insert(0, finder)
  try:
    yield
    assert f'specdec.{name}' in sys.modules
  finally:
    sys.meta_path.remove(finder)
    pop()
    sys.modules.update(saved)


def _run(test):
  """A test by its file, its name and its arguments."""
  file, name, arguments = re.fullmatch(r'(\w+)\.(\w+)\((.*)\)', test).groups()
  arguments = ast.literal_eval(f'[{arguments}]')
  getattr(importlib.import_module(f'{file}_test'), name)(*arguments)


def test_every_bug_is_read():
  names = [line for line in _TABLE.splitlines() if re.match(r'[^\s#]', line)]
  assert names == [bug.id for bug in _BUGS]
  assert len(names) == len(set(names)) >= 73


@pytest.mark.parametrize(('module', 'old', 'new', 'test'), _BUGS)
def test_a_bug_is_noticed(module, old, new, test):
  with _planted(module, old, new), pytest.raises(AssertionError):
    _run(test)


@pytest.mark.parametrize(
  'test',
  [
    _TESTS['COMMIT'],
    _TESTS['TREES'],
    _TESTS['WALKS'],
    "tree.test_accumulating_new_edges('tiny')",
    'tree.test_histories_by_hand()',
  ],
)
def test_without_a_bug_nothing_fails(test):
  """Nor does the way in which they are planted break anything."""
  harmless = 'for _ in range(num_steps):'
  with _planted('tree.tree', harmless, harmless):
    _run(test)
  with (
    pytest.raises(RuntimeError, match='plant this bug anew'),
    _planted('tree.tree', 'not there', ''),
  ):
    _run(test)
