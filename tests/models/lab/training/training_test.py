"""Training: the corpus, the tokenizer, the losses, and what is written."""

import dataclasses
import functools
import json
import os
import re

import command_lines
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import refusals
from safetensors import numpy as safetensors_numpy
import tiny
import transformers

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab.training import block_trainer
from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.lab.training import head_trainer
from specdec.models.lab.training import loss as loss_lib
from specdec.models.lab.training import model_trainer
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.lab.training import trainer
from specdec.models.nn import adapter
from specdec.models.nn import rope as rope_lib

CODE = 'def add(first, second):\n\treturn first + second\n'
TEXTS = (
  '',
  ' ',
  '  leading and trailing  ',
  '\n\n\ttabs\tand\r\nnewlines\n',
  CODE,
  'word . word , don\'t "quote" ( spaces ) !',
  'naïve Ünïcödé, 日本語, עברית, 👩‍👩‍👧 and \u0000\u200b',
)


_tokenizer = functools.partial(
  tokenizer_lib.train_tokenizer, [CODE] * 20, context=64
)


@pytest.fixture(scope='module')
def tokenizer():
  return _tokenizer(vocab_size=300)


def test_any_text_round_trips_also_once_saved(tokenizer, tmp_path):
  """And frequent text is short."""
  assert len(tokenizer) <= 300
  assert len(tokenizer(CODE)['input_ids']) < len(CODE) / 2
  module = tiny.module(vocab_size=len(tokenizer))
  hub.save_pretrained(module, tmp_path, tokenizer=tokenizer)
  config = json.loads((tmp_path / 'config.json').read_text())
  loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert loaded.eos_token == tokenizer_lib.END_OF_TEXT
  ends = [each_tokenizer.eos_token_id for each_tokenizer in (loaded, tokenizer)]
  assert ends == [config['eos_token_id']] * 2
  assert loaded.model_max_length == 64
  for text in TEXTS:
    ids = tokenizer(text)['input_ids']
    assert loaded(text)['input_ids'] == ids
    assert tokenizer.decode(ids) == loaded.decode(ids) == text
    assert max(ids, default=0) < len(tokenizer)


NAMES = [f'{folder}/{i}.py' for folder in ('a', 'b/c') for i in range(50)]


def _write_files(root, names, end=''):
  for name in names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f'text of {name}{end}')


def _texts(folder, pattern='*.py', *, held_out=False, percent=20):
  corpus = corpus_lib.Corpus(
    folder=str(folder), pattern=pattern, held_out_percent=percent
  )
  return list(corpus.texts(held_out=held_out))


@pytest.fixture
def root(tmp_path):
  _write_files(tmp_path / 'root', NAMES)
  return tmp_path / 'root'


def test_files_are_split_by_their_relative_path_alone(root):
  """Only texts are split; other files are skipped."""
  names = ['site-packages/x.py', 'lib/site-packages/deep/x.py', 'readme.txt']
  _write_files(root, [*names, '__pycache__/x.py', '.git/x.py'])
  (root / 'latin1.py').write_bytes('café'.encode('latin-1'))
  (root / 'folder.py').mkdir()
  training, held_out = _texts(root), _texts(root, held_out=True)
  assert 5 < len(held_out) < 50
  assert sorted(training + held_out) == sorted(f'text of {n}' for n in NAMES)
  # Models trained at different times must agree on what none of them saw.
  assert {text for text in held_out if 'b/c' in text} == {
    f'text of b/c/{number}.py' for number in (5, 14, 21, 24, 32)
  }
  assert set(held_out) < set(_texts(root, held_out=True, percent=40))
  # Other contents of the same names, and other names.
  _write_files(root, NAMES, end='!')
  _write_files(root, ['new.py', 'a/new.py'])
  texts = [text for text in _texts(root, held_out=True) if text.endswith('!')]
  assert texts == [f'{text}!' for text in held_out]
  # The folder itself may be called like one that is skipped.
  skipped = root / 'site-packages'
  assert _texts(skipped, percent=2) == ['text of site-packages/x.py']


def test_a_corpus_of_a_dozen_files_says_how_many_are_needed(tmp_path):
  """Whatever bytes their names have."""
  _write_files(tmp_path, [f'a{number}.py' for number in range(11)])
  (tmp_path / os.fsdecode(b't\xe9.py')).write_text('text')
  message = (
    f'none of the 12 files that match .*py under {tmp_path} is held out to'
    ' measure the loss: .* a chance of 2%, .* give 149 files or more'
  )
  with pytest.raises(ValueError, match=message):
    _texts(tmp_path, held_out=True, percent=2)
  assert len(_texts(tmp_path, percent=2)) == 12
  with pytest.raises(ValueError, match=r'is to train on: .* give 299 files or'):
    _texts(tmp_path, percent=99)


