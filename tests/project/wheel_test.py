"""The wheel has what a clone has, and its commands run without a clone."""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

from specdec import __main__ as commands
from specdec.models import extras

_ROOT = pathlib.Path(__file__).parents[2]
_SETUPTOOLS = int(importlib.metadata.version('setuptools').split('.')[0])
_builds = pytest.mark.skipif(
  _SETUPTOOLS < 77, reason="pip install -e '.[test]' has a newer setuptools"
)


def _tracked():
  """Files of the repository that are or will be committed."""
  command = ['git', 'ls-files', '--cached', '--others', '--exclude-standard']
  listed = subprocess.check_output(command, cwd=_ROOT, text=True)
  return [name for name in listed.splitlines() if (_ROOT / name).exists()]


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The file, built in a copy: `build/` may have files that are gone."""
  folder = tmp_path_factory.mktemp('wheel')
  for name in _tracked():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(_ROOT / name, folder / name, follow_symlinks=False)
  options = ['--no-deps', '--no-build-isolation', '--quiet']
  command = [sys.executable, '-m', 'pip', 'wheel', *options, '.']
  subprocess.run(command, cwd=folder, check=True)
  (file,) = folder.glob('*.whl')
  return file


@_builds
def test_a_wheel_has_every_file_of_the_packages(wheel):
  """And no other: `models` and `scripts` are links within `specdec`."""
  expected = {'specdec/models/demo/ngram.safetensors'}
  for name in _tracked():
    if name.startswith('models/') or name.endswith('.py'):
      linked = name.startswith(('models/', 'scripts/'))
      expected.add(f'specdec/{name}' if linked else name)
    elif name.startswith('specdec/') and not (_ROOT / name).is_symlink():
      expected.add(name)
  expected = {name for name in expected if name.startswith('specdec/')}
  assert len(expected) > 200
  names = zipfile.ZipFile(wheel).namelist()
  assert {name for name in names if '.dist-info/' not in name} == expected


@_builds
@pytest.mark.long
def test_commands_run_in_a_fresh_environment(wheel, tmp_path):
  """Kernels are compiled, and drafting and plain decoding say the same."""
  venv.create(tmp_path / 'env')
  python = tmp_path / 'env/bin/python'
  # The dependencies, without what is installed as editable.
  paths = [path for path in sys.path if path.endswith('site-packages')]
  (packages,) = (tmp_path / 'env').glob('lib/python*/site-packages')
  (packages / 'dependencies.pth').write_text('\n'.join(paths))
  pip = [sys.executable, '-m', 'pip', '--python', python, 'install']
  alone = ['--no-deps', '--no-index', '--ignore-installed', '--quiet']
  subprocess.run([*pip, *alone, wheel], check=True)
  environment = os.environ | {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
  environment.pop('PYTHONPATH', None)

  def run(*arguments):
    return subprocess.check_output(
      [tmp_path / 'env/bin/specdec', *arguments],
      cwd=tmp_path,
      env=environment,
      text=True,
    )

  where = [python, '-c', 'import specdec; print(specdec.__file__)']
  place = subprocess.check_output(where, cwd=tmp_path, env=environment)
  assert place.decode().startswith(str(tmp_path / 'env'))
  drafted = json.loads(run('generate', '--json'))
  plain = json.loads(run('generate', '--json', '--method=plain'))
  assert drafted['tokens'] == plain['tokens']
  assert drafted['stats']['block_efficiency'] > 2
  if shutil.which('c++'):
    assert [*(tmp_path / 'cache/specdec/kernels').glob('*.so')]
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('import \n')
  flags = f'--prompt_file={prompts}', '--max_new_tokens=8', '--batch_sizes=1'
  run('check_lossless', *flags)  # Its status is 1 if a token differs.


def test_a_missing_package_is_installed_from_where_the_library_is(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(_ROOT)
  assert extras.command('gguf') == "pip install -e '.[gguf]'"
  monkeypatch.chdir(tmp_path)
  assert extras.command('gguf') == f"pip install -e '{_ROOT}[gguf]'"
  monkeypatch.setattr(extras, '__file__', tmp_path / 'models/extras.py')
  assert extras.command('gguf') == "pip install 'specdec-jax[gguf]'"


def test_every_script_is_a_command(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['specdec'])
  commands.main()
  listed = capsys.readouterr().out.splitlines()[2:]
  scripts = {
    path.stem
    for path in (_ROOT / 'scripts').glob('*.py')
    if 'command_line.run(' in path.read_text('utf-8')
  }
  assert len(scripts) > 10
  assert {line.split()[0] for line in listed} == {*scripts, 'install_libtpu'}
  monkeypatch.setattr(sys, 'argv', ['specdec', 'generat'])
  with pytest.raises(SystemExit, match="no command 'generat'"):
    commands.main()
