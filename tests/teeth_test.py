"""Plants known bugs in a copy of the source; the suite must detect each.

Most of them were seen in other systems. Each bug is listed with a test that
must fail with it, which runs on a fresh import of all modules, one place of the
source replaced.
"""

import contextlib
import importlib
import importlib.machinery
import sys

import numpy as np
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
  'tiny',
)


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


def _run(test, *arguments):
  """A test by its file and name."""
  file, name = test.split('.')
  getattr(importlib.import_module(f'{file}_test'), name)(*arguments)


_TWO_TOKENS = ('decode.test_two_tokens', 'tree')
_SEARCH = ('growth.test_growth_is_a_best_first_search', 'model, table')
_NEXT_STEP = ('growth.test_growth_after_a_step_is_growth_after_a_prefill',)
_SUMS = (
  'tree.test_accumulating_new_edges',
  lambda rng: float(np.float32(rng.choice([-1.0, -3e-8]))),
)
_PATHS = ('verification.test_logits_in_a_tree_are_those_of_each_path_alone',)
_COMMIT = ('verification.test_commit_by_hand',)
_GPT2 = ('decode.test_drafted_equals_plain', 1, 'tree')
_END = ('decode.test_the_first_of_several_eos_ids_ends_a_row', 'chain')
_WITHOUT, _WITH = 'without_replacement', 'with_replacement'
_TREES = ('enumeration.test_rejection_has_the_targets_law', 3, 4, _WITHOUT)
_BLOCKS = (
  'enumeration.test_block_verification_has_the_targets_law',
  3,
  4,
  _WITHOUT,
)
_WALKS = (
  'enumeration.test_the_compiled_walk_branches_as_the_slow_one',
  _WITHOUT,
)
_CUTS = ('enumeration.test_the_compiled_block_is_cut_as_the_slow_one', True)
_DRAWS = ('enumeration.test_children_are_drawn_from_what_is_said', _WITHOUT)
_STREAMS = ('enumeration.test_every_stream_of_every_step_has_keys_of_its_own',)
_RANDOMNESS = ('enumeration.test_the_randomness_of_a_step_is_of_these_keys',)
_LOOP = ('law.check_loop', 'rejection', _WITHOUT, 'tree')


def _bug(what, module, old, new, test):
  return pytest.param(module, old, new, test, id=what)