def test_tokens_end_every_file_and_are_those_of_the_first_run(
  root, tokenizer, tmp_path
):
  corpus = corpus_lib.Corpus(folder=str(root), held_out_percent=20)
  splits = corpus.splits(tmp_path, tokenizer)
  for tokens, held_out in zip(splits, (False, True), strict=True):
    assert tokens.dtype == np.int32
    texts = tokenizer.decode(tokens).split(tokenizer_lib.END_OF_TEXT)
    assert texts == [*corpus.texts(held_out=held_out), '']
  _write_files(root, NAMES, end='!')
  again = corpus.splits(tmp_path, tokenizer)
  jax.tree.map(np.testing.assert_array_equal, again, splits)
  # They cannot be made again from other texts.
  (tmp_path / 'train_tokens.npy').unlink()
  with pytest.raises(ValueError, match=r'another run \(train: \d+ tokens'):
    corpus.splits(tmp_path, tokenizer)


def test_batches_are_windows_that_follow_from_the_arguments():
  usual = {'step': 7, 'seed': 3, 'batch_size': 200, 'length': 9}
  tokens = np.arange(22, dtype=np.int32)
  draw = lambda **kw: corpus_lib.training_batch(tokens[:12], **usual | kw)
  first = draw()
  np.testing.assert_array_equal(np.diff(first, axis=1), np.ones((200, 9)))
  assert set(first[:, 0]) == {0, 1, 2}
  np.testing.assert_array_equal(first, draw())
  for change in ({'step': 8}, {'seed': 4}):
    assert np.any(draw(**change) != first)
  # Held out are five windows one after another; the last batch wraps around.
  held_out = corpus_lib.held_out_batches(
    tokens, limit=9, batch_size=2, length=4
  )
  starts = [batch[:, 0].tolist() for batch in held_out]
  assert starts == [[0, 4], [8, 12], [16, 0]]
  training = model_trainer.ModelTraining(
    num_steps=20, num_positions=512, batch_tokens=300
  )
  lengths = [training.window_length(step) for step in (0, 12, 13, 17, 19)]
  assert lengths == [128, 128, 256, 300, 300]


_MODEL, _HEAD = model_trainer.ModelTraining, head_trainer.HeadTraining
_BATCH = {'tokens': [1, 2], 'step': 0, 'seed': 0, 'batch_size': 1, 'length': 9}


def test_bad_input_is_refused():
  for message, make, values in (
    ('--heads=3 must divide --width=320', _MODEL, {'num_heads': 3}),
    ('--kv_heads=1 must equal --heads', _MODEL, {'num_kv_heads': 1}),
    ('=3 must divide --h', _MODEL, {'num_kv_heads': 3, 'family': 'llama'}),
    ('of even width', _MODEL, {'family': 'llama', 'width': 5}),
    ('less than a window, --context', _HEAD, {'batch_tokens': 8}),
    ('--corpus=/no is not a folder', _texts, {'folder': '/no'}),
    (
      'no files that match .*c under',
      _texts,
      {'folder': '.', 'pattern': 'x.c'},
    ),
    ('=256 must exceed', _tokenizer, {'vocab_size': 256}),
    ('2 tokens, fewer than one', corpus_lib.training_batch, _BATCH),
  ):
    with pytest.raises(ValueError, match=message):
      make(**values)


def test_flags_are_refused_by_name(tmp_path):
  always = f'--workdir={tmp_path}', f'--output={tmp_path}'
  for flags, message in refusals.of('models/lab', 'train.py'):
    refused = command_lines.refusal('train.py', *always, *flags.split())
    assert re.search(message, refused)
  assert not [*tmp_path.iterdir()]


def _pure(module):
  graph, variables = nnx.split(module)
  return graph, nnx.to_pure_dict(variables)


def test_muon_is_for_the_matrices_of_blocks_alone():
  _, gradients = _pure(tiny.module(tie_embeddings=False, num_layers=1))
  # At zero, weight decay changes nothing.
  params = jax.tree.map(jnp.zeros_like, gradients)
  optimizer = trainer.make_optimizer(
    'muon', num_steps=10, learning_rate=0.1, warmup_steps=0
  )
  updates, _ = jax.jit(optimizer.update)(
    gradients, jax.jit(optimizer.init)(params), params
  )
  leaves, _ = jax.tree_util.tree_flatten_with_path(updates)
  num_matrices = 0
  for path, update in leaves:
    where = jax.tree_util.keystr(path, simple=True, separator='.')
    if where.startswith('h.') and where.endswith('.weight'):
      num_matrices += 1
      # Orthogonal, as far as five rounds of Newton-Schulz lift small singular
      # values, and of the root mean square 0.2 times the rate.
      values = np.linalg.svd(update, compute_uv=False)
      values /= 0.1 * 0.2 * np.sqrt(max(update.shape))
      assert np.max(values) < 1.3, (where, values)
      assert np.mean(values > 0.6) > 0.9, (where, values)
    else:
      # Adam's first step: the sign of the gradient, times one number.
      size = np.abs(update)
      np.testing.assert_allclose(size, size.mean(), rtol=1e-2, err_msg=where)
      assert 0.1 < size.mean() < 0.2, where
  assert num_matrices == 4


