"""A draft that computes and proposes some of its tokens."""

import jax
import numpy as np
import pytest
import tiny

from specdec.models.checkpoints import hub
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.nn import adapter
from specdec.models.nn.cpu import build
from specdec.models.text import choice
from specdec.models.text import vocabulary

_TEXT = 'def add(first, second):\n  return first + second\n' * 20
_V, _N = 280, 60


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('draft_vocab')
  tokenizer = tokenizer_lib.train_tokenizer([_TEXT], vocab_size=_V, context=8)
  for name, tied in (('tied', True), ('untied', False)):
    shape = {'vocab_size': _V, 'width': 8, 'num_positions': 64}
    module = tiny.module(tie_embeddings=tied, **shape)
    hub.save_pretrained(module, folder / name, tokenizer=tokenizer)
  return folder


@pytest.mark.parametrize(
  ('name', 'packed', 'dtype'),
  [
    ('tied', True, 'int8'),
    ('tied', False, 'int8'),
    ('untied', True, 'float32'),
    ('untied', False, 'int4'),
    ('tied', True, 'int4'),
  ],
)
def test_logits_are_those_of_the_whole_head(folder, name, packed, dtype):
  if packed and not build.is_available():
    pytest.skip('there is no compiler')
  path, ids = folder / name, np.array([*range(40), 77, 200, 279])
  load = lambda **options: adapter.as_model(
    hub.load_module(path, dtype=dtype, packed=packed, **options)
  )
  whole, few = load(), load(outputs=ids)
  # Rows of other tokens are looked up.
  tokens = np.arange(12).reshape(2, 6) * 23
  logits = jax.jit(lambda model: model.logits(tokens))
  expected, of_few = map(np.asarray, map(logits, (whole, few)))
  np.testing.assert_array_equal(of_few[..., ids], expected[..., ids])
  assert (np.delete(of_few, ids, axis=-1) == -np.inf).all()
  # The bytes of a forward decide on the cost of the draft.
  saved = whole.spec.parameters - few.spec.parameters
  assert saved == 8 * (_V - len(ids))
  assert few.spec.weight_bytes < whole.spec.weight_bytes


def test_special_tokens_and_the_first_ones(folder, tmp_path):
  tokenizer = hub.locate(folder / 'tied').tokenizer
  tokenizer.add_tokens(['<end>'], special_tokens=True)
  ids = vocabulary.tokens_of(_N, tokenizer, _V + 9)
  assert len(ids) == _N
  assert {*ids.tolist()} == {_V, *range(_N - 1)}
  sizes = (None, _V + 9, 10**6)
  assert [vocabulary.tokens_of(size, tokenizer, _V + 9) for size in sizes] == [
    None
  ] * 3
  given = vocabulary.tokens_of([7, 3, 7], tokenizer, _V)
  assert given.tolist() == [3, 7]
  for wrong, message in ((1, 'more than the 1 special'), ([_V], 'outside')):
    with pytest.raises(ValueError, match=f'draft_vocab.*{message}'):
      vocabulary.tokens_of(wrong, tokenizer, _V)
  path = tmp_path / 'counts.npy'
  np.save(path, [5, 0, 9, 5, 5])
  assert choice.most_frequent(path, 3) == [0, 2, 3]
  np.save(path, np.ones((2, 2)))
  for wrong, message in ((path, 'no array'), ('nowhere.npy', 'cannot be read')):
    with pytest.raises(ValueError, match=message):
      choice.most_frequent(wrong, 3)
