"""Building a table from a draft, end to end on a tiny one."""

import functools
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
import tiny

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab.training import build_ngram
from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.ngram import table as table_lib

_TEXT = 'def add(first, second):\n  return first + second\n'
_SETTINGS = {'num_tokens': 3 * 256 * 4, 'length': 4, 'batch_size': 4, 'seed': 5}
_SAMPLES = build_ngram.Samples(**_SETTINGS)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.train_tokenizer([_TEXT] * 20, vocab_size=270, context=32)


@pytest.fixture(scope='module')
def draft(tokenizer, tmp_path_factory):
  folder = tmp_path_factory.mktemp('draft')
  model = tiny.module(
    vocab_size=len(tokenizer), num_positions=32, width=8, num_layers=1
  )
  hub.save_pretrained(model, folder, tokenizer=tokenizer)
  return str(folder)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpus')
  for number in range(60):
    (folder / f'{number}.py').write_text(_TEXT * (1 + number % 3))
    (folder / f'{number}.txt').write_text('not Python')
  return folder


@pytest.fixture(scope='module', autouse=True)
def _one_program():
  """The draft is loaded once, so that its program is compiled once."""
  load_once = functools.cache(pair_lib.load_pair)
  with mock.patch.object(pair_lib, 'load_pair', load_once):
    yield


def _build(draft, workdir, **arguments):
  output = workdir / 'table'
  usual = {'corpus': None, 'samples': _SAMPLES}
  usual |= {'table': build_ngram.TableConfig()} | arguments
  build_ngram.build(draft=draft, workdir=workdir, output=output, **usual)
  return output


@pytest.fixture(scope='module')
def finished(draft, tmp_path_factory):
  """A run that nobody killed."""
  return _build(draft, tmp_path_factory.mktemp('finished'))


def _shards(folder):
  return sorted(folder.glob('samples-??????.npy'))


def test_texts_are_those_of_generate_from_the_start_token(
  draft, finished, tokenizer
):
  start = tokenizer.bos_token_id
  shards = [np.load(path) for path in _shards(finished.parent)]
  assert len(shards) == 3
  texts = np.concatenate(shards).reshape(3 * 256, 4 + 2)
  assert np.all(texts[:, 0] == start)
  assert np.all(texts[:, -1] == -1)
  assert len(np.unique(texts, axis=0)) > 750  # None twice but by chance.
  numbers = np.array([0, 3, 300, 301])
  # With as many rows as when they were sampled, so that no program is new.
  expected = specdec.generate(
    pair_lib.load_pair(choice_lib.ModelChoice(draft, None)).target,
    jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), numbers),
    [[start]] * 4,
    max_new_tokens=4,
    sampling=specdec.Sampling(temperature=1.5),
  )
  assert texts[numbers, 1:-1].tolist() == expected.tokens


def test_the_table_says_what_it_was_made_of(draft, finished, tokenizer):
  table, provenance = table_lib.load_table(finished)
  assert (table.order, table.num_continuations) == (3, 8)
  assert len(provenance['draft'].pop('model_blake2b')) == 32
  discounts = provenance.pop('discounts')
  assert len(discounts) == 3
  assert all(0 < discount < 1 for discount in discounts)
  counted = _SETTINGS | {'tokens': 3072, 'temperature': 1.5, 'top_k': None}
  assert provenance == {
    'specdec': specdec.__version__,
    'draft': {'name': draft},
    'tokenizer_blake2b': pair_lib.vocabulary_digest(tokenizer),
    'sources': {'samples': counted},
    'table': {'order': 3, 'num_continuations': 8, 'min_count': 2},
  }


def test_a_killed_run_resumes_to_the_same_file(
  draft, finished, tmp_path, monkeypatch
):
  save = np.save

  def save_a_half_of_the_last(path, arr):
    save(path, arr=arr)
    if path.name.endswith('2.npy'):
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
      raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(np, 'save', save_a_half_of_the_last)
    with pytest.raises(KeyboardInterrupt):
      _build(draft, tmp_path)
  written = lambda: {
    shard: shard.stat().st_mtime_ns for shard in _shards(tmp_path)
  }
  survivors = written()
  assert len(survivors) == 2
  assert not (tmp_path / 'table').exists()
  table = _build(draft, tmp_path)
  assert table.read_bytes() == finished.read_bytes()
  everything = written()
  assert survivors.items() < everything.items()
  # A shorter run counts the first shards, and a longer one keeps them.
  less = build_ngram.Samples(**(_SETTINGS | {'num_tokens': 1}))
  table = _build(draft, tmp_path, samples=less)
  assert table_lib.load_table(table)[1]['sources']['samples']['tokens'] == 1024
  _build(draft, tmp_path)
  assert table.read_bytes() == finished.read_bytes()
  assert written() == everything


def test_a_workdir_is_not_resumed_with_other_settings_or_weights(
  draft, finished, tmp_path, monkeypatch
):
  shutil.copytree(finished.parent, tmp_path, dirs_exist_ok=True)
  changes = {'seed': 6, 'temperature': 1.0, 'top_k': 3, 'length': 5}
  for name, value in changes.items():
    samples = build_ngram.Samples(**(_SETTINGS | {name: value}))
    with pytest.raises(ValueError, match=rf'another run .*{name}'):
      _build(draft, tmp_path, samples=samples)
  # Other weights of the same name.
  monkeypatch.setattr(plan_lib, 'model_digest', lambda _: 'another')
  with pytest.raises(ValueError, match=r'another run .*model_blake2b'):
    _build(draft, tmp_path)


def test_the_training_split_of_a_corpus_is_counted(
  draft, finished, corpus, tokenizer, tmp_path, monkeypatch
):
  chosen = corpus_lib.Corpus(folder=str(corpus), pattern='*.py')
  nothing = build_ngram.Samples(num_tokens=0)
  with monkeypatch.context() as without_weights:
    without_weights.setattr(pair_lib, 'load_pair', None)
    path = _build(draft, tmp_path, corpus=chosen, samples=nothing)
  table, provenance = table_lib.load_table(path)
  tokens = chosen.tokens(tokenizer, held_out=False)
  assert np.array_equal(np.load(tmp_path / 'corpus.npy'), tokens)
  counted = {'held_out_percent': 2, 'tokens': len(tokens)}
  counted |= {'folder': str(corpus), 'pattern': '*.py'}
  assert provenance['sources'] == {'corpus': counted}
  # So uniform a text leaves the most likely token of a context hardly a choice.
  first, second = tokenizer(_TEXT)['input_ids'][:2]
  context = table_lib.find_context(table, np.array([first, -1], np.int32))
  assert table.next_tokens[context, 0] == second
  # With samples more contexts are known.
  for shard in (*_shards(finished.parent), finished.parent / 'samples.json'):
    shutil.copy(shard, tmp_path)
  both, _ = table_lib.load_table(_build(draft, tmp_path, corpus=chosen))
  sampled, _ = table_lib.load_table(finished)
  assert both.num_contexts > max(table.num_contexts, sampled.num_contexts)


def test_what_cannot_be_built_is_refused(draft, tmp_path):
  for samples, message in (
    ({'num_tokens': 0}, 'give --num_tokens or --corpus'),
    ({'num_tokens': 1, 'batch_size': 7}, '--batch_size must divide 256, got 7'),
    ({'num_tokens': 1, 'length': 32}, '--sample_length=32 exceeds the 31'),
  ):
    with pytest.raises(ValueError, match=message):
      _build(draft, tmp_path, samples=build_ngram.Samples(**samples))