_STREAM = tiny.tokens(batch_size=1, length=17)[0]
_WINDOWS = np.stack([_STREAM[:9], _STREAM[8:]])


def test_loss_is_that_of_the_next_token_or_of_the_teacher():
  """Low precision rounds the products, not the gradients."""
  module, teacher = (tiny.module(num_layers=1, seed=seed) for seed in range(2))
  graph, params = _pure(module)
  make = functools.partial(loss_lib.make_loss, graph)
  losses = make(dtype='float32'), make(dtype='bfloat16')
  losses += (make(dtype='float32', teacher=teacher),)
  run = jax.jit(jax.value_and_grad(lambda *args: args[1](args[0], _WINDOWS)[0]))
  (loss, _), rounded, (distilled, _) = (
    run(params, function) for function in losses
  )
  logits = tiny.logits(module, _WINDOWS[:, :-1])
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  targets = _WINDOWS[:, 1:, None]
  expected = -np.take_along_axis(log_probs, targets, axis=-1).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  held_out = loss_lib.held_out_loss(adapter.as_model(module), _STREAM, length=8)
  np.testing.assert_allclose(held_out, expected, rtol=1e-5)
  theirs = jax.nn.softmax(tiny.logits(teacher, _WINDOWS[:, :-1]))
  expected = -(np.asarray(theirs) * log_probs).sum(-1).mean()
  np.testing.assert_allclose(distilled, expected, rtol=1e-5)
  assert 0 < abs(float(rounded[0] - loss)) < 0.05
  for leaf in jax.tree.leaves(rounded[1]):
    assert leaf.dtype == jnp.float32
  # As constants of a program the weights of a teacher would be copied into it.
  given = jax.tree.leaves(run.lower(params, losses[2]).args_info)
  assert len(given) == len(jax.tree.leaves((params, _pure(teacher)[1])))


def _train(training, folder, report=str):
  trainer.run(
    training,
    workdir=folder / 'work',
    output=folder / 'model',
    output_dtype='float32',
    report=report,
  )
  return folder / 'model'


def _train_killed(training, folder):
  """Trains, is killed before the last checkpoint, and is resumed."""

  def kill(line):
    if getattr(line, 'step', 0) == training.num_steps:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    _train(training, folder, kill)
  return _train(training, folder)


