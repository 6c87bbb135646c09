"""Files that a run keeps are cut, emptied, flipped, lost, or half written."""

import contextlib
import functools
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_heads

from models.checkpoints import hub
from models.lab.training import head_features
from models.lab.training import kept
from models.lab.training import run_checkpoints
from models.lab.training import tokenizer as tokenizer_lib


def _cut(file, rng):
  file.write_bytes(file.read_bytes()[: rng.integers(file.stat().st_size)])


def _empty(file, rng):
  del rng
  file.write_bytes(b'')


def _flip(file, rng):
  content = bytearray(file.read_bytes())
  content[rng.integers(len(content))] ^= 1 << rng.integers(8)
  file.write_bytes(content)


def _lose(file, rng):
  del rng
  file.unlink()


_WAYS = [_cut, _empty, _flip, _lose]


def _files(folder):
  return sorted(one for one in folder.rglob('*') if one.is_file())


def _same(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


# What is kept by the name of its folder: each is made or read, and given back.


def _tokens(folder, report):
  path = folder / 'tokens.npy'
  if not kept.is_whole(path, report):
    kept.save(path, functools.partial(np.save, arr=np.arange(99)))
  return np.load(path)


def _tokenizer(folder, report):
  path = folder / 'tokenizer'
  if not kept.is_whole(path, report):
    texts = ['def add(first, second):'] * 9
    trained = tokenizer_lib.train_tokenizer(texts, vocab_size=270, context=64)
    kept.save(path, trained.save_pretrained)
  return sorted(hub.locate(path).tokenizer.get_vocab().items())


def _features(folder, report):
  target = tiny_heads.target()
  features = head_features.compute(
    target,
    target.params['gpt2']['lm_head'],
    tiny.tokens(batch_size=70, length=9),
    tiny_heads.READS,
    folder,
    width=tiny_heads.WIDTH,
    batch_size=16,
    report=report,
  )
  return features.batch(np.arange(70))


_KEPT = [_tokens, _tokenizer, _features]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A folder of each with what it holds."""

  @functools.cache
  def make(kind):
    folder = tmp_path_factory.mktemp(kind.__name__)
    return folder, kind(folder, pytest.fail)

  return make


@pytest.mark.parametrize('way', _WAYS)
@pytest.mark.parametrize('kind', _KEPT)
def test_what_is_damaged_is_made_again_and_nothing_else(
  whole, tmp_path, kind, way
):
  made, expected = whole(kind)
  for number, file in enumerate(_files(made)):
    folder = shutil.copytree(made, tmp_path / str(number))
    way(folder / file.relative_to(made), np.random.default_rng(number))
    lines = []
    _same(kind(folder, lines.append), expected)
    # A file that is lost is as one that has never been.
    own = file.relative_to(made).parts[0].removesuffix('.blake2b')
    is_lost = way is _lose and not (folder / own).is_dir()
    damaged = [f'{folder / own} is damaged; it is made again']
    assert lines == damaged or (is_lost and not lines), file
    for other in _files(made):
      if not other.relative_to(made).parts[0].startswith(own):
        times = [one.stat().st_mtime_ns for one in (other, folder / other)]
        assert times[0] == times[1], other


_STATE = {'params': [jnp.arange(6.0), jnp.ones((2, 3))], 'count': jnp.zeros(())}
_LATER = jax.tree.map(lambda leaf: leaf + 1, _STATE)


def _restore(folder, report=pytest.fail):
  checkpoints = run_checkpoints.Checkpoints(folder, report)
  return checkpoints, *checkpoints.restore(_STATE)


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
  """Those of steps 1 and 2; that of step 0 was one too many."""
  folder = tmp_path_factory.mktemp('checkpoints')
  made, *nothing = _restore(folder)
  assert nothing == [_STATE, []]
  for step, state in ((0, _LATER), (1, _STATE), (2, _LATER)):
    made.save(step, state, [{'step': step}])
  assert sorted(one.name for one in folder.glob('?')) == ['1', '2']
  return folder


@pytest.mark.parametrize('way', _WAYS)
def test_the_checkpoint_before_a_damaged_one_is_taken(
  checkpoints, tmp_path, way
):
  """Then the run goes on as if nothing had been."""
  for number, file in enumerate(_files(checkpoints)):
    name, *_ = file.relative_to(checkpoints).parts[0]
    folder = shutil.copytree(checkpoints, tmp_path / str(number))
    way(folder / file.relative_to(checkpoints), np.random.default_rng(number))
    lines = []
    again, state, curve = _restore(folder, lines.append)
    if name == '1':  # It is not read.
      assert (lines, curve) == ([], [{'step': 2}])
      continue
    assert lines == [
      f'{folder}/2 is damaged; the checkpoint before it is taken'
    ], file
    _same((state, curve), (_STATE, [{'step': 1}]))
    again.save(2, _LATER, [{'step': 2}])
    _same(_restore(folder)[1:], (_LATER, [{'step': 2}]))


def test_without_a_whole_checkpoint_training_starts_anew(checkpoints, tmp_path):
  folder = shutil.copytree(checkpoints, tmp_path / 'checkpoints')
  for step in '12':
    _empty(folder / step / 'curve.json', None)
  (folder / '3').mkdir()
  lines = []
  _, state, curve = _restore(folder, lines.append)
  assert [line.partition('; ')[2] for line in lines] == [
    *('the checkpoint before it is taken',) * 2,
    'training starts anew',
  ]
  _same((state, curve), (_STATE, []))


def test_a_checkpoint_of_another_structure_is_refused(checkpoints):
  other = run_checkpoints.Checkpoints(checkpoints, pytest.fail)
  with pytest.raises(ValueError, match=f'{checkpoints}/2 is not of this progr'):
    other.restore(_STATE | {'more': jnp.zeros(3)})


@contextlib.contextmanager
def _full_disk():
  """Files cannot grow beyond some bytes, as on a disk that is full."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_loses_nothing(whole, checkpoints, tmp_path):
  made, expected = whole(_features)
  features = shutil.copytree(made, tmp_path / 'features')
  _lose(features / 'windows_00001.npy', None)
  with (
    pytest.raises(OSError, match=r'windows_00001\.npy cannot be written: '),
    _full_disk(),
  ):
    _features(features, pytest.fail)
  steps = shutil.copytree(checkpoints, tmp_path / 'checkpoints')
  saved = _restore(steps)[0]
  with (
    pytest.raises(OSError, match=r'/3 cannot be written: .*File too large'),
    _full_disk(),
  ):
    saved.save(3, _STATE, [])
  assert not [*tmp_path.rglob('partial*')]
  # With room again both go on.
  _same(_features(features, pytest.fail), expected)
  _same(_restore(steps)[1:], (_LATER, [{'step': 2}]))
  saved.save(3, _STATE, [])
  assert sorted(one.name for one in steps.glob('?')) == ['2', '3']


@pytest.mark.parametrize('is_folder', [False, True])
def test_a_run_that_is_killed_while_it_writes_leaves_nothing_half(
  tmp_path, is_folder
):
  path = tmp_path / 'one.npy'

  def write(partial, end=None):
    file = partial
    if is_folder:
      partial.mkdir()
      file = partial / f'of {end}'
    file.write_text(f'half {end}')
    if end:
      raise end

  for _ in range(2):
    with pytest.raises(KeyboardInterrupt):
      kept.save(path, lambda one: write(one, KeyboardInterrupt()))
    assert not kept.is_whole(path, pytest.fail)
  kept.save(path, write)
  assert kept.is_whole(path, pytest.fail)
  assert [one.read_text() for one in _files(tmp_path) if 'of' in one.name] == (
    ['half None'] if is_folder else []
  )
