"""What tells one tokenizer's ids from another's."""

from unittest import mock

from models.text.drafters import DEMO_TABLE
from models.text.pair import load_pair
from models.text.pair import vocabulary_digest
from models.training.tokenizer import train_tokenizer
from specdec.ngram.table import load_table

_TEXTS = ['def add(first, second):\n  return first + second\n'] * 20


def test_it_depends_on_the_vocabulary_and_nothing_else():
  train = lambda texts, **kw: vocabulary_digest(
    train_tokenizer(texts, **({'vocab_size': 270, 'context': 32} | kw))
  )
  digest = train(_TEXTS)
  assert len(digest) == 32
  assert int(digest, 16)
  assert train(_TEXTS, context=64) == digest
  assert train(_TEXTS, vocab_size=271) != digest
  # As many tokens, but others.
  assert train(['while number > 0:\n  number //= 2\n'] * 20) != digest


def test_ids_matter_and_their_order_does_not():
  of = lambda vocabulary: vocabulary_digest(
    mock.Mock(get_vocab=lambda: vocabulary)
  )
  digest = of({'a': 0, 'b': 1, 'é': 2})
  assert of({'é': 2, 'b': 1, 'a': 0}) == digest
  assert of({'a': 1, 'b': 0, 'é': 2}) != digest


def test_the_embedded_table_knows_its_tokenizer():
  _, provenance = load_table(DEMO_TABLE)
  digest = vocabulary_digest(load_pair('demo', None).tokenizer)
  assert provenance['tokenizer_blake2b'] == digest
