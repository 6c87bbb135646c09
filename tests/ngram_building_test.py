"""Building a table from a draft, end to end on a tiny one."""

import functools
import json
import shutil
from unittest import mock

import command_lines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from models.checkpoints import hub
from models.text.pair import vocabulary_digest
from models.training import build_ngram as ngram_building
from models.training.build_ngram import Samples
from models.training.build_ngram import TableConfig
from models.training.corpus import Corpus
from models.training.tokenizer import train_tokenizer
import specdec
from specdec.ngram.table import find_context
from specdec.ngram.table import load_table

_TEXT = 'def add(first, second):\n  return first + second\n'
_SETTINGS = {'num_tokens': 3 * 256 * 4, 'length': 4, 'batch_size': 4, 'seed': 5}
_SAMPLES = Samples(**_SETTINGS)


@pytest.fixture(scope='module')
def tokenizer():
  return train_tokenizer([_TEXT] * 20, vocab_size=270, context=32)


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
  load_once = functools.cache(ngram_building.load_pair)
  with mock.patch.object(ngram_building, 'load_pair', load_once):
    yield


def _build(draft, workdir, **changes):
  output = workdir / 'table'
  arguments = {'corpus': None, 'samples': _SAMPLES, 'table': TableConfig()}
  ngram_building.build(
    draft=draft, workdir=workdir, output=output, **arguments | changes
  )
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
  shards = [np.load(path) for path in _shards(finished.parent)]
  assert len(shards) == 3
  texts = np.concatenate(shards).reshape(3 * 256, 4 + 2)
  assert np.all(texts[:, 0] == tokenizer.bos_token_id)
  assert np.all(texts[:, -1] == -1)
  assert len(np.unique(texts, axis=0)) > 750  # None twice but by chance.
  numbers = np.array([0, 3, 300])
  pair = ngram_building.load_pair(draft, None)
  keys = [jax.random.fold_in(jax.random.key(5), n) for n in numbers]
  expected = specdec.generate(
    pair.target,
    jnp.stack(keys),
    [[tokenizer.bos_token_id]] * 3,
    max_new_tokens=4,
    sampling=specdec.Sampling(temperature=1.5),
  )
  assert texts[numbers, 1:-1].tolist() == expected.tokens


def test_the_table_says_what_it_was_made_of(draft, finished, tokenizer):
  table, provenance = load_table(finished)
  assert (table.order, table.num_continuations) == (3, 8)
  assert provenance['specdec'] == specdec.__version__
  assert provenance['draft']['name'] == draft
  assert len(provenance['draft']['weights_blake2b']) == 32
  assert provenance['tokenizer_blake2b'] == vocabulary_digest(tokenizer)
  samples = _SETTINGS | {'tokens': 3072, 'temperature': 1.5, 'top_k': None}
  assert provenance['sources'] == {'samples': samples}
  sizes = {'order': 3, 'num_continuations': 8, 'min_count': 2}
  assert provenance['table'] == sizes
  methods = [discounts['method'] for discounts in provenance['discounts']]
  assert len(methods) == 3
  assert set(methods) <= {'good-turing', 'absolute', 'constant'}


def _times(folder):
  return {path: path.stat().st_mtime_ns for path in _shards(folder)}


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
  survivors = _times(tmp_path)
  assert len(survivors) == 2
  assert not (tmp_path / 'table').exists()
  table = _build(draft, tmp_path)
  assert table.read_bytes() == finished.read_bytes()
  assert survivors.items() < _times(tmp_path).items()

  # A shorter run counts some of the shards, and keeps the others.
  written = _times(tmp_path)
  less = Samples(**(_SETTINGS | {'num_tokens': 1}))
  _build(draft, tmp_path, samples=less)
  assert load_table(table)[1]['sources']['samples']['tokens'] == 1024
  _build(draft, tmp_path)
  assert table.read_bytes() == finished.read_bytes()
  assert written == _times(tmp_path)