_BUGS = [
  # The rule by which tokens are accepted and emitted.
  _bug(
    'accepts tokens behind a rejected one',
    'tree.tree',
    'jnp.all(agrees[None] | ~is_above, axis=1)',
    'agrees',
    ('decode.test_two_tokens', 'chain'),
  ),
  _bug(
    'bonus token from the wrong node',
    'verify.match',
    'verdict.along_path(choices)',
    'verdict.replace(place=jax.numpy.roll(place, 1, 1)).along_path(choices)',
    _TWO_TOKENS,
  ),
  _bug(
    'continues past an EOS accepted within a path',
    'verify.accept',
    'jnp.minimum(until_end, room)',
    'room',
    _END,
  ),
  _bug(
    'overshoots the limit',
    'verify.accept',
    'jnp.minimum(until_end, room)',
    'until_end',
    _TWO_TOKENS,
  ),
  _bug(
    'goes on with a row that is done',
    'step',
    'jnp.where(ctx.active, room, 0)',
    'room',
    _END,
  ),
  _bug(
    'the origin of a token is that of the token before',
    'verify.accept',
    'verdict.path(nodes)[:, 1:], ((0, 0), (0, 1))',
    'verdict.path(nodes), ((0, 0), (0, 0))',
    ('verification.test_origins_by_hand',),
  ),
  # The noise.
  _bug(
    'noise keyed by step, not by position',
    'step',
    'request.row_keys,\n      state.length,',
    'request.row_keys,\n      state.counters.steps + 0 * state.length,',
    _TWO_TOKENS,
  ),
  _bug(
    'noise used again in every step',
    'sampling',
    'position_noise(row_keys, positions,',
    'position_noise(row_keys, positions - length[:, None],',
    _TWO_TOKENS,
  ),
  _bug(
    'target chooses with the noise of the depth above',
    'verify.match',
    'jax.vmap(pick)(tree.depth, nodes)',
    'jax.vmap(pick)(tree.depth, nodes) - 1',
    _TWO_TOKENS,
  ),
  _bug(
    'draft ranks with the noise of the depth above',
    'draft.language_model',
    'jax.vmap(pick)(tree.depth, nodes)',
    'jax.vmap(pick)(tree.depth, nodes) - 1',
    _SEARCH,
  ),
  # What nodes see, and where they are.
  _bug(
    'mask forgets the farthest ancestor',
    'tree.tree',
    'for _ in range(num_steps):',
    'for _ in range(num_steps - 1):',
    _PATHS,
  ),
  _bug(
    'nodes see all that is in front of them, as in a chain',
    'model',
    'window_mask(length, sees,',
    'window_mask(length, jnp.tril(sees | True),',
    _PATHS,
  ),
  _bug(
    'positions by index instead of depth',
    'model',
    '(ctx.length - 1)[:, None] + at(tree.depth, nodes)',
    '(ctx.length - 1)[:, None] + nodes',
    _PATHS,
  ),
  _bug(
    'nodes do not see the last token of the text',
    'cache',
    'before = jnp.arange(num_slots)[None] < start[:, None]',
    'before = jnp.arange(num_slots)[None] < start[:, None] - 1',
    ('cache.test_window_mask_by_hand', '_written'),
  ),
  _bug(
    'draft forgets the text that it could not read in time',
    'model',
    'sees |= slot < text.num_seen[:, :, None]',
    'pass',
    _NEXT_STEP,
  ),
  # The caches.
  _bug(
    'target keeps the first nodes, not those of the path',
    'step',
    'commit(target_state, path, emitted - 1)',
    'commit(target_state,'
    ' jnp.where(path >= 0, nodes[:, : path.shape[1]], path), emitted - 1)',
    _GPT2,
  ),
  _bug(
    'target cache keeps one too many',
    'model',
    'jnp.minimum(num_scored, num_kept + 1)',
    'jnp.minimum(num_scored, num_kept + 1) + 1',
    _COMMIT,
  ),
  _bug(
    'target cache keeps rejected nodes',
    'model',
    'jnp.minimum(num_scored, num_kept + 1)',
    '0 * num_kept + path.shape[1]',
    _COMMIT,
  ),
  _bug(
    'only keys are moved',
    'cache',
    'values=tuple(map(move, cache.values))',
    'values=cache.values',
    ('cache.test_keep_by_hand',),
  ),
  _bug(
    'draft cache keeps one too many after full acceptance',
    'model',
    'jnp.minimum(num_scored, num_kept + 1)',
    'num_kept + 1',
    _NEXT_STEP,
  ),
  _bug(
    'draft cache forgets the root',
    'model',
    'jnp.minimum(num_scored, num_kept + 1)',
    'jnp.minimum(num_scored, num_kept)',
    ('cache.test_caches_of_all_stages_after_random_steps', 'chain'),
  ),
  _bug(
    'draft cache keeps nodes in the order of the tree',
    'model',
    'jnp.argmax(in_slot, axis=2),',
    'state.num_text[:, None] + path,',
    _NEXT_STEP,
  ),
  # Trees.
  _bug(
    'duplicates are not merged',
    'tree.tree',
    'wanted & (find_children(tree, parents, tokens) == NO_NODE)',
    'wanted',
    _SEARCH,
  ),
  _bug(
    'the best nodes are not connected',
    'tree.tree',
    'best_nodes(tree, jnp.arange(capacity)',
    'best_nodes(tree.replace(log_prob=tree.cond_log_prob),'
    ' jnp.arange(capacity)',
    ('tree.test_the_best_nodes_are_a_connected_subtree', 6, False),
  ),
  _bug(
    'log-probabilities are summed from the node up',
    'tree.tree',
    '    log_prob = jnp.where(is_child, summed, log_prob)\n',
    '  walk = walk_up(tree.parent, jnp.arange(tree.capacity), max_depth)\n'
    '  summed = jnp.zeros(tree.capacity)\n'
    '  for above in walk.T:\n'
    '    summed += jnp.where(above >= 0, tree.cond_log_prob[above], 0.0)\n'
    '  log_prob = jnp.where(is_child, summed, log_prob)\n',
    _SUMS,
  ),
  _bug(
    'a context of the text instead of the path',
    'tree.tree',
    'behind_root > 0,',
    'behind_root > -1 - tree.capacity,',
    ('tree.test_histories_by_hand',),
  ),
  # Growth.
  _bug(
    'an inner stage drafts below what has been scored',
    'draft.growth',
    'expanded | states[0].scored,',
    'expanded,',
    _SEARCH,
  ),
  _bug(
    'children keep the numbers of the inner stage',
    'draft.growth',
    'jnp.where(known, log_probs, tree.cond_log_prob)',
    'tree.cond_log_prob',
    _SEARCH,
  ),
  _bug(
    'rows that are done have a say',
    'draft.growth',
    'jnp.where(ctx.active, values, 0.0)',
    'values',
    ('growth_stop.test_rows_that_are_done_have_no_say',),
  ),
  _bug(
    'lookup reads what is behind the text',
    'draft.lookup',
    '(position < length - 1)',
    '(position < num_tokens - 1)',
    ('scorers.test_lookup_by_hand',),
  ),
  _bug(
    'proposers share all of the probability, not what is left',
    'draft.candidates',
    'log_prob + left,',
    'log_prob,',
    ('scorers.test_merging_proposers', 2),
  ),
  # What only GPUs run.
  _bug(
    'slots before the window are looked up in it',
    'cache',
    'seen, place[:, None] < 0',
    'seen, place[:, None] < -1',
    ('cache.test_window_mask_by_hand', '_looked_up'),
  ),
  # Rejection verification: what the children were drawn from.
  _bug(
    'distributions without the filters that were drawn with',
    'draft.ranking',
    '    jnp.exp(log_probs),\n',
    '    jax.nn.softmax(logits, axis=-1),\n',
    _DRAWS,
  ),
  _bug(
    'the best children count as drawn',
    'draft.ranking',
    'noise = jnp.where(per_row(stochastic, noise), noise, 0.0)',
    'noise = 0.0 * noise',
    _DRAWS,
  ),
  _bug(
    'children that are not drawn count as drawn evenly',
    'verify.rejection',
    'draft = jax.nn.one_hot(token, vocab_size)',
    'draft = jnp.full(walk.target.shape, 1.0 / vocab_size)',
    ('enumeration.test_the_compiled_walk_branches_as_the_slow_one', 'best'),
  ),
  _bug(
    'drawn where float32 has no probability',
    'draft.ranking',
    '_LEAST_LOG_PROB = -69.0',
    '_LEAST_LOG_PROB = -1e29',
    ('enumeration.test_no_child_is_drawn_that_float32_gives_no_probability',),
  ),
  _bug(
    'greedy rows judged as at temperature 1',
    'sampling',
    'per_row(sampling.is_stochastic, logits)',
    'per_row(sampling.is_stochastic | True, logits)',
    _WALKS,
  ),
  _bug(
    'greedy rows divided by a temperature of -1',
    'sampling',
    'jnp.where(temperature > 0, temperature, 1.0)',
    'jnp.where(temperature > 0, temperature, -1.0)',
    ('sampling.test_temperature_0_is_argmax_whatever_the_filters',),
  ),
  _bug(
    'top-p before temperature',
    'sampling',
    '_top_p_threshold(candidates, top_p)',
    '_top_p_threshold(candidates * temperature, top_p)',
    ('sampling.test_filters_against_numpy', None, 0.6, None),
  ),
  # Its randomness.
  _bug(
    'drafting noise used again in every step',
    'sampling',
    'step_keys(row_keys, DRAFTING, length)',
    'step_keys(row_keys, DRAFTING, 0 * length)',
    _LOOP,
  ),
  _bug(
    'uniforms and bonus noise used again in every step',
    'sampling',
    'jax.vmap(jax.random.fold_in)(of_stream, length)',
    'jax.vmap(jax.random.fold_in)(of_stream, 0 * length)',
    _STREAMS,
  ),
  _bug(
    'children and uniforms from one stream',
    'sampling',
    '(2**31 - 1 - stream for stream in range(3))',
    '(2**31 - 1 - max(stream, 1) for stream in range(3))',
    _RANDOMNESS,
  ),
  _bug(
    'uniforms and bonus token from one stream',
    'sampling',
    '(2**31 - 1 - stream for stream in range(3))',
    '(2**31 - 1 - min(stream, 1) for stream in range(3))',
    _RANDOMNESS,
  ),
  _bug(
    'one uniform for all siblings',
    'verify.rejection',
    'randomness.uniforms[:, index]',
    'randomness.uniforms[:, 0]',
    _WALKS,
  ),
  _bug(
    'one drafting noise for all nodes',
    'draft.ranking',
    'jax.random.fold_in(key, node)',
    'jax.random.fold_in(key, 0 * node)',
    _DRAWS,
  ),
  # What is left after a rejection.
  _bug(
    'rows that accepted get the residual of those that did not',
    'verify.rejection',
    'rejected = (is_child & ~is_accepted)[:, None]',
    'rejected = ~is_accepted[:, None]',
    _WALKS,
  ),
  _bug(
    'residual not normalised for the next sibling',
    'verify.rejection',
    'left = normalized(jnp.maximum(target - draft, 0.0), target)',
    'left = jnp.maximum(target - draft, 0.0)',
    _TREES,
  ),
  _bug(
    'residual of the target alone',
    'verify.rejection',
    'jnp.maximum(target - draft, 0.0), target)',
    'target, target)',
    _TREES,
  ),
  _bug(
    'residual subtracts the probability of another token',
    'verify.rejection',
    'jnp.maximum(target - draft, 0.0)',
    'jnp.maximum(target - jnp.roll(draft, 1, axis=1), 0.0)',
    _TREES,
  ),
  _bug(
    'drawn without replacement, judged as with',
    'verify.rejection',
    'if children == WITHOUT_REPLACEMENT:',
    'if False:',
    _TREES,
  ),
  _bug(
    'drawn with replacement, judged as without',
    'verify.rejection',
    'if children == WITHOUT_REPLACEMENT:',
    'if True:',
    ('enumeration.test_rejection_has_the_targets_law', 3, 4, _WITH),
  ),
  _bug(
    'siblings in another order than they were drawn',
    'draft.ranking',
    '_, tokens = lax.top_k(log_probs + noise, number)',
    'tokens = jnp.flip(lax.top_k(log_probs + noise, number)[1], axis=-1)',
    _DRAWS,
  ),
  _bug(
    'the draft of the node above',
    'verify.rejection',
    'replace(at(proposals, node), walk.draft)',
    'walk.draft + (node == ROOT)[:, None] * at(proposals, node)',
    _WALKS,
  ),
  _bug(
    'the bonus token from the distribution of the root',
    'verify.rejection',
    'token_probs(of_row(logits)[:, None], sampling)',
    'token_probs(logits[:, :1], sampling)',
    _WALKS,
  ),
  _bug(
    'the bonus token where the last draft token was',
    'verify.rejection',
    '_put(walk.chosen, walk.accepted, bonus, everywhere)',
    '_put(walk.chosen, walk.accepted - 1, bonus, everywhere)',
    _WALKS,
  ),
  _bug(
    'tokens of the first nodes, not of the verified ones',
    'verify.rejection',
    'at(tree.token, nodes), at(tree.parent, nodes)',
    'tree.token[:, :num_nodes], at(tree.parent, nodes)',
    _WALKS,
  ),
  # Block verification.
  _bug(
    'a block: proposals of the first nodes, not of the verified ones',
    'verify.block',
    'at(proposals, nodes[:, :-1])',
    'proposals[:, : num_nodes - 1]',
    _CUTS,
  ),
  _bug(
    'a block: weights above 1',
    'verify.block',
    'jnp.minimum(weights[-1] * ratios[:, depth], 1.0)',
    'weights[-1] * ratios[:, depth]',
    _BLOCKS,
  ),
  _bug(
    'a block: every ratio cut at 1, as one by one',
    'verify.block',
    'jnp.minimum(weights[-1] * ratios[:, depth], 1.0)',
    'weights[-1] * jnp.minimum(ratios[:, depth], 1.0)',
    _BLOCKS,
  ),
  _bug(
    'a block: probabilities without the mass of the residual',
    'verify.block',
    'rest = mass + 1.0 - weights',
    'rest = 1.0 + 0.0 * mass',
    _BLOCKS,
  ),
  _bug(
    'a block: inner prefixes are accepted by their weight',
    'verify.block',
    'jnp.where(depth == size[:, None], weights, inner)',
    'weights',
    _BLOCKS,
  ),
  _bug(
    'a block: residual not weighted',
    'verify.block',
    'weighted = weights[:, :-1, None] * target[:, :-1]',
    'weighted = target[:, :-1]',
    _BLOCKS,
  ),
  _bug(
    'a block: cut at the first uniform that rejects',
    'verify.block',
    'jnp.max(jnp.where(is_accepted, depth, 0), axis=1)',
    'jnp.sum(jnp.cumprod(is_accepted, axis=1), axis=1) - 1',
    _CUTS,
  ),
  _bug(
    'a block: residual where all was accepted',
    'verify.block',
    'whole = (accepted == size)[:, None]',
    'whole = (accepted > size)[:, None]',
    _CUTS,
  ),
  _bug(
    'a block: the bonus token of the depth above',
    'verify.block',
    '    after_chain = at(target, accepted)\n',
    '    after_chain = at(target, jnp.maximum(accepted - 1, 0))\n'
    '    left = jnp.concatenate([left[:, :1], left[:, :-1]], axis=1)\n',
    _CUTS,
  ),
  # What is returned beside tokens.
  _bug(
    'stop strings are forgotten between blocks',
    'watchers',
    'jnp.take_along_axis(pending, emitted[:, None], axis=1)[:, 0]',
    'self.table.start',
    (
      'generator.test_a_stop_may_begin_in_one_block_and_end_in_another',
      'chain',
    ),
  ),
  _bug(
    'a token is not seen before the next block',
    'context',
    'seen_by_nodes(tree, nodes, seen, self.max_depth)',
    'jnp.broadcast_to(seen[:, None], logits.shape)',
    ('options.test_a_token_is_seen_as_soon_as_a_block_has_it',),
  ),
  _bug(
    'log-probabilities after bias and penalty',
    'step',
    'verdict=verdict, logits=scores.logits',
    'verdict=verdict, logits=logits',
    ('log_probs.test_they_are_those_of_a_forward_over_the_text', 'similar'),
  ),
  _bug(
    'the fallback tries a hopeless draft too often',
    'fallback',
    '_PREMIUM = 0.02',
    '_PREMIUM = 0.2',
    ('guard.test_the_worst_of_drafts_costs_under_five_percent', 2.0),
  ),
  _bug(
    'the fallback counts rows that are done',
    'fallback',
    'jnp.maximum(jnp.sum(active), 1)',
    'active.shape[0]',
    ('guard.test_rows_that_are_done_have_no_say',),
  ),
  # Broken models and short contexts.
  _bug(
    'a node that is NaN spoils the tree',
    'cache',
    'jnp.where(jnp.isfinite(new), new, 0)',
    'new',
    ('failure.test_a_guess_that_is_not_finite_spoils_nothing', 'tree'),
  ),
  _bug(
    'a row goes on with choices from NaN',
    'verify.accept',
    'emitted = jnp.minimum(wanted, valid)',
    'emitted = wanted',
    ('verification.test_the_stop_rule_against_a_loop', 2, 0.1),
  ),
  _bug(
    'a draft goes on beyond its context',
    'draft.growth',
    'jnp.maximum(longest - ctx.length, -1)',
    'jnp.maximum(longest - ctx.length, -1) + 1',
    ('context.test_a_stage_inside_goes_on',),
  ),
]


@pytest.mark.parametrize(('module', 'old', 'new', 'test'), _BUGS)
def test_a_bug_is_noticed(module, old, new, test):
  with _planted(module, old, new), pytest.raises(AssertionError):
    _run(*test)


@pytest.mark.parametrize(
  'test', [_TWO_TOKENS, _COMMIT, _SUMS, ('tree.test_histories_by_hand',)]
)
def test_without_a_bug_nothing_fails(test):
  """Nor does the way in which they are planted break anything."""
  harmless = 'for _ in range(num_steps):'
  with _planted('tree.tree', harmless, harmless):
    _run(*test)
  with (
    pytest.raises(RuntimeError, match='plant this bug anew'),
    _planted('tree.tree', 'not there', ''),
  ):
    _run(*test)
