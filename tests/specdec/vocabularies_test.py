"""Vocabularies of target, draft and table: equal but for padding, or not."""

import dataclasses
import functools
import itertools

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import drafters
from specdec.models.text import generator as generator_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib
from specdec.ngram import table as table_lib

_TEXT = 'def add(first, second):\n  return first + second\n' * 20
SIZE = 296
LARGER, SMALLER = 320, 284
_LIMIT = 24


def _train(text=_TEXT):
  return tokenizer_lib.train_tokenizer([text], vocab_size=280, context=96)


def _module(vocab_size):
  """The same model with any size of the vocabulary.

  The largest logits are of the tokens that the target does not have.
  """
  of_size = functools.partial(
    tiny.module, num_positions=96, num_layers=1, tie_embeddings=False
  )
  _, params = nnx.split(of_size(vocab_size=LARGER))
  params = nnx.to_pure_dict(params)
  rng = np.random.default_rng(0)
  embeddings, head = rng.normal(size=(2, LARGER, 16)).astype(np.float32)
  head[SMALLER:SIZE] *= 1.3
  head[SIZE:] *= 100
  params['wte']['embedding'] = jnp.asarray(embeddings[:vocab_size])
  params['lm_head'] = jnp.asarray(head[:vocab_size])
  return nnx.merge(nnx.split(of_size(vocab_size=vocab_size))[0], params)


def _save(folder, vocab_size, tokenizer=None):
  hub.save_pretrained(_module(vocab_size), folder, tokenizer=tokenizer)
  return str(folder)


@pytest.fixture(scope='module')
def tokenizer():
  return _train()


@pytest.fixture(scope='module')
def target(tmp_path_factory, tokenizer):
  return _save(tmp_path_factory.mktemp('target'), SIZE, tokenizer)


def _target_alone(target):
  return pair_lib.load_pair(choice_lib.ModelChoice(target, None))


def _generate(pair, drafter):
  return generator_lib.Generator(pair, drafter).generate(
    ['def add(', 'return'],
    max_new_tokens=_LIMIT,
    sampling=specdec.Sampling(temperature=[0.0, 1.0]),
    eos_ids=(),
  )


@pytest.fixture(scope='module')
def plain(target):
  generation = _generate(_target_alone(target), specdec.PLAIN)
  tokens = {*np.ravel(generation.tokens).tolist()}
  assert max(tokens) >= SMALLER > len(_train())  # not in the small draft
  assert len(tokens) > 15
  return generation


