"""Plants known bugs in a copy of the source; the suite must detect each.

Most of them were seen in other systems. Each is listed with a test that must
fail with it. The test runs on a fresh import of all modules, with one place of
the source replaced.
"""

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import pathlib
import re
import sys

import pytest

# Nothing imported under one source may be used under another.
_FILES = {
  path.stem: path
  for path in pathlib.Path(__file__).parents[1].rglob('*.py')
  if path.stem != 'conftest'
}

# By what the bug does: the module, the code, what replaces it, and the test
# that must fail with it.
_BUGS = {
  'accepts tokens after a rejected one': (
    'tree.tree',
    'jnp.all(agrees[None] | ~is_above, axis=1)',
    'agrees',
    'tree.test_the_accepted_path()',
  ),
  'bonus token from the wrong node': (
    'verify.accept',
    '.along_path(choices)',
    '.replace(index=jax.numpy.roll(index, 1, 1)).along_path(choices)',
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'continues past an EOS accepted within a path': (
    'verify.accept',
    'jnp.minimum(until_end, room)',
    'room',
    'verification.test_the_stop_rule_against_a_loop(2, 0.1)',
  ),
  'noise keyed by step, not by position': (
    'step',
    ('request.row_keys,\n      state.length,'),
    (
      'request.row_keys,\n'
      '      state.counters.target_forwards + 0 * state.length,'
    ),
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'target chooses with the noise of the depth above': (
    'verify.accept',
    '(tree.depth, nodes)',
    '(tree.depth, nodes) - 1',
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'mask forgets the farthest ancestor': (
    'tree.tree',
    'for _ in range(num_steps):',
    'for _ in range(num_steps - 1):',
    'tree.test_walks_and_masks()',
  ),
  'nodes see all that is in front of them, as in a chain': (
    'model',
    'cache.ops.mask(length, sees,',
    'cache.ops.mask(length, jnp.tril(sees | True),',
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'positions by index instead of depth': (
    'model',
    '+ at(tree.depth, nodes)',
    '+ nodes',
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'draft cache keeps one too many after full acceptance': (
    'model',
    'jnp.minimum(num_scored, added.count)',
    'added.count',
    'cache.test_keeping_nodes_by_hand()',
  ),
  'duplicates are not merged': (
    'tree.tree',
    'wanted & ~_has_child(tree, children.parents, children.tokens)',
    'wanted',
    'tree.test_adding_children()',
  ),
  'lookup reads what is after the text': (
    'draft.lookup',
    '(position < query.length - 1)',
    '(position < num_tokens - 1)',
    'scorers.test_lookup_against_a_loop()',
  ),
  'distributions without the filters that were drawn with': (
    'draft.ranking',
    'drawn_from = jnp.exp(log_probs)',
    'drawn_from = jax.nn.softmax(logits)',
    "enumeration.test_children_are_drawn_from_what_is_said('without_replacement')",
  ),
  'children and uniforms from one stream': (
    'randomness',
    '2**31 - 1 - stream',
    '2**31 - 1 - max(stream, 1)',
    'enumeration.test_the_randomness_of_a_step_is_of_these_keys()',
  ),
  'one uniform for all siblings': (
    'verify.rejection',
    '_at(nodes.uniform, child)',
    'nodes.uniform[:, 0]',
    "enumeration.check_walks('without_replacement')",
  ),
  'residual not normalised for the next sibling': (
    'verify.rejection',
    'left = normalized(jnp.maximum(target - draft, 0.0), target)',
    'left = jnp.maximum(target - draft, 0.0)',
    "enumeration.check_few('rejection', 'without_replacement')",
  ),
  'drawn without replacement, judged as with': (
    'verify.rejection',
    'if children == sampling_lib.WITHOUT_REPLACEMENT:',
    'if False:',
    "enumeration.check_few('rejection', 'without_replacement')",
  ),
  'weights above 1': (
    'verify.rejection',
    'draft), 1e-37), 1.0)',
    'draft), 1e-37), 1e9)',
    "enumeration.check_walks('without_replacement', 'traversal')",
  ),
  'stop strings are forgotten between blocks': (
    'watchers',
    '(state, added.count[:, None],',
    '(state, 0 * added.count[:, None],',
    'step.test_stop_strings_go_on_where_the_emitted_tokens_led()',
  ),
  'a token is not seen before the next block': (
    'adjusters',
    'jax.vmap(add_path)(nodes.tree, nodes.index, state)',
    'jnp.broadcast_to(state[:, None], logits.shape)',
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'log-probabilities after bias and penalty': (
    'step',
    'logits=scores.logits)',
    'logits=logits)',
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'a child has the state of its parent': (
    'context',
    'adjuster.after(before, tree.token),',
    'before,',
    "equality.check_together('table', 'chain', 'turns')",
  ),
  'a draft does not know the constraint': (
    'draft.language_model',
    'logits = ctx.adjusted(scores.logits, tree, nodes)',
    'logits = scores.logits',
    "equality.check_together('table', 'chain', 'turns')",
  ),
  'a head does not read the prompt': (
    'draft.head',
    'head, texts, window_size',
    'head, texts.replace(length=0 * texts.length + 1), window_size',
    "heads.test_trees_of_every_step_with_plain_steps_and_turns('fixed')",
  ),
  'a head feeds its state back after the norm': (
    'models.nn.eagle',
    'config.kind == MTP or config.norm_output',
    'config.kind != EAGLE',
    "heads.test_logits_are_those_of_the_formulas('sglang')",
  ),
  'a node that is NaN spoils the tree': (
    'cache',
    'jnp.where(jnp.isfinite(new), new, 0)',
    'new',
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'a draft goes on beyond its context': (
    'draft.growth',
    'jnp.maximum(longest - ctx.length, -1)',
    'jnp.maximum(longest - ctx.length, -1) + 1',
    'growth.test_no_node_is_scored_beyond_the_context()',
  ),
  'a rejected node is folded into the state': (
    'recurrent',
    'index < count,',
    'index <= count,',
    'recurrent.test_lengthening_and_going_back_by_hand()',
  ),
  'target keeps the first nodes, not those of the path': (
    'step',
    'model_lib.keep(target_state, added)',
    (
      'model_lib.keep(target_state, added.replace('
      'path=jnp.where(path >= 0, nodes[:, : path.shape[1]], path)))'
    ),
    'step.test_a_decode_of_all_that_a_step_does()',
  ),
  'target cache keeps one too many': (
    'model',
    'jnp.minimum(num_scored, added.count)',
    'jnp.minimum(num_scored, added.count) + 1',
    'cache.test_keeping_nodes_by_hand()',
  ),
  'draft cache forgets the root': (
    'model',
    'jnp.minimum(num_scored, added.count)',
    'jnp.minimum(jnp.minimum(num_scored, added.count), added.count - 1)',
    'cache.test_keeping_nodes_by_hand()',
  ),
  'only keys are moved': (
    'cache',
    'values=tuple(map(move, cache.values))',
    'values=cache.values',
    'cache.test_keep_by_hand()',
  ),
  'top-p before temperature': (
    'sampling',
    '(candidates, likeliest, top_p)',
    '(lambda: temperature * candidates(), temperature * likeliest, top_p)',
    'sampling.test_filters_against_numpy(None, 0.6, None)',
  ),
  'uniforms and bonus token from one stream': (
    'randomness',
    '2**31 - 1 - stream',
    '2**31 - 1 - min(stream, 1)',
    'enumeration.test_the_randomness_of_a_step_is_of_these_keys()',
  ),
  'residual of the target alone': (
    'verify.rejection',
    'jnp.maximum(target - draft, 0.0), target)',
    'target, target)',
    "enumeration.check_few('rejection', 'without_replacement')",
  ),
  'an MTP layer reads the state before the embedding': (
    'models.nn.eagle',
    'inputs[::-1] if self.config.state_first',
    'inputs[::-1] if not self.config.state_first',
    "own_heads.check_logits('qwen', 0)",
  ),
  'a drafted token of an assistant is rotated as itself': (
    'models.nn.assistant',
    'place > 0, place - 1',
    'place < 0, place - 1',
    "own_heads.check_logits('gemma', 0)",
  ),
  'a row learns what another row was told': (
    'draft.lookup',
    'rows = jnp.arange(entry.shape[0])[:, None]',
    'rows = jnp.arange(entry.shape[0])[::-1, None]',
    'earlier.test_recycling_against_a_loop()',
  ),
  'the logits of a rejected node for another token': (
    'step',
    'tokens = jax.vmap(tree_lib.pick)(tree.token, nodes)',
    'tokens = jax.vmap(tree_lib.pick)(tree.token, nodes - (nodes > 1))',
    'earlier.test_a_step_shows_the_logits_of_every_node()',
  ),
  'a new text has the table of the text before': (
    'draft.candidates',
    '(texts.kept >= state.length - 1)',
    '(texts.kept >= 0)',
    'earlier.test_a_row_goes_on_or_starts_anew()',
  ),
  'an index of older texts': (
    'models.text.text_store',
    'if changed * _FEW >= self._num_indexed:',
    'if changed > 100 * self._num_indexed:',
    'text_store.test_the_index_follows()',
  ),
}


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
  return module.split('.')[0] == 'specdec' or module in _FILES


def _whole(name):
  return f'specdec.{name}'


class _Finder:
  """Finds the modules of this project, one of them with a bug.

  It precedes pytest's own finder. The assertions that pytest rewrites compare
  long lists for hours where the variable `CI` is set.
  """

  def __init__(self, name, old, new):
    self._name, self._bug = _whole(name), (old, new)

  def find_spec(self, fullname, path, target=None):
    if not _is_ours(fullname):
      return None
    if fullname in _FILES:
      return importlib.util.spec_from_file_location(fullname, _FILES[fullname])
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if fullname == self._name:
      spec.loader = _Planter(fullname, spec.origin, *self._bug)
    return spec


@contextlib.contextmanager
def _planted(name, old, new):
  """All modules are imported again, one of them with a bug."""
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
    assert _whole(name) in sys.modules
  finally:
    sys.meta_path.remove(finder)
    pop()
    sys.modules.update(saved)


def _run(test):
  """A test by its file, its name and its arguments."""
  file, name, arguments = re.fullmatch(r'(\w+)\.(\w+)\((.*)\)', test).groups()
  arguments = ast.literal_eval(f'[{arguments}]')
  getattr(importlib.import_module(f'{file}_test'), name)(*arguments)


@pytest.mark.parametrize('name', _BUGS)
def test_a_bug_is_noticed(name):
  module, old, new, test = _BUGS[name]
  with _planted(module, old, new), pytest.raises(AssertionError):
    _run(test)


def test_without_a_bug_nothing_fails():
  """The way of planting bugs breaks nothing either."""
  test = "enumeration.check_few('rejection', 'without_replacement')"
  harmless = 'for _ in range(num_steps):'
  with _planted('tree.tree', harmless, harmless):
    _run(test)
  with (
    pytest.raises(RuntimeError, match='plant this bug anew'),
    _planted('tree.tree', 'not there', ''),
  ):
    _run(test)
