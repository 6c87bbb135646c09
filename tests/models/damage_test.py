"""Runs that are killed, disks that are full, checkpoints that are damaged."""

import contextlib
import dataclasses
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.lab.training import kept
from specdec.models.lab.training import trainer


def _same(tree, expected):
  jax.tree.map(np.testing.assert_array_equal, tree, expected)


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
  assert not path.exists()
  # A process that is killed by the system cannot tidy up.
  write(tmp_path / 'partial_7_other')
  with pytest.raises(OSError, match=f'{path} cannot be written'), _full_disk():
    kept.save(path, lambda folder: write(folder, 'large', size=99))
  assert not [path for path in tmp_path.rglob('*') if path.is_file()]
  kept.save(path, write)
  assert [child.name for child in path.iterdir()] == ['one']


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
  nan_after: int = 99  # Steps; then a loss is NaN.
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
  """Returns what is written, and the steps that were judged."""
  lines = []
  trainer.run(
    _Bigram(**changed),
    workdir=folder,
    output=folder / 'output',
    output_dtype='float32',
    report=lambda line: (lines.append(line), report(line)),
  )
  steps = [line.step for line in lines if isinstance(line, trainer.Progress)]
  return dict(np.load(folder / 'output/float32.npz')), steps


def _checkpoints(folder):
  names = sorted(path.name for path in folder.glob('checkpoints/*'))
  return [int(name) for name in names if name.isdecimal()]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """Weights of a run that nobody stops."""
  params, steps = _run(tmp_path_factory.mktemp('whole'))
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


def test_a_stopped_run_goes_on_with_the_bits_of_a_whole_one(
  whole, stopped, tmp_path
):
  folder = shutil.copytree(stopped, tmp_path / 'copy')
  params, steps = _run(folder)
  assert steps == [6]
  _same(params, whole)
  assert _checkpoints(folder) == [4, 6]
  assert _run(folder)[1] == []  # A finished run does nothing more.


def test_a_damaged_checkpoint_is_named_and_can_be_removed(
  whole, stopped, tmp_path
):
  """By whichever of its files is cut, or that one is not needed."""
  files = [
    file for file in stopped.rglob('checkpoints/4/**/*') if file.is_file()
  ]
  refused = 0
  for number, file in enumerate(sorted(files)):
    folder = shutil.copytree(stopped, tmp_path / f'{number}')
    content = file.read_bytes()
    path = folder / file.relative_to(stopped)
    path.write_bytes(content[: len(content) // 2])
    error, judged = '', [6]
    try:
      params, steps = _run(folder)
    except ValueError as raised:
      error, judged = str(raised), [4, 6]
      assert 'checkpoints/4 is damaged, or of another program' in error
      shutil.rmtree(folder / 'checkpoints/4')
      params, steps = _run(folder)
      refused += 1
    assert steps == judged, (path, error)
    _same(params, whole)
  assert refused


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
  save, usage = trainer.save_checkpoint, shutil.disk_usage

  def save_on_a_full_disk(*args):
    with _full_disk():
      save(*args)

  for save_then, usage_then, message in (
    (save_on_a_full_disk, usage, 'RESOURCE_EXHAUSTED|too large'),
    (save, lambda _: usage('/')._replace(free=9), 'and 9 are free'),
  ):
    monkeypatch.setattr(trainer, 'save_checkpoint', save_then)
    monkeypatch.setattr(shutil, 'disk_usage', usage_then)
    with pytest.raises(OSError, match=f'/6 cannot be written.*({message})'):
      _run(folder)
    assert _checkpoints(folder) == [2, 4]
  monkeypatch.undo()
  params, steps = _run(folder)
  assert steps == [6]
  _same(params, whole)


def test_a_workdir_of_another_run_or_program_is_refused(stopped):
  with pytest.raises(ValueError, match=r'another run \(learning_rate: 0\.005 '):
    _run(stopped, learning_rate=0.1)
  message = 'checkpoints/4 is damaged, or of another program'
  with pytest.raises(ValueError, match=message):
    trainer.restore_checkpoint(stopped / 'checkpoints', {'a': jnp.zeros(3)})
