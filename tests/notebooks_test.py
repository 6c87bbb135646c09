"""The notebooks run from top to bottom, and are kept as a run leaves them."""

import json
import pathlib
import re
import sys

import pytest
import tiny_demo

from models.bench import notebooks

_FOLDER = pathlib.Path(__file__).parents[1] / 'colab'
_FILES = sorted(_FOLDER.glob('*.ipynb'))
_BADGE = 'https://colab.research.google.com/github/specdec/specdec/blob/main'
_IDS = [file.stem for file in _FILES]


def test_there_are_notebooks():
  assert len(_FILES) >= 4


@pytest.mark.long
@pytest.mark.parametrize('file', _FILES, ids=_IDS)
def test_it_runs_in_a_kernel(file):
  notebooks.execute(file, timeout=300)


@pytest.mark.parametrize('file', _FILES, ids=_IDS)
def test_its_cells_run(file, monkeypatch, tmp_path):
  """In this process, whose programs they share, and with a tiny pair."""
  from IPython.core.interactiveshell import InteractiveShell

  tiny_demo.stand_in(monkeypatch, tmp_path)
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
  monkeypatch.chdir(_FOLDER)
  shell = InteractiveShell()
  shell.enable_gui = lambda gui=None: None  # For `%matplotlib inline`.
  cells = json.loads(file.read_text('utf-8'))['cells']
  code = [cell for cell in cells if cell['cell_type'] == 'code']
  for cell in code:
    shell.run_cell(''.join(cell['source'])).raise_error()


@pytest.mark.parametrize('file', _FILES, ids=_IDS)
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


@pytest.mark.parametrize('file', _FILES, ids=_IDS)
def test_what_it_installs_can_be_imported_at_once(file):
  notebook = json.loads(file.read_text('utf-8'))
  lines = '\n'.join(''.join(cell['source']) for cell in notebook['cells'])
  commands = [line.split() for line in re.findall(r'^ *([%!].*)', lines, re.M)]
  assert any('github.com/specdec/specdec' in ' '.join(one) for one in commands)
  for words in commands:
    assert words[0] != '%cd'
    # A running kernel does not see what is installed so.
    assert not {'-e', '--editable'} & {*words}
    # A folder called specdec would pass for the library, and hide it.
    if 'clone' in words:
      assert words[-1] == 'specdec-repository'


def test_a_cell_that_fails_is_an_error(tmp_path):
  import nbclient
  import nbformat

  cells = [nbformat.v4.new_code_cell('print(1)\n1 / 0')]
  path = tmp_path / 'bad.ipynb'
  nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
  with pytest.raises(nbclient.exceptions.CellExecutionError, match='Zero'):
    notebooks.execute(path, timeout=60)


def test_outputs_are_kept(tmp_path):
  import nbformat

  cells = [nbformat.v4.new_code_cell('print(1)')]
  path = tmp_path / 'one.ipynb'
  nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
  notebooks.update(path, timeout=60)
  ((output,),) = [one.outputs for one in nbformat.read(path, 4).cells]
  assert output.text == '1\n'


def test_without_the_extra_the_remedy_is_named(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'nbformat', None)
  remedy = re.escape("pip install -e '.[notebooks,plot]'")
  with pytest.raises(ValueError, match=remedy):
    notebooks.update(tmp_path / 'any.ipynb', timeout=60)


def test_what_is_no_notebook_is_named(tmp_path):
  path = tmp_path / 'no.ipynb'
  path.write_text('text')
  with pytest.raises(ValueError, match=r'no\.ipynb is not a notebook'):
    notebooks.execute(path, timeout=60)


def test_what_changes_with_every_run_is_stripped():
  import nbformat

  cell = nbformat.v4.new_code_cell('print(1)')
  cell.metadata = {'execution': {'iopub.status.busy': '2026-01-01'}}
  cell.outputs = [
    nbformat.v4.new_output('stream', name='stdout', text='1\n'),
    nbformat.v4.new_output('stream', name='stderr', text='a warning'),
    nbformat.v4.new_output('stream', name='stdout', text='2\n'),
    nbformat.v4.new_output('display_data', {'text/plain': 'a picture'}),
    nbformat.v4.new_output('stream', name='stdout', text='3\n'),
  ]
  notebook = nbformat.v4.new_notebook(
    cells=[cell, nbformat.v4.new_code_cell('2')]
  )
  notebook.metadata['language_info'] = {'version': '3.11.7'}
  found = notebooks.stripped(notebook)
  assert [one.id for one in found.cells] == ['cell-00', 'cell-01']
  assert found.cells[0].metadata == {}
  first, picture, last = found.cells[0].outputs
  assert (first.text, last.text) == ('1\n2\n', '3\n')
  assert picture.data == {'text/plain': 'a picture'}
  assert 'version' not in found.metadata['language_info']
