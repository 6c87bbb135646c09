"""The folder of the cache, where there may be none."""

import os
import pathlib
import pwd
import tempfile

import pytest

from specdec.models import user_cache


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
  """No home directory is known, and a folder for temporary files of its own."""

  def missing(*_):
    raise KeyError('uid not found')

  for name in ('HOME', 'XDG_CACHE_HOME'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(pwd, 'getpwuid', missing)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  user_cache._root.cache_clear()
  yield tmp_path
  user_cache._root.cache_clear()


def test_without_a_home_there_is_a_folder_of_the_users_own(temporary, caplog):
  folder = temporary / f'specdec-{os.getuid()}'
  for name in ('plans', 'kernels'):
    assert user_cache.folder(name) == folder / name
  assert folder.stat().st_mode & 0o777 == 0o700
  assert caplog.text.count('XDG_CACHE_HOME names another one') == 1


def test_a_folder_that_somebody_else_made_is_not_used(temporary):
  """Libraries in it would be run."""
  link = temporary / f'specdec-{os.getuid()}'
  (temporary / 'theirs').mkdir()
  link.symlink_to(temporary / 'theirs')
  folder = user_cache.folder('kernels').parent
  assert folder not in (link, temporary / 'theirs')
  assert folder.stat().st_mode & 0o777 == 0o700


def test_the_home_and_the_variable(temporary, monkeypatch, caplog):
  monkeypatch.setenv('HOME', str(temporary))
  expected = temporary / '.cache' / 'specdec' / 'plans'
  assert user_cache.folder('plans') == expected
  monkeypatch.setenv('XDG_CACHE_HOME', str(temporary / 'x'))
  assert user_cache.folder('a') == pathlib.Path(temporary, 'x', 'specdec', 'a')
  assert not caplog.text
