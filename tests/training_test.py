"""Training: the corpus, the tokenizer, the optimizer, and resuming."""

import contextlib
import functools
import json
import shutil
from unittest import mock

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import transformers

from models.checkpoints import hub
from models.lab.training import corpus as corpus_lib
from models.lab.training import loss as loss_lib
from models.lab.training import optimizer as optimizer_lib
from models.lab.training import pipeline
from models.lab.training import tokenizer as tokenizer_lib
from models.lab.training import trainer
from models.nn import adapter
from models.nn import experts as experts_lib
from models.nn import gpt2 as nn_gpt2


@pytest.fixture(scope='module', autouse=True)
def _shared_programs():
  """Runs of one configuration share their compiled training step."""
  with pytest.MonkeyPatch.context() as patch:
    make = functools.cache(trainer._make_train_step)
    patch.setattr(trainer, '_make_train_step', make)
    yield


CODE = 'def add(first, second):\n\treturn first + second\n'
TEXTS = (
  *('', ' ', '  leading and trailing  ', '\n\n\ttabs\tand\r\nnewlines\n', CODE),
  'word . word , don\'t "quote" ( spaces ) !',
  'naïve Ünïcödé, 日本語, עברית, 👩‍👩‍👧 and \u0000\u200b',
)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.train_tokenizer([CODE] * 20, vocab_size=300, context=64)


def test_any_text_round_trips_also_once_saved(tokenizer, tmp_path):
  """And frequent text is short."""
  assert len(tokenizer) <= 300
  assert len(tokenizer(CODE)['input_ids']) < len(CODE) / 2
  module = tiny.module(vocab_size=len(tokenizer))
  hub.save_pretrained(module, tmp_path, tokenizer=tokenizer)
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['eos_token_id'] == tokenizer.eos_token_id
  loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert loaded.eos_token == tokenizer_lib.END_OF_TEXT
  assert loaded.eos_token_id == tokenizer.eos_token_id
  assert loaded.model_max_length == 64
  for text in TEXTS:
    ids = tokenizer(text)['input_ids']
    assert loaded(text)['input_ids'] == ids
    assert tokenizer.decode(ids) == loaded.decode(ids) == text
    assert max(ids, default=0) < len(tokenizer)


NAMES = [f'{folder}/{i}.py' for folder in ('a', 'b/c') for i in range(50)]


def _write_files(root, names, end=''):
  for name in names:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'text of {name}{end}')


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
  """Only that of texts, and not of what is skipped."""
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
  known = [text for text in _texts(root, held_out=True) if text.endswith('!')]
  assert known == [f'{text}!' for text in held_out]
  # The folder itself may be called like one that is skipped.
  assert _texts(root / 'site-packages', percent=2) == [
    'text of site-packages/x.py'
  ]


def test_tokens_end_every_file(root, tokenizer):
  corpus = corpus_lib.Corpus(folder=str(root), held_out_percent=20)
  tokens = corpus.tokens(tokenizer, held_out=True)
  assert tokens.dtype == np.int32
  texts = tokenizer.decode(tokens).split(tokenizer_lib.END_OF_TEXT)
  assert texts == [*corpus.texts(held_out=True), '']


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
  with pytest.raises(ValueError, match='12 tokens, fewer than one window of 1'):
    draw(length=12)
  # Held out are five windows one after another; the last batch wraps around.
  held_out = corpus_lib.held_out_batches(
    tokens, limit=9, batch_size=2, length=4
  )
  starts = [batch[:, 0].tolist() for batch in held_out]
  assert starts == [[0, 4], [8, 12], [16, 0]]


