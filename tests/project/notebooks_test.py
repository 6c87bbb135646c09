"""The notebooks run from top to bottom, and are kept as a run leaves them."""

import json
import pathlib
import re

import nbclient
import nbformat
import pytest
import tiny_demo

_FOLDER = pathlib.Path(__file__).parents[2] / 'colab'
_FILES = sorted(_FOLDER.glob('*.ipynb'))
assert len(_FILES) >= 6
_BADGE = 'https://colab.research.google.com/github/specdec/specdec/blob/main'
_for_every_file = pytest.mark.parametrize('file', _FILES, ids=lambda f: f.stem)


@pytest.mark.long
@_for_every_file
def test_it_runs_in_a_kernel(file):
  notebook = nbformat.read(file, as_version=4)
  nbclient.execute(notebook, cwd=str(_FOLDER), timeout=300)


# Examples of `docs/api.md` make the same calls as notebook 03.
@pytest.mark.parametrize(
  'file',
  [file for file in _FILES if file.stem != '03_staged'],
  ids=lambda file: file.stem,
)
def test_its_cells_run(file, monkeypatch, tmp_path):
  """In this process, so that they share its programs, and with a tiny pair."""
  from IPython.core.interactiveshell import InteractiveShell

  tiny_demo.stand_in(monkeypatch)
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
  monkeypatch.setenv('SPECDEC_STEPS', '1')
  monkeypatch.chdir(_FOLDER)
  shell = InteractiveShell()
  shell.enable_gui = lambda gui=None: None  # For `%matplotlib inline`.
  for cell in json.loads(file.read_text('utf-8'))['cells']:
    if cell['cell_type'] == 'code':
      shell.run_cell(''.join(cell['source'])).raise_error()


@_for_every_file
def test_it_is_kept_as_a_run_leaves_it(file):
  text = file.read_text('utf-8')
  assert len(text) < 500_000
  notebook = json.loads(text)
  cells = notebook['cells']
  assert f'{_BADGE}/colab/{file.name}' in ''.join(cells[0]['source'])
  assert 'Next steps' in ''.join(cells[-1]['source'])
  code = [cell for cell in cells if cell['cell_type'] == 'code']
  counts = [cell['execution_count'] for cell in code]
  assert counts == list(range(1, len(code) + 1))
  assert sum(bool(cell['outputs']) for cell in code) >= 3
  for cell in cells:
    assert cell['metadata'] == {}
    for output in cell.get('outputs', ()):
      assert output['output_type'] != 'error'
      assert output.get('name') != 'stderr'
  source = '\n'.join(''.join(cell['source']) for cell in code)
  assert '\ndef ' not in source, 'algorithms belong in the library'
  # Installed packages can be imported at once.
  commands = re.findall(r'^ *([%!].*)', source, re.M)
  assert any('github.com/specdec/specdec' in command for command in commands)
  for words in map(str.split, commands):
    assert words[0] != '%cd'
    # A running kernel does not see what is installed so.
    assert not {'-e', '--editable'} & {*words}
    # A folder called specdec would pass for the library, and hide it.
    assert 'clone' not in words or words[-1] == 'specdec-repository'