@pytest.mark.parametrize('vocab_size', [LARGER, SMALLER])
def test_a_draft_may_have_other_padding(
  target, plain, tokenizer, tmp_path, vocab_size
):
  draft = _save(tmp_path, vocab_size, tokenizer)
  pair = pair_lib.load_pair(choice_lib.ModelChoice(target, draft))
  assert pair.draft.spec.vocab_size == SIZE
  settings = settings_lib.DraftSettings(num_draft_tokens=3)
  generation = _generate(pair, drafters.make_drafter('chain', pair, settings))
  assert generation.tokens == plain.tokens
  histogram = generation.stats.accepted_histogram
  if vocab_size > SIZE:  # the target itself, if the further logits are cut off
    assert histogram == [0, 0, 0, 2 * _LIMIT // 4]
  else:
    assert sum(histogram[1:]) > 0


def test_drafts_of_other_vocabularies_are_refused(target, tokenizer, tmp_path):
  """Without a tokenizer the sizes must be equal; with one, the tokens."""
  folders = (tmp_path / str(number) for number in itertools.count())
  save = lambda *args: _save(next(folders), *args)
  of_draft = lambda *args: (
    pair_lib.load_pair(choice_lib.ModelChoice(target, save(*args))).draft.spec
  )
  assert of_draft(SIZE).vocab_size == SIZE
  for size in (LARGER, SMALLER):
    with pytest.raises(ValueError, match=f'{SIZE} tokens, .* of {size}, and'):
      of_draft(size)
  # The difference is not padding if the smaller one lacks tokens.
  assert of_draft(len(tokenizer), tokenizer).vocab_size == SIZE
  size = len(tokenizer) - 1
  message = f'{SIZE} tokens, the draft .* of {size}, and nothing shows'
  with pytest.raises(ValueError, match=message) as error:
    of_draft(size, tokenizer)
  assert f'has {len(tokenizer)} tokens' in str(error.value)
  # Another tokenizer of the same size; it shares little but bytes.
  other = _train(_TEXT.upper())
  assert len(other) == len(tokenizer)
  draft = save(SIZE, other)
  message = r'share \d+ tokens, about \d % of a text'
  with pytest.raises(ValueError, match=message) as error:
    pair_lib.load_pair(choice_lib.ModelChoice(target, draft))
  assert all(path in str(error.value) for path in (target, draft))


def _save_table(path, vocab_size, tokenizer=None, texts=((1, 2),)):
  """With the digest of a tokenizer, as scripts/build_ngram.py writes it."""
  table = tiny_drafters.ngram_table(
    texts, vocab_size, order=3, num_continuations=2
  )
  digest = {}
  if tokenizer:
    digest['tokenizer_blake2b'] = pair_lib.vocabulary_digest(tokenizer)
  table_lib.save_table(path, table, digest)
  return str(path)


_TREE = {'num_nodes': 6, 'capacity': 16, 'width': 2, 'branching': 2}
_TREE |= {'rounds': 3, 'cost_ratio': 0, 'inner_rounds_alone': 3}


def _drafter(target, path, method='ngram', **kw):
  settings = settings_lib.with_options(
    settings_lib.DraftSettings(ngram=path, **kw), _TREE
  )
  return drafters.make_drafter(method, _target_alone(target), settings)


def test_a_table_may_have_other_padding(target, plain, tokenizer, tmp_path):
  """It proposes tokens that the target does not have, and right ones."""
  texts = []
  for prompt, new in zip(plain.prompt_tokens, plain.tokens, strict=True):
    text = prompt + new
    texts.append(text)
    texts += [[*pair, LARGER - 1] for pair in itertools.pairwise(text)] * 3
  larger = _save_table(tmp_path / 'larger', LARGER, tokenizer, texts)
  smaller = _save_table(tmp_path / 'smaller', SMALLER, tokenizer)
  equal = _save_table(tmp_path / 'equal', SIZE)
  for path in (smaller, equal, larger):
    drafter = _drafter(target, path)
    assert drafter.labels == ('ngram',)
    assert drafter.stages[0].scorer.facts.vocab_size == SIZE
  generation = _generate(_target_alone(target), drafter)
  assert generation.tokens == plain.tokens
  assert generation.finish_reasons == ['length'] * 2
  assert generation.stats.block_efficiency > 1.3


def test_a_table_of_another_tokenizer_is_refused(target, tmp_path):
  """Even if it has the size of the target; of an unknown one, if not."""
  other = _save_table(tmp_path / 'table', SIZE, _train('while 1:\n' * 20))
  larger = _save_table(tmp_path / 'larger', LARGER)
  # With --method=staged and no --inner, the table is named.
  for path, method, inner in (
    *((path, 'ngram', None) for path in (other, larger)),
    (other, 'ngram+lookup', None),
    (other, 'staged', None),
    (other, 'staged', 'ngram'),
  ):
    with pytest.raises(ValueError, match='built with another tokenizer') as e:
      _drafter(target, path, method, inner=inner)
    assert path in str(e.value)
    assert f'({SIZE} tokens)' in str(e.value)
  assert _drafter(target, other, 'staged', inner='lookup').labels == ('lookup',)


def test_the_embedded_table_is_left_out_if_it_does_not_fit(
  target, tokenizer, tmp_path, monkeypatch
):
  pair, settings = _target_alone(target), settings_lib.DraftSettings
  pair = dataclasses.replace(pair, draft=pair.target)
  labels = lambda inner=None: (
    drafters.make_drafter('staged', pair, settings(inner=inner)).labels
  )
  assert labels() == ('draft', 'lookup')
  with pytest.raises(ValueError, match='built with another tokenizer'):
    labels('ngram+lookup')
  # With this table as the embedded one.
  path = _save_table(tmp_path / 'table', SMALLER, tokenizer)
  monkeypatch.setattr(drafters, 'DEMO_TABLE', path)
  assert labels() == ('draft', 'lookup', 'ngram')
