"""Runs that are killed, disks that are full, files that are damaged or lost."""

import contextlib
import dataclasses
import re
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_heads

from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.lab.training import kept
from specdec.models.lab.training import model_trainer
from specdec.models.lab.training import run_checkpoints
from specdec.models.lab.training import target_trainer
from specdec.models.lab.training import trainer


def _flip(content, rng):
  bits = np.unpackbits(np.frombuffer(content, np.uint8))
  bits[rng.integers(len(bits))] ^= 1
  return np.packbits(bits).tobytes()


_WAYS = [
  lambda content, rng: content[: rng.integers(len(content))],
  lambda content, rng: b'',
  _flip,
  None,  # The file is lost.
]


def _damaged(made, target, pattern, ways):
  """Yields copies of a folder, and what is damaged in each, and how."""
  files = [one for one in sorted(made.rglob('*')) if one.is_file()]
  files = [one for one in files if one.stat().st_size]  # Locks are empty.
  names = [one.relative_to(made) for one in files]
  names = [one for one in names if re.match(pattern, one.as_posix())]
  for number, name in enumerate(names):
    for way in ways(number):
      folder = shutil.copytree(made, target / f'{number} {_WAYS.index(way)}')
      content = (folder / name).read_bytes()
      (folder / name).unlink()
      if way:
        rng = np.random.default_rng(number)
        (folder / name).write_bytes(way(content, rng))
      yield folder, name, way


