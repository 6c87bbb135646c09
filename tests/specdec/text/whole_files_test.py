"""Files are written whole or not at all, and by one process at a time."""

import os
import pathlib
import subprocess
import sys

import pytest
import safetensors

from specdec.models.lab.bench import record
from specdec.models.lab.training import kept
from specdec.text import whole_files


def _half(partial):
  partial.write_text('half')
  raise KeyboardInterrupt


def test_what_was_there_is_kept_until_all_is_written(tmp_path):
  path = tmp_path / 'new' / 'a.txt'
  with pytest.raises(KeyboardInterrupt):
    whole_files.write(path, _half)
  assert not path.exists()
  whole_files.write_text(path, 'ä')
  with pytest.raises(KeyboardInterrupt):
    whole_files.write(path, _half)
  assert path.read_bytes() == 'ä'.encode()
  assert [*path.parent.iterdir()] == [path]
  # So is a link, and its file is written.
  link = tmp_path / 'link'
  link.symlink_to(path)
  whole_files.write_text(link, 'b')
  assert link.is_symlink()
  assert path.read_text() == 'b'
  whole_files.write_text('/dev/null', 'b')
  assert not os.path.isfile('/dev/null')


def test_a_disk_that_is_full_is_an_os_error(tmp_path, monkeypatch):
  def full(*_, **__):
    raise safetensors.SafetensorError('No space left on device')

  monkeypatch.setattr(whole_files.safetensors_numpy, 'save_file', full)
  with pytest.raises(OSError, match=r'a\.st cannot be written: No space left'):
    whole_files.write_tensors(tmp_path / 'a.st', {}, {})


def test_errors_name_the_file_and_what_was_raised():
  for error, message in (
    (KeyError('k'), "a.x cannot be read: KeyError: 'k'; do that"),
    (ValueError('bad'), 'a.x cannot be read: bad; do that'),
    (ValueError('a.x is bad'), 'a.x is bad'),
    (ValueError('/a.x/b: bad'), '/a.x/b: bad'),
    (ValueError('aa.x'), 'a.x cannot be read: aa.x; do that'),
    (ValueError('a.xx'), 'a.x cannot be read: a.xx; do that'),
    (MemoryError(), 'a.x cannot be read: MemoryError: ; do that'),
  ):
    with (
      pytest.raises(ValueError, match=r'a\.x') as caught,
      whole_files.reading('a.x', 'do that'),
    ):
      raise error
    assert str(caught.value) == message
  # These are our own.
  with pytest.raises(AssertionError), whole_files.reading('a.x'):
    raise AssertionError


_OTHER = """
import fcntl, sys
file = open(sys.argv[1], 'ab')
fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
print('locked', flush=True)
sys.stdin.read()
"""


def _other(path):
  """Another process that shares a lock on a file, if it can."""
  command = [sys.executable, '-S', '-c', _OTHER, str(path)]
  pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
  return subprocess.Popen(command, **pipes, text=True)


@pytest.mark.parametrize(
  ('file', 'use', 'message'),
  [
    (
      'result.json',
      lambda path: record.prepare_output(str(path)),
      r'result\.json is being written .* ends, or give another --output',
    ),
    (
      'rows.jsonl',
      lambda path: kept.ResumableRows(path, {}, 1),
      r'rows\.jsonl is being written .* ends, or give another --output',
    ),
    (
      '.lock',
      lambda path: kept.write_once(path.with_name('run.json'), {}),
      'a folder is being written .* ends, or give another --workdir',
    ),
  ],
)
def test_one_process_at_a_time_writes(
  tmp_path, monkeypatch, file, use, message
):
  folder = tmp_path / 'a folder'
  folder.mkdir()
  monkeypatch.chdir(tmp_path)
  other = _other(folder / file)
  assert other.stdout.readline() == 'locked\n'
  for _ in range(2):
    with pytest.raises(ValueError, match=message):
      use(folder / file)
  # A process that is killed leaves no lock.
  other.kill()
  other.communicate()
  use(folder / file)
  # Another process cannot have it now; this one can, by any name of the file.
  assert 'BlockingIOError' in _other(folder / file).communicate()[1]
  use(pathlib.Path('a folder', file))


def test_what_is_no_file_is_not_locked():
  record.prepare_output('/dev/null')
  record.prepare_output(None)
