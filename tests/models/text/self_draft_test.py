"""The target as its own draft, with weights of fewer bits."""

import jax
import pytest
import tiny_demo

import specdec

_tiny_pair = tiny_demo.in_this_file


def test_the_target_drafts_for_itself():
  lm = specdec.load('demo', 'self', dtype='float32', method='chain')
  plain = specdec.load('demo', dtype='float32', method='plain')
  options = {'max_new_tokens': 8}
  result = lm.generate('import ', **options)
  assert result.text == plain.generate('import ', **options).text
  assert result.stats.origins['draft'] > 0
  draft, target = lm.pair.draft, lm.pair.target
  ids = lambda model: {id(array) for array in jax.tree.leaves(model.params)}
  assert ids(draft) & ids(target), 'norms are shared'
  assert ids(draft) - ids(target)
  with pytest.raises(ValueError, match='draft=self in int4, the format of the'):
    specdec.load('demo', 'self', dtype='int4')