def test_bad_input_is_refused(root):
  config, train = trainer.TrainConfig, tokenizer_lib.train_tokenizer
  for message, make, values in (
    ('warmup_steps must', config, {'warmup_steps': 9, 'num_steps': 9}),
    ('every phase needs a positive', config, {'phases': ((0, 8),)}),
    ('at most batch_tokens=4096', config, {'phases': ((1, 9000),)}),
    ('--corpus=/no is not a folder', _texts, {'folder': '/no'}),
    ('percent must lie', _texts, {'folder': root, 'percent': 0}),
    ('files match .*c under', _texts, {'folder': root, 'pattern': '*.c'}),
    ('=256 must', train, {'texts': [], 'vocab_size': 256, 'context': 8}),
    ('16 tokens exceed', _train, {'workdir': root, 'phases': ((1.0, 16),)}),
  ):
    with pytest.raises(ValueError, match=message):
      make(**values)


def _pure(module):
  graph, variables = nnx.split(module)
  return graph, nnx.to_pure_dict(variables)


def test_muon_is_for_the_matrices_of_blocks_alone():
  _, gradients = _pure(tiny.module(tie_embeddings=False, num_layers=1))
  # At zero there is no weight decay to see.
  params = jax.tree.map(jnp.zeros_like, gradients)
  optimizer = optimizer_lib.make_optimizer(
    num_steps=10, learning_rate=0.1, warmup_steps=0
  )
  updates, _ = jax.jit(optimizer.update)(
    gradients, jax.jit(optimizer.init)(params), params
  )
  leaves, _ = jax.tree_util.tree_flatten_with_path(updates)
  num_matrices = 0
  for path, update in leaves:
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    if name.startswith('h.') and name.endswith('.weight'):
      num_matrices += 1
      # Orthogonal, as far as five rounds of Newton-Schulz lift small singular
      # values, and of the root mean square 0.2 times the rate.
      values = np.linalg.svd(update, compute_uv=False)
      values /= 0.1 * 0.2 * np.sqrt(max(update.shape))
      assert np.max(values) < 1.3, (name, values)
      assert np.mean(values > 0.6) > 0.9, (name, values)
    else:
      # Adam's first step: the sign of the gradient, times one number.
      size = np.abs(update)
      np.testing.assert_allclose(size, size.mean(), rtol=1e-2, err_msg=name)
      assert 0.1 < size.mean() < 0.2, name
  assert num_matrices == 4


_STREAM = tiny.tokens(batch_size=1, length=17)[0]
_WINDOWS = np.stack([_STREAM[:9], _STREAM[8:]])


def test_loss_is_that_of_the_next_token():
  """Low precision rounds the products, not the gradients."""
  module = tiny.module(num_layers=1)
  graph, params = _pure(module)
  makes = (loss_lib.make_loss(graph, dtype=d) for d in ('float32', 'bfloat16'))
  run = lambda loss: jax.jit(jax.value_and_grad(loss))(params, _WINDOWS)
  (loss, _), rounded = map(run, makes)
  logits = tiny.logits(module, _WINDOWS[:, :-1])
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  targets = _WINDOWS[:, 1:, None]
  expected = -np.take_along_axis(log_probs, targets, axis=-1).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  held_out = loss_lib.held_out_loss(adapter.as_model(module), _STREAM, length=8)
  np.testing.assert_allclose(held_out, expected, rtol=1e-5)
  assert 0 < abs(float(rounded[0] - loss)) < 0.05
  for leaf in jax.tree.leaves(rounded[1]):
    assert leaf.dtype == jnp.float32


def test_a_mixture_also_learns_to_use_its_experts_alike():
  module = tiny.llama_module('mixtral')
  graph, params = _pure(module)
  tokens = jnp.asarray(_WINDOWS)[:, :-1]
  positions = np.broadcast_to(np.arange(8), tokens.shape)
  mask = np.broadcast_to(np.tri(8, dtype=bool), (len(tokens), 8, 8))
  make = functools.partial(loss_lib.make_loss, graph, dtype=jnp.float32)

  @jax.jit
  def losses_and_balance(weights):
    *_, routings = module.with_routing(tokens, positions, mask)
    loss = lambda weight: make(balance_weight=weight)(params, _WINDOWS)
    balance = jnp.stack([*map(experts_lib.balance_loss, routings)]).mean()
    return jax.lax.map(loss, weights), balance

  (plain, weighted), balance = losses_and_balance(jnp.array([0.0, 2.0]))
  assert balance > 1.0
  np.testing.assert_allclose(weighted - plain, 2 * balance, rtol=1e-4)