def _same_weights(*folders):
  files = [folder / 'model.safetensors' for folder in folders]
  jax.tree.map(
    np.testing.assert_array_equal, *map(safetensors_numpy.load_file, files)
  )


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The settings of a run that was killed, and the folder of its model."""
  texts = tmp_path_factory.mktemp('texts')
  for number in range(30):
    (texts / f'{number}.py').write_text(CODE.replace('add', f'f{number}') * 9)
  training = model_trainer.ModelTraining(
    corpus=corpus_lib.Corpus(folder=str(texts), held_out_percent=30),
    num_steps=40,
    eval_every=20,
    eval_tokens=64,
    batch_tokens=32,
    learning_rate=0.03,
    dtype='float32',
    width=16,
    num_layers=3,
    num_heads=2,
    num_positions=64,
    vocab_size=270,
    phases=((1, 16),),
  )
  folder = tmp_path_factory.mktemp('trained')
  return training, _train_killed(training, folder)


def test_a_model_learns_a_corpus_and_another_its_distribution(
  trained, tmp_path, monkeypatch
):
  training, folder = trained
  _same_weights(folder, _train(training, tmp_path / 'whole'))
  curve = json.loads((folder / 'loss_curve.json').read_text())
  assert [(line['step'], line['tokens']) for line in curve] == [
    (20, 640),
    (40, 1280),
  ]
  assert curve[1]['held_out_loss'] < 0.6 * curve[0]['train_loss']
  module, vocabulary = hub.load_module(folder), hub.locate(folder).tokenizer
  assert len(vocabulary) == module.config.vocab_size == 270

  draft = dataclasses.replace(training, teacher=str(folder), num_layers=1)
  longer = dataclasses.replace(draft, num_positions=65)
  with pytest.raises(ValueError, match='--context=65 exceeds the context of'):
    _train(longer, tmp_path / 'draft')
  begun = []

  def fit(training, trainee, *_):
    begun.append(trainee)
    return trainee.params, []

  monkeypatch.setattr(trainer, 'fit', fit)
  drafted = hub.locate(_train(draft, tmp_path / 'draft')).tokenizer
  assert drafted.get_vocab() == vocabulary.get_vocab()
  weights = _pure(module)[1]
  jax.tree.map(np.testing.assert_array_equal, begun[0].loss.args[0], weights)
  embeddings = [
    params['wte']['embedding'] for params in (weights, begun[0].params)
  ]
  np.testing.assert_array_equal(*embeddings)


_FROM_A_TARGET = {
  'dtype': 'float32',
  'target_dtype': 'float32',
  'vocabulary': 40,
  'length': 16,
  'feature_gigabytes': 4e-5,
  'num_steps': 4,
  'batch_tokens': 32,
  'eval_every': 2,
  'eval_windows': 3,
}


def test_a_head_learns_from_a_model_and_drafts(trained, tmp_path):
  training, target = trained
  head = head_trainer.HeadTraining(
    corpus=training.corpus, target=str(target), depth=2, **_FROM_A_TARGET
  )
  for number, (change, message) in enumerate(
    (
      ({'num_heads': 5}, '--heads=5 must divide the width 16'),
      ({'num_kv_heads': 3}, '--kv_heads=3 must divide --heads=2'),
      ({'target_dtype': 'int9'}, 'dtype=int9 is not known'),
      ({'feature_gigabytes': 1e-7}, 'room for 0 windows'),
    )
  ):
    with pytest.raises(ValueError, match=message):
      _train(dataclasses.replace(head, **change), tmp_path / str(number))
  lines = []
  folder = _train(head, tmp_path, lines.append)
  accepted = [line.accepted for line in lines if hasattr(line, 'accepted')]
  assert np.shape(accepted) == (2, 2)
  files = [*(tmp_path / 'work/features').rglob('*.npy')]
  size = sum(file.stat().st_size for file in files)
  assert 0 < size <= 4e4 + 256 * len(files)
  stated = float(lines[0].partition(' GB')[0].split()[-1])
  assert stated == pytest.approx(size / 1e9, abs=0.006)
  lm = specdec.load(target, head=folder, method='chain', dtype='float32')
  assert lm.pair.head.spec.reads == (1, 2, 3)
  result = lm.generate('def f3(', max_new_tokens=20)
  assert result.stats.stage_forwards['head'] > 0


def test_a_block_drafter_learns_from_answers_and_drafts(trained, tmp_path):
  training, target = trained
  block = block_trainer.BlockTraining(
    corpus=training.corpus,
    target=str(target),
    answer_tokens=8,
    block_size=3,
    num_layers=1,
    markov_rank=4,
    num_anchors=5,
    **_FROM_A_TARGET,
  )
  wide = dataclasses.replace(block, block_size=9)
  with pytest.raises(ValueError, match='--block_size=9 does not fit after'):
    _train(wide, tmp_path / 'wide')
  folder = _train_killed(block, tmp_path / 'killed')
  _same_weights(folder, _train(block, tmp_path / 'whole'))
  lm = specdec.load(target, head=folder, method='tree', dtype='float32')
  plain = dataclasses.replace(lm, drafter=specdec.PLAIN)
  # The rows of a file have temperatures from 0 to 1.
  file = tmp_path / 'whole/work/answers/train/windows_00000.npy'
  greedy, *others = np.load(file).tolist()
  result = plain.generate(greedy[:9], max_new_tokens=8)
  assert result.tokens == [greedy[9:]]
  *_, last = others
  assert plain.generate(last[:9], max_new_tokens=8).tokens != [last[9:]]
  stats = lm.generate(greedy[:9], max_new_tokens=8).stats
  assert stats.stage_forwards['block'] == stats.target_forwards


def test_a_head_has_one_rotation_whatever_the_layers_of_the_target_have():
  config = tiny.llama_module('llama').config
  base = dataclasses.replace(config, num_layers=2, qk_norm=False)
  local, whole = rope_lib.Rope(theta=50.0), rope_lib.Rope(theta=1e6)
  scaling = rope_lib.YarnScaling(
    factor=2.0, original_max_position_embeddings=16
  )
  scaled = dataclasses.replace(local, scaling=scaling)
  for ropes, expected in (
    (local, local),
    ((local, whole), whole),
    ((local, None), local),
    (None, rope_lib.Rope()),
    # No file of a head says that queries grow.
    (dataclasses.replace(scaled, query_growth=0.1), scaled),
  ):
    target = dataclasses.replace(base, rope=ropes)
    of_head = head_trainer.HeadTraining(target='tiny').config(target)
    assert of_head.rope == expected