def test_a_workdir_is_not_resumed_with_other_settings_or_weights(
  draft, finished, tokenizer, tmp_path
):
  shutil.copytree(finished.parent, tmp_path / 'work')
  changes = {'seed': 6, 'temperature': 1.0, 'top_k': 3, 'length': 5}
  for name, value in changes.items():
    samples = Samples(**(_SETTINGS | {name: value}))
    with pytest.raises(ValueError, match=rf'another run .*{name}'):
      _build(draft, tmp_path / 'work', samples=samples)
  shutil.copytree(draft, tmp_path / 'draft')
  module = hub.load_module(draft)
  module.ln_f.bias[...] += 1
  hub.save_pretrained(module, tmp_path / 'draft', tokenizer=tokenizer)
  with pytest.raises(ValueError, match=r'another run .*weights_blake2b'):
    _build(str(tmp_path / 'draft'), tmp_path / 'work')


def test_the_training_split_of_a_corpus_is_counted(
  draft, finished, corpus, tokenizer, tmp_path
):
  chosen = Corpus(folder=str(corpus), pattern='*.py')
  path = _build(draft, tmp_path, corpus=chosen, samples=Samples(num_tokens=0))
  table, provenance = load_table(path)
  tokens = chosen.tokens(tokenizer, held_out=False)
  assert np.array_equal(np.load(tmp_path / 'corpus.npy'), tokens)
  settings = {'folder': str(corpus), 'pattern': '*.py', 'held_out_percent': 2}
  of_corpus = settings | {'tokens': len(tokens)}
  assert provenance['sources'] == {'corpus': of_corpus}
  # So uniform a text leaves the likeliest token of a context hardly a choice.
  first, second = tokenizer(_TEXT)['input_ids'][:2]
  context = find_context(table, np.array([first, -1], np.int32))
  assert table.next_tokens[context, 0] == second

  # Together with samples.
  shutil.copytree(finished.parent, tmp_path / 'both')
  path = _build(draft, tmp_path / 'both', corpus=Corpus(folder=str(corpus)))
  both, provenance = load_table(path)
  assert provenance['sources'].keys() == {'corpus', 'samples'}
  assert both.num_contexts > load_table(finished)[0].num_contexts


def test_the_command_line(draft, corpus, tmp_path):
  settings = _SETTINGS | {'num_tokens': 1, 'temperature': 1.25, 'top_k': 9}
  flags = settings | {'sample_length': settings['length'], 'draft': draft}
  flags |= {'order': 2, 'continuations': 3, 'min_count': 1, 'corpus': corpus}
  flags |= {'workdir': tmp_path, 'output': tmp_path / 'table'}
  del flags['length']
  arguments = [f'--{name}={value}' for name, value in flags.items()]
  result = command_lines.run('build_ngram.py', *arguments)
  assert result.code == 0, result.errors
  assert 'contexts' in result.output
  assert 'counting' in result.errors
  table, provenance = load_table(tmp_path / 'table')
  assert (table.order, table.num_continuations) == (2, 3)
  assert json.loads((tmp_path / 'corpus.json').read_text())
  assert provenance['table']['min_count'] == 1
  assert provenance['sources']['samples'] == settings | {'tokens': 1024}
  assert provenance['sources']['corpus']['folder'] == str(corpus)


@pytest.mark.parametrize(
  ('make', 'flag'),
  [
    (lambda: Samples(num_tokens=-1), 'num_tokens'),
    (lambda: Samples(num_tokens=1, length=0), 'sample_length'),
    (lambda: Samples(num_tokens=1, batch_size=7), 'batch_size'),
    (lambda: Samples(num_tokens=1, temperature=float('nan')), 'temperature'),
    (lambda: Samples(num_tokens=1, top_k=0), 'top_k'),
    (lambda: TableConfig(order=6), 'order'),
    (lambda: TableConfig(num_continuations=0), 'continuations'),
    (lambda: TableConfig(min_count=0), 'min_count'),
    (lambda: Corpus(folder='/no/such/folder'), 'corpus'),
  ],
)
def test_bad_values_name_their_flag(make, flag):
  with pytest.raises(ValueError, match=f'^--{flag}[ =]'):
    make()


def test_what_cannot_be_built_is_refused(draft, tmp_path):
  with pytest.raises(ValueError, match='give --num_tokens or --corpus'):
    _build(draft, tmp_path, samples=Samples(num_tokens=0))
  with pytest.raises(ValueError, match=r'--sample_length=32 exceeds the 31'):
    _build(draft, tmp_path, samples=Samples(num_tokens=1, length=32))
  with pytest.raises(ValueError, match='there is no folder'):
    _build('/no/such/draft', tmp_path)