SHAPE = {'width': 16, 'num_layers': 1, 'num_heads': 2}
MODEL = nn_gpt2.GPT2Config(**SHAPE, vocab_size=16, num_positions=8)
SETTINGS = {'num_steps': 40, 'batch_tokens': 32, 'phases': ((1.0, 8),)}
SETTINGS |= {'learning_rate': 0.03, 'warmup_steps': 1, 'dtype': 'float32'}
SETTINGS |= {'eval_every': 20, 'eval_tokens': 64}
TOKENS = np.tile(np.arange(12, dtype=np.int32), 40)


def _train(
  workdir, *, model=MODEL, tokens=TOKENS, report=str, teacher=None, **kw
):
  config = trainer.TrainConfig(**(SETTINGS | kw))
  others = {'workdir': workdir, 'teacher': teacher, 'report': report}
  return trainer.train(model, config, tokens, TOKENS[5:200], **others)


def test_weights_of_a_teacher_are_arguments_of_the_compiled_step():
  """As constants they would be copied into it, and folded by the compiler."""
  teacher = loss_lib.Teacher('tiny', tiny.module(num_layers=1))
  graph, params = _pure(tiny.module(num_layers=1))
  config = trainer.TrainConfig(**SETTINGS)
  init, step = trainer._make_train_step(graph, config, teacher)
  state = {'params': params, 'optimizer': init(params)}
  lowered = step.func.lower(*step.args, state, _WINDOWS)
  given = [leaf.shape for leaf in jax.tree.leaves(lowered.args_info)]
  weights = tiny.parameters(teacher.model)
  expected = [jnp.shape(leaf) for leaf in jax.tree.leaves((weights, state))]
  assert sorted(given) == sorted([*expected, _WINDOWS.shape])


def _assert_same_run(actual, expected):
  losses_of = lambda curve: [(p.train_loss, p.held_out_loss) for p in curve]
  assert losses_of(actual[1]) == losses_of(expected[1])
  parameters = map(tiny.parameters, (actual[0], expected[0]))
  jax.tree.map(np.testing.assert_array_equal, *parameters)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return tmp_path_factory.mktemp('workdir')


@pytest.fixture(scope='module')
def uninterrupted(workdir):
  return _train(workdir)


def test_a_mixture_and_a_gpt2_learn_a_repetitive_corpus(
  uninterrupted, workdir, tmp_path
):
  _, mixture = _train(tmp_path, model=tiny.LLAMA_CONFIGS['mixtral'])
  for curve, folder in ((uninterrupted[1], workdir), (mixture, tmp_path)):
    assert [line.step for line in curve] == [20, 40]
    assert [line.tokens for line in curve] == [640, 1280]
    assert curve[-1].held_out_loss < 0.3 < np.log(12)
    assert curve[-1].train_loss < curve[0].train_loss
    stored = json.loads((folder / 'loss_curve.json').read_text())
    assert [line['step'] for line in stored] == [20, 40]


def test_interrupted_and_killed_runs_resume_to_the_same_bits(
  uninterrupted, tmp_path
):
  interrupted, killed = tmp_path / 'interrupted', tmp_path / 'killed'
  steps = []

  def copy(source, target):
    """As a killed process leaves it: files may vanish meanwhile."""
    with contextlib.suppress(FileNotFoundError):
      shutil.copy2(source, target)

  def interrupt(progress):
    steps.append(progress.step)
    if progress.step == 40:
      shutil.copytree(interrupted, killed, copy_function=copy)
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    _train(interrupted, report=interrupt)
  resumed = _train(interrupted, report=lambda p: steps.append(p.step))
  assert steps == [20, 40, 40]
  # A finished run does nothing more.
  again = _train(interrupted, report=pytest.fail)
  for run in (resumed, again, _train(killed)):
    _assert_same_run(run, uninterrupted)


