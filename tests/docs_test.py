"""The examples in the documentation run as they are."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parent.parent


def _examples(name):
  return re.findall(
    r'```python\n(.*?)```', (_ROOT / name).read_text('utf-8'), re.DOTALL
  )


@pytest.mark.parametrize(
  'name',
  ['README.md', 'docs/api.md', 'docs/cost_model.md', 'docs/visualize.md'],
)
def test_examples_run(name, monkeypatch, capsys):
  monkeypatch.chdir(_ROOT)
  examples = _examples(name)
  assert examples
  scope = {}
  for number, example in enumerate(examples):
    exec(compile(example, f'{name}, example {number}', 'exec'), scope)
  assert capsys.readouterr().out