def _same(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def make(tmp_path):
  """Makes or reads all that a workdir keeps, except checkpoints."""
  for number in range(8):
    (tmp_path / f'{number}.py').write_text(f'def f{number}(x):' * 9)
  corpus = corpus_lib.Corpus(folder=str(tmp_path), held_out_percent=40)
  training = model_trainer.ModelTraining(corpus=corpus, vocab_size=270)
  target, reads = tiny_heads.target(), tiny_heads.READS
  lm_head = target.params['gpt2']['lm_head']
  lesson = target_trainer.Lesson(target, None, lm_head, reads, 2)
  dtype = target_trainer.token_dtype(len(reads), tiny_heads.WIDTH)
  windows = tiny.tokens(batch_size=40, length=9)

  def make(folder):
    tokenizer = training.own_tokenizer(folder, print)
    features = lesson.features(windows, dtype, folder / 'features', print)
    return [
      sorted(tokenizer.get_vocab().items()),
      corpus.splits(folder, tokenizer),
      features.batch(np.arange(40), draw=0),
    ]

  return make


def test_what_is_damaged_is_made_again_and_nothing_else(make, tmp_path, capsys):
  made = tmp_path / 'made'
  expected = make(made)
  capsys.readouterr()
  cases = _damaged(made, tmp_path, r'(?!tokens\.json)', lambda _: _WAYS)
  for folder, name, way in cases:
    path = folder / name.as_posix().removesuffix('.blake2b')
    if path.parent.name == 'tokenizer':
      path = path.parent
    times = {
      one: one.stat().st_mtime_ns
      for one in folder.rglob('*.*')
      if path.name not in (one.name.removesuffix('.blake2b'), one.parent.name)
    }
    _same(make(folder), expected)
    is_lost = way is None and path == folder / name
    said = f'{path} is damaged; it is made again\n' * (not is_lost)
    assert capsys.readouterr().out.partition('training a')[0] == said
    assert times == {one: one.stat().st_mtime_ns for one in times}
    assert len(times) > 8


@contextlib.contextmanager
def _full_disk():
  """Files cannot grow beyond some bytes, as if the disk were full."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_nothing_is_written_by_half(tmp_path):
  """By a run that is killed, or on a full disk."""
  path = tmp_path / 'kept'

  def write(folder, name='one', size=9):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text('new' * size)
    if name == 'killed':
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    kept.save(path, lambda folder: write(folder, 'killed'))
  assert not kept.is_whole(path, pytest.fail)
  # A process that is killed by the system cannot tidy up.
  write(tmp_path / 'partial_7_other')
  for save in (kept.save, kept.fill):
    with pytest.raises(OSError, match=f'{path} cannot be wri'), _full_disk():
      save(path, lambda folder: write(folder, 'large', size=99))
    assert not [one for one in tmp_path.rglob('*') if one.is_file()]
  path.rmdir()
  kept.save(path, write)
  assert kept.is_whole(path, pytest.fail)
  kept.fill(path, lambda folder: write(folder, 'two'))
  assert sorted(one.name for one in path.iterdir()) == ['one', 'two']


# A kind of training in a few lines: the logits of the next token by token.


def _loss(params, batch):
  tokens, factor = batch
  log_probs = jax.nn.log_softmax(params['table'])
  return -log_probs[tokens[:, :-1], tokens[:, 1:]].mean() * factor, ()


_LOSS = jax.tree_util.Partial(_loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bigram(trainer.Training):
  num_steps: int = 6
  eval_every: int = 2
  batch_tokens: int = 32
  nan_after: int = 99  # Steps; then a loss is no number.
  unused: float = 0.0  # A weight that no loss depends on.

  def window_length(self, step):
    return 8

  def prepare(self, claim, report):
    assert claim(fact=1).is_dir()

    def batch(step):
      tokens = corpus_lib.training_batch(
        np.tile(np.arange(12), 9), step=step, seed=0, batch_size=4, length=8
      )
      return tokens, np.nan if step == self.nan_after else 1.0

    return trainer.Trainee(
      params={'table': jnp.zeros((12, 12)), 'unused': jnp.array(self.unused)},
      loss=_LOSS,
      held_out_loss=_LOSS,
      batch=batch,
      held_out=lambda step: [batch(98)],
      save=lambda params, folder, dtype: np.savez(folder / dtype, **params),
    )


def _run(folder, report=str, **changed):
  """Returns what is written, the steps that were judged, and other lines."""
  lines = []
  trainer.run(
    _Bigram(**changed),
    workdir=folder,
    output=folder / 'output',
    output_dtype='float32',
    report=lambda line: (lines.append(line), report(line)),
  )
  steps = [one.step for one in lines if isinstance(one, trainer.Progress)]
  damaged = [one for one in lines if 'damaged' in str(one)]
  return dict(np.load(folder / 'output/float32.npz')), steps, damaged


def _checkpoints(folder):
  found = folder.glob('checkpoints/*')
  return [int(one.name) for one in sorted(found) if one.is_dir()]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """Weights of a run that nobody stops."""
  params, steps, _ = _run(tmp_path_factory.mktemp('whole'))
  assert steps == [2, 4, 6]
  return params


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
  """A workdir with the checkpoints of steps 2 and 4."""
  folder = tmp_path_factory.mktemp('stopped')

  def stop(line):
    if line.step == 6:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    _run(folder, stop)
  assert _checkpoints(folder) == [2, 4]
  return folder


def test_the_checkpoint_before_a_damaged_one_is_taken(whole, stopped, tmp_path):
  """And the bits are those of a run that nobody stopped."""
  one_way = lambda number: [_WAYS[number % 4]]
  cases = [*_damaged(stopped, tmp_path, r'checkpoints/4\b', one_way)]
  assert len(cases) > 12
  for folder, name, _ in cases:
    line = 'checkpoints/4 is damaged; the one before is taken'
    params, *others = _run(folder)
    assert others == [[4, 6], [f'{folder}/{line}']], name
    _same(params, whole)
    assert _checkpoints(folder) == [4, 6]


def test_without_a_whole_checkpoint_training_starts_anew(
  whole, stopped, tmp_path
):
  folder = shutil.copytree(stopped, tmp_path / 'copy')
  assert _run(shutil.copytree(folder, tmp_path / 'other'))[1:] == ([6], [])
  (folder / 'checkpoints/3').mkdir()
  for step in (2, 4):
    (folder / f'checkpoints/{step}/curve.json').write_bytes(b'')
  params, steps, lines = _run(folder)
  before, anew = 'the one before is taken', 'training starts anew'
  ends = [line.partition('; ')[2] for line in lines]
  assert (ends, steps) == ([before, before, anew], [2, 4, 6])
  _same(params, whole)
  assert _run(folder)[1:] == ([], [])  # A finished run does nothing more.


@pytest.mark.parametrize(
  ('changed', 'message', 'kept_steps'),
  [
    ({'nan_after': 4}, 'loss of step 5', [2, 4]),
    ({'nan_after': 98}, 'held-out loss after step 2', []),
    ({'unused': np.nan}, 'norm of the weights after step 2', []),
  ],
)
def test_what_is_no_number_ends_the_run(tmp_path, changed, message, kept_steps):
  with pytest.raises(FloatingPointError, match=f'the {message} is not a numbe'):
    _run(tmp_path, **changed)
  assert _checkpoints(tmp_path) == kept_steps


def test_a_full_disk_loses_no_checkpoint(whole, stopped, tmp_path, monkeypatch):
  """Whether it is seen before, or a library says it."""
  folder = shutil.copytree(stopped, tmp_path / 'copy')
  save, usage = run_checkpoints.save, shutil.disk_usage

  def save_on_a_full_disk(*args):
    with _full_disk():
      save(*args)

  for save_then, usage_then, message in (
    (save_on_a_full_disk, usage, 'RESOURCE_EXHAUSTED|too large'),
    (save, lambda _: usage('/')._replace(free=9), 'and 9 are free'),
  ):
    monkeypatch.setattr(run_checkpoints, 'save', save_then)
    monkeypatch.setattr(shutil, 'disk_usage', usage_then)
    with pytest.raises(OSError, match=f'/6 cannot be written.*({message})'):
      _run(folder)
    assert _checkpoints(folder) == [2, 4]
    assert not [*folder.rglob('partial*')]
  monkeypatch.undo()
  params, *others = _run(folder)
  assert others == [[6], []]
  _same(params, whole)


def test_a_workdir_of_another_run_or_program_is_refused(stopped):
  with pytest.raises(ValueError, match=r'another run \(learning_rate: 0\.005 '):
    _run(stopped, learning_rate=0.1)
  with pytest.raises(ValueError, match='checkpoints/4/state is not of this pr'):
    run_checkpoints.restore(stopped / 'checkpoints', {'a': jnp.zeros(3)}, str)