@pytest.mark.usefixtures('uninterrupted')
def test_other_settings_do_not_resume(workdir):
  for change, message in (
    ({'learning_rate': 0.02}, r'another run \(train: .*0\.03.*0\.02'),
    ({'tokens': TOKENS[1:]}, 'data: 480 tokens.*479 tokens'),
  ):
    with pytest.raises(ValueError, match=message):
      _train(workdir, **change)


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path, monkeypatch):
  """At the second step the loss is none; at the first already the weights."""
  make = trainer._make_train_step
  spoil = functools.partial(jax.tree.map, lambda leaf: leaf * np.nan)
  for eval_every, words in (
    *((2, 'loss of step 2'), (1, 'held-out loss after st')),
  ):
    numbers = iter([1.0, np.nan])
    step = lambda state, _, numbers=numbers: (spoil(state), next(numbers))
    spoiled = lambda *args, step=step: (make(*args)[0], step)
    monkeypatch.setattr(trainer, '_make_train_step', spoiled)
    with pytest.raises(FloatingPointError, match=f'{words}.* is not a number'):
      _train(tmp_path / words, eval_every=eval_every)
    assert not (tmp_path / words / 'loss_curve.json').exists()


def test_run_writes_a_folder_and_refuses_another_corpus(
  root, tmp_path, monkeypatch
):
  """As scripts/train.py calls it."""
  (root / 'a' / '0.py').write_text(CODE * 30)
  folder = tmp_path / 'model'
  # The windows of 8 tokens are cut to this context.
  six, seven = (pipeline.Shape(**SHAPE, num_positions=n) for n in (6, 7))
  arguments = {
    'corpus': corpus_lib.Corpus(folder=str(root), held_out_percent=20),
    'config': trainer.TrainConfig(
      **(SETTINGS | {'num_steps': 2, 'eval_every': 2})
    ),
    **{'shape': six, 'vocab_size': 270, 'output_dtype': 'float16'},
    **{'tokenizer_folder': None, 'teacher_folder': None},
    **{'workdir': tmp_path / 'work', 'output': folder},
  }
  pipeline.run(**arguments)
  module = hub.load_module(folder)
  vocabulary = hub.locate(folder).tokenizer.get_vocab()
  assert module.config.vocab_size == len(vocabulary)
  assert (folder / 'loss_curve.json').exists()
  other = corpus_lib.Corpus(folder=str(root), pattern='*.txt')
  with pytest.raises(ValueError, match=r'holds another run \(corpus: '):
    pipeline.run(**arguments | {'corpus': other})

  # A draft for it needs no more than a context that the teacher has.
  draft = arguments | {'teacher_folder': str(folder)}
  draft |= {'workdir': tmp_path / 'again', 'output': tmp_path / 'draft'}
  with pytest.raises(ValueError, match='--context=7 exceeds the context of'):
    pipeline.run(**draft | {'shape': seven})
  # It learns from a teacher in test_distilling_approaches_the_teacher.
  train = mock.Mock(return_value=(module, []))
  monkeypatch.setattr(trainer, 'train', train)
  pipeline.run(**draft)
  config, settings, *texts = train.call_args.args
  assert config == module.config
  assert settings.phases == ((1.0, 6),)
  assert all(text.max() < len(vocabulary) for text in texts)
  teacher = train.call_args.kwargs['teacher']
  assert teacher.name == draft['teacher_folder']
  parameters = map(tiny.parameters, (teacher.model, module))
  jax.tree.map(np.testing.assert_array_equal, *parameters)
  assert hub.locate(tmp_path / 'draft').tokenizer.get_vocab() == vocabulary
