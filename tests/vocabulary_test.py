"""Checks that tell one tokenizer's ids from another's."""

from unittest import mock

from models.lab.training import tokenizer as tokenizer_lib
from models.text import drafters
from models.text import pair as pair_lib
from specdec.ngram import table as table_lib


def test_ids_matter_and_nothing_else():
  of = lambda ids: pair_lib.vocabulary_digest(mock.Mock(get_vocab=lambda: ids))
  digest = of({'a': 0, 'b': 1, 'é': 2})
  assert (len(digest), int(digest, 16) > 0) == (32, True)
  assert of({'é': 2, 'b': 1, 'a': 0}) == digest
  assert of({'a': 1, 'b': 0, 'é': 2}) != digest
  assert of({'a': 0, 'b': 1, 'c': 2}) != digest
  # Of a tokenizer, not the longest text that it takes.
  one, other = (
    pair_lib.vocabulary_digest(
      tokenizer_lib.train_tokenizer(['ab'], vocab_size=270, context=context)
    )
    for context in (32, 64)
  )
  assert one == other != digest


def test_the_embedded_table_knows_its_tokenizer():
  _, provenance = table_lib.load_table(drafters.DEMO_TABLE)
  digest = pair_lib.vocabulary_digest(
    pair_lib.load_pair(pair_lib.ModelChoice('demo', None)).tokenizer
  )
  assert provenance['tokenizer_blake2b'] == digest
