"""Checks that tell one tokenizer's ids from another's."""

from unittest import mock

from models.lab.training.tokenizer import train_tokenizer
from models.text.drafters import DEMO_TABLE
from models.text.pair import load_pair
from models.text.pair import ModelChoice
from models.text.pair import vocabulary_digest
from specdec.ngram.table import load_table


def test_ids_matter_and_nothing_else():
  of = lambda ids: vocabulary_digest(mock.Mock(get_vocab=lambda: ids))
  digest = of({'a': 0, 'b': 1, 'é': 2})
  assert (len(digest), int(digest, 16) > 0) == (32, True)
  assert of({'é': 2, 'b': 1, 'a': 0}) == digest
  assert of({'a': 1, 'b': 0, 'é': 2}) != digest
  assert of({'a': 0, 'b': 1, 'c': 2}) != digest
  # Of a tokenizer, not the longest text that it takes.
  one, other = (
    vocabulary_digest(train_tokenizer(['ab'], vocab_size=270, context=context))
    for context in (32, 64)
  )
  assert one == other != digest


def test_the_embedded_table_knows_its_tokenizer():
  _, provenance = load_table(DEMO_TABLE)
  digest = vocabulary_digest(load_pair(ModelChoice('demo', None)).tokenizer)
  assert provenance['tokenizer_blake2b'] == digest
